"""Linear layers of a compressed checkpoint, computed by kernels that read its integers."""

from typing import Any

import torch
from compressed_tensors.compressors import decompress_module, unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy
from torch import nn

from inlay.nodes.kernel_support import (
    missing_kernels,
    missing_packed_kernels,
    unsupported_formats,
    unsupported_packing,
    unsupported_sizes,
)
from inlay.nodes.kernels import (
    column_sums,
    dynamic_qparams,
    integer_linear,
    is_float8,
    limits,
    quantized,
)
from inlay.nodes.packed_linear import int4_linear, int8_linear, packed_int4

__all__ = ["IntegerLinear", "PackedLinear", "kernel_layer"]


class IntegerLinear(nn.Module):
    """A linear layer whose input and weight are multiplied as integers.

    :param layer: a Linear as compressed-tensors loads it, with the integers of its weight
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None
    input_scale: torch.Tensor | None
    input_zero_point: torch.Tensor | None
    sums: torch.Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        args = _scheme(layer).input_activations
        assert args is not None
        self.in_features, self.out_features = layer.in_features, layer.out_features
        # Plain values, so that compiled code serves all layers of one shape.
        self.limits, self.symmetric = limits(args), bool(args.symmetric)
        self.per_token = args.strategy == QuantizationStrategy.TOKEN
        weight = layer.weight.detach()
        self.register_buffer("weight", weight)
        for name in ("weight_scale", "bias", "input_scale"):
            self.register_buffer(name, _detached(getattr(layer, name, None)))
        zero_point = None if args.symmetric else _detached(getattr(layer, "input_zero_point", None))
        self.register_buffer("input_zero_point", zero_point)
        self.register_buffer("sums", None if args.symmetric else column_sums(weight))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scale, zero_point = self.input_scale, self.input_zero_point
        if scale is None:
            scale, zero_point = dynamic_qparams(
                input, self.limits, symmetric=self.symmetric, per_token=self.per_token
            )
        if self.symmetric:
            zero_point = None
        return integer_linear(
            quantized(input, scale, zero_point, self.limits),
            self.weight,
            scale,
            self.weight_scale,
            zero_point,
            self.sums,
            self.bias,
            dtype=input.dtype,
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PackedLinear(nn.Module):
    """A linear layer that reads its weight as it is stored, for inputs in full precision.

    :param layer: a Linear as compressed-tensors loads it
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        args = _scheme(layer).weights
        assert args is not None
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bits = args.num_bits
        integers = _integers_of(layer, args.num_bits)
        scale: Any = layer.weight_scale
        self.register_buffer("weight", packed_int4(integers) if self.bits == 4 else integers)
        scales = scale.detach().t().contiguous() if self.bits == 4 else scale.detach().reshape(-1)
        self.register_buffer("scale", scales)
        self.register_buffer("bias", _detached(layer.bias))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        linear = int4_linear if self.bits == 4 else int8_linear
        return linear(input, self.weight, self.scale, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


def _integers_of(layer: Any, bits: int) -> torch.Tensor:
    """Return the integers of a weight, which a checkpoint may have packed into 32 bits."""
    if getattr(layer, "weight_packed", None) is None:
        stored: torch.Tensor = layer.weight.detach()
        return stored
    shape = torch.Size((layer.out_features, layer.in_features))
    unpacked: torch.Tensor = unpack_from_int32(layer.weight_packed.detach(), bits, shape)
    return unpacked.contiguous()


def kernel_layer(layer: nn.Linear) -> tuple[nn.Module, str | None]:
    """Return the module that computes a compressed layer, and why it uses no kernel, if so.

    Without a kernel, the layer is decompressed, and quantizes and dequantizes its input.
    """
    scheme = _scheme(layer)
    is_weight_only = scheme.weights is not None and scheme.input_activations is None
    problem = (_not_packed if is_weight_only else _not_integer)(layer, scheme)
    if problem is None:
        return (PackedLinear if is_weight_only else IntegerLinear)(layer), None
    decompress_module(layer)
    return layer, problem


def _not_integer(layer: nn.Linear, scheme: QuantizationScheme) -> str | None:
    """Say why no kernel multiplies the input of a layer and its weight as integers."""
    if scheme.weights is None:
        return "its weight is not quantized"
    problem = unsupported_formats(scheme.input_activations, scheme.weights, layer.in_features)
    if problem is None and is_float8(scheme.weights):
        problem = "its weight has float8 values"
    if problem is None and scheme.output_activations is not None:
        problem = "its output is quantized"
    if problem is None and getattr(layer, "weight", None) is None:
        problem = "its weight is packed"
    device = _device_of(layer)
    problem = problem or missing_kernels(device)
    return problem or unsupported_sizes(device, "int", _size_of(layer))


def _not_packed(layer: nn.Linear, scheme: QuantizationScheme) -> str | None:
    """Say why no kernel reads the weight of a layer as it is stored."""
    assert scheme.weights is not None
    problem = unsupported_packing(scheme.weights, _size_of(layer))
    if problem is None and scheme.output_activations is not None:
        problem = "its output is quantized"
    return problem or missing_packed_kernels(_device_of(layer))


def _size_of(layer: nn.Linear) -> torch.Size:
    return torch.Size((layer.out_features, layer.in_features))


def _device_of(layer: Any) -> str:
    return str(layer.weight_scale.device.type)


def _scheme(layer: nn.Module) -> QuantizationScheme:
    scheme: Any = layer.quantization_scheme
    assert isinstance(scheme, QuantizationScheme)
    return scheme


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()
