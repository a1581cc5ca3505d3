"""`inlay calibrate --stream`."""

import json
from pathlib import Path

import pytest
import torch
from families import llama
from folders import assert_same_folder
from tokens import text_of, word_tokenizer
from typer.testing import CliRunner

from inlay import StoredStatistics
from inlay.cli import app

pytestmark = pytest.mark.slow


def inlay(place: Path, *arguments: str, code: int = 0) -> str:
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        done = CliRunner().invoke(app, ["calibrate", "model", *arguments])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def test_streamed_from_the_command_line_it_is_the_same(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    texts = [text_of(list(range(4 + row % 5))) for row in range(16)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    command = ["--scheme", "W8A8_STATIC", "--compiler", "eager", "--data", "texts.txt"]
    inlay(tmp_path, *command, "--out", "in-memory")
    shown = inlay(tmp_path, *command, "--out", "streamed", "--stream", "--offload-activations")
    assert "at its peak" in shown
    assert_same_folder(tmp_path / "streamed", tmp_path / "in-memory")
    report = json.loads((tmp_path / "streamed" / "report.json").read_text())["report"]
    assert report["tokens_per_second"] > 0
    assert "tokens per second" in (tmp_path / "streamed" / "report.html").read_text()
    inlay(tmp_path, *command, "--out", "alone", "--stream", "--no-comparison")
    report = json.loads((tmp_path / "alone" / "report.json").read_text())["report"]
    assert not report.get("changes")
    assert "needs --stream" in inlay(
        tmp_path, *command, "--out", "other", "--offload-activations", code=2
    )


def test_equalized_inputs_are_observed_block_by_block(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    texts = [text_of(list(range(4 + row % 5))) for row in range(8)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    observed = ["--observer", "input=histogram", "--equalize", "auto", "--compiler", "eager"]
    data = ["--data", "texts.txt", "--samples", "6", "--batch-size", "2"]
    command = ["--scheme", "W8A8_STATIC", *observed, *data]
    inlay(tmp_path, *command, "--out", "in-memory")
    inlay(tmp_path, *command, "--out", "streamed", "--stream")
    assert_same_folder(tmp_path / "streamed", tmp_path / "in-memory")
    assert StoredStatistics.load(tmp_path / "streamed").is_second_run
