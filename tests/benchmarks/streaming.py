"""From a folder to a folder, cold: streamed block by block, in memory, and the peer's pipeline.

Each in a process of its own, in turn. The clock starts when everything is imported, and ends when
the checkpoint is written; neither compares before and after. A model that is more than four times
larger than the memory a streamed run takes shows how much that is, beside what it may be.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCHES = 64
TOKENS = 512
LARGE = {"blocks": 36, "hidden": 2048, "intermediate": 5632}
LARGE_BATCHES = 4


def rows() -> Iterator[Any]:
    from harness import Row, single
    from smollm2 import smollm2

    label = f"SmolLM2-135M, static_minmax, {BATCHES} batches"
    with tempfile.TemporaryDirectory() as out:
        place = smollm2()
        streamed, whole, peer = (
            measure(way, place, out, BATCHES) for way in ("streamed", "in-memory", "sequential")
        )
        for name, other in (("in memory", whole), ("llm-compressor's sequential", peer)):
            value = single(streamed["seconds"] / other["seconds"])
            yield Row(f"time streamed / {name}", label, value)
            value = single(streamed["peak"] / other["peak"])
            yield Row(f"peak of anonymous memory streamed / {name}", label, value)
    yield from _large()


def _large() -> Iterator[Any]:
    from harness import Row, single

    sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
    from large_models import write_llama

    with tempfile.TemporaryDirectory() as place:
        block = write_llama(Path(place) / "model", **LARGE)
        taken = measure("streamed", str(Path(place) / "model"), place, LARGE_BATCHES)
        size = sum(file.stat().st_size for file in Path(place, "model").glob("*.safetensors"))
        label = f"Llama of {size / 1e9:.1f} GB, blocks of {block / 1e6:.0f} MB"
        yield Row(
            "size of the model / peak of anonymous memory", label, single(size / taken["peak"])
        )
        between = 2 * LARGE_BATCHES * TOKENS * LARGE["hidden"] * 2  # of two blocks, in bfloat16
        allowed = 2.5 * block + between + 600e6
        yield Row("peak / 2.5 blocks, values and 600 MB", label, single(taken["peak"] / allowed))
        twice = measure("equalized", str(Path(place) / "model"), place, LARGE_BATCHES)
        share = single(twice["peak"] / (allowed + between))
        yield Row("the same where observers see equalized inputs", label, share)


def measure(way: str, folder: str, out: str, count: int) -> dict[str, float]:
    """Seconds and peak of anonymous memory of one way, in a process of its own."""
    from harness import cold

    return cold(__file__, way, folder, str(Path(out) / way), str(count))


def child(way: str, folder: str, out: str, count: int) -> None:
    import torch
    from overhead import recipe
    from transformers import AutoConfig, AutoModelForCausalLM

    from inlay import Recipe, calibrate, stream
    from inlay.checkpoint.loading import load_model
    from inlay.engine.streamed.peak import MemoryWatch

    torch.manual_seed(1)
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    batches = [{"input_ids": torch.randint(0, vocabulary, (1, TOKENS))} for _ in range(count)]
    wanted = recipe("static_minmax")

    def streamed(wanted: Any = wanted) -> None:
        stream(folder, wanted, batches, out=out, held_out=0, report=False)

    def equalized() -> None:
        streamed(Recipe.from_preset("W8A8_STATIC", inputs={"observer": "minmax"}, equalize=0.7))

    def in_memory() -> None:
        calibrate(load_model(folder), wanted, batches, held_out=0).save(out, report=False)

    def sequential() -> None:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        peer(model, [batch["input_ids"] for batch in batches], wanted)
        model.save_pretrained(out, save_compressed=True)

    if way == "sequential":
        from pipelines import _peer

        peer = _peer(way)
    ways: dict[str, Callable[[], None]] = {
        "streamed": streamed,
        "equalized": equalized,
        "in-memory": in_memory,
        "sequential": sequential,
    }
    start = time.perf_counter()
    with MemoryWatch() as memory:
        ways[way]()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak": memory.peak}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    child(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
