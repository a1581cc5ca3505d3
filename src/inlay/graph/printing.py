"""Print graphs so that a person can read what was done to them."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from inlay.graph.inputs import EqualizedOf, IntegersOf, WeightOf, added_input, added_inputs
from inlay.graph.meta import made_by, observes, slots_of
from inlay.graph.shapes import fake_value

__all__ = ["format_graph"]


def format_graph(gm: GraphModule) -> str:
    """The graph, an op a line, with shapes, and with marks on what passes added."""
    added = added_inputs(gm.graph)
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node in added:
            continue
        lines.append(_line(node))
    inputs = [node.name for node in gm.graph.find_nodes(op="placeholder") if node not in added]
    state = f"; {len(added)} of state and qparams" if added else ""
    return "\n".join([f"    # {len(inputs)} inputs{state}", *filter(None, lines)])


def _line(node: Node) -> str:
    if node.op == "placeholder":
        return ""
    if node.op == "output":
        return f"    return {_argument(node.args[0])}"
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
    own = [argument for argument in node.args if not _is_hidden(argument)]
    hidden = ", …" if len(own) < len(node.args) else ""
    arguments = ", ".join(
        [*map(_argument, own), *(f"{key}={_argument(value)}" for key, value in node.kwargs.items())]
    )
    call = f"{target}({arguments}{hidden})"
    if not observes(node):
        call = f"{node.name}{_shape(node)} = {call}"
    notes = [slot.name for slot in observes(node)]
    notes += [f"{slot.name} dynamic" for slot in slots_of(node).values() if not slot.is_observed]
    if made_by(node) is not None:
        notes.append(f"by {made_by(node)}")
    return f"    {call}" + (f"  # {', '.join(notes)}" if notes else "")


def _is_hidden(value: Any) -> bool:
    """Whether an argument is state or a scale. There are many of these, so they are not printed."""
    what = added_input(value)
    return what is not None and not isinstance(what, (WeightOf, IntegersOf, EqualizedOf))


def _argument(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_argument, value))})"
    if not isinstance(value, Node):
        return repr(value)
    what = added_input(value)
    if what is not None:
        return str(what)
    return _source(value.name) if value.op == "placeholder" else value.name


def _source(name: str) -> str:
    """The name of a parameter or argument, from what Dynamo makes of it."""
    if not name.startswith("l_"):
        return name
    for word in ("modules", "parameters", "buffers"):
        name = name.replace(f"_{word}_", ".")
    return name.removeprefix("l_").removesuffix("_").removeprefix("self.")


def _shape(node: Node) -> str:
    value = fake_value(node)
    if not isinstance(value, torch.Tensor):
        return ""
    return f": {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
