"""Hypothesis strategies for small models, friendly and unfriendly ones, and recipes for them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from inlay.errors import ConfigurationError
from inlay.recipe import Plan, Recipe
from inlay.torch_private import graph_break

__all__ = [
    "LAYOUTS",
    "PLAIN",
    "STEPS",
    "GeneratedModule",
    "SequenceModule",
    "TwoSequencesModule",
    "example_inputs",
    "modules",
    "recipes",
    "sequence_modules",
]

_WIDTH = 4

# A step of a generated model: from the model, the value so far, a second input and a number.
_Step = Callable[[Any, torch.Tensor, torch.Tensor, int], Any]
STEPS: dict[str, _Step] = {}


def _step(function: _Step) -> _Step:
    STEPS[function.__name__.removeprefix("_")] = function
    return function


@_step
def _linear(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    return self.layers[number](x)


@_step
def _relu(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    return x.relu()


@_step
def _product(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    """A product with a transposed weight."""
    return self.products[number % 2](x)


@_step
def _tied(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    """Two modules with the same weight, and different values."""
    return self.tied(x * (number + 2)) + self.layers[1](x)


@_step
def _blocks(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    """Two blocks with the same weights, which may run as graphs of their own."""
    for block in self.blocks:
        x = block(x * (number + 2))
    return x


@_step
def _shared(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    """A module that is called twice, with different values."""
    return self.layers[number](x) + self.layers[number](y)


@_step
def _gated(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    return self.down(F.silu(self.gate(x)) * self.up(x))


@_step
def _attention(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    q, k, v = (layer(x).unsqueeze(1) for layer in self.layers)
    return self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))


@_step
def _embedding(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    return x + self.embed(x[..., 0].abs().long() % 8)


@_step
def _convolution(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    """Something with a weight that no recipe for Linear means."""
    return self.conv(x.transpose(-1, -2)).transpose(-1, -2).contiguous()


@_step
def _residual(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    return x + self.layers[number](x)


@_step
def _view(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    return x.reshape(-1, _WIDTH).reshape(y.shape)


@_step
def _add_input(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    return x + y * number


@_step
def _concat(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    return torch.cat([x, y], dim=0)[: y.shape[0]]


@_step
def _split(self: Any, x: Any, y: torch.Tensor, number: int) -> Any:
    parts = x.split(_WIDTH // 2, dim=-1)
    return torch.cat([parts[1], parts[0]], dim=-1)


@_step
def _written(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    """A value that is observed, changed in place, and observed again."""
    x = x.clone()
    before = self.layers[number](x)
    x.add_(number + 1)
    return before + self.layers[0](x)


@_step
def _written_through_a_view(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    x = x.clone()
    before = self.layers[number](x)
    x.view(-1).mul_(number + 2)
    return before + self.layers[1](x)


@_step
def _dropout(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    """Random in training mode, in a module and in a function."""
    x = F.dropout(self.dropout(x), 0.5, self.training)
    return self.layers[number](x)


@_step
def _unused(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    self.layers[number](x * 3).relu()
    return x


# What every tracer can trace; what follows, symbolic_trace cannot.
PLAIN = tuple(STEPS)


@_step
def _item_set(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    x = x.clone()
    before = self.layers[number](x)
    x[:, 0] = number
    return before + self.layers[2](x)


@_step
def _branch(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    return torch.cond(x.sum() > number, lambda z: z * 2, lambda z: z - 1, (x,))


@_step
def _recomputed(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    return checkpoint(self.layers[number], x, use_reentrant=False)


@_step
def _batched(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
    return torch.vmap(lambda row: row * number + 1)(x)


class _Product(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown: torch.Tensor = self.second(self.first(x).relu())
        return x + grown


class GeneratedModule(nn.Module):
    """A model put together from steps, each by its name in `STEPS` and a number from 0 to 2.

    :param training: modules in training mode: "" for the model itself, "dropout" for its dropout
    """

    def __init__(self, steps: Sequence[tuple[str, int]], training: Sequence[str] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.products = nn.ModuleList(_Product(_WIDTH, _WIDTH) for _ in range(2))
        self.tied = nn.Linear(_WIDTH, _WIDTH)
        first: Any = self.layers[1]
        self.tied.weight = first.weight
        names = {name for name, _ in steps}
        if "gated" in names:
            self.gate, self.up = nn.Linear(_WIDTH, 8), nn.Linear(_WIDTH, 8)
            self.down = nn.Linear(8, _WIDTH)
        if "attention" in names:
            self.out = nn.Linear(_WIDTH, _WIDTH)
        if "blocks" in names:
            one, other = _Block(), _Block()
            other.first.weight, other.second.weight = one.first.weight, one.second.weight
            self.blocks = nn.ModuleList([one, other])
        if "embedding" in names:
            self.embed = nn.Embedding(8, _WIDTH)
        if "convolution" in names:
            self.conv = nn.Conv1d(_WIDTH, _WIDTH, 1)
        self.dropout = nn.Dropout(0.5)
        self.requires_grad_(False)
        self.steps = tuple(steps)
        self.eval()
        for name in training:
            self.get_submodule(name).training = True

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        for name, number in self.steps:
            x = STEPS[name](self, x, y, number)
        return x

    def __repr__(self) -> str:
        training = [name for name in _MODES[-1] if self.get_submodule(name).training]
        more = f", {training!r}" if training else ""
        return f"GeneratedModule({list(self.steps)!r}{more})"


_MODES: tuple[tuple[str, ...], ...] = ((), ("dropout",), ("",), ("", "dropout"))


def modules(
    steps: Sequence[str] = tuple(STEPS), *, training: bool = False
) -> st.SearchStrategy[GeneratedModule]:
    """Small models of one to six steps; call them with `example_inputs()`.

    :param training: draw modules in training mode too, in which dropout is random
    """
    step = st.tuples(st.sampled_from(steps), st.integers(0, 2))
    drawn = st.lists(step, min_size=1, max_size=6)
    modes = st.sampled_from(_MODES) if training else st.just(())
    return st.builds(GeneratedModule, drawn, modes)


def example_inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs for generated models."""
    generator = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(2, 3, _WIDTH, generator=generator) for _ in range(2))
    return one, other


_RECIPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("W8A8_STATIC", {"inputs": {"observer": "static_minmax"}}),
    ("W8A8_STATIC", {"inputs": {"observer": "minmax"}}),
    ("W8A8_STATIC", {"inputs": {"observer": "histogram"}}),
    ("W8A8", {}),
    ("FP8", {}),
    ("FP8_DYNAMIC", {}),
    ("W4A16", {"weights": {"observer": "imatrix_mse", "group_size": 4}}),
)


@st.composite
def recipes(draw: st.DrawFn, module: nn.Module) -> Recipe:
    """A recipe that fits the module, and ignores one of its Linear modules or none."""
    linears = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    fitting = []
    for preset, changes in _RECIPES:
        try:
            Plan(module, Recipe.from_preset(preset, **changes))
        except ConfigurationError:
            continue
        fitting.append((preset, changes))
    preset, changes = draw(st.sampled_from(fitting))
    ignored = draw(st.sampled_from([None, *linears[:-1]]))
    return Recipe.from_preset(preset, **changes, ignore=[] if ignored is None else [ignored])


def _first(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x.transpose(0, 1)).transpose(0, 1)


def _flattened(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x.reshape(-1, _WIDTH)).reshape(x.shape)


def _columns(layer: nn.Module, x: torch.Tensor) -> Any:
    steps = x.transpose(0, 1)
    return layer(steps.flatten(0, 1)).view(steps.shape).transpose(0, 1)


def _heads(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x.reshape(*x.shape[:-1], 2, 2).transpose(1, 2).repeat(1, 1, 1, 2)).mean(1)


def _pooled(layer: nn.Module, x: torch.Tensor) -> Any:
    return x + 0 * layer(x[:, 0]).unsqueeze(1)


# How a layer of a `SequenceModule` is given the tokens.
LAYOUTS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "batch first": lambda layer, x: layer(x),
    "tokens first": _first,
    "rows": _flattened,
    "columns": _columns,
    "heads": _heads,
    "pooled": _pooled,
}


class SequenceModule(nn.Module):
    """A model of sequences with padding, whose layers are given tokens in several layouts.

    No token changes another, so a sequence is the same alone and beside padding. Token 0 is far
    from all others: statistics show if one of it counts.

    :param steps: layouts of the layers, and whether the graph breaks in front of them
    :param reads_mask: whether the model reads its mask at all, in its first graph
    """

    def __init__(self, steps: Sequence[tuple[str, bool]], *, reads_mask: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, _WIDTH)
        self.table.weight.data[0] = 50
        self.layers = self._layers(len(steps))
        self.steps, self.reads_mask = tuple(steps), reads_mask
        self.requires_grad_(False)
        self.eval()

    def _layers(self, count: int) -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(count))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.table(input_ids)
        if self.reads_mask:
            x = x * (2 - attention_mask.unsqueeze(-1))
        for (layout, breaks), layer in zip(self.steps, self.layers, strict=True):
            if breaks:
                graph_break()
            x = LAYOUTS[layout](layer, x)
        return x

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.steps)!r}, reads_mask={self.reads_mask})"


class TwoSequencesModule(SequenceModule):
    """The same with a decoder, whose layers read its own tokens and those of the encoder."""

    def __init__(self, steps: Sequence[tuple[str, bool]], *, reads_mask: bool = False) -> None:
        super().__init__(steps, reads_mask=reads_mask)
        self.decoder, self.cross = self._layers(len(steps)), self._layers(len(steps))
        self.requires_grad_(False)

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        decoder_input_ids: torch.Tensor,
        decoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        encoded = super().forward(input_ids, attention_mask)
        x: torch.Tensor = self.table(decoder_input_ids)
        layers = zip(self.steps, self.decoder, self.cross, strict=True)
        for (layout, breaks), own, cross in layers:
            if breaks:
                graph_break()
            x = LAYOUTS[layout](own, x) + 0 * LAYOUTS[layout](cross, encoded)[:, :1]
        return x


def sequence_modules() -> st.SearchStrategy[SequenceModule]:
    """Models of sequences of one to three layers, for batches with padding."""
    step = st.tuples(st.sampled_from(sorted(LAYOUTS)), st.booleans())
    steps = st.lists(step, min_size=1, max_size=3)
    kinds = st.sampled_from([SequenceModule, TwoSequencesModule])
    return st.builds(
        lambda made, steps, reads: made(steps, reads_mask=reads), kinds, steps, st.booleans()
    )
