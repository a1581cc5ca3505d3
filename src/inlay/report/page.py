"""The report as one HTML page that makes no request.

Names and numbers of the model are in the page twice: as JSON that the script shows as text, and
escaped in a summary for readers without scripts.
"""

import base64
import hashlib
import os
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from string import Template

from inlay.files import write_atomically
from inlay.report.data import Change, Finding, ReportData
from inlay.report.numbers import count, duration, measured, number, size

__all__ = ["escaped", "render", "static_page", "write"]

_NONE = "'none'"
_SCRIPTS = ("text.js", "charts.js", "table.js", "coverage.js", "page.js")
# Inside a script element an HTML parser looks for a few sequences, whatever the script's type.
_ESCAPES = str.maketrans({c: f"\\u{ord(c):04x}" for c in ("<", ">", "&", chr(0x2028), chr(0x2029))})


def render(data: ReportData) -> str:
    """Return the page of a report."""
    style = _asset("page.css")
    library = _asset("chart.umd.min.js").partition("//# sourceMappingURL")[0]
    # A function around the scripts keeps their names apart from those of the library.
    script = "(() => {\n" + "\n".join(map(_asset, _SCRIPTS)) + "})();\n"
    return Template(_asset("page.html")).substitute(
        policy=_policy(scripts=[library, script], styles=[style]),
        title=escaped(data.title),
        license=_asset("chart.LICENSE.md").strip(),
        style=style,
        library=library,
        script=script,
        data=data.to_json().translate(_ESCAPES),
        summary=_summary(data),
    )


def write(data: ReportData, path: str | os.PathLike[str]) -> Path:
    """Write the page atomically: a reader sees the old page or the new one, never a part."""
    path = Path(path)
    write_atomically(path, render(data))
    return path


def static_page(title: str, body: str, *, style: str = "") -> str:
    """Return a page in the style of the report that runs no script and makes no request.

    :param body: HTML, whose texts are escaped
    :param style: CSS besides that of the report
    """
    sheet = _asset("page.css") + style
    policy = _policy(scripts=(), styles=[sheet])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escaped(title)}</title>
<style>{sheet}</style>
</head>
<body>
<main class="page">
{body}
</main>
</body>
</html>
"""


def escaped(text: str) -> str:
    """Escape a text for HTML."""
    # Half a surrogate pair, as in a file name that is not UTF-8, cannot be encoded.
    return escape(text.encode("utf-8", "replace").decode("utf-8"))


@cache
def _asset(name: str) -> str:
    return files("inlay.report").joinpath(name).read_text(encoding="utf-8")


def _policy(*, scripts: Iterable[str], styles: Iterable[str]) -> str:
    """Return a policy that loads nothing and runs only the scripts of the page."""
    return "; ".join(
        [
            f"default-src {_NONE}",
            f"script-src {' '.join(map(_source_hash, scripts)) or _NONE}",
            f"style-src {' '.join(map(_source_hash, styles))}",
            "img-src data:",
            f"base-uri {_NONE}",
            f"form-action {_NONE}",
        ]
    )


def _source_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _summary(data: ReportData) -> str:
    """Return the summary for readers without scripts."""
    seconds = sum(stage.seconds for stage in data.stages)
    facts = {
        "Model": data.model,
        "Scheme": data.scheme,
        "Size": f"{size(data.size_before)} before, {size(data.size_after)} after",
        "Calibrated on": f"{count(data.tokens)} tokens in {count(data.samples)} samples of "
        f"{data.data}, and {count(data.padding_tokens)} tokens of padding",
        "Time": "; ".join([duration(seconds), *data.tiers]),
        "Created": data.created,
    }
    if data.tracing:
        facts["Tracing"] = "; ".join(data.tracing)
    if data.peak_memory is not None:
        facts["Memory"] = f"{size(data.peak_memory)} at its peak"
    if data.tokens_per_second is not None:
        facts["Throughput"] = f"{count(round(data.tokens_per_second))} tokens per second"
    if data.equalized or data.unequalized:
        facts["Equalized"] = _equalized_line(data)
    if data.compensated:
        facts["Compensated"] = _compensated_line(data)
    terms = "".join(f"<dt>{name}</dt><dd>{escaped(text)}</dd>" for name, text in facts.items())
    return "\n".join(
        [
            f"<h1>{escaped(data.title)}</h1>",
            f"<dl>{terms}</dl>",
            "<h2>How the output changed</h2>",
            _items(map(_change_line, data.changes), nothing="Not measured."),
            "<h2>Findings</h2>",
            _items(map(_finding_line, data.findings), nothing="None."),
        ]
    )


def _items(lines: Iterable[str], *, nothing: str) -> str:
    items = "".join(f"<li>{escaped(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else f"<p>{nothing}</p>"


def _change_line(change: Change) -> str:
    parts = {
        "before": (change.before, change.before_interval),
        "after": (change.after, change.after_interval),
        "value": (change.value, change.interval),
    }
    given = [f"{name} {measured(*part)}" for name, part in parts.items() if part[0] is not None]
    return f"{change.name}: {', '.join(given) or number(None)}. {change.explanation}"


def _equalized_line(data: ReportData) -> str:
    line = f"{count(len(data.equalized))} values"
    if data.equalized:
        worst = max(data.equalized, key=lambda value: value.before)
        line += (
            f"; the largest channel of what {worst.readers[0]} reads was {number(worst.before)} "
            f"times the median one, and is {number(worst.after)} times"
        )
    left = f"; {count(len(data.unequalized))} inputs could not be" if data.unequalized else ""
    return line + left


def _compensated_line(data: ReportData) -> str:
    gain = median(each.after_db - each.before_db for each in data.compensated)
    failed = sum(each.failed for each in data.compensated)
    line = f"{count(len(data.compensated))} weights by GPTQ; the median gained {gain:.1f} dB"
    return line + (f"; {count(failed)} could not be and are rounded to nearest" if failed else "")


def _finding_line(finding: Finding) -> str:
    about = f" {finding.about}:" if finding.about is not None else ""
    return f"{finding.severity.capitalize()}:{about} {finding.text}"
