"""Scales for weights that are quantized alone: channels that see large values are kept exact.

A column that is multiplied before its weight is rounded, and whose channel is divided in return,
has a smaller error where it matters. This is the idea of AWQ.
"""

from collections.abc import Sequence

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

from inlay.equalization.group import Group
from inlay.equalization.scales import Reader, Scales
from inlay.nodes.quantize import fold_weight
from inlay.recipe import AUTO_STRENGTH, Strength, make_observer

__all__ = ["activation_aware_scales_of"]

# Strengths that "auto" chooses from; with 0 everything stays as it is.
_CANDIDATES = tuple(step / 10 for step in range(11))
# Channels that are smaller than this part of the largest one count as if they were so large.
_SMALLEST = 1e-5
# Rows of a weight that the error is computed from, where rows are quantized by themselves.
_ROWS = 256
_BY_ROW = (
    QuantizationStrategy.CHANNEL,
    QuantizationStrategy.GROUP,
    QuantizationStrategy.TENSOR_GROUP,
)


@torch.no_grad()
def activation_aware_scales_of(
    group: Group, magnitudes: torch.Tensor, readers: Sequence[Reader], strength: Strength
) -> Scales:
    """Compute the scales of a group whose readers do not quantize their inputs.

    A channel whose values are `m` on average gets `m ** a`. "auto" quantizes the weights for every
    strength `a`, weighs the squared error of each column by `m ** 2`, and takes the smallest.

    :param magnitudes: of each channel, up to a common factor
    """
    sizes = group.tie(magnitudes.to(torch.float32))
    largest = float(sizes.amax())
    sizes = sizes.clamp(min=largest * _SMALLEST if largest > 0 else 1.0)
    sizes = sizes / sizes.log().mean().exp()
    if strength != AUTO_STRENGTH:
        return Scales(values=sizes**strength, strength=strength)
    errors = {a: _error(sizes**a, sizes, readers) for a in _CANDIDATES}
    best = min(errors, key=lambda a: errors[a])
    return Scales(values=sizes**best, strength=best)


def _error(scales: torch.Tensor, sizes: torch.Tensor, readers: Sequence[Reader]) -> float:
    total = 0.0
    for reader in readers:
        args, weight = reader.weight_args, reader.weight.detach()
        if args is None:
            continue
        rows = weight[:: max(1, len(weight) // _ROWS)] if args.strategy in _BY_ROW else weight
        scaled = rows * scales.to(rows)
        error = (_quantized(scaled, args) - scaled).to(scales) / scales
        total += float((error.square() * sizes.square()).sum()) * len(weight) / len(rows)
    return total


def _quantized(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    # The smallest and largest value stand for whatever observer finds the range in the end.
    quick = args.model_copy(update={"observer": "memoryless_minmax", "observer_kwargs": {}})
    qparams = make_observer("weight", quick)(weight).get_qparams()
    return fold_weight(weight, quick, qparams)
