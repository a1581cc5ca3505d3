"""The formats and strategies that tests run over, by name."""

import torch
from compressed_tensors.quantization import QuantizationArgs

INT4 = {"num_bits": 4, "type": "int"}
INT8 = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
    "zp_dtype": torch.float8_e4m3fn,
}
MXFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": torch.uint8,
    "zp_dtype": torch.uint8,
}
MXFP8 = {**MXFP4, "num_bits": 8}

_WEIGHT_STRATEGIES = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "group": {"strategy": "group", "group_size": 16},
    "block": {"strategy": "block", "block_structure": [8, 24]},
}
_ACTIVATION_STRATEGIES = {
    "tensor": {"strategy": "tensor"},
    "token": {"strategy": "token", "dynamic": True},
    "group": {"strategy": "group", "group_size": 16},
}
_ATTENTION_STRATEGIES = {
    "tensor": {"strategy": "tensor"},
    "attn_head": {"strategy": "attn_head"},
}

SHAPES = {"weight": (20, 64), "input": (2, 5, 64), "k": (2, 4, 5, 16)}


def _combine(strategies: dict[str, dict]) -> dict[str, dict]:
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


CASES: dict[str, tuple[str, dict]] = {
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


def make_args(fields: dict, **more) -> QuantizationArgs:
    return QuantizationArgs(**{**fields, **more})
