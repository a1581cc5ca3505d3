"""What a report holds, and the page that is made of it, without a browser."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_sample import empty_report, sample_report

from inlay.errors import CheckpointError, ConfigurationError
from inlay.report import (
    Change,
    Distribution,
    ExpertLayer,
    Finding,
    LayerError,
    ReportData,
    SlotRecord,
    Stage,
    render,
    write,
)
from inlay.report.numbers import duration, number, size

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>\u2028\u2029&amp;${data}$data"
texts = st.text(max_size=8) | st.sampled_from([HOSTILE, "NaN", "Infinity", "\ud800", ""])
numbers = st.floats() | st.integers(-(10**9), 10**9)
missing = st.none() | numbers
counts = st.integers(0, 10**12)


@st.composite
def distributions(draw: st.DrawFn) -> Distribution:
    edges = draw(st.lists(numbers, min_size=1, max_size=5))
    masses = st.lists(numbers, min_size=len(edges) - 1, max_size=len(edges) - 1)
    return Distribution(
        edges=tuple(edges),
        counts=tuple(draw(masses)),
        clip_low=draw(missing),
        clip_high=draw(missing),
    )


def several(part: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(part, max_size=3).map(tuple)


slots = st.builds(
    SlotRecord,
    name=texts,
    module=texts,
    kind=st.sampled_from(["weight", "input", "output", "q", "k", "v"]),
    observer=texts,
    format=texts,
    scale_count=counts,
    tokens=st.none() | counts,
    low=missing,
    high=missing,
    scale_min=missing,
    scale_max=missing,
    sqnr_db=missing,
    distribution=st.none() | distributions(),
)
reports = st.builds(
    ReportData,
    title=texts,
    model=texts,
    recipe=texts,
    scheme=texts,
    data=texts,
    samples=counts,
    tokens=counts,
    padding_tokens=counts,
    created=texts,
    size_before=counts,
    size_after=counts,
    versions=st.dictionaries(texts, texts, max_size=3),
    stages=several(st.builds(Stage, name=texts, seconds=numbers)),
    changes=several(
        st.builds(
            Change, name=texts, explanation=texts, before=missing, after=missing, value=missing
        )
    ),
    layers=several(
        st.builds(
            LayerError,
            module=texts,
            sqnr_db=missing,
            weight_sqnr_db=missing,
            input_sqnr_db=missing,
        )
    ),
    slots=several(slots),
    experts=several(st.builds(ExpertLayer, module=texts, tokens=several(counts))),
    findings=several(
        st.builds(
            Finding,
            severity=st.sampled_from(["note", "warning"]),
            about=st.none() | texts,
            text=texts,
        )
    ),
)


LIBRARY = files("inlay.report").joinpath("chart.umd.min.js").read_text().partition("//# source")[0]


class Parsed(HTMLParser):
    """Tags of a page, and what its script elements hold."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


OWN_TAGS = {tag for tag, _ in Parsed(render(sample_report(blocks=1))).tags} | {"p", "ul", "li"}


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


@given(reports)
def test_json_gives_back_what_was_written(report: ReportData) -> None:
    text = report.to_json()
    strict(text)
    # NaN is not equal to itself, but its representation is.
    assert repr(ReportData.from_json(text)) == repr(report)


@given(reports)
def test_the_page_holds_the_data_whatever_it_is(report: ReportData) -> None:
    page = render(report)
    page.encode("utf-8")
    parsed = Parsed(page.replace(LIBRARY, ""))
    assert len(parsed.scripts) == 3
    assert strict(parsed.scripts[0]) == strict(report.to_json())
    assert not {"<", ">", "&", "\u2028", "\u2029"} & set(parsed.scripts[0])
    assert {tag for tag, _ in parsed.tags} <= OWN_TAGS


def hostile_report() -> ReportData:
    sample = sample_report(blocks=1)
    return replace(
        sample,
        title=HOSTILE,
        model=HOSTILE,
        recipe=HOSTILE,
        findings=(Finding(severity="warning", about=HOSTILE, text=HOSTILE),),
        changes=(Change(name=HOSTILE, explanation=HOSTILE, value=1.0),),
        slots=tuple(replace(slot, name=f"{HOSTILE}.{i}") for i, slot in enumerate(sample.slots)),
    )


def test_hostile_names_are_text() -> None:
    page = render(hostile_report())
    assert "<img" not in page
    assert "${data}$data" in page  # data is no template


def test_nothing_is_loaded() -> None:
    parsed = Parsed(render(sample_report()))
    for tag, attributes in parsed.tags:
        assert "src" not in attributes
        if "href" in attributes:
            assert attributes["href"] == "data:,", tag
        assert not any(name.startswith("on") or name == "style" for name in attributes)
    policy = next(
        attributes["content"]
        for _, attributes in parsed.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "sourceMappingURL" not in "".join(parsed.scripts)


def test_the_page_is_small() -> None:
    assert len(render(empty_report()).encode()) < 350_000


def test_an_empty_report_says_what_is_missing() -> None:
    page = render(empty_report())
    summary = page[page.index("<noscript>") : page.index("</noscript>")]
    assert "Not measured." in summary
    assert "None." in summary


def test_the_summary_can_be_read_without_scripts() -> None:
    page = render(sample_report())
    summary = page[page.index("<noscript>") : page.index("</noscript>")]
    assert "269 MB before, 163 MB after" in summary
    assert "118,204 tokens in 256 samples of wikitext-2-raw-v1, train" in summary
    intervals = "before 21.31 (19.8 to 22.9), after 21.58 (20.1 to 23.2)"
    assert f"Perplexity: {intervals}." in summary
    assert "Warning: model.layers.1.mlp.down_proj.input: A few values" in summary


def test_the_licence_of_the_library_goes_with_the_page() -> None:
    page = render(empty_report())
    assert "Copyright (c) 2014-2024 Chart.js Contributors" in page
    assert "permission notice shall be included in all copies" in page


def test_write_replaces_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    assert write(sample_report(blocks=1), path) == path
    assert path.read_text(encoding="utf-8") == render(sample_report(blocks=1))
    assert os.listdir(path.parent) == ["report.html"]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_write_leaves_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(empty_report(), tmp_path / "report.html")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CheckpointError, match=r"report\.html could not be written: no space left"):
        write(sample_report(blocks=1), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["report.html"]


def changed(**parts: Any) -> str:
    document = json.loads(sample_report(blocks=1).to_json())
    document["report"].update(parts)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "the saved report is not JSON"),
        ("[]", "has version None, but this Inlay reads 1"),
        ('{"version": 2, "report": {}}', "has version 2, but this Inlay reads 1"),
        ('{"version": 1}', "report must be dict, not None"),
        (changed(tokens="many"), "report.tokens must be int, not 'many'"),
        (changed(tokens=True), "report.tokens must be int, not True"),
        (changed(stages=[{"name": "load"}]), r"report.stages\[0\].seconds must be float, not None"),
        (changed(mood="good"), "report has no mood"),
        (
            changed(findings=[{"severity": "error", "text": ""}]),
            r"report.findings\[0\].severity must be 'note' or 'warning', not 'error'",
        ),
    ],
)
def test_what_cannot_be_read_is_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        ReportData.from_json(text)


def test_counts_need_edges() -> None:
    with pytest.raises(ConfigurationError, match="of 2 counts needs 3 edges, not 2"):
        Distribution(edges=(0.0, 1.0), counts=(1, 2))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"),
        (math.nan, "\u2013"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (-0.0, "0"),
        (21.3149, "21.31"),
        (12345.6, "12346"),
        (0.00012345, "1.23e-04"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_sizes_and_durations() -> None:
    assert [size(v) for v in (0, 999, 999_900, 163_127_104)] == [
        "0 bytes",
        "999 bytes",
        "1 MB",
        "163 MB",
    ]
    assert [duration(v) for v in (2e-5, 0.81, 59.99, 133.7, 7265, math.nan)] == [
        "under 0.1 s",
        "0.81 s",
        "60 s",
        "2 min 14 s",
        "2 h 1 min",
        "\u2013",
    ]


def test_a_report_needs_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import inlay.report; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert re.fullmatch(r"\['inlay'\]\s*", done.stdout)
