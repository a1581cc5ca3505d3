"""The traced graphs of a calibration: what they are prepared for, and what they run with."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import GraphModule

from inlay.calibration.backend import AUTO, Backend
from inlay.calibration.bindings import Bindings
from inlay.calibration.compiled_graph import CompiledGraph
from inlay.calibration.decision import Auto, Savings
from inlay.calibration.explain import dropout_in, kernels_in_words, padding_problem
from inlay.calibration.phase import Phase
from inlay.calibration.pipelines import (
    comparing,
    observing,
    observing_equalized,
    quantizing,
    rerunning,
)
from inlay.calibration.rerun import Rerun
from inlay.calibration.tracing.running import run_apart, run_for_statistics, running
from inlay.calibration.tracing.strategies import Strategies, by_name, without_cache
from inlay.errors import StatisticsError
from inlay.graph import Pass, Pipeline
from inlay.padding.layouts import Layouts
from inlay.run_record import Agreement
from inlay.statistics.value import Statistics
from inlay.steps.weights import Weights

__all__ = ["GraphStore"]


class GraphStore:
    """All graphs of a model that were traced, and how they are prepared and run.

    Graphs are traced once. A graph is prepared anew in each phase, when it is first called there.

    :param model: returns the model
    :param bindings: the tensors that graphs take
    :param compiler: a backend of Dynamo, or "auto"
    :param passes: see `Calibration`
    :param count_padding: whether padding tokens count
    :ivar backend: for `torch.compile`: outputs stay as they are, and are observed
    :ivar agreement: of the traced model with the eager one
    :ivar root: the name of the block that runs; None outside of blocks
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        bindings: Bindings,
        *,
        compiler: str,
        passes: Sequence[type[Pass] | Pass],
        count_padding: bool,
    ) -> None:
        self._model, self._own = model, bindings
        self._passes, self.count_padding = passes, count_padding
        plan, weight_of = bindings.statistics.plan, bindings.weights.of_module
        self.auto = Auto(Savings.of(plan, weight_of), is_asked=compiler == AUTO)
        self.compiler_calls = 0
        self.agreement: Agreement | None = None
        self.root: str | None = None
        self.is_rehearsing = False  # whether blocks are traced and prepared, and do not run
        # Takes the graph of a model around its blocks, and what it gives is run in its place.
        self.arrange: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
        asked = "inductor" if compiler == AUTO else compiler  # `torch.compile` asks for a compiler
        self.backend = Backend(self, keeps_outputs=True, compiler=asked)
        # Those of batches that run for their statistics alone.
        self._pruning, self._keeping = (
            Backend(self, keeps_outputs=keeps, compiler=compiler) for keeps in (False, True)
        )
        self._graphs: list[CompiledGraph] = []
        self._strategies: Strategies | None = None
        self._phase: Phase | None = None  # while one is asked for
        self._bindings = bindings
        self._on_trace: Callable[[], None] | None = None
        self._warned = False

    def __iter__(self) -> Iterator[CompiledGraph]:
        return iter(self._graphs)

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def weights(self) -> Weights:
        """The weights of quantized modules: plain, equalized, compensated or folded."""
        return self._own.weights

    @property
    def bindings(self) -> Bindings:
        """The tensors that graphs take now: those of the calibration, or of a rerun."""
        return self._bindings

    @property
    def is_rerun(self) -> bool:
        """Whether graphs run with tensors of a rerun; they then run eagerly."""
        return self._bindings is not self._own

    @property
    def phase(self) -> Phase:
        """What graphs are prepared for now."""
        if self._phase is not None:
            return self._phase
        statistics = self._own.statistics
        if statistics.is_final:
            return Phase.QUANTIZE
        return Phase.OBSERVE_EQUALIZED if statistics.is_second_run else Phase.OBSERVE

    @contextmanager
    def running(self, phase: Phase, bindings: Bindings | None = None) -> Iterator[None]:
        """Have graphs prepared for a phase meanwhile.

        :param bindings: the tensors that they run with, eagerly; those of the calibration if None
        """
        before = self._phase, self._bindings
        self._phase, self._bindings = phase, bindings or self._own
        try:
            yield
        finally:
            self._phase, self._bindings = before

    def pipeline(
        self, layouts: Layouts | None = None, *, outputs: bool = True, kernels: bool = False
    ) -> Pipeline:
        """Return the passes of the phase.

        :param layouts: where values have the tokens of the batch; None without padding
        :param outputs: whether a graph that observes keeps its outputs
        :param kernels: whether a graph that quantizes multiplies integers where it can
        """
        statistics, equalized = self.bindings.statistics, self.bindings.weights.equalized
        plan, qparams = statistics.plan, statistics.qparams or {}
        match self.phase:
            case Phase.OBSERVE:
                return observing(plan, passes=self._passes, layouts=layouts, outputs=outputs)
            case Phase.OBSERVE_EQUALIZED:
                return observing_equalized(
                    plan, equalized, passes=self._passes, layouts=layouts, outputs=outputs
                )
            case Phase.QUANTIZE:
                found = quantizing(plan, qparams, equalized, passes=self._passes, kernels=kernels)
                return rerunning(found) if self.is_rerun else found
            case Phase.COMPARE:
                return rerunning(comparing(plan, qparams, equalized, layouts=layouts))
            case Phase.PLAIN:
                return rerunning(Pipeline(()))

    def expect(self, batches: int) -> None:
        """Say before the first batch how many will come, so that "auto" compiles for many."""
        self.auto.expected = batches

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch through the graphs, by the fastest tracing strategy that can trace it."""
        model = self._model()
        if self.phase.observes:
            self.auto.decide_by([*args, *kwargs.values()])
        if self._strategies is None:
            self._strategies = run_for_statistics(model, self._pruning, self._keeping)
        args, given = by_name(model, args, without_cache(model, kwargs))
        padding, is_final = self._own.padding, self._own.statistics.is_final
        with running(), padding.of_batch(given, counts=self.count_padding, compares=is_final):
            return self._strategies(*args, **given)

    def run_in_stages(self, arrange: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Run the model block by block under an external driver, as streaming does.

        From then on, `run` traces a batch if needed and calls what `arrange` returned.

        :param arrange: takes the graph around the blocks, whose calls of blocks are nodes
        :raises ConfigurationError: if the model has no blocks
        """
        self._strategies = run_apart(self._model(), self._pruning)
        self.arrange = arrange

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Trace and prepare blocks, observing nothing: a call of one raises RehearsedError."""
        before = self._own.statistics.snapshot()
        self.is_rehearsing = True
        try:
            yield
        finally:
            self.is_rehearsing = False
            self.rewind(before)

    @contextmanager
    def inside(self, block: str) -> Iterator[None]:
        """Say which block runs meanwhile: one graph may serve blocks that share their weights."""
        before, self.root = self.root, block
        try:
            yield
        finally:
            self.root = before

    @contextmanager
    def tracing_noted(self, note: Callable[[], None]) -> Iterator[None]:
        """Call `note` before each graph that is traced meanwhile."""
        self._on_trace = note
        try:
            yield
        finally:
            self._on_trace = None

    def note_trace(self) -> None:
        if self._on_trace is not None:
            self._on_trace()

    def take(self, graph: CompiledGraph, example_inputs: Sequence[Any]) -> CompiledGraph:
        """Add a graph that was traced, and prepare it for what it is first called with."""
        self._warn_of_dropout(graph.gm)
        with graph.knowing_padding(example_inputs):
            graph.bind(example_inputs)  # compile now, while Dynamo is compiling
        self._graphs += [graph, *graph.bodies]
        return graph

    def unbind(self) -> None:
        """Have graphs let go of the tensors that they run with, until they are called again."""
        for graph in self._graphs:
            graph.unbind()

    def rewind(self, before: Mapping[str, Statistics] | None) -> None:
        """Return to these statistics, and drop later observations; None if nothing observes."""
        self.unbind()
        if before is not None:
            self._own.statistics.rewind(before)

    def forget_given_up(self, graphs: int, pieces: int) -> None:
        """Drop the graphs of tracing strategies that run no more, up to these numbers."""
        kept = (graph for graph in self._graphs[:graphs] if graph.backend is self.backend)
        self._graphs[:graphs] = kept
        del self.auto.pieces[:pieces]

    @contextmanager
    def rerun(self) -> Iterator[Rerun]:
        """Run observed graphs in other phases meanwhile, and keep nothing of that."""
        try:
            yield Rerun(self, self._own.with_own_weights())
        finally:
            for graph in self._for_statistics():
                graph.forget((Phase.QUANTIZE, Phase.COMPARE, Phase.PLAIN))

    def serves(self, phase: Phase) -> bool:
        """Return whether graphs that ran for statistics were prepared for a phase."""
        return any(graph.serves(phase) for graph in self._for_statistics())

    def forget_equalized_copies(self) -> None:
        """Drop the copies of scaled parameters; they are made again when they are needed."""
        self.unbind()
        self.bindings.weights.equalized.forget_copies()

    @property
    def compilations(self) -> int:
        """How many graphs were traced and pieces of them compiled so far."""
        return len(self._graphs) + self.auto.compilations

    def described(self) -> list[str]:
        """Say by which tracing strategy `observe` runs, and how, if that was left to "auto"."""
        return [*self.tracing, *self.auto.described(), *kernels_in_words(self)]

    @property
    def tracing(self) -> list[str]:
        """The tracing strategy of `observe`, and why faster ones were given up."""
        return [] if self._strategies is None else self._strategies.described()

    def require_padding_left_out(self) -> None:
        """Refuse to go on if graphs could not tell the padding of a batch from data.

        :raises StatisticsError: if an observer, or the model, has no way to leave padding out
        """
        problem = None if self.count_padding else padding_problem(self._graphs)
        if problem is not None:
            raise StatisticsError(
                f"the batch has padding, {problem}; use batch_size=1, or count it with "
                "count_padding=True"
            )

    def _for_statistics(self) -> Iterator[CompiledGraph]:
        return (graph for graph in self._graphs if graph.backend is not self.backend)

    def _warn_of_dropout(self, gm: GraphModule) -> None:
        """Warn once if values are observed while dropout is active: it scales up what it keeps."""
        found = dropout_in(gm) if self.phase.observes and not self._warned else []
        if found:
            self._warned = True
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            warnings.warn(
                f"{', '.join(found[:3])}{more}: dropout is active while values are observed, so "
                "ranges include activations that it scaled up. Call model.eval() before "
                "calibrating, unless the quantized model is to run in training mode",
                stacklevel=2,
            )
