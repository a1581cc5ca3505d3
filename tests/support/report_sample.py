"""A report of a model that does not exist: a Llama of 30 blocks, with an outlier in block 1."""

import math
import random
from collections.abc import Iterator
from itertools import pairwise

from inlay.report import (
    Change,
    Distribution,
    Finding,
    Interval,
    LayerError,
    ReportData,
    SlotRecord,
    Stage,
)

__all__ = ["empty_report", "sample_report"]

_RECIPE = """\
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      ignore: [lm_head]
      config_groups:
        group_0:
          targets: [Linear]
          weights: {num_bits: 8, type: int, strategy: channel, observer: memoryless_mse}
          input_activations: {num_bits: 8, type: int, strategy: tensor, observer: histogram}
"""
# Decibels that a layer of this kind loses to the best, and how wide its inputs are.
_PROJECTIONS = {
    "self_attn.q_proj": (4.0, 9.0),
    "self_attn.k_proj": (3.0, 9.0),
    "self_attn.v_proj": (1.0, 9.0),
    "self_attn.o_proj": (7.0, 3.0),
    "mlp.gate_proj": (2.0, 12.0),
    "mlp.up_proj": (0.0, 12.0),
    "mlp.down_proj": (9.0, 25.0),
}
_OUTLIER = "model.layers.1.mlp.down_proj"


def sample_report(*, blocks: int = 30) -> ReportData:
    """14 slots a block, so 143 blocks make about 2000."""
    dice = random.Random(0)
    modules = list(_modules(blocks))
    layers = tuple(_layer(module, blocks, dice) for module in modules)
    slots = tuple(
        slot
        for layer in layers
        for slot in (_weight_slot(layer, dice), _input_slot(layer, blocks, dice))
    )
    return ReportData(
        title="SmolLM2-135M-Instruct, W8A8",
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        recipe=_RECIPE,
        scheme="W8A8 static",
        data="wikitext-2-raw-v1, train",
        samples=256,
        tokens=118_204,
        padding_tokens=12_868,
        created="2026-11-16T06:12:44+00:00",
        size_before=269_060_552,
        size_after=163_127_104,
        versions={"inlay": "0.2.0", "torch": "2.13.0", "compressed-tensors": "0.19.0"},
        stages=(
            Stage(name="load", seconds=3.1),
            Stage(name="compile", seconds=34.2),
            Stage(name="calibrate", seconds=61.7),
            Stage(name="search weights", seconds=12.9),
            Stage(name="evaluate", seconds=21.4),
            Stage(name="save", seconds=0.8),
        ),
        changes=_changes(),
        layers=layers,
        slots=slots,
        findings=_findings(),
    )


def empty_report() -> ReportData:
    return ReportData(
        title="Nothing",
        model="none",
        recipe="",
        scheme="",
        data="",
        samples=0,
        tokens=0,
        padding_tokens=0,
        created="",
        size_before=0,
        size_after=0,
    )


def _modules(blocks: int) -> Iterator[str]:
    for block in range(blocks):
        for projection in _PROJECTIONS:
            yield f"model.layers.{block}.{projection}"


def _projection(module: str) -> tuple[float, float]:
    return next(
        values for projection, values in _PROJECTIONS.items() if module.endswith(projection)
    )


def _layer(module: str, blocks: int, dice: random.Random) -> LayerError:
    lost, _ = _projection(module)
    block = int(module.split(".")[2])
    outlier = 14.0 if module == _OUTLIER else 0.0
    wave = 2.5 * math.cos(6 * block / blocks) - 3 * block / blocks
    sqnr = 38 - lost + wave - outlier + dice.gauss(0, 0.5)
    return LayerError(
        module=module,
        sqnr_db=sqnr,
        weight_sqnr_db=sqnr + 4 + outlier + dice.gauss(0, 0.4),
        input_sqnr_db=sqnr + 2 + dice.gauss(0, 0.4),
    )


def _weight_slot(layer: LayerError, dice: random.Random) -> SlotRecord:
    high = dice.uniform(0.3, 0.9)
    return SlotRecord(
        name=f"{layer.module}.weight",
        module=layer.module,
        kind="weight",
        observer="memoryless_mse",
        format="int8 per channel",
        low=-high * dice.uniform(0.8, 1),
        high=high,
        scale_min=high / 127 / dice.uniform(4, 8),
        scale_max=high / 127,
        scale_count=1536 if "mlp" in layer.module else 576,
        sqnr_db=layer.weight_sqnr_db,
    )


def _input_slot(layer: LayerError, blocks: int, dice: random.Random) -> SlotRecord:
    _, width = _projection(layer.module)
    block = int(layer.module.split(".")[2])
    width *= (0.4 + block / blocks) * dice.uniform(0.8, 1.2)
    low, high = -width, width * dice.uniform(0.7, 1)
    if layer.module == _OUTLIER:
        low, high = -1320.0, 288.0
    clip = max(-low, high) * (1 if layer.module == _OUTLIER else dice.uniform(0.6, 1))
    return SlotRecord(
        name=f"{layer.module}.input",
        module=layer.module,
        kind="input",
        observer="histogram",
        format="int8 per tensor, static",
        tokens=118_204,
        low=low,
        high=high,
        scale_min=clip / 127,
        scale_max=clip / 127,
        scale_count=1,
        sqnr_db=layer.input_sqnr_db,
        distribution=_distribution(low, high, width / 8, clip),
    )


def _distribution(low: float, high: float, spread: float, clip: float) -> Distribution:
    """A Laplace distribution counted in bins of floating-point numbers, four an octave."""
    outer = [2 ** (e + m / 4) for e in range(-6, 11) for m in range(4)]
    edges = sorted(
        {low, high, 0.0, *(-e for e in outer if -e > low), *(e for e in outer if e < high)}
    )

    def mass(edge: float) -> float:
        tail = math.exp(-abs(edge) / spread) / 2
        return tail if edge < 0 else 1 - tail

    counts = [round(68_000_000 * (mass(b) - mass(a))) for a, b in pairwise(edges)]
    counts[0] += 3
    return Distribution(
        edges=tuple(edges), counts=tuple(counts), clip_low=-clip * 128 / 127, clip_high=clip
    )


def _changes() -> tuple[Change, ...]:
    return (
        Change(
            name="Top-1 agreement",
            value=0.991,
            interval=Interval(low=0.987, high=0.994),
            explanation="How often both models would say the same next token. 1 is best.",
        ),
        Change(
            name="KL divergence",
            value=0.00312,
            explanation="How far the predicted probabilities moved, in nats. 0 is best.",
        ),
        Change(
            name="Cosine similarity",
            value=0.9984,
            explanation="Of the logits of both models. 1 is best.",
        ),
        Change(
            name="Perplexity",
            before=21.31,
            after=21.58,
            before_interval=Interval(low=19.8, high=22.9),
            after_interval=Interval(low=20.1, high=23.2),
            explanation="How surprised the model is by the text. Lower is better.",
        ),
    )


def _findings() -> tuple[Finding, ...]:
    return (
        Finding(
            severity="warning",
            about=f"{_OUTLIER}.input",
            text="A few values are 53 times as large as those of its neighbours, and all others "
            "share the few steps that remain. Leave it in full precision or quantize it per token.",
        ),
        Finding(
            severity="note",
            about="lm_head",
            text="Ignored by the recipe; it stays in full precision.",
        ),
        Finding(severity="note", text="9.8 % of the tokens were padding and were not observed."),
    )
