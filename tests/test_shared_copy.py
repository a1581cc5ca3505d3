"""Copies of module trees that share parameters: what is shared, and what is not."""

import weakref
from functools import partial
from typing import Any

import torch
from torch import nn

from inlay.torch_private import SharedCopy


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("shift", torch.ones(2))
        self.factor: Any = 1.0
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.fc(x) * self.factor + self.shift


class Outer(nn.Module):
    """Refers to its parts in every way that a copy has to follow."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Inner()
        self.same = self.one
        self.other = Inner()
        self.method = self.other.forward
        self.partial = partial(self.one.forward)
        self.listed = [{"part": (self.one,)}]
        self.reference = weakref.ref(self.other)
        self.kept: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.same, self.method, self.partial, self.listed[0]["part"][0], self.reference())
        for part in parts:
            x = part(x)
        return x


def test_the_original_is_not_run_and_not_changed() -> None:
    torch.manual_seed(0)
    model, x = Outer(), torch.randn(3, 2)
    copy = SharedCopy(model)
    before = [dict(vars(module)) for module in model.modules()]
    result = copy.root(x)
    assert [dict(vars(module)) for module in model.modules()] == before
    assert (copy.of(model.one).calls, copy.of(model.other).calls) == (3, 2)
    assert torch.equal(result, model(x))
    assert copy.root.one is copy.root.same is copy.of(model.one)
    assert copy.root.kept is model.kept
    ids = [{id(p) for p in (*each.parameters(), *each.buffers())} for each in (model, copy.root)]
    assert ids[0] == ids[1]


def test_what_is_set_on_the_original_later_reaches_the_copy() -> None:
    torch.manual_seed(0)
    model, x = Outer(), torch.randn(3, 2)
    copy = SharedCopy(model)
    copy.root(x)
    model.other.fc.weight = nn.Parameter(torch.eye(2))  # in a dict that both share
    model.one.register_buffer("shift", torch.zeros(2))
    model.one.factor = 3.0
    handle = model.other.register_forward_hook(lambda module, args, out: out * 5)
    model.one.fc = nn.Linear(2, 2)
    copy.refresh()
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in copy.root.modules())
    assert copy.of(model.one).calls == 3  # the copy keeps what it has set itself
    assert torch.equal(copy.root(x), model(x))
    handle.remove()
    copy.refresh()
    assert torch.equal(copy.root(x), model(x))
