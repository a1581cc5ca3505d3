"""Reports of calibrations: what they say, and what they warn of."""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
import torch
from families import batch, bert, llama, mixtral, vit
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from inlay import Calibration, Recipe
from inlay.evaluation.compare import Comparison, compare
from inlay.evaluation.distributions import distribution_of_histogram, distribution_of_weight
from inlay.evaluation.findings import layer_findings, slot_findings, unquantized_findings
from inlay.evaluation.summary import report_of
from inlay.ranges.float_histogram import FloatBins, Histogram
from inlay.recipe import format_in_words, preset_names, recipe_text, scheme_in_words
from inlay.report import Change, Distribution, LayerError, ReportData, SlotRecord, Stage
from inlay.run_record import Record

HISTOGRAM = {"observer": "histogram", "observer_kwargs": {"method": "minmax"}}
STATIC = Recipe.from_preset("W8A8_STATIC", ignore=(), inputs={"observer": "static_minmax"})


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


class Stack(nn.Module):
    """Layers one after the other, and one that is only used if asked for."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.spare = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, use_spare: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.spare(x) if use_spare else x


def finalized(model: nn.Module, recipe: Recipe, *batches: Any, accept: Any = ()) -> Calibration:
    calibration = Calibration(model, recipe, compiler="eager")
    for one in batches:
        calibration.observe(**one)
    calibration.finalize(accept=accept)
    return calibration


def texts(report: ReportData, about: str | None) -> list[str]:
    return [finding.text for finding in report.findings if finding.about == about]


# In words


@pytest.mark.parametrize(
    ("preset", "weight", "inputs", "scheme"),
    [
        (
            "W8A8_STATIC",
            "int8 per channel, symmetric",
            "int8 per tensor, asymmetric, static",
            "W8A8 int, static",
        ),
        (
            "W8A8",
            "int8 per channel, symmetric",
            "int8 per token, symmetric, dynamic",
            "W8A8 int, dynamic",
        ),
        ("W4A16", "int4 in groups of 128, symmetric", None, "W4A16 int"),
        (
            "NVFP4",
            "float4 in groups of 16 under a global scale, symmetric",
            "float4 in groups of 16 under a global scale, symmetric, dynamic in each group",
            "W4A4 float, dynamic",
        ),
        (
            "FP8_BLOCK",
            "float8 in blocks of 128 by 128, symmetric",
            "float8 in groups of 128, symmetric, dynamic",
            "W8A8 float, dynamic",
        ),
    ],
)
def test_formats(preset: str, weight: str, inputs: str | None, scheme: str) -> None:
    config = Recipe.from_preset(preset).config
    (group,) = config.config_groups.values()
    assert format_in_words(group.weights, "weight") == weight
    assert scheme_in_words(config) == scheme
    if inputs is None:
        assert group.input_activations is None
    else:
        assert format_in_words(group.input_activations, "input") == inputs


def test_scheme_with_a_cache() -> None:
    cache = {"num_bits": 8, "type": "float", "strategy": "attn_head"}
    config = Recipe.from_preset("W4A16", kv_cache=cache).config
    assert scheme_in_words(config) == "W4A16 int, float8 kv cache"
    assert format_in_words(config.kv_cache_scheme, "k") == "float8 per head, symmetric, static"


@pytest.mark.parametrize("preset", [name for name in preset_names() if name != "UNQUANTIZED"])
def test_the_recipe_can_be_read_again(preset: str) -> None:
    observer = {"observer": "mse"}
    recipe = Recipe.from_preset(preset, ignore=["lm_head"], weights=observer)
    again = Recipe.from_yaml(recipe_text(recipe))
    # As compressed-tensors writes it: it leaves out the type of a zero point that there is not.
    assert again.config.model_dump(mode="json") == recipe.config.model_dump(mode="json")


# Distributions


def histogram_of(values: torch.Tensor) -> Histogram:
    """Of values of shape (heads, n)."""
    bins = FloatBins(8)
    counts = bins.count(values.unsqueeze(0))
    return Histogram(bins, counts, values.amin(-1), values.amax(-1))


finite = st.sampled_from([0.0, 1e-12, -1e-12]) | st.floats(-1e6, 1e6, width=32)


@given(st.lists(finite, min_size=1, max_size=40), st.integers(1, 2), st.integers(8, 64))
def test_every_value_is_in_a_bin(numbers: list[float], heads: int, bins: int) -> None:
    values = torch.tensor(numbers * heads).reshape(heads, -1)
    made = distribution_of_histogram(histogram_of(values), (-1.0, 1.0), bins=bins)
    assert sorted(made.edges) == list(made.edges)
    assert made.edges[0] == pytest.approx(min(numbers), rel=1e-5)
    assert made.edges[-1] == pytest.approx(max(numbers), rel=1e-5)
    assert len(made.counts) <= bins + 5
    # Each count is rounded by itself.
    assert sum(made.counts) == pytest.approx(values.numel(), abs=0.5 * len(made.counts))
    assert min(made.counts) >= 0


def test_bins_where_the_values_are() -> None:
    """The bulk is divided finely though the range is a thousand times as wide."""
    torch.manual_seed(0)
    values = torch.randn(1, 10000)
    values[0, 0] = 5000
    clip = (-4.0, 4.0)
    made = distribution_of_histogram(histogram_of(values), clip, bins=100)
    inside = [edge for edge in made.edges if -3 < edge < 3]
    assert len(inside) > 40
    assert set(clip[1:]) <= set(made.edges)
    below = sum(c for c, end in zip(made.counts, made.edges[1:], strict=True) if end <= 1)
    exact = float((values <= max(edge for edge in made.edges if edge <= 1)).sum())
    assert below == pytest.approx(exact, abs=60)


def test_zeros_have_a_bin_of_their_own() -> None:
    values = torch.cat([torch.zeros(50), torch.linspace(-1, 1, 40)]).reshape(1, -1)
    made = distribution_of_histogram(histogram_of(values), (-1.0, 1.0), bins=16)
    widths = [end - start for start, end in zip(made.edges, made.edges[1:], strict=False)]
    (place,) = [index for index, width in enumerate(widths) if width == 0]
    assert (made.edges[place], made.counts[place]) == (0.0, 50.0)
    constant = distribution_of_histogram(histogram_of(torch.full((1, 5), 2.0)), (0, 2), bins=16)
    assert (constant.edges, constant.counts) == ((2.0, 2.0), (5.0,))


def test_a_weight_is_sampled_over_all_columns() -> None:
    weight = torch.zeros(1024, 512)
    weight[:, 1::2] = 1.0  # every other column: an even stride would miss these, or the others
    made = distribution_of_weight(weight, (None, None), bins=4)
    assert made is not None
    assert made.edges == (0, 0.25, 0.5, 0.75, 1)
    assert made.counts[0] == pytest.approx(weight.numel() / 2, rel=0.01)
    assert made.counts[-1] == pytest.approx(weight.numel() / 2, rel=0.01)
    assert distribution_of_weight(weight * math.nan, (None, None), bins=4) is None


# Reports


@pytest.mark.slow
def test_report_of_a_language_model() -> None:
    cache = {"num_bits": 8, "type": "float", "strategy": "attn_head", "observer": "histogram"}
    recipe = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs=HISTOGRAM, kv_cache=cache)
    model = llama()
    calibration = finalized(model, recipe, batch(model), batch(model, 1))
    comparison = compare(model, calibration, [batch(model, 7)])
    record = Record(
        model="tiny",
        data="a file",
        samples=4,
        tokens=24,
        padding_tokens=0,
        stages=(("calibrate", 1.5),),
    )
    report = report_of(calibration, comparison, record=record, sizes=(100, 60))
    assert ReportData.from_json(report.to_json()) == report

    assert report.title == "tiny, W8A8 int, static, float8 kv cache"
    assert (report.model, report.data, report.samples, report.tokens) == (
        "tiny",
        "a file",
        4,
        24,
    )
    assert (report.size_before, report.size_after) == (100, 60)
    assert report.stages == (Stage(name="calibrate", seconds=1.5),)
    assert report.versions["torch"] == torch.__version__
    assert {"inlay", "compressed-tensors", "transformers", "python"} <= set(report.versions)
    age = datetime.now(timezone.utc) - datetime.fromisoformat(report.created)
    assert age.total_seconds() < 60
    assert (report.changes, report.layers) == (comparison.changes, comparison.layers)

    slots = {slot.name: slot for slot in report.slots}
    assert slots.keys() == calibration.statistics.plan.slots.keys()
    blocks = [int(slot.name.split(".")[2]) for slot in report.slots]
    assert blocks == sorted(blocks)
    slot = slots["model.layers.1.mlp.down_proj.input"]
    state = calibration.statistics.snapshot()[slot.name]
    assert slot.low == float(state.tensors["min_vals"])
    assert slot.high == float(state.tensors["max_vals"])
    assert slot.scale_min == slot.scale_max == float(calibration.qparams[slot.name]["scale"])
    assert (slot.scale_count, slot.observer) == (1, "histogram")
    assert slot.format == "int8 per tensor, asymmetric, static"
    picture = slot.distribution
    assert picture is not None
    assert sum(picture.counts) == pytest.approx(2 * 2 * 6 * 64, abs=len(picture.counts) / 2)
    # Taken as it is, the range is what can be represented, but for the rounding of its ends.
    assert picture.clip_low == pytest.approx(slot.low, abs=slot.scale_max)
    assert picture.clip_high == pytest.approx(slot.high, abs=slot.scale_max)
    layer = next(e for e in report.layers if e.module == slot.module)
    assert slot.sqnr_db == layer.input_sqnr_db
    assert slots[f"{slot.module}.weight"].sqnr_db == layer.weight_sqnr_db

    keys = slots["model.layers.0.self_attn.k"]
    assert keys.scale_count == 2
    assert keys.distribution is not None
    assert sum(keys.distribution.counts) == pytest.approx(2 * 2 * 6 * 16, abs=150)
    assert any("combine all heads" in text for text in texts(report, None))
    assert any("lm_head" in text for text in texts(report, None))
    assert not any("held out" in finding.text for finding in report.findings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "preset"),
    [(bert, "NVFP4"), (vit, "FP8_DYNAMIC"), (mixtral, "W8A8_STATIC")],
)
def test_reports_of_other_schemes(make: Callable[[], nn.Module], preset: str) -> None:
    model = make()
    ignore = ["re:.*[.]experts[.].*"] if make is mixtral else []
    calibration = finalized(model, Recipe.from_preset(preset, ignore=ignore), batch(model))
    report = report_of(calibration)
    assert ReportData.from_json(report.to_json()) == report
    inputs = [slot for slot in report.slots if slot.kind == "input"]
    assert all(slot.scale_count == (preset == "W8A8_STATIC") for slot in inputs)
    assert all(slot.observer == "none" for slot in inputs if preset == "FP8_DYNAMIC")
    assert report.model == type(model).__name__
    assert report.size_before == sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
    assert report.size_after < report.size_before
    has_experts = any("experts" in text for text in texts(report, None))
    assert has_experts == (make is mixtral)


def test_what_can_be_represented_covers_the_weight() -> None:
    """The limits are those of the effective scale, under a global one too."""
    model = Stack(depth=1)
    for preset, steps in (("NVFP4", 6), ("FP8", 448), ("W8A8_STATIC", 127)):
        torch._dynamo.reset()
        calibration = finalized(
            model, Recipe.from_preset(preset, ignore=["spare"]), {"x": torch.randn(4, 16)}
        )
        slot = next(slot for slot in report_of(calibration).slots if slot.kind == "weight")
        assert slot.distribution is not None
        largest = float(model.layers[0].weight.detach().abs().max())
        limit = slot.distribution.clip_high
        assert limit == pytest.approx(largest, rel=0.1)
        assert slot.scale_max is not None
        assert largest / slot.scale_max == pytest.approx(steps, rel=0.1)


def test_a_clean_model_is_not_warned_of() -> None:
    model = Stack()
    x = {"x": torch.randn(64, 16), "use_spare": True}
    calibration = finalized(model, STATIC, x)
    comparison = compare(model, calibration, [x])
    assert report_of(calibration, comparison).findings == ()


def test_outliers_in_a_weight() -> None:
    model = Stack()
    with torch.no_grad():
        model.layers[2].weight[5] *= 300
    calibration = finalized(model, STATIC, {"x": torch.randn(64, 16), "use_spare": True})
    report = report_of(calibration)
    (text,) = texts(report, "layers.2.weight")
    assert "times as far as is usual" in text


def test_outliers_in_an_input() -> None:
    """One value in thousands sets the scale; clipped, it is only worth a note."""
    model = Stack()
    x = torch.rand(512, 16)
    x[3, 3] = 80.0
    for method, severity in (("minmax", "warning"), ("percentile", "note")):
        torch._dynamo.reset()
        kwargs = {"method": method, "percentile": 99.9} if method == "percentile" else {}
        inputs = {"observer": "histogram", "observer_kwargs": {"method": method, **kwargs}}
        recipe = Recipe.from_preset("W8A8_STATIC", inputs=inputs)
        calibration = finalized(model, recipe, {"x": x, "use_spare": True})
        found = [r for r in report_of(calibration).findings if r.about == "layers.0.input"]
        assert [finding.severity for finding in found] == [severity]
        assert "99.9 % of its values lie within" in found[0].text
        # Clipped outliers do not set the scale, and are not worth moving.
        assert ("--equalize auto" in found[0].text) == (severity == "warning")
        told = slot_findings(report_of(calibration).slots, equalized=True)
        assert not any("--equalize" in finding.text for finding in told)


def test_dead_slots() -> None:
    model = Stack()
    with torch.no_grad():
        model.layers[3].weight.zero_()
        model.layers[3].bias.zero_()
    with pytest.warns(UserWarning, match="1 of .* weights are all zeros: layers.3.weight. Ch"):
        calibration = finalized(model, STATIC, {"x": torch.randn(64, 16), "use_spare": True})
    report = report_of(calibration)
    assert "It is all zeros" in texts(report, "layers.3.weight")[0]
    assert len(texts(report, "layers.3.weight")) == 1
    assert "All its values are 0" in texts(report, "layers.4.input")[0]


def test_accepted_slots_are_told_of() -> None:
    model = Stack()
    calibration = finalized(model, STATIC, {"x": torch.randn(64, 16)}, accept={"unobserved"})
    report = report_of(calibration)
    (text,) = texts(report, "spare.input")
    assert "saw no data" in text
    slot = next(slot for slot in report.slots if slot.name == "spare.input")
    assert slot.format.endswith("left in full precision")
    assert (slot.scale_count, slot.low, slot.distribution) == (0, None, None)


def test_broken_statistics_are_told_of() -> None:
    model = Stack()
    x = torch.randn(8, 16)
    x[0, 0] = math.inf
    for inputs in ({"observer": "static_minmax"}, HISTOGRAM):
        torch._dynamo.reset()
        recipe = Recipe.from_preset("W8A8_STATIC", inputs=inputs, ignore=["spare"])
        calibration = finalized(model, recipe, {"x": x}, accept={"not_finite"})
        report = report_of(calibration)
        assert ReportData.from_json(report.to_json()) == report
        assert any("NaN or Inf" in text for text in texts(report, "layers.0.input"))


def test_nothing_held_out_or_nothing_to_compare() -> None:
    model = Stack(depth=1)
    calibration = finalized(model, STATIC, {"x": torch.randn(4, 16), "use_spare": True})
    for comparison in (None, Comparison(batches=0)):
        assert any("held out" in text for text in texts(report_of(calibration, comparison), None))
    report = report_of(calibration, Comparison(batches=2))
    assert any("nothing that could be compared" in text for text in texts(report, None))
    change = Change(name="Agreement", explanation="", value=1.0)
    assert texts(report_of(calibration, Comparison(batches=2, changes=(change,))), None) == []


def test_tokens_are_counted_where_values_are_observed() -> None:
    model = Stack(depth=2)
    calibration = finalized(model, STATIC, {"x": torch.randn(4, 16), "use_spare": True})
    tokens = {slot.name: slot.tokens for slot in report_of(calibration).slots}
    assert (tokens["spare.input"], tokens["spare.weight"]) == (4, None)


def test_stored_statistics_are_reported_as_well() -> None:
    model = Stack(depth=2)
    recipe = Recipe.from_preset("W8A8_STATIC", inputs=HISTOGRAM)
    calibration = finalized(model, recipe, {"x": torch.randn(4, 16), "use_spare": True})
    again = Calibration(model, recipe, compiler="eager")
    again.statistics.restore(calibration.statistics.snapshot())
    again.finalize()
    expected = replace(report_of(calibration), tracing=())  # no batch has run `again`
    assert replace(report_of(again), created=expected.created) == expected


# Findings


def slot(module: str = "layers.0.fc", **changes: Any) -> SlotRecord:
    fields = {
        "name": f"{module}.input",
        "module": module,
        "kind": "input",
        "observer": "minmax",
        "format": "int8 per tensor",
        "scale_count": 1,
        "low": -1.0,
        "high": 1.0,
    }
    return SlotRecord(**{**fields, **changes})


def test_outliers_in_weights_and_inputs_have_advice_of_their_own() -> None:
    long_tail = Distribution(edges=(0.0, 1.0, 100.0), counts=(9999.0, 1.0))
    values = {"distribution": long_tail, "low": 0.0, "high": 100.0}
    slots = [
        slot("layers.0.fc", **values),
        slot("layers.1.fc", name="layers.1.fc.weight", kind="weight", **values),
    ]
    advice = {finding.about: finding.text for finding in slot_findings(slots)}
    assert "Per-token scales" in advice["layers.0.fc.input"]
    assert "Scales per channel or in groups" in advice["layers.1.fc.weight"]
    assert "oken" not in advice["layers.1.fc.weight"]


def test_experts_that_saw_few_tokens() -> None:
    slots = [slot(f"experts.{i}.w1", tokens=4000) for i in range(8)]
    assert slot_findings(slots) == []
    slots[3] = replace(slots[3], tokens=30)
    (finding,) = slot_findings(slots)
    assert finding.about == "experts.3.w1.input"
    assert "saw 30 tokens, where 4,000 are usual" in finding.text
    assert "as is common for experts" in finding.text


def test_few_tokens_are_judged_by_the_role_of_the_module() -> None:
    """A pooler sees one token of each text; only other poolers would show whether that is few."""
    names = ("attention.output.dense", "intermediate.dense", "output.dense")
    slots = [slot(f"encoder.layer.{i}.{name}", tokens=4000) for i in range(6) for name in names]
    assert slot_findings([*slots, slot("pooler.dense", tokens=32)]) == []
    slots[7] = replace(slots[7], tokens=32)
    (finding,) = slot_findings(slots)
    assert finding.about == "encoder.layer.2.intermediate.dense.input"
    assert "expert" not in finding.text


def test_many_experts_and_other_slots_with_few_tokens_are_told_apart() -> None:
    slots = [
        slot(f"layers.{i}.experts.{k}.w1", tokens=3 if k == 2 else 900)
        for i in range(5)
        for k in range(4)
    ]
    slots += [slot(f"layers.{i}.fc", tokens=3 if i < 4 else 900) for i in range(12)]
    experts, others = slot_findings(slots)
    assert experts.text.startswith("5 slots of experts saw few tokens; the worst is layers.")
    assert others.text.startswith("4 slots saw few tokens; the worst is layers.0.fc.input.")
    assert "expert" not in others.text


def test_many_of_a_sort_are_one_finding_about_the_worst() -> None:
    slots = [slot(f"layers.{i}.fc") for i in range(30)]
    wide = [slot(f"layers.{i}.out", low=-100.0 - i) for i in range(3)]
    assert len(slot_findings([*slots, *wide])) == 3
    wide = [replace(slot(f"layers.{i}.fc"), high=100.0 + i) for i in range(12)]
    (finding,) = slot_findings([*wide, *slots])
    assert finding.text.startswith("12 slots have a range far wider than others of their kind; ")
    assert finding.about == "layers.11.fc.input"


def test_kinds_are_judged_by_themselves() -> None:
    """Inputs of one projection may be a thousand times as wide as those of another."""
    small = [slot(f"layers.{i}.q_proj", low=-0.001, high=0.001) for i in range(6)]
    large = [slot(f"layers.{i}.down_proj", low=-10.0, high=10.0) for i in range(6)]
    assert slot_findings([*small, *large]) == []
    (finding,) = slot_findings([*small, *large, slot("layers.9.down_proj", low=-1e-3, high=1e-3)])
    assert (finding.about, "nearly dead" in finding.text) == ("layers.9.down_proj.input", True)


def test_outliers_with_many_scales_are_no_outliers_of_all() -> None:
    picture = Distribution(edges=(-1.0, 1.0, 100.0), counts=(1e6, 1.0))
    one = slot(high=100.0, distribution=picture)
    (finding,) = slot_findings([one])
    assert "within 1/100 of its range" in finding.text
    assert slot_findings([replace(one, scale_count=16)]) == []


def test_layers_that_suffer() -> None:
    layers = [LayerError(module=f"layers.{i}.fc", sqnr_db=30.0 + i % 3) for i in range(9)]
    assert layer_findings(layers) == []
    layers[2] = replace(layers[2], sqnr_db=15.0)
    layers[5] = replace(layers[5], sqnr_db=4.0)
    layers[6] = replace(layers[6], sqnr_db=None, weight_sqnr_db=3.0)
    layers[7] = replace(layers[7], sqnr_db=math.inf)
    found = {finding.about: finding.text for finding in layer_findings(layers)}
    assert found.keys() == {"layers.2.fc", "layers.5.fc", "layers.6.fc"}
    assert "15.0 dB" in found["layers.2.fc"]
    assert "usual for its kind" in found["layers.2.fc"]
    assert found["layers.5.fc"].startswith("Its output is only 4.0 dB")
    assert found["layers.6.fc"].startswith("Its weight is only 3.0 dB")
    assert layer_findings([replace(layer, sqnr_db=-math.inf) for layer in layers])[0].about


def test_what_stays_as_it_is() -> None:
    names = [f"experts.{i}.input" for i in range(9)]
    (finding,) = unquantized_findings(without_data=names, not_finite=[], modules=[])
    assert finding.text.startswith("9 slots saw no data: experts.0.input, ")
    assert "and 4 more" in finding.text
    (note,) = unquantized_findings(without_data=[], not_finite=[], modules=["lm_head"])
    assert (note.severity, note.text.count("lm_head")) == ("note", 1)


def test_ranges_that_grow_with_depth_are_no_outliers() -> None:
    slots = [
        slot(f"layers.{i}.fc{k}", tokens=100 + i, low=-1.0 - i / 500)
        for i in range(500)
        for k in range(4)
    ]
    assert slot_findings(slots) == []


def test_starved_experts_are_warned_of_with_their_tokens() -> None:
    model = mixtral(num_hidden_layers=1)
    recipe = Recipe.from_preset("FP8", ignore=["lm_head", "re:.*[.]gate$"], experts="fill")
    calibration = Calibration(model, recipe, compiler="eager", progress=False)
    calibration.observe(**batch(model, rows=16))
    plan, statistics = calibration.plan, calibration.statistics
    slot = plan.slots["model.layers.0.mlp.experts.1.gate_proj.input"]
    statistics.of(slot).tokens.fill_(1)
    calibration.finalize()
    report = report_of(calibration)
    (layer,) = report.experts
    assert (layer.module, layer.starved) == ("model.layers.0.mlp.experts", (1,))
    assert layer.tokens[1] == 1
    assert len(layer.tokens) == 4
    (text,) = (f.text for f in report.findings if f.about == layer.module)
    assert text.startswith("1 of 4 experts saw too few tokens")
    assert text.endswith("They have the range of their layer.")
