"""Keep the padding of a batch out of the statistics."""

import warnings
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from inlay.graph import (
    Pass,
    PassResult,
    attention_masks,
    copy,
    fake_value,
    module_path,
    observes,
    require_whole,
)
from inlay.nodes.experts import ObserveExperts
from inlay.nodes.observe import Observe
from inlay.nodes.routing import Routing, routing_by
from inlay.statistics.rule import Rule
from inlay.torch_private import sizes_are_equal

__all__ = ["LeaveOutPadding"]


@dataclass(frozen=True, kw_only=True)
class LeaveOutPadding(Pass):
    """Give observe nodes the attention mask of the batch, if the model is called with one.

    Before:                             After:
        x, attention_mask                   x, attention_mask
        observe(x, fc_input_seen, ...)      observe(x, fc_input_seen, ..., mask=attention_mask)
        y = linear(x, w)                    y = linear(x, w)
        return y                            return y

    A mask has a number for each token of each sequence, zero for padding. A value is matched with a
    mask by its shape. A value without tokens, such as the input of a pooler, counts as a whole.
    Rows that are sent to experts are the tokens that the graph took them from.
    """

    def requires(self, gm: GraphModule) -> None:
        require_whole(gm)

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        masks = attention_masks(gm)
        modified = False
        for node in gm.graph.nodes:
            if not isinstance(node.target, Observe) or "mask" in node.kwargs:
                continue
            routing = _routing_of(node)
            mask = _mask_of(node, masks, node.args[0] if routing is None else routing.source)
            if mask is None:
                continue
            if routing is not None:
                node.update_kwarg("token_of_row", routing.tokens)
            elif node.target.reason is None and not node.target.rule.leaves_out_padding:
                _warn(node.target.rule)
                continue
            node.update_kwarg("mask", mask)
            modified = True
        gm.recompile()
        return PassResult(gm, modified)


def _routing_of(node: Node) -> Routing | None:
    ends = node.kwargs.get("ends") if isinstance(node.target, ObserveExperts) else None
    return routing_by(ends) if isinstance(ends, Node) else None


def _mask_of(node: Node, masks: dict[str, Node], of: object) -> Node | None:
    value = fake_value(of) if isinstance(of, Node) else None
    assert isinstance(node.target, Observe)
    if not isinstance(value, torch.Tensor):
        return None
    rule = node.target.rule
    fitting = {name: m for name, m in masks.items() if _fits(value, fake_value(m), rule)}
    if len(fitting) < 2:
        return next(iter(fitting.values()), None)
    # Encoder and decoder may happen to have the same length.
    path = module_path(node) or observes(node)[0].module
    own = [m for name, m in fitting.items() if f"{name.partition('_')[0]}." in path]
    return own[0] if own else fitting.get("attention_mask")


def _fits(value: torch.Tensor, mask: torch.Tensor, rule: Rule) -> bool:
    """Tell whether the observations in a value are the tokens of the mask, in that order."""
    batch, tokens = mask.shape
    if rule.slot.args.strategy == "token" and not rule.slot.is_channels:
        return False
    if rule.slot.is_attention:
        return sizes_are_equal(value.shape[0], batch) and sizes_are_equal(value.shape[2], tokens)
    if value.ndim == 2:
        return sizes_are_equal(value.shape[0], batch * tokens)
    return (
        value.ndim > 2
        and sizes_are_equal(value.shape[0], batch)
        and sizes_are_equal(value.shape[1], tokens)
    )


def _warn(rule: Rule) -> None:
    # Leave out the slot's name: Python shows the same text for all slots only once.
    warnings.warn(
        f"observer {rule.name} counts the padding of batches; override its method "
        "update_statistics_from_valid to leave it out",
        stacklevel=2,
    )
