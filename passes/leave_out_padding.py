"""Keep the padding of a batch out of statistics and comparisons."""

import warnings
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from inlay.errors import StatisticsError
from inlay.graph import (
    ErrorSums,
    PaddingMask,
    Pass,
    PassResult,
    add_input,
    added_input,
    copy,
    fake_value,
    observes,
    require_whole,
)
from inlay.nodes.compare_layer import CompareLayer
from inlay.nodes.observe import Observe
from inlay.nodes.routing import routing_by
from inlay.padding.layouts import Layouts
from inlay.recipe import Slot
from inlay.statistics.rule import Rule

__all__ = ["LeaveOutPadding"]


@dataclass(frozen=True, kw_only=True)
class LeaveOutPadding(Pass):
    """Give observe and compare nodes the valid tokens of the batch, as an input of the graph.

    Before:                             After:
        x                                   x, valid
        observe(x, fc_input_seen, ...)      observe(x, fc_input_seen, ..., mask=valid)
        y = linear(x, w)                    y = linear(x, w)
        return y                            return y

    The layouts say for each slot which dimensions of its value are batch and tokens, and which
    sequence the tokens are of. A slot without tokens, such as the input of a pooler, counts as a
    whole. Rows that stand in groups are the tokens that the graph took them from. A slot whose
    layout is unknown is refused if it is observed, and counts as a whole if it is compared.

    :param layouts: those of the batch; None for a batch without padding
    """

    layouts: Layouts | None = None

    def requires(self, gm: GraphModule) -> None:
        require_whole(gm)

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        modified = False
        for node in gm.graph.nodes if self.layouts is not None else ():
            if "mask" in node.kwargs:
                continue
            if isinstance(node.target, Observe):
                modified |= self._leave_out(gm, node, node.target, observes(node)[0])
            elif isinstance(node.target, CompareLayer):
                modified |= self._leave_out_if_known(gm, node)
        gm.recompile()
        return PassResult(gm, modified)

    def _leave_out(self, gm: GraphModule, node: Node, target: Observe, slot: Slot) -> bool:
        """Give an observe node its mask."""
        assert self.layouts is not None
        rule = target.rule
        if rule.slot.args.strategy == "token" and not rule.slot.watches_input:
            return False  # each token has statistics of its own
        mask = self.layouts.of(slot)
        if mask is None:
            return False
        value = node.args[0]
        ends = node.kwargs.get("ends")
        if isinstance(ends, Node):
            routing = routing_by(ends)
            if routing.tokens is None or routing.source is None:
                raise StatisticsError(
                    f"cannot leave padding out of {slot.name}: the graph does not show which "
                    "tokens its rows are of. Use batch_size=1, or count padding with "
                    "count_padding=True"
                )
            node.update_kwarg("token_of_row", routing.tokens)
            value = routing.source
        elif not target.is_opaque and not rule.leaves_out_padding:
            _warn(rule)
            return False
        self._give(gm, node, mask, value, slot)
        return True

    def _leave_out_if_known(self, gm: GraphModule, node: Node) -> bool:
        """Give a compare node its mask."""
        assert self.layouts is not None
        sums = added_input(node.args[4])
        assert isinstance(sums, ErrorSums)
        mask = self.layouts.mask_of_input(sums.owner)
        value = node.args[0]
        ends = node.kwargs.get("ends")
        if isinstance(ends, Node):
            value = routing_by(ends).source
        if mask is None or not isinstance(value, Node):
            return False
        self._give(gm, node, mask, value, None)
        return True

    def _give(
        self, gm: GraphModule, node: Node, mask: PaddingMask, value: object, slot: Slot | None
    ) -> None:
        example = fake_value(value) if isinstance(value, Node) else None
        assert isinstance(example, torch.Tensor), "an observed value has a shape"
        if slot is not None and slot.is_attention:
            example = example.select(1, 0)
        node.update_kwarg("mask", add_input(gm.graph, mask, mask.example(example), self.name))


def _warn(rule: Rule) -> None:
    # Leave out the slot's name: Python shows the same text for all slots only once.
    warnings.warn(
        f"observer {rule.name} counts the padding of batches; override its method "
        "update_statistics_from_valid to leave it out",
        stacklevel=2,
    )
