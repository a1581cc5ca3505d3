"""`make bench`: every row a ratio, measured side by side in this process."""

import platform

import torch
from overhead import rows
from rich.console import Console
from rich.table import Table


def main() -> None:
    console = Console()
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, "
        f"Python {platform.python_version()}"
    )
    table = Table("row", "ratio to the plain compiled forward (middle half of the rounds)")
    for name, found in rows():
        table.add_row(name, str(found))
    console.print(table)


if __name__ == "__main__":
    main()
