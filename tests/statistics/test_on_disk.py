"""Statistics on disk: kept, taken up again, merged, asked anew."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import batch, bert
from plain_llama import plain_llama
from specification import assert_equal_qparams

from inlay import Calibration, Recipe
from inlay.engine.calibrate import requantize
from inlay.errors import ConfigurationError, StatisticsError
from inlay.statistics.on_disk import StoredStatistics

pytestmark = pytest.mark.slow

DOWN = "model.layers.0.mlp.down_proj.input"


def recipe(observer: str = "static_minmax", **changes: object) -> Recipe:
    inputs = {"observer": observer, **changes}
    return Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs=inputs)


def observed(model, recipe: Recipe, indices=range(3), start: StoredStatistics | None = None):
    torch._dynamo.reset()
    make: Callable = Calibration if start is None else Calibration.from_statistics
    given = () if start is None else (start,)
    calibration = make(model, recipe, *given, compiler="eager")
    for index in indices:
        calibration.observe(**batch(model, index))
    return calibration


@pytest.mark.parametrize("observer", ["static_minmax", "minmax", "mse", "histogram"])
def test_going_on_from_disk_is_as_if_nothing_had_happened(observer: str, tmp_path: Path) -> None:
    model, how = plain_llama(num_hidden_layers=1), recipe(observer)
    first = observed(model, how, range(2))
    first.stored(model="tiny", data="words").save(tmp_path)
    stored = StoredStatistics.load(tmp_path)
    assert stored.slots[DOWN].tokens == 24
    assert (stored.model, stored.data) == ("tiny", "words")
    resumed = observed(model, how, [2], stored)
    whole = observed(model, how)
    assert_equal_qparams(resumed.finalize(), whole.finalize())
    assert resumed.statistics.tokens(resumed.statistics.plan.slots[DOWN]) == 36


def test_importance_is_kept_too(tmp_path: Path) -> None:
    model = plain_llama(num_hidden_layers=1)
    how = Recipe.from_preset(
        "W4A16", ignore=["lm_head"], weights={"observer": "imatrix_mse", "group_size": 32}
    )
    first = observed(model, how, range(2))
    path = first.stored().save(tmp_path)
    resumed = observed(model, how, [2], StoredStatistics.load(path))
    assert_equal_qparams(resumed.finalize(), observed(model, how).finalize())


def test_slots_that_share_a_value_are_stored_once(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = observed(plain_llama(num_hidden_layers=1), recipe(), range(1)).stored().save(tmp_path)
    with safe_open(path, framework="pt") as opened:
        names = list(opened.keys())
    assert len(names) == 4 * 2  # distinct values, min and max


@pytest.mark.parametrize("observer", ["static_minmax", "histogram"])
def test_merged_runs_are_one_run(observer: str, tmp_path: Path) -> None:
    model, how = plain_llama(num_hidden_layers=1), recipe(observer)
    parts = [observed(model, how, own).stored() for own in ([0], [1, 2])]
    merged = parts[0].merge(parts[1])
    merged.save(tmp_path)
    calibration = Calibration.from_statistics(model, how, StoredStatistics.load(tmp_path))
    assert_equal_qparams(calibration.finalize(), observed(model, how).finalize())
    assert merged.slots[DOWN].seen == 3


def test_runs_of_other_models_and_recipes_are_not_merged() -> None:
    model, other = plain_llama(num_hidden_layers=1), plain_llama(num_hidden_layers=1)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(2)
    stored = observed(model, recipe(), [0]).stored(model="one")
    wider = Recipe.from_preset("W8A8_STATIC", ignore=[], inputs={"observer": "static_minmax"})
    for unlike, match in (
        (observed(other, recipe(), [0]).stored(), r"weights in .*up_proj\.weight; merge"),
        (observed(model, wider, [0]).stored(), r"different ignore"),
        (replace(stored, recipe={**stored.recipe, "experts": "all"}), "experts: routed and all"),
    ):
        with pytest.raises(StatisticsError, match=match):
            stored.merge(unlike)
    with (
        pytest.warns(UserWarning, match="that they are of one model was not checked"),
        pytest.raises(StatisticsError, match="different models, one and two"),
    ):
        stored.merge(replace(stored, model="two", weights={}))
    # An observer that one of the runs left open is compared where it observed.
    left_open = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"])
    assert stored.merge(replace(stored, recipe=left_open.fields)).weights == stored.weights


def test_statistics_of_other_weights_are_used_only_if_told_to() -> None:
    model, other = plain_llama(num_hidden_layers=1), plain_llama(num_hidden_layers=1)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(2)
    stored = observed(model, recipe(), [0]).stored()
    with pytest.raises(StatisticsError, match=r"other weights: .*up_proj\.weight differ") as raised:
        requantize(other, recipe(), stored)
    assert "--accept other_weights" in str(raised.value)
    assert requantize(other, recipe(), stored, accept={"other_weights"}).qparams
    with pytest.warns(UserWarning, match="that they are of this model was not checked"):
        assert requantize(other, recipe(), replace(stored, weights={})).qparams


def test_an_average_is_weighed_by_what_was_seen() -> None:
    model, how = plain_llama(num_hidden_layers=1), recipe("minmax")
    parts = [observed(model, how, own).stored() for own in ([0], [1, 2])]
    merged = parts[0].merge(parts[1]).slots[DOWN].tensors["max_vals"]
    one, other = (part.slots[DOWN].tensors["max_vals"] for part in parts)
    torch.testing.assert_close(merged, (one + 2 * other) / 3)


def test_statistics_of_the_last_batch_cannot_be_merged() -> None:
    model, how = plain_llama(num_hidden_layers=1), recipe("memoryless_minmax")
    parts = [observed(model, how, [index]).stored() for index in (0, 1)]
    with pytest.raises(StatisticsError, match="of the last batch only"):
        parts[0].merge(parts[1])


def test_other_formats_and_methods_without_running_the_model() -> None:
    model = plain_llama(num_hidden_layers=1)
    stored = observed(model, recipe("histogram")).stored()
    for wanted in (
        recipe("histogram", num_bits=4, symmetric=True, observer_kwargs={"method": "entropy"}),
        recipe("static_minmax", type="float", symmetric=True),
    ):
        found = Calibration.from_statistics(model, wanted, stored).finalize()
        assert_equal_qparams(found, observed(model, wanted).finalize())


@pytest.mark.parametrize(
    ("gathered", "wanted", "message"),
    [
        ("static_minmax", "histogram", "which is not what histogram needs"),
        ("static_minmax", "minmax", "which is not what minmax needs"),
        ("mse", "mse", "for another format"),
    ],
)
def test_statistics_that_do_not_carry_the_recipe(gathered, wanted, message: str) -> None:
    model = plain_llama(num_hidden_layers=1)
    stored = observed(model, recipe(gathered), range(1)).stored()
    with pytest.raises(StatisticsError, match=message):
        Calibration.from_statistics(model, recipe(wanted, num_bits=4), stored)


def test_files_that_hold_no_statistics(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(ConfigurationError, match="cannot read the statistics"):
        StoredStatistics.load(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigurationError, match="holds no statistics"):
        StoredStatistics.load(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"not one")
    with pytest.raises(ConfigurationError, match="cannot read the statistics"):
        StoredStatistics.load(tmp_path / "b.safetensors")


def test_an_interrupted_save_leaves_the_old_statistics(tmp_path: Path, monkeypatch) -> None:
    calibration = observed(plain_llama(num_hidden_layers=1), recipe(), range(1))
    calibration.stored(data="old").save(tmp_path)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        calibration.stored(data="new").save(tmp_path)
    monkeypatch.undo()
    assert StoredStatistics.load(tmp_path).data == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "statistics.json",
        "statistics.safetensors",
    ]


@pytest.mark.parametrize("gathered", ["static_minmax", "minmax", "histogram"])
def test_the_observer_that_gathered_stays_where_nobody_names_one(gathered: str) -> None:
    """The preset does, and is not asked."""
    model = plain_llama(num_hidden_layers=1)
    stored = observed(model, recipe(gathered)).stored()
    other = Recipe.from_preset("FP8", ignore=["lm_head"])
    calibration = Calibration.from_statistics(model, other, stored)
    assert calibration.plan.slots[DOWN].observer == gathered
    named = Recipe.from_preset("FP8", ignore=["lm_head"], inputs={"observer": gathered})
    assert_equal_qparams(calibration.finalize(), observed(model, named).finalize())


@pytest.mark.parametrize(("gathered", "asked"), [("static_minmax", "minmax"), ("minmax", "mse")])
def test_an_observer_that_is_named_needs_statistics_of_its_own(gathered: str, asked: str) -> None:
    model = plain_llama(num_hidden_layers=1)
    stored = observed(model, recipe(gathered)).stored()
    wanted = Recipe.from_preset("FP8", ignore=["lm_head"], inputs={"observer": asked})
    with pytest.raises(StatisticsError, match=f"which is not what {asked} needs"):
        Calibration.from_statistics(model, wanted, stored)


def test_an_average_of_ranges_carries_no_global_scale() -> None:
    """That would be an average of the ranges of groups."""
    model = plain_llama(num_hidden_layers=1)
    stored = observed(model, recipe("minmax")).stored()
    other = Recipe.from_preset("NVFP4", ignore=["lm_head"])
    with pytest.raises(StatisticsError, match="they are per tensor, not per tensor_group"):
        Calibration.from_statistics(model, other, stored)


@pytest.mark.parametrize("gathered", ["static_minmax", "histogram"])
def test_a_range_per_tensor_carries_a_global_scale(gathered: str) -> None:
    model = plain_llama(num_hidden_layers=1)
    stored = observed(model, recipe(gathered)).stored()
    other = Recipe.from_preset("NVFP4", ignore=["lm_head"])
    found = Calibration.from_statistics(model, other, stored).finalize()
    named = Recipe.from_preset("NVFP4", ignore=["lm_head"], inputs={"observer": "static_minmax"})
    expected = observed(model, named).finalize()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name]["global_scale"], values["global_scale"]), name


def test_statistics_of_another_model_are_called_that() -> None:
    stored = observed(plain_llama(num_hidden_layers=1), recipe(), range(1)).stored()
    with pytest.raises(StatisticsError, match=r"of another model.*model\.layers\.0"):
        Calibration.from_statistics(bert(), Recipe.from_preset("W8A8_STATIC"), stored)
