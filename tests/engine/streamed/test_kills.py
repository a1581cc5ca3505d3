"""Streamed runs that are killed again and again."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import batch, llama
from folders import assert_same_folder
from streaming_runs import recipe_of_killed

from inlay import calibrate
from inlay.checkpoint.loading import load_model

pytestmark = pytest.mark.slow

# Imports once, and lets a child of its own do the rest each time. Children count the steps that
# leave something on disk, and one that reaches its number ends without asking anybody.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
place, moments, equalized = Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4] == "equalized"

import torch
from families import batch
from streaming_runs import recipe_of_killed as recipe_of
from inlay.checkpoint import shards
from inlay.engine.streamed import activations, finishing, journal, kept
from inlay.engine.stream import stream

torch.set_num_threads(1)  # before any thread was started, so that children may be forked


def killed_at(owner, name, left, after):
    own = getattr(owner, name)

    def step(*args, **kwargs):
        if equalized and not kwargs.get("equalized"):
            return own(*args, **kwargs)  # only steps of second passages count
        left[0] -= 1
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = own(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, step)


def child(moment, after):
    left = [moment]
    for owner, name in (
        (activations.Activations, "keep"),
        (shards, "write_tensors"),
        (shards, "complete_file"),
        (kept, "save_qparams"),
        (journal.Journal, "_save"),
        (journal.Journal, "remove"),
        (activations.Activations, "drop"),
        (Path, "rename"),
        (finishing, "move_into_place"),
    ):
        killed_at(owner, name, left, after)
    add = journal.Journal.add

    def noted(self, written):
        add(self, written)
        with (place / "finished").open("a") as file:
            file.write(written.region + "\\n")

    journal.Journal.add = noted
    recipe = recipe_of(equalized)
    data = [batch(torch.nn.Module(), index) for index in range(4)]
    options = {"out": place / "out", "held_out": 0, "compiler": "eager"}
    resume = (place / "out.streaming" / "journal.json").exists()
    stream(place / "model", recipe, data, resume=resume, **options)


killed = 0
for moment, after in moments:
    process = os.fork()
    if process == 0:
        child(moment, after)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    killed += 1
print(json.dumps({"killed": killed}))
"""


def run_killed(place: Path, moments: list[tuple[int, bool]], *, equalized: bool) -> int:
    """Stream a model, killed at these moments; return how often it was."""
    llama(num_hidden_layers=3).save_pretrained(place / "model")
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            SCRIPT,
            str(Path(__file__).parents[2] / "support"),
            str(place),
            json.dumps(moments),
            "equalized" if equalized else "",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    killed: int = json.loads(done.stdout)["killed"]
    # No region was done twice once it was in the journal.
    finished = (place / "finished").read_text().split("\n")[:-1]
    assert len(finished) == len(set(finished)) == 5
    data = [batch(torch.nn.Module(), index) for index in range(4)]
    recipe = recipe_of_killed(equalized)
    run = calibrate(load_model(place / "model"), recipe, data, held_out=0, compiler="eager")
    assert_same_folder(place / "out", run.save(place / "expected"))
    assert not (place / "out.streaming").exists()
    return killed


def test_killed_at_many_moments_it_ends_with_the_same_result(tmp_path: Path) -> None:
    chance = random.Random(16)
    moments = [(chance.randint(5, 16), chance.random() < 0.5) for _ in range(7)] + [(1000, True)]
    assert run_killed(tmp_path, moments, equalized=False) >= 4


def test_killed_while_equalized_inputs_are_observed(tmp_path: Path) -> None:
    """With the second of four batches in the first block, and with the last one there."""
    assert run_killed(tmp_path, [(6, False), (4, True), (1000, True)], equalized=True) == 2
