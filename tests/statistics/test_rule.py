"""The functional view of observers: the same statistics as the class, for every observer."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from profiles import count
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from inlay.errors import StatisticsError
from inlay.nodes.observe import Observe
from inlay.observers import Observer
from inlay.recipe import Slot
from inlay.statistics.rule import Rule
from inlay.statistics.value import Statistics
from inlay.testing import Bounds, Check, ObserverSubject
from inlay.testing.graph_laws import (
    a_graph_gathers_what_the_observer_gathers,
    first_and_later_values_are_traced_alike,
)

TENSOR = {"num_bits": 8, "strategy": "tensor"}


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


def observe(of: Rule, value: torch.Tensor) -> tuple[Observe, Statistics]:
    with FakeTensorMode() as mode:
        specs = of.specs(mode.from_tensor(value))
    return Observe(of, specs), Statistics.start(of, specs, value.device)


@pytest.mark.parametrize("name", ["test_running_sum", "test_buffered"])
def test_functional_view_gathers_what_the_class_gathers(name: str) -> None:
    """The built-in observers are held to this with all their other laws."""
    subject = ObserverSubject.of(name)
    for law in (a_graph_gathers_what_the_observer_gathers, first_and_later_values_are_traced_alike):
        Check(law, subject, bounds=Bounds(count(12)))()


def test_the_rule_keeps_no_statistics() -> None:
    of = rule("static_minmax")
    target, state = observe(of, torch.ones(1, 2))
    target(torch.ones(1, 2), *state.inputs().values())
    assert not of.observer.has_statistics


def traced(target: Observe, state: Statistics) -> list[str]:
    """What happens to a value, as ops, as a compiler is given them."""
    names = [spec.name for spec in target.specs]

    def after(value, seen, tokens, *tensors):
        return target.rule.after(dict(zip(names, tensors, strict=True)), seen, value)

    graph = make_fx(after)(torch.ones(2, 4), *state.inputs().values()).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", ["static_minmax", "minmax", "histogram"])
def test_a_value_is_measured_once(name: str) -> None:
    """Not once as the first value and once as a later one."""
    ops = traced(*observe(rule(name), torch.ones(2, 4)))
    assert ops.count("aten.amin.default") == 1
    assert ops.count("aten.amax.default") == 1


def test_extremes_and_sums_need_no_choice_between_first_and_later() -> None:
    assert "aten.where.self" not in traced(*observe(rule("histogram"), torch.ones(2, 4)))
    assert "aten.where.self" in traced(*observe(rule("minmax"), torch.ones(2, 4)))


@Observer.register("test_listing")
class Listing(Observer):
    """Keeps every value in a list, and decides at the end."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.values: list[torch.Tensor] = []

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.values.append(observed.abs().amax())
        self.max_vals = torch.stack(self.values).mean().reshape(1)
        self.min_vals = -self.max_vals


@Observer.register("test_mapped")
class Mapped(Observer):
    """Keeps its extremes in a dict, and changes them in place."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.kept = {"max": torch.zeros(1)}

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        torch.maximum(self.kept["max"], observed.abs().amax(), out=self.kept["max"])
        self.max_vals = self.kept["max"].clone()
        self.min_vals = -self.max_vals


@Observer.register("test_nested")
class Nested(Observer):
    """Counts in a dict inside a dict."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.notes = {"counts": {"batches": 0}}

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.notes["counts"]["batches"] += 1
        self.max_vals = observed.amax((0, -1)) / self.notes["counts"]["batches"]
        self.min_vals = -self.max_vals


@Observer.register("test_class_wide")
class ClassWide(Observer):
    """Keeps what it sees in a list of the class."""

    history: list[torch.Tensor] = []

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.history.append(observed.amax())
        self.max_vals = torch.stack(self.history).amax().reshape(1)
        self.min_vals = -self.max_vals


@Observer.register("test_modular")
class Modular(Observer):
    """Keeps its statistics in a module of its own."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.norm = torch.nn.BatchNorm1d(1)

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.norm(observed.reshape(-1, 1))
        self.max_vals = self.norm.running_var.sqrt() * 3
        self.min_vals = -self.max_vals


KEEPING_ELSEWHERE = {
    "test_listing": "values",
    "test_mapped": "kept, a container",
    "test_nested": "notes, which is not a tensor",
    "test_class_wide": "history, which is not a tensor",
    "test_modular": "modules or parameters of its own",
}


@pytest.mark.parametrize("name", KEEPING_ELSEWHERE)
def test_state_that_a_graph_would_lose_is_found(name: str) -> None:
    of = rule(name)
    with pytest.raises(StatisticsError, match=KEEPING_ELSEWHERE[name]), FakeTensorMode() as mode:
        of.specs(mode.from_tensor(torch.ones(2, 4)))
    assert ClassWide.history == [], "tracing left values without data on the class"
    assert not getattr(of.observer, "values", [])


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


def test_an_empty_value_changes_nothing() -> None:
    target, state = observe(rule("static_minmax"), torch.ones(2, 4))
    target(torch.empty(0, 4), *state.inputs().values())
    assert int(state.seen) == 0
