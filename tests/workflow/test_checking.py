"""Checking that Inlay gets a model right, and what it says if it does not."""

import pytest
import torch
from families import batch, llama, mixtral
from torch import nn

from inlay import Calibration, Recipe
from inlay.equalization.group import Producer
from inlay.errors import CheckError
from inlay.graph import erase_with_inputs
from inlay.passes import PREPARE, InsertObservers, Pass, PassResult
from inlay.testing import check_calibration
from inlay.workflow import checking

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZES = {"num_hidden_layers": 1}


@pytest.mark.parametrize(("build", "preset"), [(llama, "W8A8_STATIC"), (mixtral, "FP8_DYNAMIC")])
def test_families_are_right(build, preset: str) -> None:
    model = build(**SIZES)
    recipe = Recipe.from_preset(preset, ignore=["lm_head"])
    found = check_calibration(model, recipe, [batch(model, 0), batch(model, 1, tokens=9)])
    assert len(found.done) == (3 if build is llama else 1)
    assert [text.partition(",")[0] for text in found.left_out] == (
        [] if build is llama else ["the forward of compressed-tensors", "a checkpoint"]
    )


def test_a_checkpoint_that_loses_weights_is_caught() -> None:
    """Transformers loses the experts of this one; saving warns of it."""
    model = mixtral(**SIZES)
    recipe = Recipe.from_preset("W8A8", ignore=["lm_head", "re:.*experts.*"])
    with pytest.raises(CheckError, match="the checkpoint, loaded back and the finalized graph"):
        check_calibration(model, recipe, [batch(model)])


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("W8A8_STATIC", {"inputs": {"observer": "histogram"}}),
        ("W4A16", {"weights": {"observer": "imatrix_mse", "group_size": 4}}),
    ],
)
def test_a_module_of_torch_has_no_checkpoint(preset: str, changes: dict) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    recipe = Recipe.from_preset(preset, **changes)
    found = check_calibration(model, recipe, [(torch.randn(3, 8),), (torch.randn(5, 8),)])
    assert found.done[0] == "statistics of 2 slots are those of eager observers"
    assert found.left_out == ("a checkpoint, as the model is not one of transformers",)


def test_states_of_attention_are_left_out_with_a_reason() -> None:
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    model = llama(**SIZES)
    recipe = Recipe.from_preset("FP8", ignore=["lm_head"], kv_cache=cache)
    found = check_calibration(model, recipe, [batch(model)])
    assert "2 others are seen by the graph alone" in found.done[0]
    assert "wraps attention" in found.left_out[0]


@pytest.mark.parametrize(
    ("observer", "dtype"),
    [
        ("static_minmax", torch.float32),
        ("histogram", torch.float32),
        ("minmax", torch.bfloat16),
        ("static_minmax", torch.bfloat16),
    ],
)
def test_recipes_that_equalize_are_checked_too(observer: str, dtype: torch.dtype) -> None:
    model = llama(**SIZES).to(dtype)
    inputs = {"observer": observer}
    recipe = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs=inputs, equalize=0.7)
    found = check_calibration(model, recipe, [batch(model, 0), batch(model, 1, tokens=9)])
    assert found.done[1].startswith("the equalized model computes what the model does, and 7 equal")
    assert len(found.done) == 4
    assert found.left_out == ()


def test_equalization_that_changes_the_model_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Producer, "divided", lambda self, value, scale: value)
    model = llama(**SIZES)
    recipe = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], equalize=0.7)
    with pytest.raises(CheckError, match="the model and the equalized one differ by"):
        check_calibration(model, recipe, [batch(model)])


class MissesTheFirst(InsertObservers):
    """A mistake in a pass: it loses an observer."""

    def call(self, gm) -> PassResult:
        result = super().call(gm)
        graph = result.graph_module.graph
        first = next(n for n in graph.nodes if getattr(n.target, "__name__", "") == "observe")
        erase_with_inputs(graph, first)
        result.graph_module.recompile()
        return result

    def ensures(self, gm) -> None:
        pass


def calibrating_with(monkeypatch: pytest.MonkeyPatch, wrong: type[Pass]) -> None:
    passes = [wrong if step is InsertObservers else step for step in PREPARE]
    monkeypatch.setattr(
        checking, "Calibration", lambda *args, **kw: Calibration(*args, passes=passes, **kw)
    )


def two_layers() -> tuple[nn.Module, Recipe, list[tuple[torch.Tensor]]]:
    torch.manual_seed(0)
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), recipe, [(torch.randn(3, 8),)]


def test_a_slot_that_the_graph_misses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrating_with(monkeypatch, MissesTheFirst)
    with pytest.raises(CheckError, match=r"the graph misses what hooks see at 0\.input"):
        check_calibration(*two_layers())


def test_statistics_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    observe = Calibration.observe

    def scaled(self: Calibration, x: torch.Tensor) -> None:
        observe(self, x * 2)

    monkeypatch.setattr(Calibration, "observe", scaled)
    with pytest.raises(CheckError, match=r"_vals of 0\.input is .* in the graph and .* by hooks"):
        check_calibration(*two_layers())


def test_a_graph_that_quantizes_otherwise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    finalize = Calibration.finalize

    def wrong(self: Calibration, **options) -> dict:
        qparams = finalize(self, **options)
        # The graph is compiled later, with what these tensors hold then.
        forward = checking._forward_agrees

        def with_other_scales(calibration, batch, found):
            for of in qparams.values():
                of["scale"] = of["scale"] * 3
            return forward(calibration, batch, found)

        monkeypatch.setattr(checking, "_forward_agrees", with_other_scales)
        return qparams

    monkeypatch.setattr(Calibration, "finalize", wrong)
    with pytest.raises(CheckError, match="the forward of compressed-tensors and the finalized"):
        check_calibration(*two_layers())
