"""When to compile: pieces of a graph run op by op until the batches to come repay a compiler."""

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from inlay.files import write_atomically
from inlay.graph import fake_value, is_region
from inlay.nodes.fast_linear import fast_linear
from inlay.nodes.observe import Observe
from inlay.passes import OutlineObservers
from inlay.ranges.replay import has_estimates
from inlay.torch_private import compiler_cache_folder

__all__ = ["CompileCosts", "Forecast", "Tier"]

Compile = Callable[[GraphModule], Callable[..., Any]]

# How many times faster the parts of a graph run once they are compiled, as measured on a CPU with
# two cores. The products of matrices, most of a forward, are the same code either way.
_FORWARD = 1.1
_ESTIMATED = "searched from estimates"  # of the values of a tensor, read once for all candidates
_OBSERVERS = {
    _ESTIMATED: 1.0,
    "mse": 5.0,
    "memoryless_mse": 5.0,
    "histogram": 1.5,
    "static_minmax": 1.0,
    "memoryless_minmax": 1.0,
    "minmax": 1.0,
    "imatrix_mse": 1.0,  # sums squares of inputs here
    "channel ranges": 1.0,
}
_OTHER_OBSERVERS = 1.5
# Calls of a piece until it is known what it takes: the first one warms up, the next two are timed
# op by op, the two after them as they run. Of two times the shorter counts: the rest is noise.
_TIMED_BY_OP = (2, 3)
_PROBED = 5
# Calls of compiled code until it is given up for being slower.
_TRIED = 3
# How much more than it costs compiling must seem to save: both are estimates.
_MARGIN = 1.25
# Graphs whose costs are kept.
_REMEMBERED = 500
# How much longer than op by op compiled code may seem to take before it is given up: noise.
_SLOWER = 1.05


@dataclass
class Forecast:
    """How many batches a calibration has run, and how many more are to come.

    :param blocks: how often a batch calls a block
    :param found: of how many of these calls it is known by now which graph they run
    """

    total: int | None = None
    done: int = 0
    blocks: int = 0
    found: int = 0
    block_by_block: bool = False  # a batch counts anew for each block, and calls that one alone

    def expect(self, batches: int) -> None:
        self.total = self.done + batches

    def calls_in_a_batch(self, known: int) -> int:
        """How often a batch calls a piece, of which so many calls are known.

        The first batch has yet to meet the blocks that follow; they are taken to be like those
        before them.
        """
        if self.block_by_block:
            return 1
        if self.done or known < 2:
            return known
        return max(known, self.blocks * known // max(1, self.found))

    @property
    def left(self) -> int | None:
        """Batches after the one that runs; None if nobody says how many."""
        return None if self.total is None else max(0, self.total - self.done - 1)

    def __str__(self) -> str:
        if self.left is None:
            return "as many calls as there were so far"
        return f"{self.left} more batches" if self.left != 1 else "one more batch"


@dataclass
class CompileCosts:
    """What compiling costs on this machine, in seconds: to start, for each op, for known graphs.

    It is kept beside what the compiler caches: when that is emptied, all is slow again.
    """

    folder: Path = field(default_factory=compiler_cache_folder)
    start: float = 9.0  # with an empty cache, on two cores
    per_op: float = 0.06
    known: dict[str, float] = field(default_factory=dict)  # graphs that the compiler has cached
    started: bool = False  # whether this process has paid for the start

    def __post_init__(self) -> None:
        try:
            kept = json.loads(self._file.read_text())
            start, per_op = float(kept["start"]), float(kept["per_op"])
            known = {str(name): float(seconds) for name, seconds in kept["known"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return  # nothing was compiled here yet
        self.start, self.per_op, self.known = start, per_op, known

    @property
    def _file(self) -> Path:
        return self.folder / "inlay_costs.json"

    def estimate(self, graph: str, ops: int) -> float:
        """Seconds to compile a graph, by its fingerprint and its size."""
        own = self.known.get(graph, self.per_op * ops)
        return own if self.started else self.start + own

    def learn(self, graph: str, ops: int, seconds: float) -> None:
        """Take in what a compilation took."""
        if not self.started:
            own = min(seconds, self.known.get(graph, self.per_op * ops))
            self.start = max(1.0, seconds - own)
            self.started = True
        elif graph in self.known:
            self.known[graph] = seconds
        else:
            self.per_op = (self.per_op + seconds / max(1, ops)) / 2  # graphs differ
        # What is cached takes about a fifth; the next time tells.
        self.known.setdefault(graph, seconds / 5)
        self._keep()

    def _keep(self) -> None:
        latest = dict(list(self.known.items())[-_REMEMBERED:])
        content = {"start": self.start, "per_op": self.per_op, "known": latest}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, json.dumps(content))
        except OSError:
            return  # costs are then estimated again


@dataclass(frozen=True)
class _Choice:
    """One way to compile a piece."""

    what: str
    gm: GraphModule
    ops: int
    fingerprint: str
    saved_in_a_call: float  # seconds


class Tier:
    """A piece of a graph that runs op by op, and compiled once that repays itself.

    What is compiled is the piece as a whole, or its observers alone, while the rest goes on op by
    op: searching ranges is most of the time that a compiler saves, and little of what it costs.

    :param gm: the piece
    :param compile: compiles a graph; of one with regions, only these
    """

    def __init__(
        self, gm: GraphModule, compile: Compile, *, forecast: Forecast, costs: CompileCosts
    ) -> None:
        self.gm, self._compile = gm, compile
        self.forecast, self.costs = forecast, costs
        self.calls = 0
        self.calls_in_a_batch = 0
        self.is_compiled = False
        self.reason = "op by op: too few calls to judge"
        self._run: Callable[..., Any] = gm.forward
        self._next_decision: int | None = _PROBED
        self._parts: Mapping[str, float] = {}  # seconds of a call by observer; "" for the rest
        self._op_by_op = math.inf  # seconds of a call
        self._compiled: list[float] = []

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls in _TIMED_BY_OP:
            return self._probe(args)
        if self.is_compiled and self.calls == self._next_decision:
            return self._check(args)
        result = self._timed(args) if 1 < self.calls <= _PROBED else self._run(*args)
        if self.calls == self._next_decision:
            self._decide()
        return result

    def __str__(self) -> str:
        times = "once" if self.calls_in_a_batch == 1 else f"{self.calls_in_a_batch} times"
        products = ", with products by oneDNN, which is faster here" if self._uses_onednn else ""
        return f"{self.ops} ops that a batch runs {times}: {self.reason}{products}"

    @property
    def ops(self) -> int:
        return _ops(self.gm)

    @property
    def _uses_onednn(self) -> bool:
        return any(node.target is fast_linear for node in self.gm.graph.nodes)

    def _probe(self, args: Sequence[Any]) -> Any:
        timed = _Timed(self.gm, args)
        result = timed.run(*args)
        self._parts = {
            name: min(seconds, self._parts.get(name, seconds))
            for name, seconds in timed.seconds.items()
        }
        return result

    def _timed(self, args: Sequence[Any]) -> Any:
        start = _now(args)
        result = self._run(*args)
        self._op_by_op = min(self._op_by_op, _now(args) - start)
        return result

    def _decide(self) -> None:
        calls = self._calls_to_come()

        def gain(choice: _Choice) -> tuple[float, float, float]:
            saved = choice.saved_in_a_call * calls
            cost = self.costs.estimate(choice.fingerprint, choice.ops)
            return saved - cost * _MARGIN, saved, cost

        best = max(self._choices, key=gain)
        surplus, saved, cost = gain(best)
        if surplus > 0:
            self._promote(best, saved)
            return
        self.reason = (
            f"op by op: compiling {best.what} would take about {cost:.0f} s and save {saved:.0f} s "
            f"over {self.forecast}"
        )
        # If nobody says how many batches there are, every call is news.
        self._next_decision = None if self.forecast.total is not None else self.calls + 1

    @cached_property
    def _choices(self) -> list[_Choice]:
        measured = sum(self._parts.values()) or 1.0
        # Shares of a call that compiling saves, by observer; "" for the rest.
        saved = {
            name: seconds / measured * (1 - 1 / _speedup(name))
            for name, seconds in self._parts.items()
        }
        slow = frozenset(name for name, share in saved.items() if name and share > 0)
        whole = ("all of it", self.gm, sum(saved.values()))
        outlined = OutlineObservers(observers=slow)(self.gm) if slow else None
        found = [whole]
        if outlined is not None and outlined.modified:
            share = sum(saved[name] for name in slow)
            found.append(("its observers", outlined.graph_module, share))
        return [
            _Choice(what, gm, _ops_to_compile(gm), _fingerprint(gm), share * self._op_by_op)
            for what, gm, share in found
        ]

    def _calls_to_come(self) -> int:
        """Calls in the rest of this batch and in those that follow.

        If nobody says how many there are, as many as there were so far. So a run takes at most
        about three times as long as by the better choice, whenever it ends.
        """
        in_a_batch = self.forecast.calls_in_a_batch(self.calls_in_a_batch)
        rest = max(0, in_a_batch - self.calls)
        if self.forecast.left is None:
            return max(rest, self.calls)
        return rest + self.forecast.left * in_a_batch

    def _promote(self, choice: _Choice, saved: float) -> None:
        start = time.perf_counter()
        try:
            self._run = self._compile(choice.gm)
        except Exception as error:
            # Whatever ails the compiler, the calibration does not need it.
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            warnings.warn(f"going on op by op, for compiling failed: {reason}", stacklevel=2)
            self.reason, self._next_decision = f"op by op: compiling failed: {reason}", None
            return
        taken = time.perf_counter() - start
        self.costs.learn(choice.fingerprint, choice.ops, taken)
        self.is_compiled = True
        self._next_decision = self.calls + 2  # the first call of new code warms up
        self.reason = (
            f"{choice.what} compiled after {self.calls} calls, in {taken:.0f} s: that should save "
            f"{saved:.0f} s over {self.forecast}"
        )

    def _check(self, args: Sequence[Any]) -> Any:
        """Give up compiled code that is slower than op by op."""
        start = _now(args)
        result = self._run(*args)
        self._compiled.append(_now(args) - start)
        if min(self._compiled) <= self._op_by_op * _SLOWER:
            self._next_decision = None
        elif len(self._compiled) < _TRIED:
            self._next_decision = self.calls + 1
        else:
            self._run, self.is_compiled, self._next_decision = self.gm.forward, False, None
            self.reason = (
                f"op by op: compiled, a call took {min(self._compiled):.3f} s instead of "
                f"{self._op_by_op:.3f} s"
            )
        return result


class _Timed(Interpreter):
    """Runs a graph op by op, and takes the seconds of its observers and of the rest."""

    def __init__(self, gm: GraphModule, args: Sequence[Any]) -> None:
        super().__init__(gm)
        self._args = args  # on the device that is timed
        self.seconds: dict[str, float] = {}

    def run_node(self, n: Node) -> Any:
        start = _now(self._args)
        result = super().run_node(n)
        name = _part(n)
        self.seconds[name] = self.seconds.get(name, 0.0) + _now(self._args) - start
        return result


def _part(node: Node) -> str:
    """The observer of a node, as far as that decides what a compiler saves; "" for other ops."""
    if not isinstance(node.target, Observe):
        return ""
    rule, value = node.target.rule, fake_value(node.all_input_nodes[0])
    is_one_group = rule.slot.args.strategy == QuantizationStrategy.TENSOR
    searches = rule.name in ("mse", "memoryless_mse")
    if searches and is_one_group and has_estimates(rule.slot.args, value.dtype):
        return _ESTIMATED
    return str(rule.name)


def _speedup(part: str) -> float:
    return _OBSERVERS.get(part, _OTHER_OBSERVERS) if part else _FORWARD


def _ops_to_compile(gm: GraphModule) -> int:
    """How much a compiler gets to see: the regions of a graph, or all of it if there are none."""
    regions = {str(node.target) for node in gm.graph.nodes if is_region(node)}
    return sum(_ops(gm.get_submodule(name)) for name in regions) if regions else _ops(gm)


def _ops(gm: nn.Module) -> int:
    """The ops of a graph. An observer is a handful of them, a search many."""
    assert isinstance(gm, GraphModule)
    return sum(_weight(node) for node in gm.graph.nodes)


def _weight(node: Node) -> int:
    if not isinstance(node.target, Observe):
        return int(node.op not in ("placeholder", "output", "get_attr"))
    return 40 if _OBSERVERS.get(node.target.rule.name, 0) > 4 else 8


def _fingerprint(gm: GraphModule) -> str:
    """The same for graphs that the compiler turns into the same code."""
    inputs = [fake_value(node) for node in gm.graph.find_nodes(op="placeholder")]
    shapes = [
        (str(tuple(value.shape)), str(value.dtype), str(value.device))
        for value in inputs
        if isinstance(value, torch.Tensor)
    ]
    text = f"{torch.__version__} {gm.code} {shapes}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _now(values: Sequence[Any]) -> float:
    """The time when the device of the values has done what it was given."""
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values):
        torch.accelerator.synchronize()
    return time.perf_counter()
