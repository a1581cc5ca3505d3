"""Say in words what is observed, and print graphs so that a person can read them."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch.fx import GraphModule, Node

from inlay.calibration.compiled_graph import CompiledGraph
from inlay.calibration.phase import Phase
from inlay.graph import (
    EnclosedSlot,
    enclosed_slots,
    format_graph,
    inputs_of,
    module_path,
    slots_of,
    tensor_of,
)
from inlay.nodes.kernels import float8_linear, integer_linear
from inlay.nodes.observe import Observe
from inlay.passes import kept_from_kernels
from inlay.recipe import Plan, Slot
from inlay.recipe.describe import format_in_words, left_in_words
from inlay.statistics.by_slot import StatisticsBySlot

if TYPE_CHECKING:
    from inlay.calibration.graph_store import GraphStore

__all__ = ["dropout_in", "explain", "kernels_in_words", "padding_problem"]


def explain(
    statistics: StatisticsBySlot, graphs: "GraphStore", equalization: Iterable[str] = ()
) -> str:
    """Return the slots as a table, what is equalized, how graphs run, then every distinct graph."""
    slots = statistics.plan.slots
    header = ("slot", "observer", "format", "values seen", "shared with")
    rows = [header, *(_row(statistics, slot) for slot in _first_of_stacks(statistics.plan))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    opaque = {
        f"{observe.rule.name} runs outside the compiled graph: {observe.reason}"
        for graph in graphs
        for observe in (node.target for node in _observing(graph))
        if observe.reason is not None
    }
    parts = [f"{len(slots)} slots, phase: {graphs.phase.value}", "\n".join(lines), *sorted(opaque)]
    left = {**statistics.plan.stacks_left, **statistics.plan.modules_left}
    parts += left_in_words(left)
    if graphs.agreement is not None:
        parts.append(str(graphs.agreement))
    enclosed = dict.fromkeys(str(one) for graph in graphs for one in _enclosed(statistics, graph))
    if enclosed:
        parts.append("\n".join(enclosed))
    if equalization:
        parts.append("\n".join(equalization))
    if graphs.described():
        parts.append("\n".join(graphs.described()))
    for index, graph in enumerate(graphs):
        for variant in graph.variants.values():
            parts.append(f"graph {index}:\n{format_graph(variant.graph_module)}")
    if not len(graphs):
        parts.append("no graph yet: run a batch through the compiled model")
    return "\n\n".join(parts)


def kernels_in_words(graphs: "GraphStore") -> list[str]:
    """Say which layers of finalized graphs multiply integers, and why others do not.

    Of blocks with one graph, the first is named.
    """
    if graphs.phase is not Phase.QUANTIZE or not graphs.backend.uses_kernels:
        return []
    lowered: set[str] = set()
    kept: dict[str, list[str]] = {}
    for gm in (
        variant.graph_module
        for graph in graphs
        if graph.backend is graphs.backend
        for variant in graph.variants.values()
    ):
        on_kernels = (
            node for node in gm.graph.nodes if node.target in (float8_linear, integer_linear)
        )
        lowered.update(slots_of(node)["weight"].module for node in on_kernels)
        for node, reason in kept_from_kernels(gm):
            kept.setdefault(reason, []).append(slots_of(node)["weight"].module)
    described = [f"integer kernels compute {', '.join(sorted(lowered))}"] if lowered else []
    for reason, modules in sorted(kept.items()):
        named = ", ".join(sorted(set(modules)))
        described.append(f"quantize-dequantize computes {named}: {reason}")
    return described


def padding_problem(graphs: Iterable[CompiledGraph]) -> str | None:
    """Say why graphs that observe would count the padding of batches, if they would."""
    nodes = [node for graph in graphs for node in _observing(graph)]
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
    return None


def dropout_in(gm: GraphModule) -> list[str]:
    """Return where a traced graph drops values at random: the modules, or the functions."""
    found = (_dropping(node) for node in gm.graph.nodes if node.op == "call_function")
    return list(dict.fromkeys(name for name in found if name is not None))


def _dropping(node: Node) -> str | None:
    assert isinstance(node.target, Callable)  # type: ignore[arg-type]
    if node.target is F.scaled_dot_product_attention:
        probability = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
    elif node.target in _DROPOUT:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        given.apply_defaults()
        probability = given.arguments["p"] if given.arguments["training"] else 0.0
    else:
        return None
    name = getattr(node.target, "__name__", str(node.target))
    return (module_path(node) or name) if probability else None


_DROPOUT = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
)


def _observing(graph: CompiledGraph) -> Iterator[Any]:
    """Yield the nodes whose targets are `Observe`."""
    for variant in graph.variants.values():
        for node in variant.graph_module.graph.nodes:
            if isinstance(node.target, Observe):
                yield node


def _enclosed(statistics: StatisticsBySlot, graph: CompiledGraph) -> Iterable[EnclosedSlot]:
    """Slots of a graph that are left alone because of what their ops stand in."""
    for variant in graph.variants.values():
        # Variants may be pruned; the graph is whole, but does not know the tensors of its inputs.
        gm = variant.graph_module
        known = {node.name: tensor_of(gm, node) for node in inputs_of(gm.graph)}
        tensors = {name: tensor for name, tensor in known.items() if tensor is not None}
        yield from enclosed_slots(graph.gm, statistics.plan, tensors)


def _first_of_stacks(plan: Plan) -> Iterator[Slot]:
    """Yield all slots, but of the matrices of a stack, which are quantized alike, the first."""
    return (slot for slot in plan.slots.values() if not _index(plan, slot))


def _index(plan: Plan, slot: Slot) -> int | None:
    weight = plan.weights.get(slot.module)
    return None if weight is None else weight.index


def _shown(plan: Plan, slot: Slot) -> str:
    if _index(plan, slot) is None:
        return slot.name
    holder, _, projection = slot.module.rsplit(".", 2)
    count = len(plan.stacks[plan.weights[slot.module].parameter].by_index)
    return f"{holder}.0 … {count - 1}.{projection}.{slot.base_name}"


def _row(statistics: StatisticsBySlot, slot: Slot) -> tuple[str, str, str, str, str]:
    sharing = [other.name for other in statistics.shared_with(slot) if other != slot]
    if not slot.is_observed:
        observer, seen = "none, it is dynamic", "-"
    else:
        observer = slot.observer
        seen = "at finalize" if slot.is_weight else str(statistics.seen(slot))
    format = format_in_words(slot.args, slot.base_name)
    return _shown(statistics.plan, slot), observer, format, seen, ", ".join(sharing) or "-"
