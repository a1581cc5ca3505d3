"""An observer of your own with its own statistics: mean and deviation, gathered over all batches.

With statistics other than `min_vals` and `max_vals`, `has_statistics` and `get_qparams` are yours.
Sums merge over batches and ranks where means do not, so it is sums that are kept.
"""

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import generate_gparam
from torch import distributed as dist

from inlay.observers import Observer, QParamsDict, require_finite
from inlay.ranges.qparams import qparams_of_range


@Observer.register("normal")
class NormalObserver(Observer):
    """The range is the mean, plus and minus `k` standard deviations."""

    _act_sync_dict = {
        "count": dist.ReduceOp.SUM,
        "total": dist.ReduceOp.SUM,
        "squares": dist.ReduceOp.SUM,
    }

    @property
    def has_statistics(self) -> bool:
        return hasattr(self, "count")

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        values = observed.double()
        total, squares = values.sum(dim=(0, -1)), values.square().sum(dim=(0, -1))
        count = torch.full_like(total, observed.shape[0] * observed.shape[-1])
        if self.has_statistics:
            count, total, squares = count + self.count, total + self.total, squares + self.squares
        self.count, self.total, self.squares = count, total, squares

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        k = self.args.observer_kwargs.get("k", 3.0)
        mean = self.total / self.count
        deviation = (self.squares / self.count - mean.square()).clamp(min=0).sqrt()
        return (mean - k * deviation).float(), (mean + k * deviation).float()

    def get_qparams(self) -> QParamsDict:
        require_finite(self, ("total", "squares"))  # also refuses if nothing was observed
        min_vals, max_vals = self.range()
        global_scale = None
        if self.args.strategy == "tensor_group":
            ranges = [observer.range() for observer in (self, *self._fused_observers)]
            largest = torch.stack([torch.maximum(-low, high).max() for low, high in ranges]).max()
            global_scale = generate_gparam(-largest.reshape(1), largest.reshape(1))
        scale, zero_point = qparams_of_range(min_vals, max_vals, self.args, global_scale)
        return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}


def main() -> None:
    torch.manual_seed(0)
    args = QuantizationArgs(num_bits=8, strategy="tensor")
    observer = Observer.load_from_registry("normal", base_name="input", args=args, k=4.0)
    for _ in range(8):
        observer(torch.randn(4, 16, 32))
    low, high = observer.range()
    print(f"range {low.item():.2f} to {high.item():.2f}")
    print(f"scale {observer.get_qparams()['scale'].item():.4f}")


if __name__ == "__main__":
    main()
