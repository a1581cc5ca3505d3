"""Quantization as nodes of a graph, computed by compressed-tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from inlay.observers import QParamsDict
from inlay.ranges.args import key_of

__all__ = ["QuantizeDequantize", "fold_weight"]


@dataclass(frozen=True, eq=False)
class QuantizeDequantize:
    """The callable of a quantize-dequantize node: what the quantized model will see of a value.

    :param args: how the value is quantized
    :param names: which qparams follow the value, of scale, zero_point and global_scale; those
        that are missing are computed from the value itself
    """

    args: QuantizationArgs
    names: tuple[str, ...]
    __name__ = "quantize_dequantize"

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        return key_of(self.args), self.names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuantizeDequantize) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __call__(self, value: torch.Tensor, *qparams: torch.Tensor) -> torch.Tensor:
        return self.quantized(value, dict(zip(self.names, qparams, strict=True)))

    def quantized(self, value: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Quantize and dequantize a value by the qparams that are given, computing the others."""
        global_scale = given.get("global_scale")
        if "scale" in given:
            scale, zero_point = given["scale"], given.get("zero_point")
        else:
            scale, zero_point = compute_dynamic_scales_and_zp(
                value=value, args=self.args, module=None, global_scale=global_scale
            )
        if global_scale is not None and global_scale.ndim > 1:
            global_scale = global_scale.unsqueeze(-1)  # of rows, which have several groups
        result: torch.Tensor = fake_quantize(
            value, scale, zero_point, self.args, global_scale=global_scale
        )
        return result


def fold_weight(weight: torch.Tensor, args: QuantizationArgs, qparams: QParamsDict) -> torch.Tensor:
    """The weight as the quantized model will see it."""
    folded: torch.Tensor = fake_quantize(
        weight.detach(),
        qparams["scale"],
        qparams["zero_point"],
        args,
        global_scale=qparams.get("global_scale"),
    )
    return folded
