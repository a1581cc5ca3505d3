"""Experts of one parameter as Linear modules, run one after another: the specification."""

from typing import Any

import torch
from torch import nn

from inlay.recipe import Plan

__all__ = ["LinearExperts", "linear_weights", "use_linear_experts"]


class LinearExperts(nn.Module):
    """The experts of a module of transformers, each with a Linear for each of its projections.

    Its children have the names that a recipe and a checkpoint know them by: `3.gate_proj`.

    :param experts: the module that keeps them in one parameter
    :param name: of that module in the model
    :ivar tokens: the numbers of the tokens that the running expert is given
    """

    def __init__(self, experts: nn.Module, plan: Plan, name: str) -> None:
        super().__init__()
        self._of: list[Any] = [experts]  # its parameters are no parameters of this module
        self.every_token = plan.recipe.experts == "all"
        self.tokens = torch.empty(0, dtype=torch.int64)
        self.linears: dict[str, nn.Linear] = {}
        for stack in (stack for stack in plan.stacks.values() if stack.holder == name):
            parameter = experts.get_parameter(stack.name.rpartition(".")[2])
            for own, weight in linear_weights(stack.name, parameter).items():
                _, number, projection = own.rsplit(".", 2)
                if number not in self._modules:
                    self.add_module(number, nn.Module())
                rows, columns = weight.shape
                linear = nn.Linear(columns, rows, bias=False, device="meta")
                linear.weight = nn.Parameter(weight, requires_grad=False)
                self.get_submodule(number).add_module(projection, linear)
                self.linears[own] = linear

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        result = torch.zeros_like(rows)
        for number, expert in self.named_children():
            chosen = top_k_index == int(number)
            tokens = chosen.any(-1).nonzero().flatten()
            if self.every_token:
                self.tokens = torch.arange(len(rows), device=rows.device)
                found = self._run(expert, rows)[tokens]
            elif len(tokens):
                self.tokens = tokens
                found = self._run(expert, rows[tokens])
            else:
                continue
            share = (top_k_weights * chosen).sum(-1)[tokens].unsqueeze(-1)
            result.index_add_(0, tokens, (found * share).to(result.dtype))
        return result.reshape(hidden_states.shape)

    def _run(self, expert: Any, rows: torch.Tensor) -> torch.Tensor:
        (of,) = self._of
        # As a sequence: of a matrix, compressed-tensors would give one scale to all tokens.
        rows = rows.unsqueeze(0)
        if of.has_gate:
            inner = of._apply_gate(torch.cat([expert.gate_proj(rows), expert.up_proj(rows)], -1))
        else:
            inner = of.act_fn(expert.up_proj(rows))
        result: torch.Tensor = expert.down_proj(inner)
        return result.squeeze(0)


def linear_weights(name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Cut a parameter of experts into the weights of Linear modules, by their names."""
    experts, _, own = name.rpartition(".")
    projections = ("gate_proj", "up_proj") if own == "gate_up_proj" else (own,)
    return {
        f"{experts}.{number}.{projection}": weight
        for number, expert in enumerate(parameter.detach().unbind())
        for projection, weight in zip(projections, expert.chunk(len(projections)), strict=True)
    }


def use_linear_experts(model: nn.Module, plan: Plan) -> None:
    """Put Linear modules in place of the quantized experts of a model, a copy to be thrown away."""
    for name in dict.fromkeys(stack.holder for stack in plan.stacks.values()):
        parent, _, own = name.rpartition(".")
        linear = LinearExperts(model.get_submodule(name), plan, name)
        model.get_submodule(parent).add_module(own, linear)
