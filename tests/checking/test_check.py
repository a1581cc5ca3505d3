"""Checking that Inlay gets a model right, and what it says if it does not."""

from pathlib import Path

import pytest
import torch
from families import batch, gpt2, llama, mixtral, qwen3_moe
from safetensors.torch import load_file, save_file
from torch import nn

from inlay import Calibration, Recipe
from inlay.calibration.tracing.strategies import call
from inlay.checking import check as checking
from inlay.equalization.group import Producer
from inlay.errors import CheckError
from inlay.graph import MAIN, PaddingMask, erase_with_inputs
from inlay.padding import probing
from inlay.passes import PREPARE, InsertObservers, Pass, PassResult
from inlay.ranges.row_groups import RowGroups
from inlay.statistics.rule import Rule
from inlay.testing import check_calibration
from inlay.testing.modules import SequenceModule, TwoSequencesModule

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZES = {"num_hidden_layers": 1}
STATIC = Recipe.from_preset("W8A8_STATIC", ignore=(), inputs={"observer": "static_minmax"})


def test_a_family_is_right() -> None:
    model = llama(**SIZES)
    recipe = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"])
    found = check_calibration(model, recipe, [batch(model, 0), batch(model, 1, tokens=9)])
    assert len(found.done) == 3
    assert found.left_out == ()


@pytest.mark.parametrize(
    ("build", "preset", "slots"),
    [
        (mixtral, "FP8_DYNAMIC", 0),
        (mixtral, "W4A16", 0),
        (qwen3_moe, "FP8", 4 + 4 * 3),  # q, k, v, o, and three of each expert
        (qwen3_moe, "W8A8", 0),
    ],
)
def test_experts_are_right(build, preset: str, slots: int) -> None:
    """Statistics, forward and checkpoint, also where transformers cannot load the checkpoint."""
    model = build(**SIZES)
    changes = {"weights": {"group_size": 16}} if preset == "W4A16" else {}
    recipe = Recipe.from_preset(preset, ignore=["lm_head", "re:.*gate$"], **changes)
    found = check_calibration(model, recipe, [batch(model, i, tokens=9 + i) for i in range(3)])
    assert found.done[0] == f"statistics of {slots} slots are those of eager observers"
    assert len(found.done) == 3
    assert found.left_out == ()


def padded(model: nn.Module, side: str = "right", index: int = 0) -> dict[str, torch.Tensor]:
    """Two sequences of eight tokens, of the second of which three are padding."""
    one = batch(model, index, tokens=8)
    places = slice(5, None) if side == "right" else slice(0, 3)
    one["attention_mask"][1, places] = 0
    return one


@pytest.mark.parametrize(
    ("build", "preset", "side"),
    [(llama, "W8A8_STATIC", "left"), (llama, "W4A16", "right"), (qwen3_moe, "FP8", "right")],
)
def test_padding_is_checked_too(build, preset: str, side: str) -> None:
    model = build(**SIZES)
    observer = {"observer": "imatrix_mse", "group_size": 16}
    changes = (
        {"weights": observer} if preset == "W4A16" else {"inputs": {"observer": "static_minmax"}}
    )
    recipe = Recipe.from_preset(preset, ignore=["lm_head", "re:.*gate$"], **changes)
    found = check_calibration(model, recipe, [padded(model, side), batch(model, 1)])
    assert found.done[1].startswith("without padding, statistics of ")
    assert found.done[2].endswith("slots have the statistics of the sequences one by one")


def test_sequences_that_the_model_computes_otherwise_are_left_out() -> None:
    """Positions of this one are counted from the left, padding or not."""
    model = gpt2(n_layer=1)
    recipe = Recipe.from_preset("W8A8_STATIC", targets=["lm_head"])
    found = check_calibration(model, recipe, [padded(model, "left")])
    assert found.left_out[0].startswith("sequences one by one, which the model computes otherwise")


def test_padding_that_counts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(**SIZES)
    recipe = Recipe.from_preset(
        "W8A8_STATIC", ignore=["lm_head"], inputs={"observer": "static_minmax"}
    )
    valid = Rule.valid

    def all_of_it(
        self: Rule, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        return valid(self, value, None if mask is None else torch.ones_like(mask))

    monkeypatch.setattr(Rule, "valid", all_of_it)
    one = padded(model)
    with pytest.raises(CheckError, match=r"in the graph and .* by hooks that leave padding out"):
        check_calibration(model, recipe, [one, padded(model, index=1)])
    monkeypatch.setattr(checking, "padding_agrees", _only_run)
    with pytest.raises(CheckError, match=r"in the graph and .* for its sequences one by one"):
        check_calibration(model, recipe, [one, padded(model, index=1)])


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("made", [SequenceModule, TwoSequencesModule])
def test_a_mask_that_is_matched_by_size_is_caught(made, by_position: bool, monkeypatch) -> None:
    """The reference knows tokens by what the model computes for sequences alone."""
    model = made([("tokens first", False)])
    lengths = torch.tensor([4, 2, 3, 1])
    mask = (torch.arange(4) < lengths[:, None]).long()
    one = {"input_ids": torch.randint(1, 16, mask.shape) * mask, "attention_mask": mask}
    if made is TwoSequencesModule:
        one["decoder_input_ids"] = torch.randint(1, 16, mask.shape)
    data = [tuple(one.values()) if by_position else one]
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
    assert check_calibration(model, recipe, data).done[1].startswith("without padding, statistics")
    sizes = PaddingMask(MAIN, ("batch", "tokens"))
    found = probing.layouts_of
    monkeypatch.setattr(probing, "layouts_of", lambda *given: dict.fromkeys(found(*given), sizes))
    with pytest.raises(CheckError, match=r"in the graph and .* by hooks that leave padding out"):
        check_calibration(model, recipe, data)


def _only_run(calibration: Calibration, batches, tolerance: float) -> tuple[str, bool]:
    for one in batches:
        call(calibration.observe, one)
    return "not looked at", True


def test_experts_that_see_other_rows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen3_moe(**SIZES)
    recipe = Recipe.from_preset("FP8", ignore=["lm_head", "re:.*gate$"])
    monkeypatch.setattr(
        "inlay.nodes.observe.RowGroups",
        lambda ends, valid=None: RowGroups((ends - 1).clamp(min=0), valid),
    )
    with pytest.raises(CheckError, match=r"experts\.\d\..* by hooks"):
        check_calibration(model, recipe, [batch(model, tokens=9)])


def test_a_checkpoint_that_mixes_up_experts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    save = Calibration.save

    def mixed_up(self: Calibration, folder: Path, **options) -> Path:
        file = save(self, folder, **options) / "model.safetensors"
        stored = load_file(file)
        swap = {".experts.0.": ".experts.1.", ".experts.1.": ".experts.0."}
        mixed = {}
        for name, tensor in stored.items():
            found = next((old for old in swap if old in name), "")
            mixed[name.replace(found, swap[found]) if found else name] = tensor
        save_file(mixed, file, {"format": "pt"})
        return file.parent

    monkeypatch.setattr(Calibration, "save", mixed_up)
    model = qwen3_moe(**SIZES)
    recipe = Recipe.from_preset("FP8_DYNAMIC", ignore=["lm_head", "re:.*gate$"])
    with pytest.raises(CheckError, match="the checkpoint, loaded back and the finalized graph"):
        check_calibration(model, recipe, [batch(model)])


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


class UsesTheWeight(nn.Module):
    """Multiplies by the weight of a module without calling it, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x @ self.fc.weight.T * self.calls


class Remembers(UsesTheWeight):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + x.mean()
        return self.fc(x * self.calls)


def test_weights_that_are_used_without_their_module_are_left_out_with_a_reason() -> None:
    found = check_calibration(UsesTheWeight(), STATIC, [(torch.randn(3, 4),)])
    assert "which does not quantize fc: it is never called" in found.left_out[0]


def test_models_that_remember_batches_are_right() -> None:
    found = check_calibration(Remembers(), STATIC, [(torch.randn(3, 4),), (torch.randn(3, 4),)])
    assert len(found.done) == 2


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
    reference = checking.quantized_copy

    def with_other_scales(calibration: Calibration) -> nn.Module:
        found = reference(calibration)
        for name, parameter in found.named_parameters():
            if name.endswith("_scale"):
                parameter.data *= 3
        return found

    monkeypatch.setattr(checking, "quantized_copy", with_other_scales)
    with pytest.raises(CheckError, match="the forward of compressed-tensors and the finalized"):
        check_calibration(*two_layers())
