"""The formats and strategies that laws run over, by name."""

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs

__all__ = [
    "CASES",
    "FP8",
    "INT4",
    "INT8",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "SHAPES",
    "Fields",
    "make_args",
]

Fields = dict[str, Any]  # of QuantizationArgs

INT4: Fields = {"num_bits": 4, "type": "int"}
INT8: Fields = {"num_bits": 8, "type": "int"}
FP8: Fields = {"num_bits": 8, "type": "float"}
NVFP4: Fields = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
    "zp_dtype": torch.float8_e4m3fn,
}
MXFP4: Fields = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": torch.uint8,
    "zp_dtype": torch.uint8,
}
MXFP8: Fields = {**MXFP4, "num_bits": 8}

_WEIGHT_STRATEGIES: dict[str, Fields] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "group": {"strategy": "group", "group_size": 16},
    "block": {"strategy": "block", "block_structure": [8, 24]},
}
_ACTIVATION_STRATEGIES: dict[str, Fields] = {
    "tensor": {"strategy": "tensor"},
    "token": {"strategy": "token", "dynamic": True},
    "group": {"strategy": "group", "group_size": 16},
}
_ATTENTION_STRATEGIES: dict[str, Fields] = {
    "tensor": {"strategy": "tensor"},
    "attn_head": {"strategy": "attn_head"},
}

SHAPES = {"weight": (20, 64), "input": (2, 5, 64), "k": (2, 4, 5, 16)}


def _combine(strategies: dict[str, Fields]) -> dict[str, Fields]:
    return {
        f"{format}-{strategy}-{'symmetric' if symmetric else 'asymmetric'}": {
            **bits,
            **shape,
            "symmetric": symmetric,
        }
        for format, bits in {"int4": INT4, "int8": INT8, "fp8": FP8}.items()
        for strategy, shape in strategies.items()
        for symmetric in (True, False)
    }


CASES: dict[str, tuple[str, Fields]] = {
    f"{base_name}-{name}": (base_name, fields)
    for base_name, cases in {
        "weight": {
            **_combine(_WEIGHT_STRATEGIES),
            "nvfp4": NVFP4,
            "mxfp4": MXFP4,
            "mxfp8": MXFP8,
        },
        "input": {
            **_combine(_ACTIVATION_STRATEGIES),
            "nvfp4-local": {**NVFP4, "dynamic": "local"},
            "mxfp4": MXFP4,
        },
        "k": _combine(_ATTENTION_STRATEGIES),
    }.items()
    for name, fields in cases.items()
}


def make_args(fields: Fields, **more: Any) -> QuantizationArgs:
    """QuantizationArgs of these fields, and of others in their place."""
    return QuantizationArgs(**{**fields, **more})
