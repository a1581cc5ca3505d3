"""Find values whose channels can be scaled without changing what the model computes."""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from inlay.equalization.ops import Refusal, quantizes_linear, weight_source
from inlay.equalization.search import Search
from inlay.equalization.uses import uses_of_parameters
from inlay.graph import (
    Equalizable,
    Pass,
    PassResult,
    Source,
    annotate,
    copy,
    equalizable,
    mark_equalizable,
    require_whole,
    slots_of,
    weight_use,
)
from inlay.recipe import Plan, channels_of

__all__ = ["FindEqualizable"]


@dataclass(frozen=True, kw_only=True)
class FindEqualizable(Pass):
    """Find groups: quantized readers of a value, and the parameters that it is computed from.

    Before:                               After:
        h = layer_norm(x, w, b)               h = layer_norm(x, w, b)
        y = linear(h, v)  # fc.input          y = linear(h, v)  # fc.input, fc.channels
        return y                              return y  # group: v's columns, w and b

    If every producer is divided by a scale for each channel, and the columns of every reader's
    weight are multiplied by it, the value that is read changes and nothing else does. The pass
    walks back from the value through ops that commute with such a scale until parameters take it
    up, then makes sure that nobody else reads what is scaled on the way. It writes the groups, and
    the reason for each value that has none, on the output of the graph, and has the ranges of
    channels observed where a group reads. It changes nothing if the recipe does not equalize.

    :param equalizes: whether to look for groups; a graph that quantizes has no need of them
    """

    plan: Plan
    equalizes: bool = True

    def requires(self, gm: GraphModule) -> None:
        require_whole(gm)

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        if self.plan.recipe.equalize is None or not self.equalizes:
            return PassResult(gm, False)
        groups: list[Search] = []
        refused: list[tuple[Source, str]] = []
        grouped: set[Node] = set()
        for node in gm.graph.nodes:
            if node in grouped or not quantizes_linear(gm, node):
                continue
            search = Search(gm)
            try:
                self._require_own_ranges(gm, node)
                search.run(node)
            except Refusal as reason:
                refused.append((weight_source(gm, node), str(reason)))
                continue
            groups.append(search)
            grouped.update(search.readers)
        found = Equalizable(
            groups=tuple(search.found() for search in groups),
            refused=tuple(refused),
            uses=tuple(uses_of_parameters(gm, groups)),
        )
        modified = equalizable(gm) != found
        mark_equalizable(gm, found)
        for node in grouped:
            slots = slots_of(node)
            channels = channels_of(slots)
            modified |= annotate(node, {**slots, channels.key: channels})
        return PassResult(gm, modified)

    def _require_own_ranges(self, gm: GraphModule, node: Node) -> None:
        use = weight_use(gm, node)
        if use is not None and use.kind == "grouped" and self.plan.shared_range:
            reason = self.plan.shared_range
            raise Refusal(f"{reason}, and equalization gives each channels of its own size")
