"""A new observer is one file: whatever else knows observers reads its class."""

import importlib.util
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
from graphs import linear

from inlay import Calibration, Recipe
from inlay.calibration.decision import Savings
from inlay.cli import known
from inlay.observers import Observer
from inlay.testing import check_observer

FILE = """
    from torch import distributed as dist

    from inlay.observers import MemorylessMinMaxObserver, Observer
    from inlay.observers.kwargs import fraction


    @Observer.register("test_new_activation")
    class NewActivation(MemorylessMinMaxObserver):
        \"\"\"A part of the range of all values.\"\"\"

        any_format = True
        follows_channels = True
        _act_sync_dict = {"min_vals": dist.ReduceOp.MIN, "max_vals": dist.ReduceOp.MAX}
        _kwargs = (fraction("share", 0.5),)

        @classmethod
        def saved_by_compiling(cls, args):
            return 20.0

        def _chosen_range(self):
            return self.min_vals * self.share, self.max_vals * self.share


    @Observer.register("test_new_weight")
    class NewWeight(MemorylessMinMaxObserver):
        \"\"\"The range of a weight, with the number of its inputs.\"\"\"

        observes_input = True
        _act_sync_dict = {"rows": dist.ReduceOp.SUM}

        def measure_input(self, x, valid=None):
            rows = x.reshape(-1, x.size(-1))
            return {"rows": rows.new_ones(len(rows)).sum() if valid is None else valid.sum() * 1.0}
"""


@pytest.fixture(scope="module", autouse=True)
def added(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path: Path = tmp_path_factory.mktemp("new") / "new_observers.py"
    path.write_text(textwrap.dedent(FILE))
    spec = importlib.util.spec_from_file_location("new_observers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calibration(**changes: object) -> Calibration:
    observers = {"inputs": {"observer": "test_new_activation"}, **changes}
    recipe = Recipe.from_preset("W8A8_STATIC", **observers)
    return Calibration(linear(), recipe, compiler="eager")


def test_the_plan_uses_it(added: ModuleType) -> None:
    plan = calibration(weights={"observer": "test_new_weight"}).plan
    (slot,) = plan.activation_slots()
    assert slot.observer_class is added.NewActivation
    (weight,) = plan.weight_slots()
    assert weight.importance in plan.watches(weight.module).values()


def test_data_is_seen_once_if_its_range_follows_from_channels(
    monkeypatch: pytest.MonkeyPatch, added: ModuleType
) -> None:
    assert not calibration(equalize=0.5).plan.needs_second_run
    monkeypatch.setattr(added.NewActivation, "follows_channels", False)
    assert calibration(equalize=0.5).plan.needs_second_run


def test_what_compiling_saves_is_decided_by_it() -> None:
    of = calibration()
    savings = Savings.of(of.plan, of.graphs.weights.of_module)
    assert savings.observers == ("test_new_activation",)
    assert savings.decide(10**9).observers == ("test_new_activation",)


def test_a_calibration_explains_and_finalizes_it() -> None:
    of = calibration(weights={"observer": "test_new_weight"})
    of.observe(torch.ones(3, 4))
    assert "test_new_activation" in of.explain()
    qparams = of.finalize()
    (slot,) = of.plan.activation_slots()
    torch.testing.assert_close(qparams[slot.name]["scale"], torch.tensor([0.5 / 255]))


def test_the_command_line_lists_it() -> None:
    rows = {row[0]: row[1:] for row in known.observer_rows()}
    about = "A part of the range of all values."
    assert rows["test_new_activation"] == ("activations", "share=0.5", about)
    assert rows["test_new_weight"][0] == "weights"


@pytest.mark.parametrize("name", ["test_new_activation", "test_new_weight"])
def test_the_laws_hold_it(name: str) -> None:
    assert Observer.get_value_from_registry(name)
    check_observer(name, examples=2, compilers=("eager",))
