"""The page as a browser shows it. Skipped where there is no Chromium."""

import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright
from report_sample import empty_report, sample_report

from inlay.report import (
    Change,
    Distribution,
    EqualizedValue,
    ExpertLayer,
    Finding,
    LayerError,
    ReportData,
    SlotRecord,
    Stage,
    UnequalizedValue,
    write,
)

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
    ),
]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
DESKTOP: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 360, "height": 740}
HOSTILE = "</script><img src=x onerror=alert(1)><b>bold</b>"
MISSING = "\u2013"
OUTLIER = "model.layers.1.mlp.down_proj"

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens a report. In the end, nothing may have been complained of or asked for."""
    problems: list[str] = []
    contexts = []

    def open_page(report: ReportData, *, viewport: ViewportSize = DESKTOP, **options: Any) -> Page:
        path = write(report, tmp_path / "report.html")
        contexts.append(browser.new_context(viewport=viewport, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda request: request.url == path.as_uri() or problems.append(request.url),
        )
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="module")
def sample() -> ReportData:
    return sample_report(blocks=4)


def column(page: Page, title: str) -> list[str]:
    titles = page.locator("#slots th").all_inner_texts()
    place = next(i for i, text in enumerate(titles) if text.startswith(title)) + 1
    return page.locator(f"#slots tbody td:nth-child({place})").all_inner_texts()


def sort_by(page: Page, title: str) -> str | None:
    header = page.locator("#slots th", has_text=title)
    header.locator("button").click()
    return header.get_attribute("aria-sort")


def datasets(page: Page, chart: str) -> list[dict[str, Any]]:
    """What a chart draws: the label and the data of each of its series."""
    found: list[dict[str, Any]] = page.evaluate(
        "id => Chart.getChart(id).data.datasets.map(({ label, data }) => ({ label, data }))", chart
    )
    return found


def slot(name: str, **values: Any) -> SlotRecord:
    module, _, kind = name.rpartition(".")
    words = {"observer": "minmax", "format": "int8 per tensor, static", "scale_count": 1}
    return SlotRecord(name=name, module=module, kind=kind, **{**words, **values})  # type: ignore[arg-type]


def test_the_summary_comes_first(show: Open, sample: ReportData) -> None:
    page = show(sample)
    cards = page.locator(".card").all_inner_texts()
    assert "269 MB \u2192 163 MB" in cards[0].replace("\u00a0", " ")
    assert "1.65 times smaller" in cards[0]
    assert "0.991" in cards[1]
    assert "118,204 tokens" in cards[2]
    assert "2 min 14 s" in cards[3].replace("\u00a0", " ")
    assert page.title() == sample.title
    assert page.locator("#findings li").first.inner_text().startswith("warning")
    last = page.locator("#changes li").last.inner_text()
    assert last.endswith("21.31 \u2192 21.58")
    assert "95% interval: 19.8 to 22.9 \u2192 20.1 to 23.2" in last
    page.locator("summary", has_text="Recipe").click()
    assert page.locator("#recipe").inner_text() == sample.recipe


def test_equalized_channels_are_listed_and_the_rest_explained(
    show: Open, sample: ReportData
) -> None:
    assert not show(sample).locator("#equalized-section").is_visible()
    values = tuple(
        EqualizedValue(
            readers=(f"layers.{index}.down",),
            parameters=(f"layers.{index}.up.weight",),
            strength=0.8,
            before=ratio,
            after=2.0,
        )
        for index, ratio in enumerate((10.0, math.inf, 123.4))
    )
    left = tuple(UnequalizedValue(module=f"fc{n}", reason="add reads it too") for n in range(2))
    page = show(replace(sample, equalized=values, unequalized=left))
    items = page.locator("#equalized .changes li").all_inner_texts()
    assert [text.split()[0] for text in items] == [
        "layers.1.down",
        "layers.2.down",
        "layers.0.down",
    ]
    assert "123 \u2192 2" in items[1]
    page.locator("#equalized details summary").click()
    assert "fc0, fc1: add reads it too" in page.locator("#equalized details").inner_text()


def test_tokens_of_experts_are_a_map_that_names_what_is_under_the_pointer(show: Open) -> None:
    page = show(empty_report())
    assert not page.locator("#experts-section").is_visible()
    layers = [
        ExpertLayer(module=f"model.layers.{n}.mlp.experts", tokens=(90, 0, 110, 3), starved=(1, 3))
        for n in range(3)
    ]
    page = show(replace(empty_report(), experts=tuple(layers)))
    note = page.locator("#experts-note")
    assert note.inner_text() == "6 of 12 experts saw no tokens, or few."
    chart = page.locator("#experts-chart")
    box = chart.bounding_box()
    assert box is not None
    assert box["width"] == 4 / 3 * box["height"]
    chart.hover(position={"x": box["width"] * 5 / 8, "y": box["height"] / 2})
    assert note.inner_text() == "model.layers.1.mlp.experts.2: 110 tokens"
    page.mouse.move(0, 0)
    assert note.inner_text().startswith("6 of 12")


def test_errors_of_experts_are_a_map_that_names_the_worst(show: Open) -> None:
    layers = [
        ExpertLayer(module=f"layers.{n}.experts", sqnr_db=(30.0 - n, None, math.inf, 20.0))
        for n in range(2)
    ]
    page = show(replace(empty_report(), experts=tuple(layers)))
    assert not page.locator("#experts-tokens").is_visible()
    note = page.locator("#experts-errors-note")
    summary = "Half of the experts are above 24.5 dB. The worst is layers.0.experts.3: 20.0 dB."
    assert note.inner_text().replace("\u00a0", " ") == summary
    chart = page.locator("#experts-errors-chart")
    box = chart.bounding_box()
    assert box is not None
    for place, text in enumerate(("29.0 dB", "no data", "inf dB", "20.0 dB")):
        chart.hover(position={"x": box["width"] * (place + 0.5) / 4, "y": box["height"] * 0.75})
        shown = note.inner_text().replace("\u00a0", " ")
        assert shown == f"layers.1.experts.{place}: {text}"
    # The strongest colour is that of the largest error.
    read = "c => [...c.getContext('2d').getImageData(0, 5, c.width, 1).data]"
    pixels = chart.evaluate(read)  # of the first row: red, green, blue and alpha
    none, usual, worst = (pixels[4 * (20 * place + 5) + 3] for place in (2, 0, 3))
    assert none < usual < worst


def test_the_worst_layer_is_named(show: Open, sample: ReportData) -> None:
    page = show(sample)
    assert page.locator("#worst li").first.inner_text().startswith(OUTLIER)
    label = page.locator("#errors-chart").get_attribute("aria-label")
    assert label is not None
    assert OUTLIER in label
    for chart in page.locator("canvas").all():
        assert chart.get_attribute("role") == "img"
        assert chart.get_attribute("aria-label")


def test_layers_are_drawn_by_kind_and_kinds_can_be_hidden(show: Open, sample: ReportData) -> None:
    page = show(sample)
    kinds = [series["label"] for series in datasets(page, "errors-chart")]
    assert kinds == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    button = page.locator("#errors-legend button", has_text="down_proj")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert "down_proj" not in [series["label"] for series in datasets(page, "errors-chart")]
    button.focus()
    page.keyboard.press("Space")
    assert len(datasets(page, "errors-chart")) == 7


def test_hovering_names_the_layer(show: Open, sample: ReportData) -> None:
    page = show(sample)
    page.locator("#errors-chart").scroll_into_view_if_needed()
    place = page.evaluate(
        """() => {
            const chart = Chart.getChart("errors-chart");
            const point = chart.getDatasetMeta(6).data[1];
            const box = chart.canvas.getBoundingClientRect();
            return [box.left + point.x, box.top + point.y];
        }"""
    )
    page.mouse.move(*place)
    page.wait_for_function("Chart.getChart('errors-chart').tooltip.title?.length")
    assert "".join(page.evaluate("Chart.getChart('errors-chart').tooltip.title")) == OUTLIER


def test_roles_with_the_same_last_word_are_told_apart(show: Open) -> None:
    names = ["attention.output.dense", "intermediate.dense", "attention.self.query"]
    layers = [f"bert.layer.{block}.{name}" for block in range(2) for name in names]
    report = replace(
        empty_report(), layers=tuple(LayerError(module=name, sqnr_db=30.0) for name in layers)
    )
    kinds = [series["label"] for series in datasets(show(report), "errors-chart")]
    assert kinds == ["attention.output.dense", "intermediate.dense", "query"]


def test_ranges_of_the_chosen_kind(show: Open, sample: ReportData) -> None:
    page = show(sample)
    assert page.locator("#ranges-kind").input_value() == "input"
    assert page.locator("#ranges-log").is_checked()  # one input is far wider than the others
    page.locator("#ranges-kind").select_option("weight")
    assert not page.locator("#ranges-log").is_checked()
    drawn = [point["y"] for series in datasets(page, "ranges-chart") for point in series["data"]]
    ranges = [[s.low, s.high] for s in sample.slots if s.kind == "weight"]
    assert sorted(drawn) == sorted(ranges)


def test_sorting(show: Open) -> None:
    lows = [9.0, 10.0, None, -2.0, math.nan, 1e-4, -math.inf]
    slots = [slot(f"layers.{i}.fc.input", low=low) for i, low in enumerate(lows)]
    page = show(replace(empty_report(), slots=tuple(slots)))
    minus = "\u2212"
    ascending = [f"{minus}inf", f"{minus}2.000", f"1.000e{minus}4", "9.000", "10.00"]
    assert sort_by(page, "Low") == "ascending"
    assert column(page, "Low") == [*ascending, MISSING, MISSING]
    assert sort_by(page, "Low") == "descending"
    assert column(page, "Low") == [*reversed(ascending), MISSING, MISSING]
    assert page.locator("#slots th[aria-sort=none]").count() == 10


def test_sorting_with_the_keyboard_and_names_by_number(show: Open) -> None:
    slots = [slot(f"layers.{i}.fc.input") for i in (10, 9, 100)]
    page = show(replace(empty_report(), slots=tuple(slots)))
    page.locator("#slots th button", has_text="Slot").focus()
    page.keyboard.press("Enter")
    assert [name.split(".")[1] for name in column(page, "Slot")] == ["9", "10", "100"]


def test_searching(show: Open, sample: ReportData) -> None:
    page = show(sample)
    page.locator("#search").fill("Down_proj INPUT")
    names = column(page, "Slot")
    assert names == [f"model.layers.{block}.mlp.down_proj.input" for block in range(4)]
    assert page.locator("#slots-count").inner_text() == "4 of 56 slots"
    page.locator("#table-kind").select_option("weight")
    assert column(page, "Slot") == []
    page.locator("#search").fill("")
    assert len(column(page, "Slot")) == 28


def test_a_finding_leads_to_its_slot(show: Open, sample: ReportData) -> None:
    page = show(sample)
    page.locator("#table-kind").select_option("weight")
    finding = page.locator("#findings li").first
    finding.locator("button").click()
    assert column(page, "Slot") == [finding.locator("button").inner_text()]


def test_errors_of_weights_alone_say_why(show: Open, sample: ReportData) -> None:
    assert "errors of inputs" not in show(sample).locator("#errors-note").inner_text()
    layers = tuple(replace(layer, sqnr_db=None, input_sqnr_db=None) for layer in sample.layers)
    note = show(replace(sample, layers=layers)).locator("#errors-note").inner_text()
    assert "No held-out data ran, so errors of inputs and outputs are unknown" in note


def test_nothing_is_said_twice_about_the_model(show: Open, sample: ReportData) -> None:
    named = replace(sample, model="model", scheme="W8A8", title="model, W8A8")
    byline = show(named).locator("#byline").inner_text()
    assert "model" not in byline
    assert byline.endswith("UTC")


def test_the_picker_changes_the_distribution(show: Open, sample: ReportData) -> None:
    page = show(sample)
    picker = page.locator("#slot")
    assert picker.input_value() == f"{OUTLIER}.input"
    first = datasets(page, "distribution-chart")
    picker.fill("model.layers.3.self_attn.q_proj.input")
    second = datasets(page, "distribution-chart")
    assert second != first
    picker.fill("0 o_proj")
    picker.press("Enter")
    assert picker.input_value() == "model.layers.0.self_attn.o_proj.input"
    assert datasets(page, "distribution-chart") != second
    page.locator("#slot-next").click()
    assert picker.input_value() == "model.layers.0.mlp.gate_proj.input"
    picker.fill("nowhere")
    picker.press("Enter")
    assert "nowhere" in page.locator("#slot-problem").inner_text()
    page.locator("#slots tbody button", has_text=f"{OUTLIER}.input").click()
    assert picker.input_value() == f"{OUTLIER}.input"
    assert page.locator("#slot-problem").inner_text() == ""


def test_density_is_count_over_width(show: Open) -> None:
    """Half of the values in a bin twice as wide, a quarter exactly zero, a quarter clipped."""
    distribution = Distribution(
        edges=(-2.0, 0.0, 0.0, 1.0), counts=(50, 25, 25), clip_low=-2.0, clip_high=0.0
    )
    page = show(replace(empty_report(), slots=(slot("fc.input", distribution=distribution),)))
    page.locator("#log-density").uncheck()
    [curve] = datasets(page, "distribution-chart")
    assert [(point["x"], point["y"]) for point in curve["data"]] == [
        (-2, 0),
        (-2, 0.25),
        (0, 0.25),
        (0, 0.25),
        (1, 0.25),
        (1, 0),
    ]
    facts = page.locator("#slot-facts").inner_text().replace("\u00a0", " ")
    assert "Clipped\n25 %" in facts
    assert "Exactly 0\n25 %" in facts


def test_hostile_names_stay_text(show: Open, sample: ReportData) -> None:
    slots = [replace(s, name=f"{HOSTILE}.{s.name}", module=HOSTILE) for s in sample.slots]
    report = replace(
        sample,
        title=HOSTILE,
        model=HOSTILE,
        recipe=HOSTILE,
        data=HOSTILE,
        versions={HOSTILE: HOSTILE, "__proto__": HOSTILE},
        stages=(Stage(name=HOSTILE, seconds=1.0),),
        changes=(Change(name=HOSTILE, explanation=HOSTILE, value=1.0),),
        layers=tuple(replace(layer, module=f"{HOSTILE}.{layer.module}") for layer in sample.layers),
        slots=tuple(slots),
        findings=(Finding(severity="warning", about=HOSTILE, text=HOSTILE),),
    )
    page = show(report)
    page.wait_for_timeout(100)  # for an error handler to fire, if there were an image
    assert page.locator("img, b").count() == 0
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.title() == HOSTILE
    assert column(page, "Slot")[0] == f"{HOSTILE}.{sample.slots[0].name}"


def test_odd_numbers_break_nothing(show: Open, sample: ReportData) -> None:
    odd = [math.nan, math.inf, -math.inf, None, 0.0, 1e-300, 1e300]
    layers = [
        replace(layer, sqnr_db=odd[i % 7], weight_sqnr_db=math.nan, input_sqnr_db=None)
        for i, layer in enumerate(sample.layers)
    ]
    slots = [
        replace(s, low=odd[i % 7], high=odd[i % 5], scale_min=odd[i % 3], sqnr_db=odd[i % 4])
        for i, s in enumerate(sample.slots)
    ]
    unbounded = Distribution(
        edges=(-math.inf, 0.0, 0.0, math.inf), counts=(1, math.nan, 3), clip_low=math.nan
    )
    slots.append(slot("fc.input", distribution=unbounded))
    slots.append(slot("empty.input", distribution=Distribution(edges=(0.0,), counts=())))
    report = replace(
        sample,
        layers=tuple(layers),
        slots=tuple(slots),
        changes=(Change(name="Perplexity", explanation="", before=21.0, after=math.inf),),
        stages=(Stage(name="load", seconds=math.nan),),
    )
    page = show(report)
    for name in ("fc.input", "empty.input"):
        page.locator("#slot").fill(name)
        for box in ("#log-density", "#log-values"):
            page.locator(box).click()
    for kind in ("weight", "input"):
        page.locator("#ranges-kind").select_option(kind)
        page.locator("#ranges-log").click()
    assert "inf" in page.locator("#changes").inner_text()
    assert "NaN" not in page.locator("body").inner_text()


def test_an_empty_report_says_so(show: Open) -> None:
    text = show(empty_report()).locator("main").inner_text()
    for sentence in ("Not measured.", "The error of layers was not measured.", "None."):
        assert sentence in text


def test_a_phone_scrolls_only_down(show: Open, sample: ReportData) -> None:
    long = replace(
        sample,
        title="a" * 200,
        model="b" * 200,
        findings=(Finding(severity="note", about="c" * 200, text="d" * 200),),
    )
    page = show(long, viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate(
        "(({ scrollWidth, clientWidth }) => scrollWidth > clientWidth)"
        "(document.getElementById('slots-scroller'))"
    )
    page.locator("details").evaluate_all("all => all.forEach((one) => (one.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_dark_mode_also_when_it_is_switched(show: Open, sample: ReportData) -> None:
    page = show(sample, color_scheme="light")

    def colours() -> list[str]:
        return page.evaluate(  # type: ignore[no-any-return]
            """() => [
                getComputedStyle(document.body).backgroundColor,
                getComputedStyle(document.body).color,
                Chart.getChart("errors-chart").data.datasets[0].borderColor,
                Chart.getChart("ranges-chart").data.datasets[0].backgroundColor,
                Chart.getChart("distribution-chart").data.datasets[0].borderColor,
                Chart.getChart("distribution-chart").scales.x.options.ticks.color,
            ]"""
        )

    light = colours()
    page.emulate_media(color_scheme="dark")
    # The charts follow with the next frame.
    page.wait_for_function(
        "before => Chart.getChart('distribution-chart').data.datasets[0].borderColor !== before",
        arg=light[4],
    )
    dark = colours()
    same = [a for a, b in zip(light, dark, strict=True) if a == b]
    assert same == []


def test_two_thousand_slots(show: Open) -> None:
    report = sample_report(blocks=143)
    assert len(report.slots) >= 2000
    start = time.monotonic()
    page = show(report)
    assert page.locator("#slots-count").inner_text() == "2,002 of 2,002 slots"
    sort_by(page, "SQNR")
    page.locator("#search").fill("layers.77.")
    assert page.locator("#slots-count").inner_text() == "14 of 2,002 slots"
    # Far more than it takes; what it guards against is a page that hangs.
    assert time.monotonic() - start < 15


def test_rows_come_as_the_reader_scrolls(show: Open) -> None:
    page = show(sample_report(blocks=15))
    assert len(column(page, "Slot")) == 100
    for rows in (200, 210):
        page.locator("#slots-scroller").evaluate("box => (box.scrollTop = box.scrollHeight)")
        page.wait_for_function(
            "rows => document.querySelectorAll('#slots tbody tr').length === rows", arg=rows
        )


def test_without_scripts_the_summary_is_shown(show: Open, sample: ReportData) -> None:
    page = show(sample, java_script_enabled=False)
    assert not page.locator("main").is_visible()
    assert (
        "Perplexity: before 21.31 (19.8 to 22.9), after 21.58"
        in page.locator("noscript").inner_text()
    )
