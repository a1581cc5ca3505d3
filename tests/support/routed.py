"""What each expert of a model sees, found by a loop over experts: the specification."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations import moe

from inlay.model import modules_with_stacks
from inlay.recipe import Slot
from inlay.statistics.value import Statistics

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
Rows = dict[str, list[torch.Tensor]]


@torch.no_grad()
def routed_rows(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> Rows:
    """Run a model as it is, and take the rows that each projection of each expert gets.

    :return: inputs by the name of the Linear that a checkpoint has, a tensor for each batch that
        has any, without padding
    """
    found: Rows = {}
    products: list[torch.Tensor] = []

    def grouped_linear(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        products.append(rows)
        return moe_linear(rows, *args, **kwargs)

    moe_linear = moe._grouped_linear
    with pytest.MonkeyPatch.context() as patched:
        # As in a graph, where transformers multiplies with an op of its own.
        patched.setattr(moe, "_can_use_grouped_mm", _can_use_grouped_mm)
        patched.setattr(moe, "_grouped_linear", grouped_linear)
        for batch in batches:
            mask = batch["attention_mask"].flatten().bool()
            with ExitStack() as hooks:
                for name, experts in modules_with_stacks(model):
                    record = _Recorder(name, found, mask, products)
                    hook = experts.register_forward_hook(record)
                    hooks.callback(hook.remove)
                model(**batch)
    return found


class _Recorder:
    """Divides what the two products of a module were given among its experts."""

    def __init__(
        self, name: str, found: Rows, mask: torch.Tensor, products: list[torch.Tensor]
    ) -> None:
        self.name, self.found, self.mask, self.products = name, found, mask, products

    def __call__(self, module: Any, args: tuple[torch.Tensor, ...], _: Any) -> None:
        hidden, chosen = args[0].reshape(-1, args[0].shape[-1]), args[1]
        outer, inner = self.products
        self.products.clear()
        order = torch.sort(chosen.flatten()).indices // chosen.shape[-1]  # within an expert, any
        start = 0
        for number in range(len(module.down_proj)):
            count = int((chosen == number).sum())
            own = slice(start, start + count)
            start = own.stop
            tokens = order[own]
            assert bool((chosen[tokens] == number).any(-1).all())
            assert torch.equal(outer[own], hidden[tokens])
            counted = self.mask[tokens]
            if not bool(counted.any()):
                continue
            for projection, rows in zip(PROJECTIONS, (outer, outer, inner), strict=True):
                name = f"{self.name}.{number}.{projection}"
                self.found.setdefault(name, []).append(rows[own][counted])


def _can_use_grouped_mm(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16


def assert_observed(statistics: Statistics, slot: Slot, seen: list[torch.Tensor]) -> None:
    """Compare statistics with those of an eager observer that saw the values one after another."""
    observer = slot.make_observer()
    for value in seen:
        if slot.is_importance:
            observer.observe_input(value)
        else:
            observer(value)
    assert int(statistics.seen) == len(seen)
    assert int(statistics.tokens) == sum(map(len, seen))
    for name, tensor in statistics.tensors.items():
        assert torch.equal(tensor, getattr(observer, name)), (slot.name, name)


@torch.no_grad()
def everywhere_rows(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> Rows:
    """What each projection of each expert would get of all tokens, as in llm-compressor."""
    found: Rows = {}
    for batch in batches:
        mask = batch["attention_mask"].flatten().bool()
        with ExitStack() as hooks:
            for name, experts in modules_with_stacks(model):
                record = partial(_record_everywhere, name, found, mask)
                hooks.callback(experts.register_forward_pre_hook(record).remove)
            model(**batch)
    return found


def _record_everywhere(
    name: str, found: Rows, mask: torch.Tensor, module: Any, args: tuple[torch.Tensor, ...]
) -> None:
    rows = args[0].reshape(-1, args[0].shape[-1])[mask]
    for number, weight in enumerate(module.gate_up_proj):
        gate, up = F.linear(rows, weight).chunk(2, -1)
        given = (rows, rows, module.act_fn(gate) * up)
        for projection, value in zip(PROJECTIONS, given, strict=True):
            found.setdefault(f"{name}.{number}.{projection}", []).append(value)
