"""The functional view of observers: the same statistics as the class, for every observer."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given, settings
from strategies import batches, observables
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from inlay.errors import StatisticsError
from inlay.nodes.observe import Observe, SlotState
from inlay.observers import Observer
from inlay.recipe import Slot
from inlay.statistics.rule import Rule

TENSOR = {"num_bits": 8, "strategy": "tensor"}
BUILT_IN = ["memoryless_minmax", "static_minmax", "minmax", "memoryless_mse", "mse"]
few = settings(max_examples=12)  # every example is traced twice


@Observer.register("test_running_sum")
class RunningSum(Observer):
    """Statistics from the constructor on, changed in place."""

    _act_sync_dict = {"total": dist.ReduceOp.SUM}

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.total = torch.zeros(2, dtype=torch.float64)

    @property
    def has_statistics(self) -> bool:
        return bool(self.total.any())

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.total += torch.stack([observed.sum().double(), observed.square().sum().double()])


@Observer.register("test_buffered")
class Buffered(Observer):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.count = self.count + observed.numel()
        self.min_vals, self.max_vals = observed.amin((0, -1)), observed.amax((0, -1))


@Observer.register("test_branching")
class Branching(Observer):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        if observed.max().item() > 1:
            observed = observed.clamp(max=1)
        self.min_vals, self.max_vals = observed.amin((0, -1)), observed.amax((0, -1))


@Observer.register("test_counting")
class Counting(Observer):
    batches = 0

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.batches += 1
        self.min_vals, self.max_vals = observed.amin((0, -1)), observed.amax((0, -1))


@Observer.register("test_growing")
class Growing(Observer):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        low, high = observed.amin((0, -1)), observed.amax((0, -1))
        if self.has_statistics:
            low, high = torch.cat([self.min_vals, low]), torch.cat([self.max_vals, high])
        self.min_vals, self.max_vals = low, high


def rule(name: str, fields: dict = TENSOR, base_name: str = "input") -> Rule:
    return Rule(Slot("fc", base_name, QuantizationArgs(**fields, observer=name)))


def observe(of: Rule, value: torch.Tensor) -> tuple[Observe, SlotState]:
    with FakeTensorMode() as mode:
        specs = of.specs(mode.from_tensor(value))
    target = Observe(of, specs)
    slot = Slot("fc", of.observer.base_name, of.observer.args)
    return target, SlotState([slot], target, value.device)


@pytest.mark.parametrize("name", [*BUILT_IN, "test_running_sum", "test_buffered"])
@few
@given(values=batches())
def test_functional_view_gathers_what_the_class_gathers(name: str, values) -> None:
    target, state = observe(rule(name), values[0])
    eager = rule(name).observer
    for value in values:
        target(value, *state.inputs().values())
        eager(value)
    found = state.observed()
    assert int(state.seen) == len(values)
    for spec in target.specs:
        assert torch.equal(getattr(found, spec.name), getattr(eager, spec.name)), spec.name


@pytest.mark.parametrize("name", BUILT_IN)
@few
@given(case=observables())
def test_every_strategy(name: str, case) -> None:
    base_name, args, value = case
    of = Rule(Slot("m", base_name, args.model_copy(update={"observer": name})))
    target, state = observe(of, value)
    target(value, *state.inputs().values())
    eager = of.observer(value)
    assert torch.equal(state.observed().min_vals, eager.min_vals)
    assert torch.equal(state.observed().max_vals, eager.max_vals)


def test_the_rule_keeps_no_statistics() -> None:
    of = rule("static_minmax")
    target, state = observe(of, torch.ones(1, 2))
    target(torch.ones(1, 2), *state.inputs().values())
    assert not of.observer.has_statistics


def test_first_and_later_values_share_their_work() -> None:
    """make_fx shows the graph: one minimum and one maximum, whatever the number of branches."""
    target, state = observe(rule("minmax"), torch.ones(2, 4))
    graph = _traced_update(target, state)
    from torch._functorch.compile_utils import fx_graph_cse

    shared = fx_graph_cse(graph)
    names = [str(node.target) for node in shared.nodes]
    assert names.count("aten.amin.default") == 1
    assert names.count("aten.amax.default") == 1
    assert "aten.where.self" in names


def _traced_update(target: Observe, state: SlotState) -> torch.fx.Graph:
    def update(value, seen, tokens, *tensors):
        return target.update(value, seen, tensors)

    return make_fx(update)(torch.ones(2, 4), *state.inputs().values()).graph


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_branching", "_local_scalar_dense"),
        ("test_counting", "batches, which is not a tensor"),
        ("test_growing", "change shape or dtype"),
    ],
)
def test_what_cannot_be_traced_says_why(name: str, reason: str) -> None:
    with pytest.raises(Exception, match=reason), FakeTensorMode() as mode:
        rule(name).specs(mode.from_tensor(torch.ones(2, 4)))


def test_state_of_another_kind_is_refused() -> None:
    _, state = observe(rule("static_minmax"), torch.ones(2, 4))
    other, _ = observe(rule("static_minmax"), torch.ones(2, 4, dtype=torch.bfloat16))
    with pytest.raises(StatisticsError, match=r"fc\.input was observed as .*float32.*bfloat16"):
        state.require(other)


def test_an_empty_value_changes_nothing() -> None:
    target, state = observe(rule("static_minmax"), torch.ones(2, 4))
    target(torch.empty(0, 4), *state.inputs().values())
    assert int(state.seen) == 0
