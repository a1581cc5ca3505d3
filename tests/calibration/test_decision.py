"""What "auto" compiles: decided before the first batch, and never by the clock."""

import json
import random
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import linear
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import inlay
from inlay import Calibration, Recipe, StoredStatistics
from inlay.calibration import decision
from inlay.calibration.backend import Backend
from inlay.calibration.decision import Auto, Decision, Savings
from inlay.engine.streamed.journal import Journal

FP8 = Recipe.from_preset("FP8", inputs={"observer": "mse"})
EVERYTHING = asdict(Decision(compiled="everything", reason="a test wants it"))
OBSERVERS = asdict(Decision(compiled="its observers", observers=("mse",)))
SAVINGS = Savings(layers=4, fused=1e4, searches=2, searched=1e6, observers=("mse",))


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(linear(), torch.nn.ReLU(), linear(seed=1))


def batches(count: int = 8) -> list[torch.Tensor]:
    return [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def observed(
    recipe: Recipe, *, stored: dict[str, Any] | None = None, **options: Any
) -> Calibration:
    torch._dynamo.reset()
    calibration = Calibration(layers(), recipe, **options)
    calibration.graphs.auto.restore(stored)
    calibration.graphs.expect(8)
    for x in batches():
        calibration.observe(x)
    return calibration


@given(tokens=st.lists(st.integers(0, 10**10), min_size=2, max_size=2), searched=st.floats(0, 1e6))
@examples(100)
def test_more_tokens_never_compile_less(tokens: list[int], searched: float) -> None:
    order = ["nothing", "its observers", "everything"]
    savings = replace(SAVINGS, searched=searched)
    few, many = (order.index(savings.decide(count).compiled) for count in sorted(tokens))
    assert few <= many


def test_what_compiling_repays() -> None:
    """Searching observers first: they save most, and are little to compile."""
    few, some, many = (SAVINGS.decide(tokens) for tokens in (1_000, 100_000, 10**7))
    assert str(few) == (
        "eager: compiling its observers is estimated to take 14 s and to save 1 s over 1,000 tokens"
    )
    assert some.compiled == "its observers"
    assert some.observers == ("mse",)
    assert str(many).startswith("everything compiled: compiling everything is estimated to take 21")


def test_savings_follow_from_the_model_and_the_recipe() -> None:
    def savings(model: torch.nn.Module, observer: str, preset: str = "FP8") -> Savings:
        recipe = Recipe.from_preset(preset, inputs={"observer": observer})
        calibration = Calibration(model, recipe)
        return Savings.of(calibration.plan, calibration.graphs.weights.of_module)

    one, two = savings(linear(), "mse"), savings(layers(), "mse")
    assert (two.layers, two.searches) == (1, 1)  # of equal layers
    assert two.searched == 2 * one.searched > 0
    assert one.observers == ("mse",)
    plain = savings(linear(), "static_minmax")
    assert (plain.fused, plain.searched, plain.observers) == (one.fused, 0, ())
    assert savings(linear(), "mse", "W8A8_STATIC").searched == 0  # from estimates, eagerly


class Jumping:
    """A clock that jumps ahead by any time, as under any load."""

    def __init__(self, seed: int) -> None:
        self.now, self._random = 0.0, random.Random(seed)

    def __call__(self) -> float:
        self.now += self._random.choice([0.0, 1e-6, 1.0, 1e5])
        return self.now


@pytest.mark.parametrize("expected", [8, 10**12])
def test_no_clock_decides(monkeypatch: pytest.MonkeyPatch, expected: int) -> None:
    later = Backend._compile
    monkeypatch.setattr(
        Backend, "_compile", lambda self, name, gm, inputs: later(self, "aot_eager", gm, inputs)
    )
    found = []
    for seed in range(3):
        with monkeypatch.context() as patch:
            for name in ("perf_counter", "monotonic", "time", "process_time"):
                patch.setattr(time, name, Jumping(seed))
            torch._dynamo.reset()
            calibration = Calibration(layers(), FP8)
            calibration.graphs.expect(expected)
            for x in batches():
                calibration.observe(x)
            assert str(calibration.graphs.auto) == ("compiled" if expected > 8 else "eager")
            found.append((calibration.graphs.auto.decision, calibration.finalize()))
    for decided, qparams in found[1:]:
        assert decided == found[0][0]
        for slot, expected_qparams in found[0][1].items():
            assert torch.equal(qparams[slot]["scale"], expected_qparams["scale"])


def test_only_these_files_read_a_clock() -> None:
    """To tell people how long things take, to notice ranks that died, and to save now and then.

    A file that decides by the clock what is computed would give other bits under load.
    """
    folder = Path(inlay.__file__).parent
    reading = {
        str(file.relative_to(folder))
        for file in folder.rglob("*.py")
        if re.search(r"^\s*(import time\b|from time import)", file.read_text(), re.MULTILINE)
    }
    assert reading <= {
        "ranks/together.py",
        "run_record.py",
        "testing/law.py",
        "engine/keeping.py",
        "engine/run.py",
    }


TWICE = """
import sys, torch
from inlay import Calibration, Recipe
torch.manual_seed(0)
model = torch.nn.Sequential(*(
    torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.RMSNorm(32), torch.nn.GELU())
    for _ in range(2)
))
calibration = Calibration(model, Recipe.from_preset("FP8", inputs={"observer": "minmax"}))
calibration.graphs.expect(10**9)
for rows in (6, 9):
    calibration.observe(torch.randn(rows, 32))
assert str(calibration.graphs.auto) == "compiled", calibration.graphs.auto.described()
calibration.stored().save(sys.argv[1])
"""


@pytest.mark.slow
def test_two_processes_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the compiler has cached, and in whatever order sets are."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        folder = tmp_path / seed
        subprocess.run([sys.executable, "-c", TWICE, str(folder)], check=True)
        found.append(StoredStatistics.load(folder))
    first, second = found
    assert first.decision == second.decision
    assert first.slots.keys() == second.slots.keys()
    for name, known in first.slots.items():
        for key, tensor in known.tensors.items():
            assert torch.equal(tensor, second.slots[name].tensors[key]), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [EVERYTHING, OBSERVERS])
@pytest.mark.parametrize("observer", ["static_minmax", "minmax", "histogram", "mse"])
def test_statistics_do_not_depend_on_what_is_compiled(
    monkeypatch: pytest.MonkeyPatch, observer: str, stored: dict[str, Any]
) -> None:
    """Bit for bit where the ops are the same: here compiled code runs eagerly as well."""
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": observer})
    later = Backend._compile
    monkeypatch.setattr(
        Backend, "_compile", lambda self, name, gm, inputs: later(self, "aot_eager", gm, inputs)
    )
    plain = observed(recipe, compiler="eager")
    compiled = observed(recipe, stored={**stored, "observers": [observer]})
    assert (str(plain.graphs.auto), str(compiled.graphs.auto)) == ("", "compiled")
    for name, qparams in plain.finalize().items():
        assert torch.equal(qparams["scale"], compiled.finalize()[name]["scale"])


def test_a_compiler_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler\nand a long story")

    monkeypatch.setattr(Backend, "_compile", fail)
    message = r"compilation failed; continuing eagerly: RuntimeError: no C\+\+ compiler$"
    with pytest.warns(UserWarning, match=message):
        calibration = observed(FP8, stored=EVERYTHING)
    assert str(calibration.graphs.auto) == "eager"
    assert re.search(message, calibration.explain(), re.MULTILINE)
    monkeypatch.undo()
    for name, qparams in observed(FP8, compiler="eager").finalize().items():
        assert torch.equal(qparams["scale"], calibration.finalize()[name]["scale"])


def test_auto_says_what_it_does() -> None:
    calibration = observed(FP8)
    assert str(calibration.graphs.auto) == "eager"
    (line, *_) = calibration.graphs.auto.described()
    assert re.match(r"eager: compiling .* is estimated to .* over 40 tokens$", line)
    assert line in calibration.explain()
    alone = Calibration(layers(), FP8)
    alone.observe(batches()[0])
    assert alone.graphs.auto.described()[0] == "eager: the number of batches to come is not known"


def test_a_resumed_run_uses_the_decision_of_the_first(tmp_path: Path) -> None:
    first = observed(FP8, stored=OBSERVERS)
    first.stored().save(tmp_path)
    stored = StoredStatistics.load(tmp_path)
    resumed = Calibration.from_statistics(layers(), FP8, stored)
    resumed.graphs.expect(1)
    resumed.graphs.auto.decide(1)
    assert resumed.graphs.auto.decision == first.graphs.auto.decision
    old = replace(stored, decision=None)  # as older files have it
    assert Calibration.from_statistics(layers(), FP8, old).graphs.auto.decision is None
    asked = observed(FP8, compiler="eager").stored()
    assert asked.decision is None


def test_a_resumed_stream_uses_the_decision_of_the_first(tmp_path: Path) -> None:
    def journal(decided: dict[str, Any], *, resume: bool) -> Any:
        return Journal(tmp_path / "out", {}, resume=resume, decision=decided).decision

    assert journal(OBSERVERS, resume=False) == OBSERVERS
    kept = journal(EVERYTHING, resume=True)
    assert Decision.from_plain(kept) == Decision.from_plain(OBSERVERS)
    (file,) = tmp_path.rglob("journal.json")
    content = json.loads(file.read_text())
    del content["decision"]  # of an older Inlay
    file.write_text(json.dumps(content))
    assert journal(EVERYTHING, resume=True) == EVERYTHING


@pytest.mark.parametrize("known", [None, OBSERVERS])
def test_ranks_run_alike(monkeypatch: pytest.MonkeyPatch, known: dict[str, Any] | None) -> None:
    """As rank 0 decides for the tokens of all, or as one of them has done before."""
    others = Decision.from_plain(known) if known else None
    sent: list[Any] = []

    def gathered(own: Any) -> list[Any]:
        sent.append(own)
        return [own, (others, 10**7)] if isinstance(own, tuple) else [own, "of another rank"]

    monkeypatch.setattr(decision, "from_all_ranks", gathered)
    auto = Auto(SAVINGS, is_asked=True)
    auto.decide(1_000)
    expected = SAVINGS.decide(10**7 + 1_000) if known is None else others
    assert auto.decision == sent[1] == expected
    unknown = Auto(SAVINGS, is_asked=True)
    unknown.decide(None)
    if known is None:
        assert str(unknown.decision) == "eager: the number of batches to come is not known"
