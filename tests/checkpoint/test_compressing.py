"""Weights are compressed and folded some rows at a time, with the result of all at once."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.lifecycle import fake_quantize
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from torch import nn

from inlay import Calibration, Recipe
from inlay.checkpoint.compressing import compressed_weight
from inlay.checkpoint.contents import _qparams_as_stored
from inlay.checkpoint.layers import QuantizedLayer, quantized_layers
from inlay.nodes import quantize
from inlay.observers import QParamsDict

PRESETS = ["W8A8", "W8A16", "W4A16", "W4A16_ASYM", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16"]
PRESETS += ["MXFP4A16", "MXFP8A16"]
PER_TENSOR = {"strategy": "tensor"}


def layer_of(
    preset: str, rows: int, dtype: torch.dtype
) -> tuple[QuantizedLayer, torch.Tensor, dict[str, QParamsDict]]:
    model = nn.ModuleDict({"fc": nn.Linear(128, rows, bias=False, dtype=dtype)})
    name, _, per_tensor = preset.partition(" ")
    recipe = Recipe.from_preset(name, **({"weights": PER_TENSOR} if per_tensor else {}))
    calibration = Calibration(model, recipe, compiler="eager")
    qparams = calibration.finalize()
    (layer,) = quantized_layers(model, calibration.plan)
    return layer, calibration.graphs.weights.current(layer.weight).detach(), qparams


@pytest.mark.parametrize("preset", [*PRESETS, "FP8_DYNAMIC per tensor", "W8A8 per tensor"])
@given(rows=st.integers(1, 300), half=st.booleans(), at_once=st.sampled_from([1, 6000, 20000]))
@examples(4)
@torch.no_grad()
def test_some_rows_at_a_time_or_all_at_once(
    preset: str, rows: int, half: bool, at_once: int
) -> None:
    layer, weight, qparams = layer_of(preset, rows, torch.bfloat16 if half else torch.float32)
    (slot,) = (slot for slot in layer.slots if slot.is_weight)
    own = qparams[slot.name]
    state = _qparams_as_stored(layer, slot, own)
    compressor = BaseCompressor.get_value_from_registry(layer.scheme.format)
    whole = compressor.compress({"weight": weight, **state}, layer.scheme)
    folded = fake_quantize(
        weight, own["scale"], own["zero_point"], slot.args, global_scale=own.get("global_scale")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "_AT_ONCE", at_once)
        parts = list(quantize.parts_by_rows(weight, slot.args, state))
        found = compressed_weight(weight, state, layer.scheme)
        folded_by_rows = quantize.fold_weight(weight, slot.args, own)
    assert len(parts) > 1 or rows <= 160
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(_bits(found[name]), _bits(tensor)), name
    assert torch.equal(_bits(folded_by_rows), _bits(folded))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
