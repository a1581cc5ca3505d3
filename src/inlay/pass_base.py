"""What a pass is, and how passes are run one after the other."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import GraphModule

from inlay.errors import GraphError, InlayError

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

    def __call__(self, gm: GraphModule) -> PassResult:
        modified = False
        done: list[str] = []
        for step in self.passes:
            try:
                result = step(gm)
            except InlayError as error:
                raise type(error)(f"{_place(step, done)}: {error}") from error
            except Exception as error:
                raise GraphError(
                    f"{_place(step, done)}: {type(error).__name__}: {error}"
                ) from error
            gm, modified = result.graph_module, modified or result.modified
            done.append(step.name)
        return PassResult(gm, modified)


def _place(step: Pass, done: list[str]) -> str:
    return f"in pass {step.name}, after {', '.join(done) if done else 'no other'}"
