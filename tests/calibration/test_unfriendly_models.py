"""Models that do what graphs are bad at: they are observed as hooks see them, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from inlay import Calibration, GraphError, Recipe
from inlay.checking.hooks import Hooks
from inlay.recipe import Plan
from inlay.statistics.functional import tensors_of

STATIC = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
WIDTH = 8
SIZES = [(2, 3), (2, 3), (4, 5)]
X = [
    torch.linspace(-1 - i, 2, a * b * WIDTH).reshape(a, b, WIDTH) for i, (a, b) in enumerate(SIZES)
]


class Bag:
    """Something that is no module, in which models keep things."""

    def __init__(self) -> None:
        self.value: Any = 1.0
        self.items: list[Any] = []


COUNTER = [0]
GLOBAL = Bag()


class Block(nn.Module):
    """A block that computes with what it finds outside of itself, by a function of its own."""

    def __init__(self, of: Callable[["Block", torch.Tensor], torch.Tensor], bag: Bag) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.of, self.bag = of, bag
        self.factor: Any = 1.0
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.fc(self.of(self, x, *args, **kwargs))


class Stack(nn.Module):
    """Three blocks in a row, and how they are called."""

    def __init__(self, run: Callable[["Stack", torch.Tensor], Any], of: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = Bag()
        blocks = [Block(of or (lambda block, x: x), self.bag) for _ in range(3)]
        self.layers = nn.ModuleList(blocks)
        self.run = run
        self.calls = 0
        self.head: nn.Module | None = None
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        result = self.run(self, x)
        return result if self.head is None else self.head(result)


def one_after_another(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for block in self.layers:
        x = block(x)
    return x


def called_twice() -> Stack:
    def run(self: Stack, x: torch.Tensor) -> Any:
        return one_after_another(self, one_after_another(self, x) * 2)

    return Stack(run)


def with_other_arguments() -> Stack:
    def run(self: Stack, x: torch.Tensor) -> Any:
        for number, block in enumerate(self.layers):
            x = block(x, 1.0 + number, flag=number == 1)
        return x

    return Stack(run, lambda block, x, factor, flag: x.relu() * 5 if flag else x * factor)


def keeps_a_number_elsewhere() -> Stack:
    def run(self: Stack, x: torch.Tensor) -> Any:
        for block in self.layers:
            self.bag.value = self.bag.value + 1.0
            x = block(x)
        self.bag.value = 1.0 + x.shape[0]
        return x

    return Stack(run, lambda block, x: x * block.bag.value)


def keeps_a_tensor_elsewhere() -> Stack:
    def run(self: Stack, x: torch.Tensor) -> Any:
        self.bag.value = x.abs().mean()
        return one_after_another(self, x)

    return Stack(run, lambda block, x: x * block.bag.value)


def sets_a_number_of_its_blocks() -> Stack:
    def run(self: Stack, x: torch.Tensor) -> Any:
        for number, block in enumerate(self.layers):
            block.factor = float(number + x.shape[0])
            x = block(x)
        return x

    return Stack(run, lambda block, x: x * block.factor)


def fills_a_list() -> Stack:
    def run(self: Stack, x: torch.Tensor) -> Any:
        self.bag.items.append(x.mean())
        return one_after_another(self, x + torch.stack(self.bag.items).sum())

    return Stack(run)


def counts_in_a_global_list() -> Stack:
    def run(self: Stack, x: torch.Tensor) -> Any:
        COUNTER[0] = 0
        return one_after_another(self, x)

    def of(block: Block, x: torch.Tensor) -> torch.Tensor:
        COUNTER[0] += 1
        return x * COUNTER[0]

    return Stack(run, of)


def keeps_a_tensor_globally() -> Stack:
    def run(self: Stack, x: torch.Tensor) -> Any:
        GLOBAL.value = x.abs().amax()
        return one_after_another(self, x)

    return Stack(run, lambda block, x: x * GLOBAL.value)


def keeps_an_output() -> Stack:
    def run(self: Stack, x: torch.Tensor) -> Any:
        if self.bag.value is not None:
            x = x + self.bag.value.mean()
        self.bag.value = one_after_another(self, x)
        return self.bag.value

    stack = Stack(run)
    stack.bag.value = None
    return stack


def blocks_remember() -> Stack:
    def of(block: Block, x: torch.Tensor) -> torch.Tensor:
        if block.last is not None and block.last.shape == x.shape:
            x = x + block.last
        block.last = x * 2
        return x

    return Stack(one_after_another, of)


def blocks_write_into_their_input() -> Stack:
    def run(self: Stack, x: torch.Tensor) -> Any:
        x = x.clone()
        for block in self.layers:
            y = block(x)
            x.add_(y)
        return x

    def of(block: Block, x: torch.Tensor) -> torch.Tensor:
        before = x.clone()
        x.mul_(1.5)
        return before

    return Stack(run, of)


def depends_on_data() -> Stack:
    def run(self: Stack, x: torch.Tensor) -> Any:
        for block in self.layers:
            x = block(x) if x.sum() > 0 else block(-x) * 0.5
        return x

    return Stack(run)


def counts_its_calls() -> Stack:
    def run(self: Stack, x: torch.Tensor) -> Any:
        self.calls += 1
        return one_after_another(self, x * self.calls)

    return Stack(run)


def runs_in_autocast() -> Stack:
    def run(self: Stack, x: torch.Tensor) -> Any:
        for number, block in enumerate(self.layers):
            with torch.autocast("cpu", torch.bfloat16, enabled=number == 1):
                x = block(x.float())
        return x.float()

    return Stack(run)


def reads_a_size_from_data() -> Stack:
    """As Funnel does: with `fullgraph=True`, Dynamo fails with an internal error."""

    def run(self: Stack, x: torch.Tensor) -> Any:
        places = torch.arange(0, x.shape[1], dtype=x.dtype)
        distances = torch.arange(places[-1], places[0] - 1, -1, dtype=torch.long)
        return one_after_another(self, x * (distances + 1).unsqueeze(-1))

    return Stack(run)


UNFRIENDLY = [
    called_twice, with_other_arguments, keeps_a_number_elsewhere, keeps_a_tensor_elsewhere,
    sets_a_number_of_its_blocks, fills_a_list, counts_in_a_global_list, keeps_a_tensor_globally,
    keeps_an_output, blocks_remember, blocks_write_into_their_input, depends_on_data,
    counts_its_calls, runs_in_autocast, reads_a_size_from_data,
]  # fmt: skip


def forget() -> None:
    COUNTER[0], GLOBAL.value = 0, 1.0


@pytest.mark.parametrize("around", ["eager", "traced"])
@pytest.mark.parametrize("make", UNFRIENDLY)
def test_statistics_are_those_of_hooks(make: Callable[[], Stack], around: str) -> None:
    """A head that is quantized has Dynamo trace the model around its blocks, too."""
    forget()
    model = make()
    if around == "traced":
        model.head = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    with Hooks.on(copy.deepcopy(model), Plan(model, STATIC)) as hooks:
        for value in X:
            hooks.model(value)
    forget()
    calibration = Calibration(model, STATIC, compiler="eager")
    for value in X:
        calibration.observe(value)
    found = calibration.statistics.snapshot()
    for name, seen in hooks.seen.items():
        assert int(found[name].seen) == seen.values
        for key, tensor in tensors_of(seen.observer).items():
            assert torch.equal(found[name].tensors[key], tensor), (name, key)


def test_batches_under_autocast_are_observed_as_hooks_see_them() -> None:
    """Autocast keeps weights that it cast, and gave them to the trace of the next size."""
    model = called_twice().requires_grad_(True)
    calibration = Calibration(model, STATIC, compiler="eager")
    with Hooks.on(copy.deepcopy(model), Plan(model, STATIC)) as hooks:
        for value in X:
            with torch.autocast("cpu", torch.bfloat16):
                hooks.model(value)
                calibration.observe(value)
                assert torch.is_autocast_cache_enabled()
    found = calibration.statistics.snapshot()
    for name, seen in hooks.seen.items():
        for key, tensor in tensors_of(seen.observer).items():
            assert torch.equal(found[name].tensors[key], tensor), (name, key)


def test_branches_on_numbers_are_refused_by_the_name_of_the_model() -> None:
    """As in Longformer: after a graph break in a loop, Dynamo runs code without observers."""

    def run(self: Stack, x: torch.Tensor) -> Any:
        for block in self.layers:
            x = block(x) * 2 if (x > 0).any().item() else block(x)
        return x

    model = Stack(run)
    model.head = nn.Linear(WIDTH, WIDTH).requires_grad_(False)  # is traced around its blocks
    calibration = Calibration(model, STATIC, compiler="eager")
    with pytest.raises(GraphError, match=r"Stack cannot be traced: it branches .*line \d+, in run"):
        calibration.observe(X[0])


def test_what_a_model_does_later_and_not_at_first() -> None:
    """Its blocks run on their own by then, and would not see what it keeps."""

    def run(self: Stack, x: torch.Tensor) -> Any:
        self.bag.value = 5.0 if x.shape[1] > 4 else 1.0
        return one_after_another(self, x)

    model = Stack(run, lambda block, x: x * block.bag.value)
    calibration = Calibration(model, STATIC, compiler="eager")
    for value in X:
        calibration.observe(value)
    found = calibration.statistics.snapshot()["layers.0.fc.input"]
    assert float(found.tensors["max_vals"]) == 5 * float(X[2].max())
    assert int(found.seen) == len(X)
