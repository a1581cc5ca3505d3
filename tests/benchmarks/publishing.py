"""Write the tables of the parts that ran into the README of the benchmarks."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from harness import Row

README = Path(__file__).parent / "README.md"


def publish(rows: Mapping[str, Iterable[Row]], machine: str, file: Path = README) -> None:
    """Replace what stands between the markers of each part.

    :param rows: the rows of each part that ran
    :param machine: the date, the processor and the versions, as a sentence
    :raises ValueError: if the README has no markers for a part
    """
    text = file.read_text(encoding="utf-8")
    for part, own in rows.items():
        section = re.compile(rf"(<!-- part {re.escape(part)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not section.search(text):
            raise ValueError(f"{file} has no section for {part}: add <!-- part {part} -->")
        content = f"{_table(own)}\n{machine}\n"
        text = section.sub(lambda found, new=content: found[1] + new + found[2], text)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


def _table(rows: Iterable[Row]) -> str:
    lines = ["| ratio | of | value | interval |", "|---|---|---|---|"]
    for row in rows:
        low, high = row.ratio.low, row.ratio.high
        spread = "once" if low == high else f"{low:.3f} to {high:.3f}"
        lines.append(f"| {row.group} | {row.name} | {row.ratio.value:.3f} | {spread} |")
    return "\n".join(lines) + "\n"
