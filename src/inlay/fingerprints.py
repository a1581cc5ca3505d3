"""Fingerprints of weights: they tell whether statistics were gathered from the same model.

A fingerprint is the dtype of a tensor and a digest of its shape and of a sample of its values. The
sample is a few short runs of neighbors, so that little of a file has to be read. It depends neither
on the device nor on the strides of a tensor.

Values are hashed as float64. So a bfloat16 file has the same fingerprints whether it is loaded in
bfloat16 or in float32, which holds the same numbers. Loading in a narrower dtype rounds weights,
and rounded weights count as other weights.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

__all__ = ["difference", "fingerprint", "fingerprints", "weights_in"]

_RUNS, _LENGTH = 16, 16  # of neighbors in a sample
_NAMED = 3  # how many tensors an error names


def weights_in(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers of a model, tied ones under each name.

    Integer buffers are left out: they count, and no product reads them.
    """
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            yield name, tensor


def fingerprints(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the fingerprints of tensors by name, sorted by name."""
    known: dict[int, tuple[torch.Tensor, str]] = {}  # kept alive, or another may get its id
    found: dict[str, str] = {}
    for name, tensor in tensors:
        if id(tensor) not in known:
            known[id(tensor)] = tensor, fingerprint(tensor)
        found[name] = known[id(tensor)][1]
    return dict(sorted(found.items()))


def fingerprint(tensor: torch.Tensor) -> str:
    """Return the fingerprint of a tensor; "" for one whose values are not in memory."""
    if tensor.is_meta or type(tensor) not in (torch.Tensor, nn.Parameter):
        return ""
    sample = _sample(tensor.detach())
    wide = torch.float64 if sample.is_floating_point() else torch.int64
    values = torch.view_as_real(sample) if sample.is_complex() else sample.to(wide)
    found = hashlib.blake2b(str(tuple(tensor.shape)).encode(), digest_size=8)
    found.update(values.contiguous().numpy().tobytes())
    return f"{_dtype(tensor)} {found.hexdigest()}"


def difference(
    known: Mapping[str, str], found: Mapping[str, str], *, same_dtypes: bool = False
) -> str | None:
    """Name the tensors whose fingerprints differ, and the dtypes if they explain it.

    Tensors whose values were not in memory on one side are not compared.

    :param same_dtypes: count the same numbers in another dtype as different
    :return: such as "a.weight, b.weight and 7 more (float32 instead of bfloat16)"; None if all
        fingerprints agree
    """
    both = [name for name in known if known[name] and found.get(name)]
    part = slice(0 if same_dtypes else 1, 2)
    unlike = [name for name in both if known[name].split()[part] != found[name].split()[part]]
    one_sided = sorted({n for n in known if n not in found} | {n for n in found if n not in known})
    unlike += one_sided
    if not unlike:
        return None
    more = f" and {len(unlike) - _NAMED} more" if len(unlike) > _NAMED else ""
    text = f"{', '.join(unlike[:_NAMED])}{more}"
    first = unlike[0]
    if first in one_sided:
        return f"{text} (missing on one side)"
    before, now = known[first].split()[0], found[first].split()[0]
    return text if before == now else f"{text} ({now} instead of {before})"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values of a small tensor, and runs from all over a large one, on the CPU."""
    count = tensor.numel()
    if count <= _RUNS * _LENGTH:
        return tensor.cpu().reshape(-1)
    apart = count // _RUNS
    # Runs start at varying columns: a fixed stride could meet the same column in each row.
    starts = [run * apart + run * 7919 % (apart - _LENGTH + 1) for run in range(_RUNS)]
    places = torch.tensor(starts).unsqueeze(1) + torch.arange(_LENGTH)
    where = torch.unravel_index(places.reshape(-1).to(tensor.device), tensor.shape)
    return tensor[where].cpu()
