"""Differences of the weights of two models: in their files, and once they are loaded."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low

import torch
from torch import nn

from inlay.checkpoint.files.weight_files import WeightFiles
from inlay.checkpoint.source import Source
from inlay.errors import InlayError
from inlay.report.data import Finding
from inlay.report.numbers import number

__all__ = ["listed", "stored_differences", "stored_files", "weight_differences"]

_NAMED = 3
# What compressed-tensors stores of a layer instead of, or beside, its weight.
_OF_WEIGHTS = ("packed", "scale", "zero_point", "shape", "g_idx", "global_scale")
_WEIGHT_ENDS = tuple(f".weight_{end}" for end in _OF_WEIGHTS)
_OTHER_ENDS = tuple(
    f".{port}_{end}"
    for port in ("input", "output", "q", "k", "v")
    for end in ("scale", "zero_point", "global_scale")
)
# The error of a weight over its length. 4 bits in groups of 128 have about 0.1, 3 bits 0.2.
_LARGE = 0.25
_UNUSUAL = 3  # times the median of the same kind in other blocks
_MANY = 0.25  # share of all weights; then they are no faults, but another model


def stored_files(source: Source) -> WeightFiles | None:
    """Return the files with the weights of a model; None for GGUF and what is not there."""
    if source.gguf_file is not None:
        return None
    try:
        return WeightFiles(source.folder())
    except InlayError:
        return None  # loading names the problem


def stored_differences(a: Source, b: Source) -> Iterator[Finding]:
    """Find tensors that only one model has, and tensors that stand in the place of others."""
    files = [stored_files(side) for side in (a, b)]
    first, second = files
    if first is None or second is None:
        return
    names = [_weights(each) for each in (first, second)]
    for letter, only in (("A", names[0] - names[1]), ("B", names[1] - names[0])):
        only -= {name for name in only if name.startswith("lm_head.")}  # tied, or not
        if only:
            other = "B" if letter == "A" else "A"
            yield Finding(
                severity="warning",
                about="tensors",
                text=f"{listed(sorted(only))} {'is' if len(only) == 1 else 'are'} stored in "
                f"{letter}, and not in {other}.",
            )
    yield from _moved(first.fingerprints(), second.fingerprints())


def _weights(files: WeightFiles) -> set[str]:
    found = set()
    for name in files.tensors:
        if name.endswith(_WEIGHT_ENDS):
            found.add(f"{name.rpartition('.')[0]}.weight")
        elif not name.endswith(_OTHER_ENDS):
            found.add(name)
    return found


def _moved(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Finding]:
    """Find tensors of B that are those of A by another name."""
    counts = [Counter(each.values()) for each in (a, b)]
    places = {value: name for name, value in a.items() if counts[0][value] == 1}
    for name, value in b.items():
        place = places.get(value)
        if name in a and a[name] != value and place is not None and counts[1][value] == 1:
            yield Finding(
                severity="warning",
                about=name,
                text=f"What B has here, A has as {place}: tensors have been swapped.",
            )


def weight_differences(a: nn.Module, b: nn.Module) -> Iterator[Finding]:
    """Find weights of zeros, and weights that are much further apart than others of their kind."""
    first, second = dict(a.named_parameters()), dict(b.named_parameters())
    errors: dict[str, float] = {}
    zeros = []
    for name in first.keys() & second:
        if first[name].shape != second[name].shape or first[name].dim() not in (2, 3):
            continue
        for place, (one, other) in _matrices(name, first[name], second[name]):
            length = float(torch.linalg.vector_norm(one, dtype=torch.float64))
            if not length:
                continue
            if not bool(other.any()):
                zeros.append(place)
                continue
            apart = other.to(one.device, torch.float32) - one.float()
            errors[place] = float(torch.linalg.vector_norm(apart, dtype=torch.float64)) / length
    if zeros:
        yield Finding(
            severity="warning",
            about="weights of B",
            text=f"{listed(sorted(zeros))} {'has' if len(zeros) == 1 else 'have'} only zeros in B, "
            "and not in A.",
        )
    yield from _outliers(errors)


def _matrices(
    name: str, one: torch.Tensor, other: torch.Tensor
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the matrices of a weight: those of stacked experts one by one."""
    if one.dim() == 2:
        yield name, (one, other)
    else:
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield f"{name}[{index}]", pair


def _outliers(errors: Mapping[str, float]) -> Iterator[Finding]:
    kinds: dict[str, list[float]] = {}
    for name, error in errors.items():
        kinds.setdefault(_kind(name), []).append(error)
    usual = {kind: median_low(of) for kind, of in kinds.items()}
    large = [
        name
        for name, error in errors.items()
        if error > _LARGE and (error > _UNUSUAL * usual[_kind(name)] or len(kinds[_kind(name)]) < 3)
    ]
    ranked = sorted(large, key=lambda name: (-errors[name], name))
    different = sum(error > _LARGE for error in errors.values())
    if different > _MANY * len(errors):
        yield Finding(
            severity="note",
            about="weights of B",
            text=f"{different:,} of {len(errors):,} weights differ by more than "
            f"{_LARGE:.0%} of their length: B is another model, has few bits, or its weights are "
            "rotated or equalized.",
        )
    elif ranked:
        shown = [f"{name} (by {number(errors[name])} of its length)" for name in ranked]
        yield Finding(
            severity="warning",
            about="weights of B",
            text=f"{listed(shown)} differ from A far more than others of their kind; look for "
            "scales or weights of another layer.",
        )


def _kind(name: str) -> str:
    """Return the name without the numbers of blocks and experts."""
    parts = name.partition("[")[0].split(".")
    return ".".join("*" if part.isdecimal() else part for part in parts)


def listed(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
