"""The imatrix observer, which weighs the range search by the importance of input channels."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from torch import distributed as dist

from inlay.errors import StatisticsError
from inlay.observers.base import Observer
from inlay.observers.helpers import flatten_for_calibration
from inlay.observers.kwargs import count, expansion, fraction, positive, switch
from inlay.observers.measuring import MeasuringObserver, Tensors
from inlay.observers.mse import shrink_factors
from inlay.ranges.row_groups import RowGroups
from inlay.ranges.search import RangeSearch

__all__ = ["IMatrixMSEObserver", "NVFP4ExpandedIMatrixObserver"]

_PRECISION = torch.float32
_STRATEGIES = (
    QuantizationStrategy.CHANNEL,
    QuantizationStrategy.GROUP,
    QuantizationStrategy.TENSOR_GROUP,
)


@Observer.register("imatrix_mse")
class IMatrixMSEObserver(MeasuringObserver):
    """The range of a weight with the smallest error, weighted by E[x²] of its input channels.

    `attach` puts a hook on a Linear module that sums x² while data flows through it. This observer
    uses the sums, and `detach` leaves them on the module for the next observer's `attach`, so that
    one pass can gather them and another one use them.

    Without usable importance, or for values and strategies that have none, the search is uniform
    and a warning says why; with `strict` an error is raised instead.
    """

    _act_sync_dict = {"_imatrix_sum": dist.ReduceOp.SUM, "_imatrix_count": dist.ReduceOp.SUM}
    _kwargs = (
        fraction("maxshrink", 0.95),
        count("patience", 5),
        positive("grid", 20),
        positive("norm", 3.0),
        expansion(),
        switch("strict", False),
    )

    observes_input = True
    maxshrink: float
    patience: int
    grid: float
    norm: float
    expand: float
    strict: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._imatrix_sum: torch.Tensor | None = None
        self._imatrix_count: torch.Tensor = torch.tensor(0, dtype=torch.int64)
        self._warned: set[str] = set()

    @property
    def search(self) -> RangeSearch:
        return RangeSearch(
            args=self.args,
            shrinks=shrink_factors(max(1, int(self.maxshrink * self.grid)) + 1, self.grid),
            norm=self.norm,
            patience=self.patience or None,
            expand=self.expand,
        )

    def attach(self, module: torch.nn.Module) -> None:
        """Take over sums left on the module, or start summing x² there."""
        owner: Any = module  # Any, for attributes that nn.Module does not declare
        self._synced.clear()
        if hasattr(owner, "_imatrix_sum"):
            self._imatrix_sum, self._imatrix_count = owner._imatrix_sum, owner._imatrix_count
            del owner._imatrix_sum, owner._imatrix_count
            return
        if not hasattr(owner, "in_features"):
            return
        device = next((p.device for p in module.parameters()), None)
        total = torch.zeros(owner.in_features, dtype=_PRECISION, device=device)
        self._share(owner, total, torch.tensor(0, dtype=torch.int64, device=device))
        owner._imatrix_hook = module.register_forward_pre_hook(self._accumulate, with_kwargs=True)

    def detach(self, module: torch.nn.Module) -> None:
        """Stop summing, and leave the sums on the module for the next observer to take over."""
        owner: Any = module
        if hasattr(owner, "_imatrix_hook") and self._imatrix_sum is not None:
            owner._imatrix_hook.remove()
            del owner._imatrix_hook
            self._share(owner, self._imatrix_sum, self._imatrix_count)

    def measure(self, observed: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        """Search the range of a weight, using the importance gathered so far."""
        if valid is not None:
            observed = observed[valid]
        found = self.search(observed, self._importance(observed))
        return dict(zip(("min_vals", "max_vals"), found, strict=True))

    @classmethod
    def measure_weights(
        cls, observers: Sequence[MeasuringObserver], observed: torch.Tensor
    ) -> Tensors:
        search = None
        importance: list[torch.Tensor | None] = []
        for observer, own in zip(observers, observed, strict=True):
            assert isinstance(observer, IMatrixMSEObserver)
            importance.append(observer._importance(own.unsqueeze(0)))
            search = observer.search
        assert search is not None
        known = [each for each in importance if each is not None]
        if len(known) == len(importance):
            found = search.each(observed, torch.cat(known))
        else:  # the search of some is uniform
            alone = [
                search(own.unsqueeze(0), weights)
                for own, weights in zip(observed, importance, strict=True)
            ]
            low, high = zip(*alone, strict=True)
            found = torch.stack(low), torch.stack(high)
        return dict(zip(("min_vals", "max_vals"), found, strict=True))

    def measure_input(self, x: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        """Sum x² over tokens, and count them."""
        if valid is not None:
            x = torch.where(valid.unsqueeze(-1), x.reshape(-1, x.size(-1)), 0)
        squares = x.to(_PRECISION).pow(2).sum(dim=list(range(x.ndim - 1)))
        none = torch.zeros((), dtype=torch.int64, device=x.device)
        return {
            "_imatrix_sum": squares,
            "_imatrix_count": none + (math.prod(x.shape[:-1]) if valid is None else valid.sum()),
        }

    def measure_input_row_groups(self, x: torch.Tensor, groups: RowGroups) -> Tensors:
        squares = x.to(_PRECISION).pow(2)
        return {"_imatrix_sum": groups.total(squares), "_imatrix_count": groups.counts()}

    def follow(self, before: Mapping[str, torch.Tensor], measured: Tensors) -> Tensors:
        # The model may have moved to another device since the sums were gathered.
        moved = {name: before[name].to(value.device) for name, value in measured.items()}
        return super().follow(moved, measured)

    @classmethod
    def divide_input(cls, statistics: Mapping[str, torch.Tensor], scales: torch.Tensor) -> Tensors:
        sums = statistics["_imatrix_sum"]
        return {**statistics, "_imatrix_sum": sums / scales.to(sums) ** 2}

    @torch.no_grad()
    def _accumulate(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        x = args[0] if args else kwargs.get("input")
        x = x[0] if isinstance(x, tuple) else x
        if isinstance(x, torch.Tensor):
            self.observe_input(x)
            self._share(module, self._imatrix_sum, self._imatrix_count)

    def _share(self, module: Any, total: torch.Tensor | None, seen: torch.Tensor) -> None:
        """Keep the same sums here and on the module, for use in this pass or a later one."""
        self._imatrix_sum, self._imatrix_count = total, seen
        module._imatrix_sum, module._imatrix_count = total, seen

    def _importance(self, observed: torch.Tensor) -> torch.Tensor | None:
        """Compute the importance of each element, of mean 1 and shaped as `observed`, or None."""
        problem = self._problem(observed)
        if problem is not None:
            self._fall_back(problem)
            return None
        assert self._imatrix_sum is not None
        importance = (self._imatrix_sum / self._imatrix_count.float()).to(observed.device)
        importance = importance / (importance.mean() + torch.finfo(_PRECISION).tiny)
        per_row = importance.expand(observed.shape[1], -1)
        return flatten_for_calibration(per_row, self.base_name, self.args)

    def _problem(self, observed: torch.Tensor) -> str | None:
        """Explain why the importance cannot be used; return None if it can."""
        if self.base_name != "weight":
            return "only weights have importance"
        if self.args.strategy not in _STRATEGIES:
            return f"strategy {self.args.strategy} has no importance per input channel"
        if self._imatrix_sum is None or int(self._imatrix_count) == 0:
            return "no importance was gathered; attach the observer to its module before data flows"
        if not bool(torch.isfinite(self._imatrix_sum).all()):
            return "the importance is not finite"
        if bool((self._imatrix_sum < 0).any()):
            return "the importance has negative values"
        if not bool(self._imatrix_sum.any()):
            return "the importance is zero everywhere"
        columns = math.prod(observed.shape[2:])
        if self._imatrix_sum.numel() != columns:
            return (
                f"the importance has {self._imatrix_sum.numel()} channels, but the weight has "
                f"{columns}"
            )
        return None

    def _fall_back(self, problem: str) -> None:
        if self.strict:
            raise StatisticsError(
                f"{self.slot}: imatrix_mse cannot weigh the error: {problem}; "
                "strict=False accepts a uniform search"
            )
        if problem not in self._warned:
            self._warned.add(problem)
            # Leave out the slot's name: Python shows the same text for all slots only once.
            warnings.warn(
                f"imatrix_mse searches without importance: {problem}; strict=True makes this an "
                "error",
                stacklevel=2,
            )


@Observer.register("nvfp4_expanded_imatrix")
class NVFP4ExpandedIMatrixObserver(IMatrixMSEObserver):
    """The search of `nvfp4_expanded_mse`, weighted as that of `imatrix_mse`."""

    _kwargs = (
        fraction("maxshrink", 1 - 0.8 / 1.8),
        count("patience", 1000),
        positive("grid", 200),
        positive("norm", 2.4),
        expansion(1.8),
        switch("strict", False),
    )
