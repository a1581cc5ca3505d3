"""The histogram observer, which counts values first and chooses the range later."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby, islice
from typing import Any, NamedTuple, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import distributed as dist

from inlay.errors import ConfigurationError, StatisticsError
from inlay.observers.base import MinMaxTuple, Observer, QParamsDict, require_finite
from inlay.observers.helpers import as_stored
from inlay.observers.kwargs import Kwarg, one_of, percent, positive, read_kwargs, whole
from inlay.observers.measuring import Tensors
from inlay.observers.min_max import StaticMinMaxObserver
from inlay.ranges.args import key_of
from inlay.ranges.clipping import ClipSearch, Loss, clip, divergence, quantization_error
from inlay.ranges.float_histogram import FloatBins, Histogram
from inlay.ranges.padding import as_weights
from inlay.ranges.row_groups import RowGroups

__all__ = ["HistogramObserver"]

# Settings that choose the range; `HistogramObserver.range` can override them later.
_CHOICE: tuple[Kwarg, ...] = (
    one_of("method", "mse", ("mse", "percentile", "entropy", "minmax")),
    percent("percentile", 99.99),
    positive("norm", 2.4),
    whole("grid", 128, at_least=8, at_most=4096),
)
_EXTREMES = ("min_vals", "max_vals")
# Bins of histograms that are searched together: 16 MiB of counts, and a few times as much for what
# is made of them. These are 64 tensors by default; more at once would not be faster.
_BINS_TOGETHER = 2**21
_Answer: TypeAlias = QParamsDict | StatisticsError
_ACTIVATION = (QuantizationStrategy.TENSOR,)
_ATTENTION = (QuantizationStrategy.TENSOR, QuantizationStrategy.ATTN_HEAD)


@Observer.register("histogram")
class HistogramObserver(StaticMinMaxObserver):
    """The range chosen from a histogram of all observed values, when it is asked for.

    Bins are made of sign, exponent and `mantissa_bits` of the number, so they need no knowledge of
    the data, and neither order nor distribution over ranks matters. They take 1 KiB times two to
    the power of `mantissa_bits`: by default 256 KiB for each tensor or head. `method` chooses the
    range, always inside the exact extremes:

    - `mse`: the range with the smallest sum of `|quantized - observed| ** norm`
    - `percentile`: the range that holds `percentile` per cent of the values, by magnitude if the
      quantization is symmetric, else leaving out as many at either end
    - `entropy`: the range whose quantized distribution diverges least, as in TensorRT
    - `minmax`: the extremes

    `mse` and `entropy` try `grid` thresholds, then half as many around the best one.
    """

    _act_sync_dict = {**StaticMinMaxObserver._act_sync_dict, "counts": dist.ReduceOp.SUM}
    _kwargs = (*_CHOICE, whole("mantissa_bits", 8, at_least=0, at_most=10))

    counts: torch.Tensor
    method: str
    percentile: float
    norm: float
    grid: int
    mantissa_bits: int

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        strategies = _ATTENTION if base_name in ("q", "k", "v") else _ACTIVATION
        if self.args.strategy not in strategies:
            raise ConfigurationError(
                f"{base_name}: histogram does not work with strategy {_name(self.args.strategy)}; "
                f"use {', '.join(map(_name, strategies))}"
            )

    @property
    def bins(self) -> FloatBins:
        return FloatBins(self.mantissa_bits)

    @property
    def histogram(self) -> Histogram:
        """Return the distribution of the values observed so far."""
        require_finite(self, _EXTREMES)
        return Histogram(self.bins, self.counts, self.min_vals, self.max_vals)

    def measure(self, observed: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        return {**super().measure(observed, valid), "counts": self._counts(observed, valid)}

    def _counts(self, observed: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        if valid is None:
            return self.bins.count(as_stored(observed))
        rows = as_weights(valid, observed) > 0
        counts = self.bins.count(torch.where(rows, as_stored(observed), 0))
        # Invalid values were counted as zero, whose bin is the first; take them out again.
        zeros = torch.arange(self.bins.size, device=observed.device) == 0
        return counts - zeros * ((~valid).sum() * observed.size(-1))

    def measure_row_groups(self, observed: torch.Tensor, groups: RowGroups) -> Tensors:
        counts = self.bins.count(as_stored(observed), groups)
        return {**super().measure_row_groups(observed, groups), "counts": counts}

    @torch.no_grad()
    def range(self, args: QuantizationArgs | None = None, **settings: Any) -> MinMaxTuple:
        """Choose the range, optionally for other arguments or by another method.

        :param args: how the values will be quantized; None for the observer's own arguments
        :param settings: `method`, `percentile`, `norm` or `grid`, to override the observer's own
        """
        args = self._require_same_strategy(args)
        return _range_of(self.histogram, args, self._choice(settings))

    @classmethod
    def saved_by_compiling(cls, args: QuantizationArgs) -> float:
        return 1.5

    @classmethod
    def get_qparams_of(
        cls, observers: Iterable[Observer]
    ) -> Iterator[QParamsDict | StatisticsError]:
        """Compute the qparams of several observers, searching those together that are alike."""
        for kind, alike in groupby(observers, _kind_of):
            if kind is None or cls is not HistogramObserver:  # a subclass may choose otherwise
                yield from super().get_qparams_of(alike)
                continue
            yield from _side_by_side(_qparams_together, alike, kind.together)

    @torch.no_grad()
    def requantize(self, args: QuantizationArgs | None = None, **settings: Any) -> QParamsDict:
        """Compute the qparams for other arguments or settings; see `range`."""
        args = self._require_same_strategy(args)
        return self._qparams_of(*self.range(args, **settings), args)

    def _chosen_range(self) -> MinMaxTuple:
        return self.range()

    def _choice(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        own = {kwarg.name: getattr(self, kwarg.name) for kwarg in _CHOICE}
        return read_kwargs(type(self).__name__, _CHOICE, {**own, **settings}, closed=True)

    def _require_same_strategy(self, args: QuantizationArgs | None) -> QuantizationArgs:
        if args is None:
            return self.args
        if args.strategy != self.args.strategy:
            raise ConfigurationError(
                f"{self.slot}: values were counted for strategy {_name(self.args.strategy)} and "
                f"cannot be quantized with {_name(args.strategy)}; observe them again for it"
            )
        return args


class _Kind(NamedTuple):
    """What histograms have in common that are searched together."""

    args: str
    choice: tuple[Any, ...]
    counts: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def together(self) -> int:
        return max(1, _BINS_TOGETHER // self.counts.numel())


def _kind_of(observer: Observer) -> _Kind | None:
    if not isinstance(observer, HistogramObserver) or not observer.has_statistics:
        return None
    return _Kind(
        key_of(observer.args),
        tuple(observer._choice({}).values()),
        observer.counts.shape,
        observer.min_vals.dtype,
        observer.min_vals.device,
    )


@torch.no_grad()
def _qparams_together(observers: Sequence[Any]) -> list[QParamsDict | StatisticsError]:
    found: dict[int, QParamsDict | StatisticsError] = {}
    usable = []
    for index, observer in enumerate(observers):
        try:
            require_finite(observer, _EXTREMES)
            usable.append(index)
        except StatisticsError as error:
            found[index] = error
    if usable:
        first = observers[usable[0]]
        stacked = (
            torch.stack([getattr(observers[index], name) for index in usable])
            for name in ("counts", *_EXTREMES)
        )
        ranges = _range_of(Histogram(first.bins, *stacked), first.args, first._choice({}))
        for index, low, high in zip(usable, *ranges, strict=True):
            try:
                found[index] = observers[index]._qparams_of(low, high, first.args)
            except StatisticsError as error:
                found[index] = error
    return [found[index] for index in range(len(observers))]


def _side_by_side(
    function: Callable[[list[Observer]], list[_Answer]], observers: Iterator[Observer], size: int
) -> Iterator[_Answer]:
    """Yield the result of the function for each observer, with one part per thread.

    Only these parts are taken from the observers at a time: their histograms may be many.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            while parts := [part for _ in range(threads) if (part := [*islice(observers, size)])]:
                yield from chain.from_iterable(pool.map(function, parts))
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread.

    A search is thousands of operations of about 50 microseconds. Divided between threads they gain
    little, and where the cores are busy the threads wait for each other many times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def _range_of(
    histogram: Histogram, args: QuantizationArgs, choice: Mapping[str, Any]
) -> MinMaxTuple:
    method = choice["method"]
    if method == "minmax":
        return histogram.min_vals, histogram.max_vals
    if method == "percentile":
        return _percentile(histogram, args, choice["percentile"] / 100)
    loss: Loss = (
        quantization_error(histogram, args, choice["norm"])
        if method == "mse"
        else divergence(histogram, args)
    )
    search = ClipSearch(
        histogram=histogram, loss=loss, symmetric=bool(args.symmetric), grid=choice["grid"]
    )
    return search()


def _percentile(histogram: Histogram, args: QuantizationArgs, fraction: float) -> MinMaxTuple:
    if args.symmetric:
        below = above = histogram.magnitudes().quantile(fraction)
    else:
        left_out = (1 - fraction) / 2
        below, above = -histogram.quantile(left_out), histogram.quantile(1 - left_out)
    return clip(histogram.min_vals, histogram.max_vals, below, above)


def _name(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))
