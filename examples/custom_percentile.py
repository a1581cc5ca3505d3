"""An observer of your own that cuts off outliers: the range between two percentiles.

`torch.quantile` takes a single dimension and at most 16 million elements. Here the k-th smallest
values are found directly, for any shape and any number of elements.
"""

import torch
from compressed_tensors.quantization import QuantizationArgs

from inlay.errors import ConfigurationError
from inlay.observers import Observer


@Observer.register("percentile")
class PercentileObserver(Observer):
    """The range from the (100 - `percentile`)-th to the `percentile`-th percentile."""

    _act_sync_dict = {}

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        percentile = self.args.observer_kwargs.get("percentile", 99.9)
        if not 50 <= percentile <= 100:
            raise ConfigurationError(f"percentile must be from 50 to 100, got {percentile}")
        groups = observed.movedim(0, -2).flatten(-2)  # (*qparam_shape, all values that share one)
        self.min_vals = quantile(groups, 1 - percentile / 100)
        self.max_vals = quantile(groups, percentile / 100)


def quantile(values: torch.Tensor, q: float) -> torch.Tensor:
    """The q-th quantile over the last dimension, between two elements in proportion."""
    position = q * (values.size(-1) - 1)
    below = min(int(position), values.size(-1) - 1)
    above = min(below + 1, values.size(-1) - 1)
    low = values.kthvalue(below + 1, dim=-1).values
    high = values.kthvalue(above + 1, dim=-1).values
    return low + (high - low) * (position - below)


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    weight[0, 0] = 100.0
    args = QuantizationArgs(num_bits=8, strategy="tensor", observer_kwargs={"percentile": 99.5})
    for name in ("memoryless_minmax", "percentile"):
        kwargs = args.observer_kwargs if name == "percentile" else {}
        plain = args.model_copy(update={"observer_kwargs": kwargs})
        observer = Observer.load_from_registry(name, base_name="weight", args=plain)
        print(f"{name}: scale {observer(weight).get_qparams()['scale'].item():.4f}")


if __name__ == "__main__":
    main()
