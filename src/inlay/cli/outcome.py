"""The result of a run in a few lines."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from inlay.cli.terminal import console, table

if TYPE_CHECKING:
    from inlay.comparison.result import Choice, ModelComparison
    from inlay.engine.run import Run
    from inlay.engine.stream import Streamed
    from inlay.report import ReportData
    from inlay.searching import Found

__all__ = ["interrupted", "report_data", "show_comparison", "show_result", "show_search"]

# Measures of a comparison, in words.
_MEASURES = {
    "agreement": "top-1 agreement",
    "kl": "KL divergence of B from A",
    "kl_reverse": "KL divergence of A from B",
    "perplexity_a": "perplexity of A",
    "perplexity_b": "perplexity of B",
    "perplexity_ratio": "perplexity of B over A",
}


def report_data(folder: Path) -> "ReportData | None":
    """Read the data of a folder's report; return None if it has no report."""
    from inlay.report import ReportData

    path = folder / "report.json"
    return ReportData.from_json(path.read_text(encoding="utf-8")) if path.exists() else None


def interrupted(folder: Path, what: str) -> NoReturn:
    """Say how a run that the user stopped can go on, and end.

    :param folder: holds the progress of the run
    :param what: the content of that folder
    """
    import typer

    from inlay.cli.terminal import exit_code, tell
    from inlay.ranks.identity import is_first

    if is_first() and folder.exists():
        tell(f"interrupted; {folder} holds the {what} so far: continue with --resume")
    elif is_first():
        tell(f"interrupted before any {what} were saved; nothing was written")
    raise typer.Exit(exit_code(sys.exc_info()[1]))


def show_result(run: "Run | Streamed", out: Path) -> None:
    """Print where a run was saved, how long its stages took, and how the output changed."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for name, value in _facts(run, out).items():
        grid.add_row(name, value)
    console().print(grid)
    for text in run.record.advice:
        console().print(f"warning: {text}.", soft_wrap=True)


def show_search(found: "Found", out: Path) -> None:
    """Print what a search found, and where it was written."""
    from collections import Counter

    from rich.table import Table

    from inlay.report.numbers import count, measured, number, size

    formats = Counter(found.formats.values())
    facts = {
        "recipe": str(out),
        "target": str(found.target),
        "bits": f"{number(found.bits)} per weight, without scales",
        "size": size(found.size),
        "layers": ", ".join(f"{count(n)} in {name}" for name, n in formats.most_common()),
    }
    if found.scores.left:
        facts["left"] = f"{count(len(found.scores.left))} layers stay as they are"
    if found.kl is not None:
        facts["KL divergence"] = f"{measured(found.kl.value, found.kl.interval)}, held-out rows"
    elif found.predicted_kl is not None:
        facts["KL divergence"] = f"{number(found.predicted_kl)}, predicted"
    facts["scores"] = str(out.with_suffix(".scores.json"))
    facts["report"] = str(out.with_suffix(".html"))
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(name, value)
    console().print(grid)


def _dtype_to_load(folder: Path) -> str | None:
    """Describe the only dtype in which transformers runs a checkpoint; None if any works."""
    import json

    from inlay.formats.storage import dtype_to_load

    path = folder / "config.json"
    if not path.exists():
        return None
    config = json.loads(path.read_text(encoding="utf-8")).get("quantization_config", {})
    names = [group.get("format") for group in config.get("config_groups", {}).values()]
    dtype = dtype_to_load(names)
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"{name} only: transformers decompresses {', '.join(dict.fromkeys(names))} to it"


def _facts(run: "Run | Streamed", out: Path) -> dict[str, str]:
    from inlay.recipe.describe import method_in_words
    from inlay.report.numbers import count, duration, measured, size

    facts = {"checkpoint": str(out)}
    ignored = run.recipe.config.ignore
    if ignored:
        facts["full precision"] = ", ".join(ignored)
    facts["weights"] = method_in_words(run.recipe)
    data, record = report_data(out), run.record
    if data is not None:
        facts["size"] = f"{size(data.size_before)} → {size(data.size_after)}"
    dtype = _dtype_to_load(out)
    if dtype is not None:
        facts["dtype"] = dtype
    if record.data:
        facts["data"] = record.data
    if record.samples:
        padding = f" and {count(record.padding_tokens)} of padding" if record.padding_tokens else ""
        facts["tokens"] = f"{count(record.tokens)}{padding}, {count(record.samples)} samples"
    facts["time"] = ", ".join(f"{name} {duration(took)}" for name, took in record.stages)
    peak = getattr(run, "peak_memory", None)
    if peak is not None:
        facts["memory"] = f"{size(peak)} at its peak"
    for change in data.changes if data is not None else ():
        values = [(change.value, change.interval)]
        if change.value is None:
            values = [
                (change.before, change.before_interval),
                (change.after, change.after_interval),
            ]
        facts[change.name] = " → ".join(measured(*value) for value in values)
    if data is not None:
        facts["report"] = str(out / "report.html")
    facts["serve"] = f"vllm serve {shlex.quote(str(out))}"
    facts["try"] = f'inlay run {shlex.quote(str(out))} --text "…"'
    return facts


def show_comparison(found: "ModelComparison") -> None:
    """Print what differs between two models."""
    from rich.table import Table

    from inlay.report.numbers import count, measured

    screen = console()
    grid = Table.grid(padding=(0, 2))
    grid.add_row("A", found.a)
    grid.add_row("B", found.b if found.via is None else f"{found.b}, served at {found.via}")
    grid.add_row(
        "data", f"{found.data}; {count(found.rows)} rows, {count(found.positions)} positions"
    )
    for name, each in found.estimates.items():
        least = "at least " if each.is_bound else ""
        words = _MEASURES.get(name, name.replace("_", " "))
        grid.add_row(words, f"{least}{measured(each.value, each.interval)}")
    screen.print(grid)
    _show_special_tokens(found)
    _show_worst(found)
    for finding in found.findings:
        screen.print(f"{finding.severity}: {finding.about}: {finding.text}", soft_wrap=True)
    if not found.findings:
        screen.print("Configs, tokenizers, stored tensors and weights show no fault.")


def _show_special_tokens(found: "ModelComparison") -> None:
    from inlay.report.numbers import count, number

    if not found.special_tokens:
        return
    columns = ("special token", "next in data", "p(A) there", "p(B) there")
    rows = table(*columns, "chosen by A", "by B", "by both", "p(A) elsewhere", "p(B) elsewhere")
    for each in found.special_tokens:
        least = "≥ " if each.is_bound else ""
        rows.add_row(
            each.token,
            count(each.expected),
            number(each.expected_a),
            number(each.expected_b),
            count(each.chosen_a),
            count(each.chosen_b),
            count(each.chosen_both),
            number(each.elsewhere_a),
            f"{least}{number(each.elsewhere_b)}",
        )
    console().print(rows)


def _show_worst(found: "ModelComparison") -> None:
    from inlay.report.numbers import number

    if not found.worst:
        return
    rows = table("row", "token", "KL", "text before", "expected (p in A, B)", "A says", "B says")
    for each in found.worst:
        expected = ""
        if each.expected is not None:
            shares = f"{number(each.expected.probability)}, {number(each.expected_b)}"
            expected = f"{each.expected.token!r} ({shares})"
        top = [_choices(choices) for choices in (each.top_a, each.top_b)]
        text = repr(each.text[-60:])
        rows.add_row(str(each.row), str(each.token), number(each.kl), text, expected, *top)
    console().print(rows)


def _choices(choices: "tuple[Choice, ...]") -> str:
    return ", ".join(f"{each.token!r} {each.probability:.2f}" for each in choices)
