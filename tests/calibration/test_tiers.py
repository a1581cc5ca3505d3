"""When pieces of a graph are compiled, by a clock that is set by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Functional, linear, observed, trace
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from torch.fx import GraphModule

from inlay import Calibration, Recipe
from inlay.calibration import tiers
from inlay.calibration.backend import Backend
from inlay.calibration.tiers import CompileCosts, Forecast, Tier
from inlay.recipe import Plan

MSE = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "mse"})


class Clock:
    """Seconds that pass when an op runs, and not otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(tiers, "_now", lambda values: self.now)
        monkeypatch.setattr(tiers.time, "perf_counter", lambda: self.now)

    def takes(self, seconds: float) -> Any:
        def run(*args: Any) -> None:
            self.now += seconds

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make_tier(
    clock: Clock,
    folder: Path,
    *,
    op_by_op: float,
    compiled: float,
    forecast: Forecast,
    in_a_batch: int = 10,
) -> Tier:
    """A piece whose time is all its observer's, and whose compilation takes what is estimated."""
    gm = GraphModule({}, torch.fx.symbolic_trace(torch.nn.Identity()).graph)
    costs = CompileCosts(folder)

    def compile(chosen: GraphModule) -> Any:
        clock.now += costs.start
        return clock.takes(compiled)

    tier = Tier(gm, compile, forecast=forecast, costs=costs)
    tier._run = clock.takes(op_by_op)
    tier._probe = lambda args: setattr(tier, "_parts", {"mse": op_by_op})
    tier.calls_in_a_batch = in_a_batch
    return tier


def run(tier: Tier, forecast: Forecast, batches: int) -> None:
    for _ in range(batches):
        for _ in range(tier.calls_in_a_batch):
            tier(torch.ones(1))
        forecast.done += 1


@given(
    op_by_op=st.floats(0.001, 2),
    compiled=st.floats(0.001, 2),
    batches=st.integers(1, 300),
    told=st.booleans(),
)
@examples(200)
def test_never_much_longer_than_the_better_choice(
    tmp_path_factory: pytest.TempPathFactory,
    op_by_op: float,
    compiled: float,
    batches: int,
    told: bool,
) -> None:
    """Whatever compiling brings: told the number of batches or not, and right about it or not."""
    with pytest.MonkeyPatch.context() as patch:
        clock, forecast = Clock(patch), Forecast()
        folder = tmp_path_factory.mktemp("costs")
        tier = make_tier(clock, folder, op_by_op=op_by_op, compiled=compiled, forecast=forecast)
        cost = tier.costs.start  # there are no ops in it
        if told:
            forecast.expect(batches)
        run(tier, forecast, batches)
        plain = op_by_op * batches * 10
        better = min(plain, cost + compiled * batches * 10)
        # Compiled code that is slower is tried a few times before it is given up.
        trial = 5 * max(compiled, op_by_op)
        if compiled <= op_by_op / 4:  # as fast as expected, or faster
            assert clock.now <= 3 * better + trial
        assert clock.now <= 1.05 * plain + cost + trial
        if plain * 0.75 < cost and told:
            assert not tier.is_compiled


def test_decisions_are_said(clock: Clock, tmp_path: Path) -> None:
    forecast = Forecast()
    forecast.expect(3)
    few = make_tier(clock, tmp_path, op_by_op=0.1, compiled=0.01, forecast=forecast)
    run(few, forecast, 1)
    assert not few.is_compiled
    assert "compiling all of it would take about 9 s and save 2 s over 2 more" in str(few)
    forecast = Forecast()
    forecast.expect(100)
    many = make_tier(clock, tmp_path, op_by_op=0.1, compiled=0.01, forecast=forecast)
    run(many, forecast, 1)
    assert many.is_compiled
    assert many.calls == 10  # in the middle of the first batch
    assert "compiled after 5 calls" in str(many)
    assert "a batch runs 10 times" in str(many)


def test_slower_code_is_given_up(clock: Clock, tmp_path: Path) -> None:
    forecast = Forecast()
    forecast.expect(1000)
    tier = make_tier(clock, tmp_path, op_by_op=0.1, compiled=0.5, forecast=forecast)
    run(tier, forecast, 2)
    assert not tier.is_compiled
    assert "a call took 0.500 s instead of 0.100 s" in tier.reason


def test_a_compiler_that_fails_is_done_without(clock: Clock, tmp_path: Path) -> None:
    forecast = Forecast()
    forecast.expect(1000)
    tier = make_tier(clock, tmp_path, op_by_op=0.1, compiled=0.01, forecast=forecast)

    def fail(chosen: GraphModule) -> Any:
        raise RuntimeError("no C++ compiler\nand a long story")

    tier._compile = fail
    with pytest.warns(UserWarning, match=r"op by op, for compiling failed: .*no C\+\+ compiler$"):
        run(tier, forecast, 1)
    run(tier, forecast, 5)
    assert not tier.is_compiled


def test_costs_are_remembered_with_the_cache(tmp_path: Path) -> None:
    costs = CompileCosts(tmp_path / "cache")
    cold = costs.estimate("one", 100)
    costs.learn("one", 100, 7.0)
    assert costs.estimate("two", 100) == pytest.approx(6.0)  # the start is paid for
    costs.learn("two", 100, 8.0)
    assert costs.estimate("three", 100) == pytest.approx(7.0)
    later = CompileCosts(tmp_path / "cache")
    # Starting took a second; what is cached takes a fifth, until somebody has seen it.
    assert later.estimate("two", 100) == pytest.approx(1.0 + 8.0 / 5)
    assert later.estimate("three", 100) == pytest.approx(1.0 + 7.0)
    later.learn("one", 100, 3.0)
    later.learn("two", 100, 0.5)
    assert later.estimate("two", 100) == pytest.approx(0.5)
    assert later.estimate("three", 100) == pytest.approx(7.0)  # learned from new graphs alone
    for broken in ("{", "[]", '{"start": "soon"}'):
        (tmp_path / "cache" / "inlay_costs.json").write_text(broken)
        assert CompileCosts(tmp_path / "cache").estimate("one", 100) == cold


def test_costs_that_cannot_be_kept_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    CompileCosts(tmp_path / "file").learn("one", 10, 1.0)


def test_fingerprints_tell_graphs_apart() -> None:
    def fingerprint(model: torch.nn.Module, rows: int) -> str:
        calibration = Calibration(model, MSE)
        torch._dynamo.reset()
        calibration.observe(torch.ones(rows, 4))
        (tier, *_) = calibration._observing.tiers
        return tiers._fingerprint(tier.gm)

    one, other = linear(), linear(seed=1)
    assert fingerprint(one, 3) == fingerprint(other, 3)
    assert fingerprint(one, 3) != fingerprint(one, 5)
    assert fingerprint(one, 3) != fingerprint(torch.nn.Sequential(one, torch.nn.ReLU(), other), 3)


def test_observers_may_be_compiled_alone() -> None:
    """The search is most of the time, and a small part of what there is to compile."""
    model = Functional(lambda self, x: self.fc(x).relu().sin().cos(), fc=linear())
    x = torch.randn(3, 4)
    gm = observed(trace("dynamo", model, x), Plan(model, MSE))
    tier = Tier(gm, lambda chosen: chosen.forward, forecast=Forecast(), costs=CompileCosts())
    tier._parts, tier._op_by_op = {"mse": 0.9, "": 0.1}, 1.0
    whole, observers = tier._choices
    assert whole.gm is gm
    assert observers.ops < whole.ops
    assert observers.saved_in_a_call == pytest.approx(0.9 * 0.8)
    assert whole.saved_in_a_call > observers.saved_in_a_call
    assert [str(n.target) for n in observers.gm.graph.nodes if n.op == "call_module"] == [
        "region_0"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("alone", "after"), [(False, 7), (True, 3)])
@pytest.mark.parametrize("observer", ["static_minmax", "minmax", "histogram", "mse"])
def test_statistics_do_not_depend_on_the_tier(
    monkeypatch: pytest.MonkeyPatch, observer: str, after: int, alone: bool
) -> None:
    """Bit for bit where the ops are the same: here compiled code runs op by op as well."""
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": observer})
    model = torch.nn.Sequential(linear(), torch.nn.ReLU(), linear(seed=1))
    batches = [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    later = Backend._compile
    monkeypatch.setattr(
        Backend, "_compile", lambda self, name, gm, inputs: later(self, "aot_eager", gm, inputs)
    )

    def decide(self: Tier) -> None:
        if self.calls >= after:
            self._promote(self._choices[-1 if alone else 0], 1.0)
        else:
            self._next_decision = self.calls + 1

    monkeypatch.setattr(Tier, "_decide", decide)
    # What this takes says nothing of a compiler, and must not be remembered on this machine.
    monkeypatch.setattr(CompileCosts, "_keep", lambda self: None)
    monkeypatch.setattr(Tier, "_check", lambda self, args: self._run(*args))
    found = []
    for compiler in ("eager", "auto"):
        torch._dynamo.reset()
        calibration = Calibration(model, recipe, compiler=compiler)
        for x in batches:
            calibration.observe(x)
        found.append(calibration)
    assert found[1].tier == "compiled"
    assert found[0].tier == ""
    for name, qparams in found[0].finalize().items():
        assert torch.equal(qparams["scale"], found[1].finalize()[name]["scale"])


def test_auto_says_what_it_does(clock: Clock) -> None:
    model = torch.nn.Sequential(linear(), torch.nn.ReLU(), linear(seed=1))
    calibration = Calibration(model, MSE)
    calibration.expect(6)
    for index in range(6):
        calibration.observe(torch.randn(5, 4, generator=torch.Generator().manual_seed(index)))
    assert calibration.tier == "op by op"
    assert calibration.tiers
    for line in calibration.tiers:
        assert "op by op: compiling" in line
        assert line in calibration.explain()
