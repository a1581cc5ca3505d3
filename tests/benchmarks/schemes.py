"""Schemes with the defaults of the command line: size, perplexity and KL divergence.

Each scheme is calibrated on the same windows and judged on others, by `inlay calibrate`. The
numbers come from its report.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CALIBRATING, HELD_OUT = 32, 48
SCHEMES: dict[str, tuple[str, ...]] = {
    "FP8_DYNAMIC": (),
    "W8A8": (),
    "W8A8_STATIC": (),
    "W8A16": ("--group-size", "64"),
    "W4A16": ("--group-size", "64"),
    "NVFP4A16": (),
    "MXFP4A16": (),
}


def rows() -> Iterator[Any]:
    from harness import Ratio, Row, single
    from rotated import rotated_smollm2, windows

    folder = rotated_smollm2()
    calibrating, held_out = windows(folder, CALIBRATING, HELD_OUT)
    with tempfile.TemporaryDirectory() as place:
        data = Path(place, "windows.jsonl")
        lines = (json.dumps({"input_ids": ids.tolist()}) for ids in (*calibrating, *held_out))
        data.write_text("\n".join(lines))
        for scheme, options in SCHEMES.items():
            report = _report(folder, scheme, options, data, Path(place, scheme))
            name = " ".join((scheme, *options))
            yield Row(
                "size / bfloat16", name, single(2 * report["size_after"] / report["size_before"])
            )
            for change in report["changes"]:
                if change["name"] in ("Perplexity ratio", "KL divergence"):
                    yield Row(change["name"], name, Ratio(change["value"], *change["interval"]))


def _report(
    folder: str, scheme: str, options: tuple[str, ...], data: Path, out: Path
) -> dict[str, Any]:
    samples = ("--samples", str(CALIBRATING), "--held-out", str(HELD_OUT))
    command = [sys.executable, "-m", "inlay", "calibrate", folder, "--scheme", scheme]
    subprocess.run(
        [*command, *options, *samples, "--data", str(data), "--out", str(out), "--quiet"],
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    found: dict[str, Any] = json.loads((out / "report.json").read_text())["report"]
    return found
