"""How much memory a model adds to a process: print the bytes that are resident after a run."""

import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

import inlay
from inlay.memory import returning_freed_memory

LOADED = "Inlay"  # in place of a class of transformers


def main(cls: str, dtype: str, place: str) -> None:
    warnings.simplefilter("ignore")
    _run(cls, dtype, place)  # what is imported on the way counts for nobody
    before = _resident()
    model = _run(cls, dtype, place)
    print(json.dumps({"bytes": _resident() - before}))
    del model


def _run(cls: str, dtype: str, place: str) -> Any:
    """Load a model and run a few tokens, which maps what was not read yet."""
    if cls == LOADED:
        model = inlay.load(place, dtype=dtype, compile=False)
    else:
        given = getattr(torch, dtype)
        model = getattr(transformers, cls).from_pretrained(place, dtype=given).eval()
    with torch.no_grad():
        model(torch.ones(1, 8, dtype=torch.long))
    return model


def _resident() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith("VmRSS"))
    return int(size) * 1024


if __name__ == "__main__":
    with returning_freed_memory():
        main(*sys.argv[1:])
