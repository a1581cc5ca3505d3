"""The graphs that docstrings of passes show, before and after."""

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node, symbolic_trace

from inlay.graph import propagate_shapes

__all__ = ["Documented", "difference", "documented"]

_GETITEM = ("getitem", "_getitem")  # reads a result of a call, which docstrings leave out


@dataclass(frozen=True)
class Documented:
    """What a docstring shows: the lines of a graph before and after a pass.

    A graph starts with a line of its inputs. Its ops are compared, with what they read: `...`
    stands for arguments that do not matter, and a comment for what a node is known by.
    """

    lines_before: tuple[str, ...]
    lines_after: tuple[str, ...]

    def graph(self) -> GraphModule | None:
        """The graph before, if its lines are Python that can be traced."""
        inputs, *lines = self.lines_before
        names = [part.split(":")[0].strip() for part in inputs.split(",")]
        source = "\n    ".join([f"def forward({', '.join(names)}):", *lines])
        scope: dict[str, Any] = {**vars(torch), **vars(F), "torch": torch, "F": F}
        example = [torch.ones(4, 4) for _ in names]
        try:
            # It is the code of whoever wrote the pass, as in a doctest.
            exec(source, scope)
            return propagate_shapes(symbolic_trace(scope["forward"]), *example)
        except Exception:
            return None


def documented(cls: type) -> Documented | None:
    """The graphs in the docstring of a pass, under the words `Before:` and `After:`."""
    lines = (inspect.getdoc(cls) or "").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("Before:") and "After:" in line:
            column = line.index("After:")
            shown = []
            for row in lines[number + 1 :]:
                if not row.strip():
                    break
                shown.append((row[:column].strip(), row[column:].strip()))
            before, after = zip(*shown, strict=True)
            return Documented(tuple(filter(None, before)), tuple(filter(None, after)))
    return None


def difference(lines: Sequence[str], gm: GraphModule) -> str | None:
    """Say how a graph differs from the lines that show it; None if it does not.

    Ops are compared by name and in order. What they read and what is returned may have other names
    in the graph, but the same name has to stand for the same value throughout.
    """
    shown = [call for call in _calls_in(lines) if call.op not in _GETITEM]
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    nodes = [node for node in nodes if _op_of(node) not in _GETITEM]
    names, found = [call.op for call in shown], [_op_of(node) for node in nodes]
    if names != found:
        return f"the docstring shows {_listed(names)}, and the graph has {_listed(found)}"
    values = _Values({node.name: node for node in gm.graph.find_nodes(op="placeholder")})
    for call, node in zip(shown, nodes, strict=True):
        operands = [*zip(call.operands, node.args, strict=False)]
        operands += [(name, node.kwargs.get(key)) for key, name in call.keywords.items()]
        for name, operand in operands:
            if not values.agree(name, operand):
                return f"{call.op} reads {name} in the docstring, and {operand} in the graph"
        if call.result is not None and not values.agree(call.result, node):
            return f"{call.result} is another value in the docstring than {node} in the graph"
    (output,) = gm.graph.find_nodes(op="output")
    given = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    for name, value in zip(_returned_in(lines), given, strict=False):
        if not values.agree(name, value):
            return f"the docstring returns {name}, and the graph {value}"
    return None


@dataclass(frozen=True)
class _Call:
    """A line that calls an op.

    :param operands: names of the values it reads, up to `...`; None for what is no value
    """

    op: str
    operands: tuple[str | None, ...]
    keywords: dict[str, str | None]
    result: str | None


@dataclass
class _Values:
    """Which value of a graph each name in a docstring stands for, inputs by their own names."""

    known: dict[str, Node]

    def agree(self, name: str | None, value: Any) -> bool:
        if name is None:
            return True
        if not isinstance(value, Node):
            return False
        while _op_of(value) in _GETITEM:  # results of a call go by the name of the call
            value = value.args[0]
        return self.known.setdefault(name, value) is value


def _calls_in(lines: Sequence[str]) -> Iterator[_Call]:
    aliases: dict[str, str] = {}
    for statement in _statements(lines):
        value = getattr(statement, "value", None)
        if not isinstance(statement, (ast.Assign, ast.Expr)) or not isinstance(value, ast.Call):
            continue
        result = None
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            result = statement.targets[0].id
        call = _call(value, result, aliases)
        if call.op in _GETITEM and result is not None and call.operands[0] is not None:
            aliases[result] = call.operands[0]
        yield call


def _call(value: ast.Call, result: str | None, aliases: dict[str, str]) -> _Call:
    def name_of(operand: ast.expr) -> str | None:
        return aliases.get(operand.id, operand.id) if isinstance(operand, ast.Name) else None

    operands = []
    function = value.func
    if isinstance(function, ast.Attribute) and name_of(function.value) not in (None, "torch", "F"):
        operands.append(name_of(function.value))  # a method
    for operand in value.args:
        if isinstance(operand, ast.Constant) and operand.value is ...:
            break
        operands.append(name_of(operand))
    op = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
    keywords = {each.arg: name_of(each.value) for each in value.keywords if each.arg is not None}
    return _Call(op, tuple(operands), keywords, result)


def _returned_in(lines: Sequence[str]) -> list[str | None]:
    aliases = {
        call.result: call.operands[0]
        for call in _calls_in(lines)
        if call.op in _GETITEM and call.result is not None
    }
    for statement in _statements(lines):
        if isinstance(statement, ast.Return):
            value = statement.value
            values = value.elts if isinstance(value, ast.Tuple) else [value]
            names = [each.id if isinstance(each, ast.Name) else None for each in values]
            return [aliases.get(name, name) if name is not None else None for name in names]
    return []


def _statements(lines: Sequence[str]) -> Iterator[ast.stmt]:
    for line in lines:
        try:
            yield from ast.parse(line).body
        except SyntaxError:
            continue  # words


def _op_of(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
