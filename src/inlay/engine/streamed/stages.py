"""A traced model cut into stages at its blocks, so that batches can stop between them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from inlay.calibration.tracing.blocks import is_block_call
from inlay.errors import GraphError
from inlay.padding.of_batch import Padding

__all__ = ["StagedGraph", "Started", "Starting"]


class StagedGraph:
    """The graph of a model around its blocks, cut in front of every call of a block.

    The first stage is what comes before the blocks; every other one is a block and what follows it
    up to the next. The ops are those of the graph, and run in its order, so a batch that goes
    through all stages is computed as by the graph as a whole.

    :param run: runs the graph as a whole: the `forward` of a graph module
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        gm = getattr(run, "__self__", None)
        if not isinstance(gm, GraphModule) or not any(map(is_block_call, gm.graph.nodes)):
            raise GraphError("the graph calls no blocks")
        self._gm = gm
        self._inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.stages: list[list[Node]] = [[]]
        for node in gm.graph.nodes:
            if is_block_call(node):
                self.stages.append([])
            if node.op != "placeholder":
                self.stages[-1].append(node)
        self._last_use = self._find_last_uses()
        self._kept = [self._find_kept(stage) for stage in range(len(self.stages))]

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that the stages after the first run, in order."""
        return [stage[0].target.run.block.module for stage in self.stages[1:]]  # type: ignore[union-attr]

    def parameters(self, stage: int, args: Sequence[Any]) -> list[nn.Parameter]:
        """The parameters among the arguments that the nodes of a stage read."""
        read = {input for node in self.stages[stage] for input in node.all_input_nodes}
        given = zip(self._inputs, args, strict=True)
        return [arg for node, arg in given if node in read and isinstance(arg, nn.Parameter)]

    def lasts(self, name: str, stage: int) -> bool:
        """Whether a value that is kept before a stage is kept after it too."""
        return stage + 1 < len(self.stages) and name in self._kept[stage + 1]

    def run(self, stage: int, args: Sequence[Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Run one stage.

        :param args: arguments of the graph
        :param values: by name, those that earlier stages computed and this or a later one reads
        :return: the same for the next stage; after the last, what the graph returns as `output`
        """
        known: dict[Node, Any] = dict(zip(self._inputs, args, strict=True))
        known.update({node: values[name] for name, node in self._kept[stage].items()})
        nodes = self.stages[stage]
        left = _uses_within(nodes)
        for node in nodes:
            known[node] = self._call(node, known)
            for used in node.all_input_nodes:
                left[used] -= 1
                # Free what nothing reads any more, as the graph itself would.
                if not left[used] and self._last_use.get(used, -1) <= stage:
                    known.pop(used, None)
            if node not in self._last_use and node.op != "output":
                known.pop(node)
        if stage + 1 == len(self.stages):
            return {"output": known[nodes[-1]]}
        return {name: known[node] for name, node in self._kept[stage + 1].items()}

    def _call(self, node: Node, known: Mapping[Node, Any]) -> Any:
        if node.op == "get_attr":
            return self._attribute(str(node.target))

        def value_of(input: Node) -> Any:
            # An attribute of the graph may stand far in front of what reads it.
            return known[input] if input in known else self._attribute(str(input.target))

        args, kwargs = _filled_in(node.args, value_of), _filled_in(node.kwargs, value_of)
        if node.op == "output":
            return args[0]
        if node.op == "call_module":
            return self._attribute(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _attribute(self, name: str) -> Any:
        value: Any = self._gm
        for part in name.split("."):
            value = getattr(value, part)
        return value

    def _find_kept(self, stage: int) -> dict[str, Node]:
        return {
            node.name: node
            for number, nodes in enumerate(self.stages[:stage])
            for node in nodes
            if node.op != "get_attr" and self._last_use.get(node, number) >= stage
        }

    def _find_last_uses(self) -> dict[Node, int]:
        found = {}
        for number, nodes in enumerate(self.stages):
            for node in nodes:
                found.update(dict.fromkeys(node.all_input_nodes, number))
        return found


class Started:
    """A batch before its first stage: the graph that it was traced to, and its arguments."""

    def __init__(self, graph: StagedGraph, args: Sequence[Any], padding: Padding) -> None:
        self.graph, self._args = graph, list(args)
        self._padding, self._own = padding, padding.current

    def run(self, stage: int, values: Mapping[str, Any]) -> dict[str, Any]:
        with self._padding.using(self._own):
            return self.graph.run(stage, self._args, values)

    def parameters(self, stage: int) -> list[nn.Parameter]:
        return self.graph.parameters(stage, self._args)


class Starting:
    """Takes the place of graphs in a calibration, and hands over the batches they are called with.

    With the results of a batch at hand, it answers a call with these instead, so that the model
    makes its outputs from them.

    :param padding: that of the batch that is started, which its stages run with
    """

    def __init__(self, padding: Padding) -> None:
        self._padding = padding
        self._started: list[Started] = []
        self._results: Any = None

    def arrange(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Replace a graph. One that returns nothing is called for its statistics."""
        graph = StagedGraph(run)
        (output,) = graph.stages[-1][-1:]
        returned = output.args[0]
        nothing = (None,) * len(returned) if isinstance(returned, (tuple, list)) else None

        def start(*args: Any) -> Any:
            if self._results is not None:
                results, self._results = self._results, None
                return results
            self._started.append(Started(graph, args, self._padding))
            return nothing

        return start

    def start(self, run: Callable[[], Any]) -> Started:
        """Start a batch.

        :param run: runs it through the calibration
        """
        self._started.clear()
        run()
        if len(self._started) != 1:
            raise GraphError("the batch does not run as one graph")
        return self._started.pop()

    def finish(self, run: Callable[[], Any], results: Any) -> Any:
        """Return what the model makes of the results of a batch that went through all stages."""
        self._results = results
        return run()


def _filled_in(value: Any, value_of: Callable[[Node], Any]) -> Any:
    """Put values in the place of nodes, in containers as the code of a graph makes them.

    Those of torch.fx are types of their own, which a block that is traced would see.
    """
    if isinstance(value, Node):
        return value_of(value)
    if isinstance(value, tuple):
        items = [_filled_in(item, value_of) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_filled_in(item, value_of) for item in value]
    if isinstance(value, dict):
        return {key: _filled_in(item, value_of) for key, item in value.items()}
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return slice(*(_filled_in(part, value_of) for part in parts))
    return value


def _uses_within(nodes: Sequence[Node]) -> dict[Node, int]:
    uses: dict[Node, int] = {}
    for node in nodes:
        for used in node.all_input_nodes:
            uses[used] = uses.get(used, 0) + 1
    return uses
