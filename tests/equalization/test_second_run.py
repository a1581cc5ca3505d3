"""Observers that have to see equalized inputs: the data is run twice, and says so."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import SIZE, Blocks, Form
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from torch import nn

import inlay
from inlay import Calibration, Recipe
from inlay.engine.calibrate import requantize
from inlay.errors import ConfigurationError, StatisticsError
from inlay.statistics.on_disk import StoredStatistics

pytestmark = pytest.mark.slow

BATCHES = list(torch.randn(3, 2, 3, SIZE, generator=torch.Generator().manual_seed(5)))
OBSERVERS = ["histogram", "minmax", "mse"]


def recipe(observer: str, strength: Any = 0.7, **options: Any) -> Recipe:
    inputs = {"observer": observer}
    return Recipe.from_preset("W8A8_STATIC", inputs=inputs, equalize=strength, **options)


def calibration(model: nn.Module, wanted: Recipe) -> Calibration:
    torch._dynamo.reset()
    return Calibration(model, wanted, compiler="eager", progress=False)


def after_both_runs(model: nn.Module, wanted: Recipe) -> Calibration:
    made = calibration(model, wanted)
    for batch in BATCHES:
        made.observe(batch)
    made.equalize()
    for batch in BATCHES:
        made.observe(batch)
    return made


def with_equalized_parameters(made: Calibration) -> nn.Module:
    """A copy of the model that has the scaled parameters for its own."""
    model = copy.deepcopy(made.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(made.equalization.parameters.of(made.model.get_parameter(name)))
    return model


def assert_same_qparams(one: Calibration, other: Calibration) -> None:
    ours, theirs = one.finalize(), other.finalize()
    assert ours.keys() == theirs.keys()
    for name, qparams in theirs.items():
        for key, value in qparams.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(ours[name][key], value), (name, key)


@given(
    form=st.builds(
        Form,
        norm=st.sampled_from(["layer", "rms", "gemma"]),
        mlp=st.sampled_from(["gated", "relu", "gelu"]),
        attention=st.sampled_from(["expand", "gqa", "matmul"]),
    ),
    observer=st.sampled_from(OBSERVERS),
    strength=st.sampled_from([0.5, 0.9, "auto"]),
)
@examples(5)
def test_inputs_are_observed_as_those_of_a_model_with_the_scaled_parameters(
    form: Form, observer: str, strength: Any
) -> None:
    """What equalization leaves alone is observed as well, and all of it once."""
    made = after_both_runs(Blocks(form).eval(), recipe(observer, strength))
    made.finalize()
    assert made.equalization.done
    plain = calibration(with_equalized_parameters(made), recipe(observer, None))
    for batch in BATCHES:
        plain.observe(batch)
    equalized = {name for each in made.equalization.done for name in each.group.readers}
    theirs = plain.finalize()
    for slot in made.plan.activation_slots():
        assert made.statistics.seen(slot) == len(BATCHES)
        ours = made.finalize()[slot.name]["scale"]
        if slot.module in equalized:
            assert torch.equal(ours, theirs[slot.name]["scale"])
        else:  # seen in the first run, where what stands before it was rounded otherwise
            torch.testing.assert_close(ours, theirs[slot.name]["scale"], rtol=2e-2, atol=0)


def test_the_first_run_observes_channels_and_what_is_left_alone() -> None:
    made = calibration(Blocks(Form(mlp="gelu")).eval(), recipe("histogram"))
    made.observe(BATCHES[0])
    first = set(made.stored().slots)
    assert "blocks.0.down.input" in first  # gelu lets no scale through
    assert "blocks.0.q.input:channels" in first
    assert "blocks.0.q.input" not in first
    made.equalize()
    made.observe(BATCHES[0])
    assert made.statistics.seen(made.plan.slots["blocks.0.down.input"]) == 1
    assert made.statistics.seen(made.plan.slots["blocks.0.q.input"]) == 1


def test_the_compiled_model_observes_and_quantizes_in_turn() -> None:
    model = Blocks(Form(norm="rms")).eval()
    made = calibration(model, recipe("histogram"))
    compiled = torch.compile(model, backend=made.backend)
    with torch.no_grad():
        for batch in BATCHES:
            torch.testing.assert_close(compiled(batch), model(batch))
        made.equalize()
        for batch in BATCHES:
            torch.testing.assert_close(compiled(batch), model(batch), rtol=1e-4, atol=1e-5)
        assert_same_qparams(made, after_both_runs(model, recipe("histogram")))
        assert torch.equal(compiled(BATCHES[0]), made.quantized_module(BATCHES[0])(BATCHES[0]))


def test_a_second_run_goes_on_from_disk(tmp_path: Path) -> None:
    model = Blocks(Form()).eval()
    begun = calibration(model, recipe("mse", "auto"))
    for batch in BATCHES:
        begun.observe(batch)
    begun.equalize()
    begun.observe(BATCHES[0])
    begun.stored().save(tmp_path)
    again = Calibration.from_statistics(
        model, recipe("mse", "auto"), StoredStatistics.load(tmp_path), compiler="eager"
    )
    assert not again.needs_second_run
    for batch in BATCHES[1:]:
        again.observe(batch)
    whole = after_both_runs(model, recipe("mse", "auto"))
    assert_same_qparams(again, whole)
    assert [each.strength for each in again.equalization.done] == [
        each.strength for each in whole.equalization.done
    ]


def test_stored_statistics_serve_the_strength_that_they_were_gathered_with() -> None:
    model = Blocks(Form()).eval()
    whole = after_both_runs(model, recipe("histogram"))
    stored = whole.stored()
    assert_same_qparams(requantize(model, recipe("histogram"), stored), whole)
    for other in (recipe("histogram", 0.5), recipe("histogram", None)):
        with pytest.raises(StatisticsError, match=r"equalized with strength 0\.7"):
            requantize(model, other, stored)
    unlike = after_both_runs(model, recipe("histogram", 0.4)).stored()
    with pytest.raises(StatisticsError, match="equalized with other scales"):
        stored.merge(unlike)
    assert stored.merge(stored).is_second_run


def test_what_is_out_of_turn_is_refused() -> None:
    model = Blocks(Form()).eval()
    made = calibration(model, recipe("histogram"))
    made.observe(BATCHES[0])
    with pytest.raises(StatisticsError, match=r"call equalize\(\), run the same batches again"):
        made.finalize()
    made.equalize()
    with pytest.raises(ConfigurationError, match="needs no second run over the data, or it has"):
        made.equalize()
    with pytest.raises(ConfigurationError, match="needs no second run over the data, or it has"):
        calibration(model, recipe("static_minmax")).equalize()


def test_a_graph_that_forbids_what_is_done_already_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)

        def forward(self, x: torch.Tensor, give_both: bool = False) -> Any:
            h = self.norm(x)
            return (self.fc(h), h) if give_both else self.fc(h)

    made = calibration(Model().eval(), recipe("minmax"))
    made.observe(BATCHES[0])
    made.equalize()
    with pytest.raises(Exception, match=r"uses the parameters of fc otherwise"):
        made.observe(BATCHES[0], give_both=True)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_calibrate_runs_the_data_twice(observer: str, tmp_path: Path) -> None:
    model = Blocks(Form(norm="rms")).eval()
    torch._dynamo.reset()
    run = inlay.calibrate(
        model, recipe(observer), BATCHES, held_out=0, compiler="eager", statistics=tmp_path / "kept"
    )
    assert run.record.samples == len(BATCHES) * 2
    assert "equalizing" in dict(run.record.stages)
    assert "the data is run twice: first for the ranges of channels" in run.explain()
    assert_same_qparams(run, after_both_runs(model, recipe(observer)))


def test_an_interrupted_second_run_is_resumed(tmp_path: Path, monkeypatch: Any) -> None:
    model = Blocks(Form()).eval()
    options: dict[str, Any] = {"held_out": 0, "compiler": "eager", "statistics": tmp_path / "kept"}
    monkeypatch.setattr("inlay.engine.keeping._SAVE_EVERY", 0.0)
    taken = []

    def interrupt(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(taken) == len(BATCHES) + 1:
            raise KeyboardInterrupt
        taken.append(1)
        observe(self, *args, **kwargs)

    observe = Calibration.observe
    with monkeypatch.context() as patch:
        patch.setattr(Calibration, "observe", interrupt)
        with pytest.raises(KeyboardInterrupt):
            inlay.calibrate(model, recipe("histogram"), BATCHES, **options)
    torch._dynamo.reset()
    run = inlay.calibrate(model, recipe("histogram"), BATCHES, resume=True, **options)
    assert_same_qparams(run, after_both_runs(model, recipe("histogram")))


def test_data_that_can_be_read_once_is_refused_before_it_is() -> None:
    drawn = []

    def once() -> Any:
        for batch in BATCHES:
            drawn.append(1)
            yield (batch,)

    with pytest.raises(ConfigurationError, match="the data is run twice"):
        inlay.calibrate(
            Blocks(Form()).eval(), recipe("mse"), once(), samples=None, compiler="eager"
        )
    assert len(drawn) <= 2
