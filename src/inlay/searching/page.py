"""The page of a search: the frontier with the choice on it, and a map of layers by format."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inlay.report.numbers import count, measured, number, size
from inlay.report.page import escaped, static_page
from inlay.searching.scores import Scores, UnitScore
from inlay.searching.solving import Choice
from inlay.searching.targets import corrected, points_of

if TYPE_CHECKING:
    from inlay.searching.found import Found

__all__ = ["render_search"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _EDGE = 1080, 320, 72, 40, 12
_KINDS = 8  # colors of the style
_STYLE = "\n".join(
    [
        "svg text { fill: var(--muted); font-size: 12px; }",
        "svg .axis { stroke: var(--grid); }",
        "svg .frontier { fill: none; stroke: var(--accent); stroke-width: 2; }",
        "svg .check { fill: var(--surface); stroke: var(--text); stroke-width: 1.5; }",
        "svg .interval { stroke: var(--text); stroke-width: 1.5; }",
        "svg .choice { fill: var(--kind-3); stroke: var(--surface); stroke-width: 2; }",
        "svg .target { stroke: var(--warning); stroke-dasharray: 4 4; }",
        ".map td { color: #fff; }",
        ".map td:empty, .map td.block { color: var(--muted); }",
        ".legend span { padding: 2px 8px; border-radius: 4px; color: #fff; }",
        *(f".format-{n} {{ background: var(--kind-{n}); }}" for n in range(_KINDS)),
    ]
)


@dataclass(frozen=True)
class _Point:
    bits: float
    kl: float


def render_search(found: "Found") -> str:
    """Return the page of a search."""
    title = f"{found.scores.model}, {found.target}"
    parts = [
        '<header class="masthead"><p class="eyebrow">Inlay search</p>',
        f"<h1>{escaped(title)}</h1>",
        f'<p class="byline">{escaped(_byline(found.scores))}</p></header>',
        f'<ul class="cards">{"".join(_cards(found))}</ul>',
        "<section><h2>Frontier</h2>",
        f'<p class="hint">{escaped(_FRONTIER if not found.scores.forward_only else _RELATIVE)}</p>',
        f"{_frontier(found)}</section>",
        "<section><h2>Formats of layers</h2>",
        f'<p class="hint">{escaped(_MAP)}</p>',
        f"{_legend(found.scores)}{_map(found)}</section>",
        f"<section><h2>Measured choices</h2>{_checks(found)}</section>",
        *_left(found.scores),
    ]
    return static_page(title, "\n".join(parts), style=_STYLE)


_FRONTIER = (
    "The least KL divergence by mean bits of a weight: predicted, and corrected by what was "
    "measured (line); measured on held-out rows, with 95% intervals (circles); the choice (dot)."
)
_RELATIVE = (
    "The least sum of relative errors by mean bits of a weight (line), in units of the measured "
    "KL divergence; measured on held-out rows, with 95% intervals (circles); the choice (dot)."
)
_MAP = "A row for each block, a column for the layers that share a format, and its bits."


def _byline(scores: Scores) -> str:
    settings = "; ".join(f"{name} {value}" for name, value in scores.settings.items())
    return f"Scored on {count(scores.tokens)} tokens of {scores.data}; {settings}"


def _cards(found: "Found") -> Iterable[str]:
    kl, predicted = found.kl, found.predicted_kl
    yield _card("Bits of a weight", number(found.bits), "mean, without scales")
    yield _card("Size", size(found.size), "of all tensors")
    if kl is not None:
        yield _card("KL divergence", number(kl.value), measured(kl.value, kl.interval))
    else:
        yield _card("KL divergence", number(predicted), "predicted")
    check = found.scores.check_of(found.choice)
    if check is not None and check.agreement is not None:
        ratio = check.perplexity_ratio
        detail = "" if ratio is None else f"perplexity ratio {number(ratio.value)}"
        yield _card("Top-1 agreement", number(check.agreement.value), detail)


def _card(label: str, value: str, detail: str) -> str:
    return (
        f'<li class="card"><p class="label">{escaped(label)}</p>'
        f'<p class="value">{escaped(value)}</p><p class="detail">{escaped(detail)}</p></li>'
    )


def _frontier(found: "Found") -> str:
    """Draw the frontier, with a logarithmic axis of KL divergences."""
    scores = found.scores
    line = [_predicted(scores, choice) for choice in points_of(scores)]
    line = [point for point in line if point.kl > 0]
    checks = [
        (check, _Point(scores.bits_of(check.choice), check.kl.value)) for check in scores.checks
    ]
    chosen = _predicted(scores, found.choice)
    if found.kl is not None:
        chosen = _Point(found.bits, found.kl.value)
    shown = [each for each in (*line, *(point for _, point in checks), chosen) if each.kl > 0]
    if not shown:
        return '<p class="hint">No choice loses anything.</p>'
    bits = [point.bits for point in shown]
    low, high = (math.log10(edge) for edge in (_least(shown), max(p.kl for p in shown)))
    # A whole power of ten on either side gives the axis its marks.
    low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)

    def x(value: float) -> float:
        span = max(bits) - min(bits)
        part = (value - min(bits)) / span if span else 0.5
        return round(_LEFT + part * (_WIDTH - _LEFT - _EDGE), 1)

    def y(value: float) -> float:
        part = (math.log10(max(value, 10**low)) - low) / (high - low)
        return round(_HEIGHT - _BOTTOM - part * (_HEIGHT - _BOTTOM - _EDGE), 1)

    drawn = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escaped(_FRONTIER)}">']
    for power in range(low, high + 1):
        at = y(10.0**power)
        drawn.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{at}" y2="{at}"/>')
        drawn.append(f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{10.0**power:g}</text>')
    for value in _marks(min(bits), max(bits)):
        drawn.append(
            f'<text x="{x(value)}" y="{_HEIGHT - 16}" text-anchor="middle">{value:g}</text>'
        )
    drawn.append(f'<text x="{_WIDTH - _EDGE}" y="{_HEIGHT - 2}" text-anchor="end">bits</text>')
    if found.target.kind == "max_kl":
        at = y(found.target.value)
        drawn.append(f'<line class="target" x1="{_LEFT}" x2="{_WIDTH}" y1="{at}" y2="{at}"/>')
    path = " ".join(f"{x(point.bits)},{y(point.kl)}" for point in line)
    drawn.append(f'<polyline class="frontier" points="{path}"/>')
    for check, point in checks:
        if check.kl.interval is not None:
            top, bottom = y(check.kl.interval.high), y(check.kl.interval.low)
            at = x(point.bits)
            drawn.append(f'<line class="interval" x1="{at}" x2="{at}" y1="{top}" y2="{bottom}"/>')
        drawn.append(_circle("check", 5, x(point.bits), y(point.kl), point))
    drawn.append(_circle("choice", 7, x(chosen.bits), y(chosen.kl), chosen))
    return "\n".join([*drawn, "</svg>"])


def _circle(kind: str, radius: int, x: float, y: float, point: _Point) -> str:
    words = f"{number(point.bits)} bits, KL divergence {number(point.kl)}"
    return f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}"><title>{words}</title></circle>'


def _predicted(scores: Scores, choice: Choice) -> _Point:
    return _Point(scores.bits_of(choice), corrected(scores, scores.predicted(choice)))


def _least(points: Sequence[_Point]) -> float:
    """Return the smallest divergence to show; next to none would leave no room for others."""
    return max(min(point.kl for point in points), 1e-4 * max(point.kl for point in points))


def _marks(low: float, high: float) -> list[float]:
    step = next((s for s in (0.5, 1.0, 2.0, 4.0) if (high - low) / s <= 12), 8.0)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]


def _legend(scores: Scores) -> str:
    names = (
        f'<span class="format-{place % _KINDS}">{escaped(name)}</span>'
        for place, name in enumerate(scores.formats)
    )
    return f'<p class="legend">{"".join(names)}</p>'


def _map(found: "Found") -> str:
    """Return a table of blocks and of the layers in them, colored by format."""
    scores = found.scores
    rows: dict[str, dict[str, str]] = {}
    for place, unit in enumerate(scores.units):
        block, column = _place(unit)
        chosen = scores.format_of(place, found.choice)
        name = escaped(f"{', '.join(unit.layers[:4])}: {scores.formats[chosen]}")
        bits = unit.bits[found.choice[place]]
        cell = f'<td class="format-{chosen % _KINDS}" title="{name}">{bits}</td>'
        rows.setdefault(block, {})[column] = cell
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    head = "".join(f"<th>{escaped(column)}</th>" for column in columns)
    body = "".join(
        f'<tr><td class="block">{escaped(block)}</td>'
        + "".join(row.get(column, "<td></td>") for column in columns)
        + "</tr>"
        for block, row in rows.items()
    )
    return (
        f'<div class="scroller"><table class="map"><thead><tr><th>block</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _place(unit: UnitScore) -> tuple[str, str]:
    """Return the block of a unit, and what its layers are called in each block."""
    first = re.match(r"((?:.*?\.)?\d+)\.(.*)$", unit.layers[0])
    block, tail = (first[1], first[2]) if first else ("", unit.layers[0])
    inside, _, name = tail.rpartition(".")
    if len(unit.layers) == 1 or not unit.targets[0].startswith("re:"):
        names = (layer.rpartition(".")[2] for layer in unit.layers)
        return block, f"{inside} {', '.join(names)}".strip()
    return block, re.sub(r"\.\d+$", "", inside) or name


def _checks(found: "Found") -> str:
    if not found.scores.checks:
        return '<p class="hint">None.</p>'
    rows = []
    for check in sorted(found.scores.checks, key=lambda each: each.predicted):
        ratio, agreement = check.perplexity_ratio, check.agreement
        cells = (
            number(found.scores.bits_of(check.choice)),
            size(found.scores.size_of(check.choice)),
            number(check.predicted),
            measured(check.kl.value, check.kl.interval),
            number(None if ratio is None else ratio.value),
            number(None if agreement is None else agreement.value),
            "chosen" if check.choice == found.choice else "",
        )
        rows.append(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in cells)}</tr>")
    loss = "sum of relative errors" if found.scores.forward_only else "predicted KL"
    names = ("bits", "size", loss, "measured KL", "perplexity ratio", "top-1 agreement", "")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        f'<div class="scroller"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _left(scores: Scores) -> Iterable[str]:
    if scores.left:
        items = "".join(
            f"<li>{escaped(name)}: {escaped(reason)}</li>" for name, reason in scores.left.items()
        )
        yield f"<section><h2>Layers that stay as they are</h2><ul>{items}</ul></section>"
