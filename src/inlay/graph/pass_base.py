"""What a pass is, and how passes are run one after the other."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, NamedTuple

from torch.fx import GraphModule, Node

from inlay.errors import ConfigurationError, GraphError, InlayError

__all__ = ["Pass", "PassResult", "Pipeline"]


class PassResult(NamedTuple):
    """The graph a pass returns, and whether it differs from the one it was given."""

    graph_module: GraphModule
    modified: bool


@dataclass(frozen=True, kw_only=True)
class Pass(ABC):
    """A function from graph to graph. Its configuration is in its fields.

    A pass leaves the graph it is given as it was, and changes nothing when it is run on its own
    result. `requires` and `ensures` raise `GraphError` if the graph is not what the pass needs or
    what it promises.
    """

    # Whether the graph computes the same as before; a pass that is meant to change it says False.
    keeps_function: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def call(self, gm: GraphModule) -> PassResult:
        """Rewrite the graph."""

    def requires(self, gm: GraphModule) -> None:  # noqa: B027  most passes take any graph
        """Check the graph before the pass."""

    def ensures(self, gm: GraphModule) -> None:  # noqa: B027
        """Check the graph after the pass."""

    def __call__(self, gm: GraphModule) -> PassResult:
        self.requires(gm)
        result = self.call(gm)
        result.graph_module.graph.lint()
        self.ensures(result.graph_module)
        return result


@dataclass(frozen=True)
class Pipeline:
    """Passes in order, each on the result of the one before."""

    passes: Sequence[Pass]

    @classmethod
    def of(cls, passes: Iterable["type[Pass] | Pass"], **configuration: Any) -> "Pipeline":
        """Instantiate each pass, filling its fields from the configuration.

        A field that the configuration does not name keeps its default. A pass that is an instance
        already is taken as it is.
        """
        return cls(
            tuple(
                step if isinstance(step, Pass) else step(**_settings(step, configuration))
                for step in passes
            )
        )

    def __call__(self, gm: GraphModule) -> PassResult:
        modified = False
        done: list[str] = []
        for step in self.passes:
            try:
                result = step(gm)
            except InlayError as error:
                raise type(error)(f"{_place(step, done, error)}: {error}") from error
            except Exception as error:
                raise GraphError(
                    f"{_place(step, done, error)}: {type(error).__name__}: {error}"
                ) from error
            gm, modified = result.graph_module, modified or result.modified
            done.append(step.name)
        return PassResult(gm, modified)


def _settings(step: type[Pass], configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a pass that the configuration names."""
    missing = [
        f.name
        for f in fields(step)
        if f.name not in configuration and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise ConfigurationError(
            f"{step.__name__} needs {', '.join(missing)}, which the configuration does not name"
        )
    return {f.name: configuration[f.name] for f in fields(step) if f.name in configuration}


def _place(step: Pass, done: list[str], error: Exception) -> str:
    node = _node_at_hand(error)
    at = "" if node is None else f" at node {node.name}"
    return f"in pass {step.name}, after {', '.join(done) if done else 'no other'}{at}"


def _node_at_hand(error: Exception) -> Node | None:
    """The node that was worked on: passes call the one they are at `node`."""
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        node = traceback.tb_frame.f_locals.get("node")
        found = node if isinstance(node, Node) else found
        traceback = traceback.tb_next
    return found
