"""Weights of few bits: perplexity and time of Inlay and llm-compressor on the same rows.

Each way runs in a process of its own, from a loaded model to a quantized one. Times are processor
times, because the machine is shared. Perplexity is that of the same held-out windows, with a
bootstrap interval over windows of its ratio to float32.
"""

import json
import math
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

CALIBRATING, HELD_OUT = 32, 48
OBSERVER = "imatrix_mse"
FORMATS: dict[str, dict[str, Any]] = {
    "W4A16 g64": {"preset": "W4A16", "weights": {"group_size": 64}},
    "W3A16 g64": {"preset": "W4A16", "weights": {"num_bits": 3, "group_size": 64}},
    "NVFP4A16": {"preset": "NVFP4A16", "weights": {}},
    "MXFP4A16": {"preset": "MXFP4A16", "weights": {}},
}
INLAY = (
    "nearest",
    "mse",
    "imatrix",
    "gptq",
    "gptq imatrix",
    "gptq imatrix auto",
    "gptq local hessian",
)
PEER = ("gptq", "gptq imatrix")
_OBSERVERS = {
    "mse": "memoryless_mse",
    "imatrix": OBSERVER,
    "gptq imatrix": OBSERVER,
    "gptq imatrix auto": OBSERVER,
    "gptq local hessian": "local_hessian_mse",
}


def rows() -> Iterator[Any]:
    from harness import Ratio, Row, cold, single

    plain = cold(__file__, "float32", "", "")
    for name in FORMATS:
        own = {way: cold(__file__, "inlay", name, way) for way in INLAY}
        peer = {way: cold(__file__, "peer", name, way) for way in PEER}
        for label, found in (("Inlay", own), ("llm-compressor", peer)):
            for way, result in found.items():
                value, low, high = _interval(result["losses"], plain["losses"])
                yield Row(
                    "perplexity of quantized weights / float32",
                    f"{name}, {label} {way}",
                    Ratio(value, low, high),
                )
        for way in PEER:
            quotient = own[way]["seconds"] / peer[way]["seconds"]
            yield Row("Inlay's time / llm-compressor's", f"{name}, {way}", single(quotient))
        gathering = own["gptq"]["gathering"] / own["gptq"]["forwards"]
        yield Row("gathering Hessians / plain forwards", name, single(gathering))


def _interval(losses: Any, plain: Any) -> tuple[float, float, float]:
    """The ratio of perplexities, and a 95% bootstrap interval over windows."""
    differences = [own - other for own, other in zip(losses, plain, strict=True)]
    dice = random.Random(0)
    means = sorted(
        sum(dice.choices(differences, k=len(differences))) / len(differences) for _ in range(2000)
    )
    middle = sum(differences) / len(differences)
    return math.exp(middle), math.exp(means[50]), math.exp(means[-51])


def child(way: str, name: str, method: str) -> None:
    import torch
    from rotated import rotated_smollm2, windows
    from transformers import AutoModelForCausalLM

    folder = rotated_smollm2()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    calibrating, held_out = windows(folder, CALIBRATING, HELD_OUT)
    result: dict[str, Any] = {}
    if way == "inlay":
        result = _inlay(model, FORMATS[name], method, calibrating)
    elif way == "peer":
        result = _peer(model, FORMATS[name], method, calibrating)
    result["losses"] = _losses(model, held_out)
    result["perplexity"] = math.exp(sum(result["losses"]) / len(result["losses"]))
    print(json.dumps(result))


def _inlay(model: Any, wanted: dict[str, Any], method: str, calibrating: Any) -> dict[str, Any]:
    import torch

    import inlay

    weights = {**wanted["weights"], "observer": _OBSERVERS.get(method, "memoryless_minmax")}
    gptq = {"damping": "auto"} if method.endswith("auto") else method.startswith("gptq")
    recipe = inlay.Recipe.from_preset(
        wanted["preset"], ignore=["lm_head"], weights=weights, gptq=gptq
    )
    start = time.process_time()
    calibration = inlay.Calibration(model, recipe, progress=False)
    if calibration.plan.needs_data:
        calibration.graphs.expect(len(calibrating))
        for window in calibrating:
            calibration.observe(input_ids=window[None])
    gathered = time.process_time()
    qparams = calibration.finalize()
    done = time.process_time()
    with torch.no_grad():
        for window in calibrating[:8]:
            model.model(input_ids=window[None], use_cache=False)
    forwards = (time.process_time() - done) * len(calibrating) / 8
    weights = calibration.graphs.weights
    for name, view in calibration.plan.weights.items():
        model.get_submodule(name).weight.data.copy_(weights.quantized(view, qparams))
    return {"seconds": done - start, "gathering": gathered - start, "forwards": forwards}


def _peer(model: Any, wanted: dict[str, Any], method: str, calibrating: Any) -> dict[str, Any]:
    import tempfile

    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from torch.utils.data import DataLoader

    scheme = preset_name_to_scheme(wanted["preset"], ["Linear"])
    changes = {**wanted["weights"], "observer": _OBSERVERS.get(method)}
    scheme.weights = scheme.weights.model_copy(update=changes)
    modifier = GPTQModifier(config_groups={"a": scheme}, ignore=["lm_head"])
    data = DataLoader([{"input_ids": window[None]} for window in calibrating], batch_size=None)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)  # it looks there whether the model is quantized
        model.config._name_or_path = model.name_or_path = folder
        start = time.process_time()
        oneshot(model=model, recipe=modifier, dataset=data, processor=object())
        return {"seconds": time.process_time() - start}


def _losses(model: Any, held_out: Any) -> list[float]:
    import torch
    import torch.nn.functional as F

    found = []
    with torch.no_grad():
        for window in held_out:
            logits = model(input_ids=window[None], use_cache=False).logits[0, :-1].float()
            found.append(float(F.cross_entropy(logits, window[1:])))
    return found


if __name__ == "__main__":
    child(*sys.argv[1:])
