"""The memory that a streamed run takes, in a process that does nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from large_models import VOCABULARY, write_llama

pytestmark = pytest.mark.slow

BATCHES, TOKENS, HIDDEN = 3, 64, 1024
SCRIPT = """
import json, sys
import torch
from inlay import Recipe, stream

torch.set_num_threads(1)
folder, out, vocabulary, batches, tokens = sys.argv[1:3] + list(map(int, sys.argv[3:]))
data = [{"input_ids": torch.randint(0, vocabulary, (1, tokens))} for _ in range(batches + 4)]
recipe = Recipe.from_preset(
    "W8A8_STATIC", ignore=["lm_head"], inputs={"observer": "minmax"}, equalize=0.7
)
done = stream(folder, recipe, data, out=out, samples=batches, held_out=4, compiler="eager")
print(json.dumps(done.peak_memory))
"""


def test_it_takes_two_and_a_half_blocks_and_what_the_libraries_take(tmp_path: Path) -> None:
    """The model alone would take more than all that is allowed besides the libraries.

    It is equalized and batches pass each block twice, which takes all that other runs take and
    more: scaled copies of a block, and values of the equalized model. Then it is compared.
    """
    block = write_llama(tmp_path / "model", blocks=16, hidden=HIDDEN, intermediate=2816)
    size = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert size > 400e6
    arguments = [tmp_path / "model", tmp_path / "out", VOCABULARY, BATCHES, TOKENS]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak = json.loads(done.stdout.splitlines()[-1])
    if peak is None:
        pytest.skip("this system does not say how much memory a process takes")
    activations = 2 * 2 * BATCHES * TOKENS * HIDDEN * 2  # of two blocks and of two models
    # Comparing has a block of the model and of the quantized one in memory.
    assert peak <= 2 * 2.5 * block + activations + 600e6
