"""A calibration as a folder, and back."""

import json
import re
from pathlib import Path

import pytest
import torch
from families import batch, llama
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from inlay import Calibration, Recipe, StoredStatistics, calibrate
from inlay.engine.run import Run
from inlay.errors import ConfigurationError, StatisticsError
from inlay.report import ReportData
from inlay.run_record import Stages

pytestmark = pytest.mark.slow

STATIC = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs={"observer": "histogram"})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Calibration, Path]:
    torch._dynamo.reset()
    model = llama()
    data = [batch(model, index) for index in range(6)]
    calibration = calibrate(model, STATIC, data, samples=8, compiler="eager")
    return model, calibration, calibration.save(tmp_path_factory.mktemp("saved") / "out")


def test_everything_is_there(saved) -> None:
    _, _, folder = saved
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "recipe.yaml",
        "report.html",
        "report.json",
        "statistics",
    }
    # A server reads all of these as the checkpoint.
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert not [name for name in names if name.endswith((".bin", ".pt", ".partial"))]
    assert not [path for path in folder.parent.iterdir() if path != folder]


def test_transformers_gives_the_outputs_of_the_finalized_graph(saved) -> None:
    model, calibration, folder = saved
    torch._dynamo.reset()
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    one = batch(model, 99)
    with torch.no_grad():
        wanted = torch.compile(model, backend=calibration.backend)(**one).logits
        found = loaded(**one).logits
        plain = model(**one).logits
    error = float((found - wanted).abs().max())
    assert error < 0.05 * float((wanted - plain).abs().max())


def test_the_recipe_and_the_statistics_can_be_taken_up_again(saved) -> None:
    model, calibration, folder = saved
    recipe = Recipe.from_yaml(folder / "recipe.yaml")
    stored = StoredStatistics.load(folder)
    again = Calibration.from_statistics(model, recipe, stored)
    for slot, qparams in again.finalize().items():
        assert torch.equal(qparams["scale"], calibration.qparams[slot]["scale"])


def test_the_report_says_what_was_done(saved) -> None:
    _, calibration, folder = saved
    data = ReportData.from_json((folder / "report.json").read_text())
    assert data.samples == 8
    assert data.tokens == 48
    assert len(data.slots) == len(calibration.statistics.plan.slots)
    assert [stage.name for stage in data.stages][-2:] == ["writing", "comparing"]
    assert tuple((stage.name, stage.seconds) for stage in data.stages) == calibration.record.stages
    assert data.size_before > data.size_after > 0
    assert any(change.name.lower().startswith("top-1") for change in data.changes)
    assert any(slot.distribution is not None for slot in data.slots)
    json_in_page = re.search(
        r'type="application/json"[^>]*>(.*?)</script>',
        (folder / "report.html").read_text(),
        re.DOTALL,
    )
    assert json_in_page is not None
    assert json.loads(json_in_page.group(1))


def test_scales_in_the_checkpoint_are_those_of_the_calibration(saved) -> None:
    _, calibration, folder = saved
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        for slot, qparams in calibration.qparams.items():
            module, _, base_name = slot.rpartition(".")
            stored = opened.get_tensor(f"{module}.{base_name}_scale")
            torch.testing.assert_close(
                stored.flatten().float(), qparams["scale"].flatten().float(), rtol=0, atol=0
            )


def test_a_second_save_is_timed_by_itself(saved, tmp_path: Path) -> None:
    model, calibration, _ = saved
    again = Run(model, STATIC, stages=Stages({"calibrating": 1.0, "writing": 1e6}))
    again.statistics.restore(calibration.statistics.snapshot())
    again.finalize()
    again.save(tmp_path / "out", report=False)
    stages = dict(again.record.stages)
    assert stages.keys() == {"calibrating", "writing"}
    assert stages["writing"] < 1e6


def test_a_plain_calibration_is_saved_too(saved, tmp_path: Path) -> None:
    model, calibration, _ = saved
    plain = Calibration.from_statistics(model, STATIC, calibration.stored())
    plain.finalize()
    plain.save(tmp_path / "out")
    data = ReportData.from_json((tmp_path / "out" / "report.json").read_text())
    assert (data.model, data.data) == ("LlamaForCausalLM", "unknown data")
    assert any("held out" in finding.text for finding in data.findings)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_what_is_not_finalized_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="finalize"):
        Calibration(llama(), STATIC).save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_scale_is_not_saved(saved, tmp_path: Path, monkeypatch) -> None:
    _, calibration, _ = saved
    slot = "model.layers.0.mlp.down_proj.input"
    broken = {**calibration.qparams[slot], "scale": torch.tensor([0.0])}
    monkeypatch.setitem(calibration.statistics.qparams, slot, broken)
    with pytest.raises(StatisticsError, match=r"down_proj"):
        calibration.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
