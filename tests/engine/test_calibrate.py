"""Calibrating a model on data, from beginning to end."""

import copy
from pathlib import Path

import pytest
import torch
from families import batch, llama
from plain_llama import plain_llama
from specification import assert_equal_qparams
from torch import nn

from inlay import Calibration, Recipe, StoredStatistics, calibrate, stream
from inlay.checking import check_calibration
from inlay.errors import CheckError, ConfigurationError, StatisticsError
from inlay.evaluation.summary import report_of
from inlay.observers import Observer

pytestmark = pytest.mark.slow

STATIC = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs={"observer": "minmax"})


def batches(model, count: int = 5) -> list[dict]:
    return [batch(model, index) for index in range(count)]


def run(model, data, **options):
    torch._dynamo.reset()
    options = {"samples": None, **options}  # read batches as they come
    return calibrate(model, STATIC, data, compiler="eager", **options)


class InterruptedRunError(Exception):
    """What a user's Ctrl-C is to a test."""


def interrupting(items: list, after: int):
    yield from items[:after]
    raise InterruptedRunError


def test_it_ends_finalized_with_a_record() -> None:
    model = plain_llama()
    calibration = run(model, batches(model), samples=6, held_out=4)
    assert isinstance(calibration, Calibration)
    assert calibration.qparams is not None
    assert calibration.record.model == "PlainLlama"
    assert (calibration.record.samples, calibration.record.tokens) == (6, 36)
    assert len(calibration.held_out) == 2
    assert [name for name, _ in calibration.record.stages] == [
        "reading data",
        "tracing and compiling",
        "calibrating",
        "checking the trace",
        "searching ranges",
    ]


def test_a_folder_for_statistics_that_cannot_be_made_is_refused_before_it_runs() -> None:
    model = plain_llama()
    with pytest.raises(ConfigurationError, match="cannot write the folder /proc/deep/out"):
        run(model, batches(model), statistics="/proc/deep/out")


def test_texts_of_all_lengths_are_compiled_once() -> None:
    model = llama()
    data = [{"input_ids": torch.randint(0, 96, (1, length))} for length in (5, 9, 7, 12)]
    traced = 1  # the block that the model repeats
    assert len(run(model, data, held_out=0).graphs) == traced
    # Read as they come, nobody knows of the second length before it is there.
    assert len(run(model, iter(data), samples=None, held_out=0).graphs) == 2 * traced


def test_an_offloaded_model_is_refused_before_it_runs(tmp_path: Path) -> None:
    """And one whose device map keeps it in memory is not."""
    from accelerate import cpu_offload
    from transformers import AutoModelForCausalLM

    llama().save_pretrained(tmp_path)
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    assert run(mapped, batches(mapped), held_out=0).qparams
    with pytest.raises(ConfigurationError, match=rf"inlay calibrate {tmp_path} --stream"):
        run(cpu_offload(mapped), batches(mapped))


def test_a_quantized_model_is_refused_before_it_runs() -> None:
    model = llama()
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    with pytest.raises(ConfigurationError, match=r"load_model\(folder\) dequantizes its weights"):
        run(model, batches(model))
    model.config.quantization_config = {"quant_method": "gguf"}
    with pytest.raises(ConfigurationError, match=r"load_model\(folder, gguf_file=…\) unpacks"):
        run(model, batches(model))


def test_interrupted_and_resumed_it_is_the_same(tmp_path: Path, monkeypatch) -> None:
    model = plain_llama()
    data = batches(model)
    monkeypatch.setattr("inlay.engine.keeping._SAVE_EVERY", 0.0)
    with pytest.raises(InterruptedRunError):
        run(model, interrupting(data, 3), statistics=tmp_path)
    with pytest.raises(InterruptedRunError):
        run(model, interrupting(data, 4), statistics=tmp_path, resume=True)
    resumed = run(model, iter(data), statistics=tmp_path, resume=True)
    whole = run(model, iter(data))
    assert_equal_qparams(resumed.qparams, whole.qparams)
    assert resumed.record.tokens == whole.record.tokens


def test_other_data_is_not_resumed(tmp_path: Path, monkeypatch) -> None:
    model = plain_llama()
    data = batches(model)
    monkeypatch.setattr("inlay.engine.keeping._SAVE_EVERY", 0.0)
    with pytest.raises(InterruptedRunError):
        run(model, interrupting(data, 3), statistics=tmp_path)
    with pytest.raises(StatisticsError, match="batch 1 is not that"):
        run(model, iter(data[1:]), statistics=tmp_path, resume=True)
    with pytest.raises(StatisticsError, match="had observed a batch 3"):
        run(model, iter(data[:2]), statistics=tmp_path, resume=True)
    with pytest.raises(ConfigurationError, match="holds the statistics of an earlier run"):
        run(model, iter(data), statistics=tmp_path)
    refused = {"statistics": tmp_path, "resume": True, "accept": {"other_weights"}}
    with pytest.raises(ConfigurationError, match=r"other weights.*float64 instead of float32"):
        run(copy.deepcopy(model).double(), iter(data), **refused)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(0.1)
    with pytest.raises(ConfigurationError, match=r"layers\.1\.mlp\.up_proj\.weight differ\."):
        run(model, iter(data), **refused)


def test_where_nothing_can_be_resumed_other_runs_are_named(tmp_path: Path, monkeypatch) -> None:
    model = plain_llama()
    data = batches(model, 3)
    monkeypatch.setattr("inlay.engine.keeping._SAVE_EVERY", 0.0)
    (tmp_path / "notes").mkdir()
    options = {"statistics": tmp_path / "oot.statistics", "resume": True}
    with pytest.raises(ConfigurationError, match=r"no run to resume in .*oot\.statistics\. Name"):
        run(model, iter(data), **options)
    with pytest.raises(InterruptedRunError):
        run(model, interrupting(data, 2), statistics=tmp_path / "out.statistics")
    (tmp_path / "other.streaming").mkdir()
    (tmp_path / "other.streaming" / "journal.json").touch()
    match = r"holds runs in other\.streaming, out\.statistics\. Name"
    with pytest.raises(ConfigurationError, match=match):
        run(model, iter(data), **options)
    with pytest.raises(ConfigurationError, match=match):
        stream(tmp_path / "model", STATIC, data, out=tmp_path / "other2", resume=True)


def test_fingerprints_are_taken_only_where_statistics_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, taken = plain_llama(), []
    monkeypatch.setattr("inlay.engine.keeping.digest", lambda one: taken.append(one) or b"any")
    data = batches(model, 2)
    unkept = run(model, data, held_out=0)
    assert taken == []
    assert unkept.statistics.data_seen.batches == 2
    kept = run(model, data, held_out=0, statistics=tmp_path)
    assert len(taken) == 2
    assert StoredStatistics.load(tmp_path).data_seen.fingerprints == {0: "616e79", 1: "616e79"}
    assert_equal_qparams(kept.qparams, unkept.qparams)


def test_statistics_of_unknown_batches_are_not_resumed_but_merged(tmp_path: Path) -> None:
    model = plain_llama()
    data = batches(model, 2)
    run(model, data, held_out=0).stored().save(tmp_path / "checkpoint")
    kept = run(model, data, held_out=0, statistics=tmp_path / "kept")
    stored = StoredStatistics.load(tmp_path / "checkpoint")
    merged = stored.merge(kept.stored())
    assert (merged.data_seen.batches, merged.data_seen.fingerprints) == (4, {})
    merged.save(tmp_path / "merged")
    for name in ("checkpoint", "merged"):
        with pytest.raises(ConfigurationError, match=f"{name} does not say which batches"):
            run(model, data, statistics=tmp_path / name, resume=True)


def test_a_recipe_without_static_activations_needs_no_data() -> None:
    recipe = Recipe.from_preset("W8A8", ignore=["lm_head"])
    calibration = calibrate(plain_llama(), recipe, compiler="eager")
    assert calibration.qparams
    assert calibration.record.data == "no data"


def test_data_that_is_not_used_and_missing_samples_are_stated() -> None:
    model = plain_llama()
    dynamic = Recipe.from_preset("W8A8", ignore=["lm_head"])
    unused = calibrate(model, dynamic, batches(model), compiler="eager")
    assert unused.record.data.startswith("5 batches, not calibrated on: the recipe observes not")
    few = run(model, batches(model), samples=512, held_out=0)
    assert few.record.data == "5 batches, fewer than samples=512"
    assert run(model, batches(model), samples=6, held_out=0).record.data.count(",") == 0


def test_a_recipe_with_static_activations_does() -> None:
    with pytest.raises(ConfigurationError, match="give data"):
        calibrate(plain_llama(), STATIC, compiler="eager")


class Unmasked(torch.nn.Module):
    """Takes an attention mask and does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = torch.nn.Embedding(96, 8), torch.nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.fc(self.embed(input_ids))


def padded(model) -> list[dict]:
    one = batch(model)
    one["attention_mask"][0, 3:] = 0
    return [one]


@pytest.mark.parametrize("by_position", [False, True])
def test_padding_is_left_out_and_reported_for_a_model_that_does_not_read_its_mask(
    by_position: bool,
) -> None:
    model = Unmasked()
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
    (one,) = padded(model)
    data = [(one["input_ids"], one["attention_mask"])] if by_position else [one]
    run = calibrate(model, recipe, data, held_out=0, compiler="eager")
    valid = int(one["attention_mask"].sum())
    assert int(run.stored().slots["fc.input"].tokens) == valid
    seen = run.statistics.data_seen
    assert (seen.tokens, seen.padding_tokens) == (valid, one["attention_mask"].numel() - valid)


def test_a_mask_that_does_not_tell_padding_is_refused() -> None:
    model = Unmasked()
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
    (one,) = padded(model)
    rows, tokens = one["input_ids"].shape
    data = [{**one, "attention_mask": torch.randn(rows, 1, tokens, tokens)}]
    with pytest.raises(StatisticsError, match="does not tell for certain which tokens are padding"):
        calibrate(model, recipe, data, held_out=0, compiler="eager")
    run = calibrate(model, recipe, data, held_out=0, compiler="eager", count_padding=True)
    seen = run.statistics.data_seen
    assert (seen.tokens, seen.padding_tokens) == (rows * tokens, 0)


@Observer.register("test_average_of_all")
class AverageOfAll(Observer):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.max_vals = observed.abs().mean(dim=(0, -1))
        self.min_vals = -self.max_vals


def test_an_observer_that_cannot_leave_out_padding_is_refused_with_padding() -> None:
    model = plain_llama()
    inputs = {"observer": "test_average_of_all"}
    recipe = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs=inputs)
    torch._dynamo.reset()
    with (
        pytest.warns(UserWarning, match="counts the padding"),
        pytest.raises(StatisticsError, match="test_average_of_all cannot leave out"),
    ):
        calibrate(model, recipe, padded(model), compiler="eager")


class Dropping(nn.Sequential):
    """Two layers with dropout between them; it fails for 13 rows."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 13:
            raise KeyError("13")
        return super().forward(x)


@pytest.mark.parametrize("training", [(), ("",), ("", "1"), ("1", "2")])
def test_a_model_in_training_mode_is_calibrated_in_evaluation_mode(training) -> None:
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
    batches = [(torch.randn(4, 8),) for _ in range(3)]
    expected = calibrate(Dropping().eval(), recipe, batches, compiler="eager", held_out=1)
    model = Dropping().eval()
    for name in training:
        model.get_submodule(name).training = True
    modes = [module.training for module in model.modules()]
    found = calibrate(model, recipe, batches, compiler="eager", held_out=1)
    assert found.qparams["2.input"]["scale"] == expected.qparams["2.input"]["scale"]
    x = torch.randn(4, 8)
    assert torch.equal(found.quantized_module(x)(x), expected.quantized_module(x)(x))
    check_calibration(model, recipe, batches)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(Exception, match="13"):
        calibrate(model, recipe, [(torch.randn(13, 8),)], compiler="eager", held_out=0)
    assert [module.training for module in model.modules()] == modes


class Mistraced(nn.Module):
    """It computes something else while it is traced, from `second` on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x.relu() if torch.compiler.is_compiling() else x)


EIGHT = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})


@pytest.mark.parametrize(
    ("held_out", "what"), [(1, "a held-out sample"), (0, "the shortest calibration sample")]
)
def test_a_model_that_is_traced_wrongly_is_refused(held_out: int, what: str) -> None:
    data = [(torch.randn(1, 8),) for _ in range(9)]
    with pytest.raises(CheckError, match=rf"on {what}, outputs differ by 0\..*first in second"):
        calibrate(Mistraced(), EIGHT, data, compiler="eager", held_out=held_out)
    with pytest.warns(UserWarning, match="does not compute what the eager one does"):
        found = calibrate(
            Mistraced(), EIGHT, data, compiler="eager", held_out=held_out, accept=["mistraced"]
        )
    assert "does not compute what the eager one does" in found.explain()


def test_the_check_of_the_trace_observes_nothing() -> None:
    model = plain_llama()
    random = torch.get_rng_state()
    found = run(model, batches(model), held_out=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert found.graphs.agreement is not None
    assert (bool(found.graphs.agreement), found.graphs.agreement.difference) == (True, 0)
    assert {found.statistics.seen(slot) for slot in found.plan.activation_slots()} == {5}
    manual = Calibration(model, STATIC, compiler="eager")
    for one in batches(model):
        manual.observe(**one)
    assert_equal_qparams(manual.finalize(), found.qparams)


class Random(Mistraced):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + torch.randn(8))


class Counting(Mistraced):
    """It keeps state between calls."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.second(self.first(x)) * self.count


@pytest.mark.parametrize("cls", [Random, Counting])
def test_a_model_that_differs_from_itself_is_not_refused(cls: type[nn.Module]) -> None:
    data = [(torch.randn(3, 8),) for _ in range(4)]
    found = calibrate(cls(), EIGHT, data, compiler="eager", held_out=0)
    assert found.graphs.agreement is not None
    if not found.graphs.agreement:
        assert "differs from itself" in found.explain()
        finding = report_of(found).findings[-1]
        assert "differs from itself" in finding.text
    assert bool(found.graphs.agreement) == (
        cls is Random
    )  # random numbers are the same in both runs
