"""Equalized models block by block, held against runs in memory.

Observers that have to see equalized inputs see them in a second passage through each block, with
scaled weights, and from values that scaled weights have computed.
"""

from pathlib import Path

import pytest
import torch
from families import electra, llama, mixtral, qwen3_moe
from folders import assert_same_folder
from streaming_runs import batches, in_memory, stopping, streamed

from inlay import Recipe, StoredStatistics
from inlay.checkpoint.stored_model import StoredModel
from inlay.engine.streamed.regions import Regions, Segment
from inlay.errors import ConfigurationError
from inlay.observers import Observer
from inlay.recipe import Plan

pytestmark = pytest.mark.slow

GATES = ["lm_head", "re:.*[.]gate$"]


@Observer.register("test_clipped")
class Clipped(Observer):
    """One that a user may write: it branches on what it sees, so that it runs outside of graphs."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        if observed.max().item() > 1:
            observed = observed.clamp(max=1)
        low, high = observed.amin((0, -1)), observed.amax((0, -1))
        if self.has_statistics:
            low, high = torch.minimum(low, self.min_vals), torch.maximum(high, self.max_vals)
        self.min_vals, self.max_vals = low, high


def static(observer: str, strength: float | str, **fields) -> Recipe:
    inputs = {"observer": observer}
    fields = {"ignore": (), **fields}
    return Recipe.from_preset("W8A8_STATIC", inputs=inputs, equalize=strength, **fields)


RECIPES = {
    "static_minmax": static("static_minmax", 0.7, ignore=["lm_head"]),
    # The norm in front of the head is scaled too, and written with it.
    "head": static("static_minmax", "auto"),
    "weights": Recipe.from_preset(
        "W4A16",
        ignore=["lm_head"],
        weights={"observer": "imatrix_mse", "group_size": 16},
        equalize=0.5,
    ),
    "minmax": static("minmax", 0.6, ignore=["lm_head"]),
    "mse and head": static("mse", "auto"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama(num_hidden_layers=3).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", RECIPES)
def test_it_writes_what_a_run_in_memory_writes(folder: Path, name: str) -> None:
    data, options = batches(4), {"samples": 4, "held_out": 4}
    expected = in_memory(folder, RECIPES[name], data, **options)
    assert_same_folder(streamed(folder, RECIPES[name], data, **options), expected)


def test_of_several_lengths_with_values_in_memory_or_on_disk(folder: Path) -> None:
    """And every weight is read once, though batches pass each block twice."""
    recipe, data = static("histogram", 0.7), batches(6, lengths=(6, 9))
    options = {"samples": 6, "held_out": 0}
    expected = in_memory(folder, recipe, data, **options)
    assert StoredStatistics.load(expected).is_second_run
    stored = StoredModel.open(folder)
    assert_same_folder(streamed(stored, recipe, data, **options), expected)
    assert set(stored.reads.values()) == {1}
    offloaded = streamed(
        folder, recipe, data, name="offloaded", offload_activations=True, **options
    )
    assert_same_folder(offloaded, expected)


@pytest.mark.filterwarnings("ignore:observer test_clipped cannot be traced")
def test_observers_of_users_see_equalized_inputs(folder: Path) -> None:
    recipe = static("test_clipped", "auto", ignore=["lm_head"])
    expected = in_memory(folder, recipe, batches(2), held_out=0)
    assert_same_folder(streamed(folder, recipe, batches(2), held_out=0), expected)


@pytest.mark.parametrize("observer", ["static_minmax", "histogram"])
def test_a_norm_in_front_of_what_precedes_the_blocks(tmp_path: Path, observer: str) -> None:
    """ELECTRA projects its embeddings; norm and projection are scaled, and written last."""
    electra().save_pretrained(tmp_path / "model")
    recipe = static(observer, 0.6)
    expected = in_memory(tmp_path / "model", recipe, batches(2), held_out=0)
    groups = StoredStatistics.load(expected).groups
    assert "embeddings.LayerNorm.weight" in [group["producers"][0]["parameter"] for group in groups]
    assert_same_folder(streamed(tmp_path / "model", recipe, batches(2), held_out=0), expected)


OF_EXPERTS = {
    "qwen3_moe": (qwen3_moe, Recipe.from_preset("FP8", ignore=GATES, equalize="auto")),
    "mixtral": (
        mixtral,
        Recipe.from_preset("FP8", ignore=GATES, inputs={"observer": "minmax"}, equalize=0.6),
    ),
}


@pytest.mark.parametrize("family", OF_EXPERTS)
def test_experts_are_equalized_each_by_itself(tmp_path: Path, family: str) -> None:
    """Also after an interruption, with the scales of the blocks that were written."""
    make, recipe = OF_EXPERTS[family]
    make().save_pretrained(tmp_path / "model")
    data, options = batches(4), {"samples": 4, "held_out": 4}
    expected = in_memory(tmp_path / "model", recipe, data, **options)
    stored = StoredStatistics.load(expected)
    assert [group["stacked"] for group in stored.groups].count(4) == 2
    with stopping(after=2):
        streamed(tmp_path / "model", recipe, data, **options)
    found = streamed(tmp_path / "model", recipe, data, resume=True, **options)
    assert_same_folder(found, expected)


@pytest.mark.parametrize(
    ("observer", "after"), [("static_minmax", 3), ("minmax", 3), ("minmax", 4)]
)
def test_an_interrupted_run_goes_on(folder: Path, observer: str, after: int) -> None:
    """After the second of three blocks, or when only the head and its norm are left."""
    recipe, data, options = static(observer, "auto"), batches(3), {"samples": 3, "held_out": 3}
    expected = in_memory(folder, recipe, data, **options)
    with stopping(after=after):
        streamed(folder, recipe, data, **options)
    assert_same_folder(streamed(folder, recipe, data, resume=True, **options), expected)


def test_what_is_spread_over_several_blocks_is_refused_by_name(folder: Path) -> None:
    stored = StoredModel.open(folder)
    shared = "model.norm.weight"
    blocks = [f"model.layers.{number}" for number in range(3)]
    uses = [Segment("before the blocks", 0, ("model.embed_tokens.weight",))]
    uses += [
        Segment(block, stage, (f"{block}.mlp.up_proj.weight", shared))
        for stage, block in enumerate(blocks, start=1)
    ]
    regions = Regions(stored, uses, Plan(stored.model, static("histogram", 0.5)))
    inside = {"model.layers.1.mlp.up_proj": ["model.layers.1.mlp.up_proj.weight"]}
    assert regions.scaled_in(inside) == {2: set(*inside.values())}
    with pytest.raises(ConfigurationError, match=r"input of lm_head.*around several blocks"):
        regions.scaled_in({"lm_head": ["lm_head.weight", shared]})
