"""The command line from beginning to end, on a small model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import llama
from safetensors import safe_open
from tokens import CHAT, text_of, word_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from inlay import StoredStatistics
from inlay.cli import app

pytestmark = pytest.mark.slow

SLOT = "model.layers.0.mlp.down_proj.input"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("real")
    llama().save_pretrained(place / "model")
    word_tokenizer(chat_template=CHAT).save_pretrained(place / "model")
    for part, start in (("one", 0), ("two", 20)):
        texts = [text_of(list(range(start, start + 4 + row % 9))) for row in range(24)]
        (place / f"{part}.txt").write_text("\n".join(texts))
    in_a_process(place, *calibrate("one"))
    inlay(place, *calibrate("two"))
    return place


def calibrate(part: str) -> list[str]:
    observer = "input=histogram:method=percentile,percentile=90"
    scheme = ["--scheme", "W8A8_STATIC", "--observer", observer, "--compiler", "eager"]
    data = ["--data", f"{part}.txt", "--batch-size", "4", "--out", f"out_{part}"]
    return ["calibrate", "model", *scheme, *data]


def in_a_process(place: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "inlay", *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def inlay(place: Path, *arguments: str, code: int = 0) -> str:
    """The same in this process, which has imported already what it needs."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def scale_in(folder: Path) -> torch.Tensor:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return file.get_tensor(f"{SLOT}_scale")


def test_what_it_writes_is_loaded_by_transformers(place: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(place / "out_one").eval()
    with torch.no_grad():
        assert bool(model(torch.tensor([[1, 2, 3]])).logits.isfinite().all())
    assert (place / "out_one" / "report.html").exists()
    assert (place / "out_one" / "tokenizer.json").exists()
    assert sorted(p.name for p in place.iterdir() if p.name.startswith((".", "out_one"))) == [
        "out_one"
    ]


def test_again_it_is_refused_unless_it_may_overwrite(place: Path) -> None:
    before = (place / "out_one" / "model.safetensors").read_bytes()
    again = ["calibrate", "model", "--scheme", "W8A8", "--out", "out_one"]
    assert "is not empty" in inlay(place, *again, code=1)
    assert (place / "out_one" / "model.safetensors").read_bytes() == before
    written = (place / "out_one" / "model.safetensors").stat().st_ino
    shown = inlay(place, *calibrate("one"), "--overwrite")
    assert "out_one/report.html" in shown
    stages = re.search(r"^time +(.*?)^\w", shown, re.MULTILINE | re.DOTALL)
    assert stages is not None
    assert re.findall(r"[a-z]{2,}(?: [a-z]{2,})*", stages[1].replace("under", "")) == [
        "reading data",
        "tracing and compiling",
        "calibrating",
        "checking the trace",
        "searching ranges",
        "writing",
        "comparing",
    ]
    assert (place / "out_one" / "model.safetensors").stat().st_ino != written
    assert (place / "out_one" / "model.safetensors").read_bytes() == before


def test_another_observer_from_the_statistics_of_a_checkpoint(place: Path) -> None:
    wanted = ["--scheme", "W8A8_STATIC", "--observer", "input=static_minmax"]
    command = ["requantize", "out_one", *wanted, "--no-report"]
    shown = inlay(place, *command, "--model", "model", "--out", "out_minmax")
    assert re.search(r"^tokens +159 and 55 of padding, 21 samples *$", shown, re.MULTILINE)
    took = r"(under )?[\d.]+ s"
    assert re.search(rf"^time +searching ranges {took}, writing {took} *$", shown, re.MULTILINE)
    assert not (place / "out_minmax" / "report.json").exists()
    seen = StoredStatistics.load(place / "out_one").slots[SLOT].tensors
    # A step of eight bits for the whole range that was seen, where the percentile cuts it short.
    low, high = seen["min_vals"].clamp(max=0), seen["max_vals"].clamp(min=0)
    torch.testing.assert_close(scale_in(place / "out_minmax"), (high - low) / 255)
    assert bool(scale_in(place / "out_one") < scale_in(place / "out_minmax"))
    impossible = ["--scheme", "W8A8_STATIC", "--observer", "input=mse"]
    again = ["requantize", "out_one", *impossible, "--model", "model", "--out", "out_mse"]
    assert "do not carry this recipe" in inlay(place, *again, code=1)
    assert not (place / "out_mse").exists()


def test_statistics_of_two_checkpoints_are_merged(place: Path) -> None:
    inlay(place, "merge", "out_one", "out_two", "--out", "both")
    parts = [StoredStatistics.load(place / name).slots[SLOT] for name in ("out_one", "out_two")]
    both = StoredStatistics.load(place / "both").slots[SLOT]
    assert both.tokens == sum(part.tokens for part in parts)
    assert torch.equal(both.tensors["counts"], sum(part.tensors["counts"] for part in parts))
    wanted = ["--scheme", "W8A8_STATIC", "--observer", "input=histogram:method=minmax"]
    inlay(place, "requantize", "both", *wanted, "--model", "model", "--out", "out_both")
    assert (place / "out_both" / "report.html").exists()


def test_the_report_is_written_again(place: Path) -> None:
    page = place / "out_two" / "report.html"
    before = page.read_text()
    page.unlink()
    inlay(place, "report", "out_two")
    assert page.read_text() == before


def test_the_report_holds_no_path_of_the_machine(place: Path) -> None:
    for name in ("report.html", "report.json"):
        assert str(place) not in (place / "out_one" / name).read_text()
    data = json.loads((place / "out_one" / "report.json").read_text())["report"]
    assert data["model"] == "model"
    assert data["title"].startswith("model, ")


def test_what_would_be_observed(place: Path) -> None:
    shown = inlay(place, "explain", "model", "--scheme", "FP8", "--kv-cache", "fp8")
    assert "0 … 1" in shown
    assert "lm_head" in shown
