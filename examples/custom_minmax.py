"""An observer of your own, the simple kind: statistics are `min_vals` and `max_vals`.

This one forgets nothing and leaves a margin around what it saw. The base class turns the range
into scale, zero point and global scale.
"""

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import distributed as dist

from inlay.observers import Observer


@Observer.register("margin_minmax")
class MarginMinMaxObserver(Observer):
    _act_sync_dict = {"min_vals": dist.ReduceOp.MIN, "max_vals": dist.ReduceOp.MAX}

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        margin = 1 + self.args.observer_kwargs.get("margin", 0.1)
        min_vals = torch.amin(observed, dim=(0, -1)) * margin
        max_vals = torch.amax(observed, dim=(0, -1)) * margin
        if self.has_statistics:
            min_vals = torch.min(min_vals, self.min_vals)
            max_vals = torch.max(max_vals, self.max_vals)
        self.min_vals, self.max_vals = min_vals, max_vals


def main() -> None:
    args = QuantizationArgs(num_bits=8, strategy="tensor", observer_kwargs={"margin": 0.5})
    observer = Observer.load_from_registry("margin_minmax", base_name="input", args=args)
    observer(torch.tensor([[-1.0, 2.0]]))(torch.tensor([[0.0, 4.0]]))
    print(f"range {observer.min_vals.item()} to {observer.max_vals.item()}")
    print(f"scale {observer.get_qparams()['scale'].item():.4f}")


if __name__ == "__main__":
    main()
