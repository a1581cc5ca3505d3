"""Whether observers could tell the padding of batches from data."""

from collections.abc import Iterable

from inlay.calibration.compiled_graph import CompiledGraph
from inlay.nodes.observe import Observe

__all__ = ["padding_problem"]


def padding_problem(graphs: Iterable[CompiledGraph]) -> str | None:
    """Why graphs that observe would count padding, if they would."""
    nodes = [
        node
        for graph in graphs
        for variant in graph.variants.values()
        for node in variant.graph_module.graph.nodes
        if isinstance(node.target, Observe)
    ]
    unable = {
        node.target.rule.name
        for node in nodes
        if not node.target.is_opaque and not node.target.rule.leaves_out_padding
    }
    if unable:
        return (
            f"which {', '.join(sorted(unable))} cannot leave out: it has no method "
            "update_statistics_from_valid"
        )
    if nodes and not any("mask" in node.kwargs for node in nodes):
        return "and the model reads no attention_mask that would tell it from data"
    return None
