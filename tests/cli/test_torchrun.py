"""The command line on processes that torchrun starts, and one of them killed."""

import json
import os
import subprocess
import sys
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

# A file of observers is executed by every process, so it can let one of them die.
DEADLY = """
import os, signal
from inlay.observers import Observer
from inlay.observers.min_max import StaticMinMaxObserver
from inlay.engine import keeping

note, keeping._SAVE_EVERY = keeping.Keeper.note, 0.0

def noted(self, run, number, batch):
    note(self, run, number, batch)
    if os.environ.get("RANK") == "1" and number >= 3:
        os.kill(os.getpid(), signal.SIGKILL)

keeping.Keeper.note = noted

@Observer.register("test_deadly")
class Deadly(StaticMinMaxObserver):
    pass
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ranks")
    llama(num_hidden_layers=1).save_pretrained(place / "model")
    word_tokenizer().save_pretrained(place / "model")
    texts = [text_of(list(range(row % 20, row % 20 + 4 + row % 9))) for row in range(26)]
    (place / "texts.txt").write_text("\n".join(texts))
    (place / "deadly.py").write_text(DEADLY)
    alone(place, "out_alone")
    return place


def command(out: str, *more: str) -> list[str]:
    observer = "input=histogram:mantissa_bits=4"
    scheme = ["--scheme", "W8A8_STATIC", "--observer", observer, "--compiler", "eager"]
    data = ["--data", "texts.txt", "--batch-size", "3", "--out", out]
    return ["calibrate", "model", *scheme, *data, *more]


def alone(place: Path, out: str, *more: str) -> None:
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        done = CliRunner().invoke(app, command(out, *more))
    assert done.exit_code == 0, done.output


def torchrun(place: Path, processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*start, "--nproc-per-node", str(processes), "-m", "inlay", *arguments],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def assert_same(place: Path, out: str) -> None:
    one, other = (place / name for name in ("out_alone", out))
    name = "model.safetensors"
    assert (one / name).read_bytes() == (other / name).read_bytes()
    kept, known = StoredStatistics.load(one).slots, StoredStatistics.load(other).slots
    assert kept.keys() == known.keys()
    for slot, statistics in kept.items():
        assert statistics.tokens == known[slot].tokens
        for key, tensor in statistics.tensors.items():
            torch.testing.assert_close(known[slot].tensors[key], tensor, rtol=0, atol=0)


def report_in(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())["report"]


def test_four_processes_write_what_one_does(place: Path) -> None:
    done = torchrun(place, 4, *command("out_four"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("out_four/report.html") == 1
    assert_same(place, "out_four")
    found, expected = report_in(place / "out_four"), report_in(place / "out_alone")
    assert "26 texts, divided over 4 processes (2 each of 8 batches)" in found["data"]
    for key in ("samples", "tokens", "padding_tokens"):
        assert found[key] == expected[key]
    shown = ("name", "tokens", "low", "high", "scale_min", "scale_max", "distribution")
    assert [[slot.get(key) for key in shown] for slot in found["slots"]] == [
        [slot.get(key) for key in shown] for slot in expected["slots"]
    ]
    assert not list(place.glob("*.statistics"))


def test_a_killed_process_ends_all_and_another_number_goes_on(place: Path) -> None:
    deadly = ["--observer-file", "deadly.py"]
    done = torchrun(place, 2, *command("out_killed", *deadly))
    assert done.returncode == 1
    assert "inlay: error: rank 1 ended without an error of its own: it was killed" in done.stderr
    written = [path.name for path in place.iterdir() if "out_killed" in path.name]
    assert written == ["out_killed.statistics"]
    kept = (place / "out_killed.statistics").glob("*.safetensors")
    assert sorted(path.name for path in kept)[-1] == "rank-1-of-2.safetensors"
    alone(place, "out_killed", "--resume")
    assert_same(place, "out_killed")
    assert not list(place.glob("*.statistics"))


def test_two_processes_stream_what_one_does(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    texts = [text_of(list(range(4 + row % 3))) for row in range(5)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    done = torchrun(tmp_path, 2, *command("out", "--stream", "--no-comparison"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("at its peak") == 1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes have
    alone(tmp_path, "alone", "--stream", "--no-comparison")
    torch.set_num_threads(threads)
    assert_same_folder(tmp_path / "out", tmp_path / "alone", but=["data"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "alone",
        "model",
        "out",
        "texts.txt",
    ]


def test_a_wrong_option_is_said_once(place: Path) -> None:
    done = torchrun(place, 2, *command("out_five", "--equalize", "much"))
    assert done.returncode == 1
    assert done.stderr.count("is no strength") == 1
