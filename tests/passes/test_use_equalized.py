import pytest
import torch
from graphs import TRACERS, Functional, inputs_for, linear, ops, trace
from torch import nn

from inlay.equalization.group import Group, Producer
from inlay.equalization.parameters import EqualizedParameters
from inlay.graph import added_inputs, bind
from inlay.passes import UseEqualized

X = torch.randn(2, 4)
SCALE = torch.tensor([0.5, 2.0, 1.0, 4.0])


def model_and_scaled() -> tuple[nn.Module, EqualizedParameters]:
    norm = nn.RMSNorm(4)
    nn.init.normal_(norm.weight)
    model = Functional(lambda self, x: self.fc(self.norm(x)), norm=norm, fc=linear())
    equalized = EqualizedParameters(model)
    producers = (Producer(parameter="norm.weight", axes=(0,)),)
    group = Group(readers=("fc",), producers=producers, shape=(4,))
    equalized.scale({group: SCALE}, lambda reader: f"{reader}.weight")
    return model, equalized


def test_docstring_example() -> None:
    model, equalized = model_and_scaled()
    result = UseEqualized(equalized=equalized)(trace("dynamo", model, X))
    assert result.modified
    assert ops(result.graph_module)[-2:] == [
        "linear = linear(rms_norm, fc.weight equalized, None)",
        "return (linear)",
    ]
    assert "norm.weight equalized" in ops(result.graph_module)[0]
    added = {what.owner for what in added_inputs(result.graph_module.graph).values()}
    assert added == {"norm.weight", "fc.weight"}


@pytest.mark.parametrize("how", TRACERS)
def test_graphs_of_all_tracers_compute_the_same_with_scaled_parameters(how: str) -> None:
    model, equalized = model_and_scaled()
    gm = UseEqualized(equalized=equalized)(trace(how, model, X)).graph_module
    constants = {what: equalized.named(what.owner) for what in added_inputs(gm.graph).values()}
    assert len(constants) == 2
    bound = bind(gm, constants)
    with torch.no_grad():
        result = bound(*inputs_for(bound, X))
    result = result if isinstance(result, torch.Tensor) else result[0]
    torch.testing.assert_close(result, model(X))


def test_nothing_to_scale_changes_nothing_and_neither_does_a_second_run() -> None:
    model, equalized = model_and_scaled()
    gm = trace("dynamo", model, X)
    assert not UseEqualized()(gm).modified
    assert not UseEqualized(equalized=EqualizedParameters(model))(gm).modified
    once = UseEqualized(equalized=equalized)(gm).graph_module
    assert not UseEqualized(equalized=equalized)(once).modified
