"""The kit catches broken observers: each by the law that speaks of its mistake, in its words."""

import re

import pytest
import torch
from profiles import count, unshrunk
from torch import distributed as dist

from inlay.observers import MinMaxObserver, Observer, QParamsDict
from inlay.testing import Bounds, BrokenLawError, check_observer, checks_of

EXTREMES = {"min_vals": dist.ReduceOp.MIN, "max_vals": dist.ReduceOp.MAX}


def register(cls: type[Observer]) -> type[Observer]:
    registered: type[Observer] = Observer.register(f"broken_{cls.__name__}")(cls)
    return registered


class Extremes(Observer):
    """What the others break: the smallest and largest value of all batches."""

    _act_sync_dict = EXTREMES

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.take_in(observed.amin(dim=(0, -1)), observed.amax(dim=(0, -1)))

    def take_in(self, low: torch.Tensor, high: torch.Tensor) -> None:
        if self.has_statistics:
            low, high = torch.min(low, self.min_vals), torch.max(high, self.max_vals)
        self.min_vals, self.max_vals = low, high


@register
class Right(Extremes):
    pass


@register
class ForgotAbs(Extremes):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        largest = observed.amax(dim=(0, -1))  # of observed.abs()
        self.take_in(-largest, largest)


@register
class ReducesGroups(Extremes):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.take_in(observed.amin(dim=(0, -2)), observed.amax(dim=(0, -2)))


@register
class MixesGroups(Extremes):
    """The right shape, and groups in another order than their elements."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.take_in(observed.amin(dim=(0, -1)), observed.flip(1).amax(dim=(0, -1)))


@register
class FirstHalfOnly(Extremes):
    """Looks at the first half of the elements that share a scale."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        super().update_statistics_from_observed(observed[..., : -(-observed.shape[-1] // 2)])


@register
class LastObservationOnly(Extremes):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        super().update_statistics_from_observed(observed[-1:])


@register
class ChangesTheValue(Extremes):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        largest = observed.abs_().amax(dim=(0, -1))
        self.take_in(-largest, largest)


@register
class KeepsAView(Observer):
    _act_sync_dict = {}

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        groups = observed.movedim(0, -2).flatten(-2)
        self.min_vals, self.max_vals = groups.amin(dim=-1), groups.amax(dim=-1)
        self.sample = observed[0]  # for a plot, later


@register
class KeepsOnItsClass(Extremes):
    kept: dict[str, torch.Tensor] = {}

    def take_in(self, low: torch.Tensor, high: torch.Tensor) -> None:
        key = f"{self.base_name} {tuple(low.shape)}"
        largest = torch.maximum(-low, high)
        self.kept[key] = torch.maximum(self.kept.get(key, largest), largest)
        super().take_in(-self.kept[key], self.kept[key])


@register
class GetterResets(Extremes):
    def get_qparams(self) -> QParamsDict:
        qparams = super().get_qparams()
        del self.min_vals, self.max_vals
        return qparams


@register
class StartsAtZero(Extremes):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.min_vals = self.max_vals = torch.zeros(1)


@register
class DropsNan(Extremes):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        super().update_statistics_from_observed(observed.nan_to_num(0.0, 0.0, 0.0))


@register
class ForgetsNan(Extremes):
    def take_in(self, low: torch.Tensor, high: torch.Tensor) -> None:
        if self.has_statistics and not bool(torch.isfinite(self.max_vals - self.min_vals).all()):
            del self.min_vals, self.max_vals  # start again after a bad batch
        super().take_in(low, high)


@register
class ScaleOfNothing(Extremes):
    def get_qparams(self) -> QParamsDict:
        qparams = super().get_qparams()
        spread = (self.max_vals - self.min_vals).reshape(qparams["scale"].shape)
        return {**qparams, "scale": torch.where(spread == 0, 0.0, qparams["scale"].float())}


@register
class LastBatchOnly(Observer):
    _act_sync_dict = EXTREMES

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.min_vals, self.max_vals = observed.amin(dim=(0, -1)), observed.amax(dim=(0, -1))


@register
class AverageAsSum(Extremes):
    """The mean of all values, which ranks would add up."""

    _act_sync_dict = {**EXTREMES, "mean": dist.ReduceOp.SUM, "count": dist.ReduceOp.SUM}

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        mean = observed.double().mean(dim=(0, -1))
        count = own = torch.full_like(mean, observed.shape[0] * observed.shape[-1])
        if self.has_statistics:
            count = own + self.count
            mean = self.mean + (mean - self.mean) * own / count
        self.mean, self.count = mean, count
        super().update_statistics_from_observed(observed)


@register
class HalfPrecisionSum(Extremes):
    _act_sync_dict = {**EXTREMES, "squares": dist.ReduceOp.SUM}

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        squares = observed.square().sum(dim=(0, -1))
        self.squares = squares + self.squares if self.has_statistics else squares
        super().update_statistics_from_observed(observed)


@register
class ForgotToDeclare(Extremes):
    _act_sync_dict = {}


@register
class DeclaresATypo(Extremes):
    _act_sync_dict = {"min_val": dist.ReduceOp.MIN, "max_val": dist.ReduceOp.MAX}


@register
class FirstBatchCountsTwice(Extremes):
    """Depends on which batch comes first, as warming up does."""

    def take_in(self, low: torch.Tensor, high: torch.Tensor) -> None:
        if not self.has_statistics:
            low, high = low * 2, high * 2
        super().take_in(low, high)


@register
class KeepsAList(Extremes):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.history: list[torch.Tensor] = []

    def take_in(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.history.append(torch.maximum(-low, high))
        largest = torch.stack(self.history).amax(dim=0)
        self.min_vals, self.max_vals = -largest, largest


@register
class StartsWithAPrior(Extremes):
    """Adds a value that nobody saw, once for each rank."""

    _act_sync_dict = {**EXTREMES, "count": dist.ReduceOp.SUM}

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.count = torch.ones(1)

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.count = self.count + observed.shape[0]
        super().update_statistics_from_observed(observed)


@register
class AveragesExtremes(MinMaxObserver):
    """Declares extremes, which start at infinity where a graph is compiled, and averages them."""

    _act_sync_dict = EXTREMES


@register
class ExtremesAsAverages(Extremes):
    """Ranks would average what each of them has as the smallest and the largest value."""

    _act_sync_dict = dict.fromkeys(EXTREMES, dist.ReduceOp.AVG)


@register
class CountsPadding(Extremes):
    def update_statistics_from_valid(self, observed: torch.Tensor, valid: torch.Tensor) -> None:
        self.update_statistics_from_observed(observed)


@register
class OverridesForward(Extremes):
    """Works by itself; a graph never calls `forward`."""

    def forward(self, observed: torch.Tensor) -> Observer:
        return super().forward(observed.clamp(-1, 1))


SHAPE = "scales_have_the_shape_of_their_strategy"
POSITIVE = "scales_are_positive_and_zero_points_in_range"
RESEMBLE = "quantized_values_resemble_the_observed_ones"
ELEMENTS = "scales_follow_their_elements"
PLACES = "places_within_a_scale_do_not_matter"
VALUE = "observing_leaves_the_value_alone"
OWN = "statistics_are_not_the_value_itself"
SHARE = "observers_do_not_share_statistics"
GETTER = "get_qparams_changes_nothing"
NOTHING = "without_values_there_are_no_qparams"
NAN = "nan_and_infinity_are_refused"
EXIST = "declared_statistics_exist"
LAST = "what_is_not_declared_is_of_the_last_batch"
SPLIT = "splitting_a_batch_changes_nothing"
ORDER = "the_order_of_batches_does_not_matter"
REPEAT = "repeated_batches_add_up_in_sums_alone"
BETWEEN = "averages_lie_between_what_they_average"
BAD = "a_bad_batch_is_not_forgotten"
RANKS = "ranks_merge_to_one_process"
PADDING = "padding_is_left_out"
STORING = "statistics_survive_storing"
GRAPH = "a_graph_gathers_what_the_observer_gathers"
TRACED = "first_and_later_values_are_traced_alike"
COMPILED = "compiled_equals_eager"

# The law that speaks of the mistake, what its message says, and other laws that may break with it.
MISTAKES: list[tuple[type[Observer], str, str, set[str]]] = [
    (ForgotAbs, RESEMBLE, "does the range cover negative values", {NAN}),
    (ReducesGroups, SHAPE, "reduce over dimensions 0 and -1", {RESEMBLE, ELEMENTS, PLACES}),
    (MixesGroups, ELEMENTS, "scales do not belong to their elements", {RESEMBLE}),
    (FirstHalfOnly, PLACES, "does it look at all of them", {RESEMBLE}),
    (LastObservationOnly, PLACES, "does it look at all of them", {RESEMBLE, SPLIT, NAN, BAD}),
    (ChangesTheValue, VALUE, "changes the value in place", set()),
    (KeepsAView, OWN, "sample is a view of the observed value", set()),
    (
        KeepsOnItsClass,
        SHARE,
        "depends on what other observers saw",
        {
            POSITIVE, RESEMBLE, ELEMENTS, NAN, RANKS, STORING, BAD, ORDER, SPLIT, GRAPH, COMPILED,
            REPEAT,
        },
    ),
    (GetterResets, GETTER, "the statistics are gone after get_qparams", set()),
    (StartsAtZero, NOTHING, "has_statistics is true before any value", {
        RANKS, GRAPH, TRACED, STORING,
    }),
    (DropsNan, NAN, r"get_qparams\(\) gives the scale .* without a word", {BAD}),
    (ForgetsNan, BAD, "the first batch held nan", set()),
    (ScaleOfNothing, POSITIVE, "the scale is not above zero", {RESEMBLE}),
    (LastBatchOnly, SPLIT, "declared as M.. in _act_sync_dict", {ORDER, BAD, RANKS}),
    (AverageAsSum, REPEAT, "mean is .* a SUM should be that often as large", {RANKS}),
    (ExtremesAsAverages, BETWEEN, "in either order; declare it as M.., not as AVG", set()),
    (HalfPrecisionSum, REPEAT, "summed in float32 or float64", {SPLIT, ORDER, RANKS}),
    (ForgotToDeclare, LAST, "_act_sync_dict does not say how it merges", set()),
    (DeclaresATypo, EXIST, "names min_val, max_val, and the observer has max_vals", {
        LAST, SPLIT, ORDER, REPEAT, RANKS, BAD,
    }),
    (FirstBatchCountsTwice, ORDER, "in the order", {SPLIT, RANKS, REPEAT}),
    (KeepsAList, STORING, "outside of tensors", {RANKS}),
    (CountsPadding, PADDING, "must leave out what `valid` does not mark", set()),
    (OverridesForward, GRAPH, "a graph, op by op", {
        RANKS, TRACED, COMPILED, NAN, BAD, STORING,
    }),
    (OverridesForward, COMPILED, 'a graph compiled with ".*eager"', {
        RANKS, TRACED, GRAPH, NAN, BAD, STORING,
    }),
    (StartsWithAPrior, RANKS, "count, declared as SUM .* for merged over ranks", {REPEAT}),
    (AveragesExtremes, TRACED, "for a traced graph", {
        SPLIT, ORDER, RANKS, BAD, COMPILED, STORING,
    }),
]  # fmt: skip


def broken_by(cls: type[Observer], bounds: Bounds, laws: set[str] | None = None) -> dict[str, str]:
    """The laws that an observer breaks, with their messages."""
    found = {}
    for check in checks_of(cls, bounds):
        if check.reason_not is None and (laws is None or check.law.name in laws):
            try:
                check()
            except BrokenLawError as error:
                found[check.law.name] = str(error)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "law", "message", "others"), MISTAKES, ids=[f"{m[0].__name__}-{m[1]}" for m in MISTAKES]
)
def test_each_mistake_is_caught_by_the_law_that_speaks_of_it(
    cls: type[Observer], law: str, message: str, others: set[str]
) -> None:
    with unshrunk():
        assert re.search(message, broken_by(cls, Bounds(60), {law}).get(law, "")), law
        # The others are held to: whom it may be mistaken for is known.
        assert set(broken_by(cls, Bounds(count(12)))) <= {law, *others}


@pytest.mark.parametrize("cls", [Right])
def test_what_is_right_breaks_nothing(cls: type[Observer]) -> None:
    check_observer(cls, examples=5)


def test_every_law_catches_something() -> None:
    caught = {law for _, law, _, _ in MISTAKES}
    assert caught == {check.law.name for check in checks_of("static_minmax")}
