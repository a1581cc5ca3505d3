"""Weight views: reading, writing, and the layouts that are known."""

import pytest
import torch
import torch.nn.functional as F
from families import gpt2, gpt_oss, granite_moe, mixtral, qwen3_moe
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from torch import nn

from inlay.model import Stack, Weight, find_stacks, layout_of, saved_names

NAMES = ("gate_proj", "up_proj", "k_proj")


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Stack, torch.Tensor]:
    """A parameter that holds one matrix or many, in any layout, and its views."""
    count = draw(st.none() | st.integers(1, 3))
    parts, size, inputs = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    outputs = parts * size
    interleaved, transposed = draw(st.booleans()), draw(st.booleans())
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    cuts = [
        range(part, outputs, parts) if interleaved else range(part * size, (part + 1) * size)
        for part in range(parts)
    ]
    weights = tuple(
        Weight(
            module=f"{index}.{name}",
            parameter="w",
            shape=(size, inputs),
            index=index,
            rows=None if parts == 1 else rows,
            transposed=transposed,
        )
        for index in ([None] if count is None else range(count))
        for name, rows in zip(NAMES[:parts], cuts, strict=True)
    )
    parameter = torch.zeros(shape if count is None else (count, *shape))
    return Stack("w", weights), parameter


@given(stacks())
@examples(60)
def test_what_is_written_is_read_and_nothing_else_changes(
    drawn: tuple[Stack, torch.Tensor],
) -> None:
    stack, parameter = drawn
    for number, view in enumerate(stack.weights, 1):
        before = parameter.clone()
        matrix = torch.full(view.shape, float(number))
        view.write(matrix, parameter)
        assert torch.equal(view.read(parameter), matrix)
        changed = parameter != before
        assert int(changed.sum()) == view.numel
        assert bool((parameter[changed] == number).all())
    assert bool((parameter != 0).all()), "the views of a parameter are all of it"


@given(stacks())
@examples(30)
def test_outputs_are_cut_as_the_rows_are(drawn: tuple[Stack, torch.Tensor]) -> None:
    stack, parameter = drawn
    parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
    x = torch.arange(3.0 * stack.weights[0].shape[1]).reshape(3, -1)
    for view in stack.weights:
        matrix = parameter if view.index is None else parameter[view.index]
        whole = F.linear(x, matrix.t() if view.transposed else matrix)
        assert torch.equal(view.outputs_of(whole), F.linear(x, view.read(parameter)))
        # The bias of all outputs is cut alike.
        bias = torch.arange(float(whole.shape[-1]))
        stacked = bias if view.index is None else bias.expand(len(parameter), -1)
        assert torch.equal(view.read_bias(stacked), view.outputs_of(bias.unsqueeze(0))[0])


def views_of(model: nn.Module, name: str) -> dict[str, Weight]:
    module = model.get_submodule(name)
    layout = layout_of(name, module)
    assert layout is not None
    return {view.module: view for view in layout.weights(name, module)}


@torch.no_grad()
def test_views_of_gpt_oss_compute_what_its_experts_compute() -> None:
    """Its experts are transposed, interleaved and have biases; it is not served yet."""
    model, name = gpt_oss(), "model.layers.0.mlp.experts"
    experts, views = model.get_submodule(name), views_of(model, name)
    assert find_stacks(model)[1].keys() == {name, "model.layers.1.mlp.experts"}

    def linear(x: torch.Tensor, module: str) -> torch.Tensor:
        view = views[f"{name}.{module}"]
        weight = view.read(model.get_parameter(view.parameter))
        assert weight.shape == view.shape
        assert view.bias is not None
        return F.linear(x, weight, view.read_bias(model.get_parameter(view.bias)))

    x = torch.randn(5, 32)
    for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
        bias.normal_()
    for number in range(4):
        gate, up = (linear(x, f"{number}.{part}_proj") for part in ("gate", "up"))
        inner = experts._apply_gate(torch.stack([gate, up], -1).flatten(-2))
        found = linear(inner, f"{number}.down_proj")
        expected = experts(x, torch.full((5, 1), number), torch.ones(5, 1))
        torch.testing.assert_close(found, expected)


def test_the_view_of_a_conv1d_is_transposed() -> None:
    model, name = gpt2(), "transformer.h.0.attn.c_attn"
    ((_, view),) = views_of(model, name).items()
    module, x = model.get_submodule(name), torch.randn(3, 32)
    bias = view.read_bias(model.get_parameter(view.bias))
    found = F.linear(x, view.read(model.get_parameter(view.parameter)), bias)
    torch.testing.assert_close(found, module(x))
    assert view.shape == (96, 32)


@pytest.mark.parametrize("family", [mixtral, qwen3_moe])
def test_saved_names_are_those_that_a_checkpoint_has(family) -> None:
    model = family()
    found, left = find_stacks(model)
    assert not left
    for stack in found:
        names = saved_names(model, stack)
        assert names.keys() == {view.module for view in stack.weights}
        if family is mixtral:
            names = {own: name for own, name in names.items() if own.endswith("0.gate_proj")}
            assert all(name.endswith("block_sparse_moe.experts.0.w1") for name in names.values())
        else:
            assert all(own == name for own, name in names.items())


def test_a_stack_that_is_saved_as_one_tensor_is_left_alone() -> None:
    found, left = find_stacks(granite_moe())
    assert not found
    assert all("one tensor for all matrices" in reason for reason in left.values())
