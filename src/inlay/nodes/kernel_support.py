"""Tell which layers a kernel computes: by their formats, their sizes, and the device."""

from functools import cache

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType

from inlay.nodes.kernels import is_float8
from inlay.nodes.packed_linear import BLOCK, is_known_order
from inlay.torch_private import has_float8_product, has_integer_product, has_weight_products

__all__ = [
    "missing_kernels",
    "missing_packed_kernels",
    "unprofitable",
    "unsupported_formats",
    "unsupported_packing",
    "unsupported_sizes",
]

_BITS = 8
# Sums of so many products of two 8-bit integers, and their correction, fit into 32 bits.
_MOST_INPUTS = 2**16 - 1
_FEWEST_INPUTS = 2  # torch 2.13 returns wrong numbers for one
_GROUPS = (32, 64, 128, 256)  # columns of a 4-bit weight that may share a scale
# Weights of fewer elements are multiplied as fast, or faster, by quantize-dequantize. Speed of
# kernels over it, compiled, static inputs (AMD EPYC with AVX-512 VNNI, one thread, medians of 21):
#
#     weight                16x16   64x64   128x128   576x16   576x576
#     float32, 2 rows        0.86    0.86      0.84     0.83      1.71
#     float32, 16 rows       0.94    0.97      1.02     0.91      3.07
#     float32, 512 rows      1.06    1.70      2.97     1.76      6.64
#     bfloat16, 2 rows       0.94    1.54      1.28     1.52      1.71
#     bfloat16, 512 rows     1.43    1.38      1.32     1.24      1.71
SMALLEST = {torch.float32: 1 << 14, torch.bfloat16: 1 << 10}
# What cuBLAS asks of the numbers of inputs and outputs.
_MULTIPLES = {"int": 8, "float": 16}
# The first NVIDIA GPUs with these products: A100, and those of the generations Ada and Hopper.
_CAPABILITIES = {"int": (8, 0), "float": (8, 9)}


def unsupported_formats(
    inputs: QuantizationArgs | None, weights: QuantizationArgs, in_features: int
) -> str | None:
    """Say why no kernel computes a layer with these formats; None if one does."""
    if inputs is None:
        return "its input is not quantized"
    problem = _unsupported_input(inputs) or _unsupported_weight(weights)
    if problem is None and is_float8(inputs) != is_float8(weights):
        problem = f"its input has {_format(inputs)}, and its weight {_format(weights)}"
    if problem is None and not is_float8(weights) and in_features > _MOST_INPUTS:
        problem = f"sums over {in_features} inputs may not fit into 32 bits"
    if problem is None and in_features < _FEWEST_INPUTS:
        problem = "torch multiplies int8 matrices of one column wrongly"
    return problem


def unsupported_sizes(device: str, type: str, weight: torch.Size) -> str | None:
    """Say why no kernel of a kind of device multiplies by a weight of this shape."""
    multiple = _MULTIPLES[type]
    if device != "cuda" or all(size % multiple == 0 for size in weight):
        return None
    sizes = " and ".join(map(str, weight))
    return f"cuBLAS multiplies sizes divisible by {multiple} only, not {sizes}"


def unsupported_packing(weights: QuantizationArgs, weight: torch.Size) -> str | None:
    """Say why no kernel reads such a weight as it is stored, for inputs in full precision."""
    problem = None if weights.symmetric else "its weight has zero points"
    if weights.type != QuantizationType.INT or weights.num_bits not in (4, _BITS):
        return f"its weight has {_format(weights)}"
    if problem is not None or weights.actorder == "group":
        return problem or "the columns of its weight are in another order"
    if weights.num_bits == _BITS:
        is_known = weights.strategy == QuantizationStrategy.CHANNEL
        return None if is_known else f"its 8-bit weight has scales per {_named(weights.strategy)}"
    if weights.strategy != QuantizationStrategy.GROUP or weights.group_size not in _GROUPS:
        size = weights.group_size or _named(weights.strategy)
        return f"its 4-bit weight has scales per {size}, not per {', '.join(map(str, _GROUPS))}"
    if weight[0] % BLOCK or weight[1] % weights.group_size:
        return f"its {weight[0]} outputs and {weight[1]} inputs are no multiples of {BLOCK}"
    return None


@cache
def missing_packed_kernels(device: str) -> str | None:
    """Say why reading packed weights does not pay on a kind of device; None if it does."""
    if device != "cpu":
        return f"kernels for packed weights run on a CPU, not on {device}"
    if not has_weight_products():
        return "this version of torch has no kernels for packed weights"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "the processor has no AVX-512"
    return None if is_known_order() else "this version of torch packs weights in another order"


def unprofitable(device: str, dtype: torch.dtype, weight: torch.Size) -> str | None:
    """Say why a kernel for a weight of this shape does not pay, by what was measured.

    A table is looked up, so that the same command runs the same code, whatever else runs.

    :param dtype: of the result
    """
    least = SMALLEST.get(dtype, 0)
    if device != "cpu" or weight.numel() >= least:
        return None
    return f"it has {weight.numel():,} weights, and kernels pay from {least:,} on in {dtype}"


@cache
def missing_kernels(device: str, type: str = "int") -> str | None:
    """Say why products of 8-bit values do not pay on a kind of device; None if they do.

    It is looked up, not measured, so that the same command runs the same code. Products of
    512x576x1536 took 4.4 ms in float32, 1.08 in bfloat16 and 0.51 in int8; those of one row 0.047,
    0.066 and 0.008 (AMD EPYC with AVX-512 VNNI, two threads, medians). Without VNNI oneDNN widens
    the integers first.

    :param type: "int" or "float", as compressed-tensors has it
    """
    if device not in ("cpu", "cuda"):
        return f"kernels run on a CPU or with CUDA, not on {device}"
    if not (has_float8_product() if type == "float" else has_integer_product()):
        return f"this version of torch cannot multiply {_NAMES[type]} matrices"
    return _missing_on_cuda(type) if device == "cuda" else _missing_on_cpu(type)


_NAMES = {"int": "int8", "float": "float8"}


def _missing_on_cuda(type: str) -> str | None:
    if torch.version.hip is not None:
        return "kernels were written for CUDA, not for ROCm"
    least, found = _CAPABILITIES[type], torch.cuda.get_device_capability()
    if found < least:
        needed, had = (".".join(map(str, each)) for each in (least, found))
        return f"{_NAMES[type]} products need compute capability {needed}; the GPU has {had}"
    return None


def _missing_on_cpu(type: str) -> str | None:
    if type == "float":
        return "float8 products run with CUDA, not on a CPU"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no oneDNN"
    if not torch.cpu.get_capabilities().get("avx512_vnni", False):
        return "the processor has no AVX-512 VNNI"
    return None


def _unsupported_input(args: QuantizationArgs) -> str | None:
    strategy = args.strategy
    if _is_wide(args):
        return f"its input has {_format(args)}"
    if strategy not in (QuantizationStrategy.TENSOR, QuantizationStrategy.TOKEN):
        return f"its input has scales per {_named(strategy)}"
    if is_float8(args):
        return None if args.symmetric else "its input has zero points"
    if args.zp_dtype not in (None, torch.int8):
        return f"its zero points are stored as {args.zp_dtype}"
    return f"its scales are stored as {args.scale_dtype}" if args.scale_dtype else None


def _unsupported_weight(args: QuantizationArgs) -> str | None:
    strategy = args.strategy
    if _is_wide(args):
        return f"its weight has {_format(args)}"
    if strategy not in (QuantizationStrategy.TENSOR, QuantizationStrategy.CHANNEL):
        return f"its weight has scales per {_named(strategy)}"
    return None if args.symmetric else "its weight has zero points"


def _is_wide(args: QuantizationArgs) -> bool:
    """Return whether values are neither integers of 8 bits or fewer nor float8."""
    is_known = args.type in (QuantizationType.INT, QuantizationType.FLOAT)
    if not is_known or args.num_bits > _BITS:
        return True
    return is_float8(args) and args.num_bits != _BITS


def _format(args: QuantizationArgs) -> str:
    return f"{args.num_bits}-bit {getattr(args.type, 'value', args.type)} values"


def _named(strategy: QuantizationStrategy | str | None) -> str:
    return str(getattr(strategy, "value", strategy))
