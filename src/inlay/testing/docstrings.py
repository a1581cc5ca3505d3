"""The graphs that docstrings of passes show, before and after."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, symbolic_trace

from inlay.graph import propagate_shapes

__all__ = ["Documented", "documented", "op_names"]

_CALL = re.compile(r"^(?:\w+ = )?(?:\w+\.)*(\w+)\(")
_GETITEM = ("getitem", "_getitem")  # reads a result of a call, which docstrings leave out


@dataclass(frozen=True)
class Documented:
    """What a docstring shows: the lines of a graph before and after a pass.

    A graph starts with a line of its inputs. The names of its ops are compared; `...` stands for
    arguments that do not matter, and a comment for what a node is known by.
    """

    lines_before: tuple[str, ...]
    lines_after: tuple[str, ...]

    @property
    def before(self) -> list[str]:
        return _ops_in(self.lines_before)

    @property
    def after(self) -> list[str]:
        return _ops_in(self.lines_after)

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


def _ops_in(lines: Sequence[str]) -> list[str]:
    calls = (_CALL.match(line) for line in lines)
    names = [call.group(1) for call in calls if call is not None]
    return [name for name in names if name not in _GETITEM]


def op_names(gm: GraphModule) -> list[str]:
    """What a graph calls, by name and in order."""
    names = [
        str(getattr(node.target, "__name__", node.target))
        for node in gm.graph.nodes
        if node.op.startswith("call_")
    ]
    return [name for name in names if name not in _GETITEM]
