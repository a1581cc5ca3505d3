"""`make bench`: ratios measured side by side, as a table, as JSON and as a picture."""

import argparse
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from datetime import date
from pathlib import Path

import after
import compressed_tensors
import depth
import four_bits
import inside
import llmcompressor
import overhead
import pipelines
import processes
import schemes
import search
import serving
import streaming
import torch
import weights
from harness import Row
from plot import plot
from publishing import publish
from rich.console import Console
from rich.table import Table

PARTS = {
    "schemes": schemes.rows,
    "overhead": overhead.rows,
    "weights": weights.rows,
    "four_bits": four_bits.rows,
    "search": search.rows,
    "depth": depth.rows,
    "pipelines": pipelines.rows,
    "after": after.rows,
    "inside": inside.rows,
    "streaming": streaming.rows,
    "processes": processes.rows,
    "serving": serving.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    console = Console()
    machine = describe()
    console.print(machine)
    found: dict[str, list[Row]] = {}
    for part in arguments.parts:
        with console.status(f"measuring {part}"):
            found[part] = list(PARTS[part]())
        publish({part: found[part]}, sentence(machine))  # at once: a later part may fail
    rows = [row for own in found.values() for row in own]
    console.print(table(rows))
    write(rows, machine, arguments.out)
    console.print(f"written to {arguments.out} and tests/benchmarks/README.md")


def describe() -> dict[str, str]:
    return {
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compressed-tensors": compressed_tensors.__version__,
        "llmcompressor": llmcompressor.__version__,
    }


def sentence(machine: dict[str, str]) -> str:
    """Say when and where something was measured."""
    versions = ", ".join(
        f"{name} {value}" for name, value in machine.items() if name != "processor"
    )
    return f"Measured on {date.today().isoformat()}, {machine['processor']}, {versions}."


def table(rows: Iterable[Row]) -> Table:
    shown = Table("ratio", "of", "value", "middle half of the rounds")
    for row in rows:
        spread = f"{row.ratio.low:.2f} to {row.ratio.high:.2f}"
        once = row.ratio.low == row.ratio.high
        shown.add_row(row.group, row.name, f"{row.ratio.value:.2f}", "once" if once else spread)
    return shown


def write(rows: list[Row], machine: dict[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, "rows": [asdict(row) for row in rows]}
    temporary = folder / "benchmarks.json.tmp"
    temporary.write_text(json.dumps(content, indent=2))
    temporary.rename(folder / "benchmarks.json")
    plot(rows, folder / "benchmarks.png")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
