"""Decide before the first batch how a calibration runs: eagerly, or compiled in part.

The decision follows from the model, the recipe and the tokens to come. It never depends on a clock
or on what a compiler has cached, so the same command gives the same bits.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from inlay.collectives import from_all_ranks
from inlay.nodes.fast_linear import fast_linear
from inlay.passes import OutlineObservers, SpeedUpProducts
from inlay.products import onednn_is_faster
from inlay.ranges.args import key_of
from inlay.recipe import Plan

__all__ = ["Auto", "Decision", "Piece", "Savings"]

NOTHING, OBSERVERS, EVERYTHING = "nothing", "its observers", "everything"

# Seconds that Inductor takes with an empty cache on two cores: to start, for each distinct layer
# (about 28 ops), and for each distinct observer that compiling makes faster (about 40 ops).
_START, _PER_LAYER, _PER_OBSERVER = 9.0, 1.7, 2.4
# Nanoseconds that compiling saves for each element that enters a layer, besides what observers
# save: activations, norms and residuals are fused. Products of matrices take as long either way.
_FUSED = 0.3
# How much less these take on an accelerator, whose memory is about that much faster.
_ACCELERATOR = 50
# By how much compiling must seem to repay itself: all of these are estimates.
_MARGIN = 1.25


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How the pieces of a model run.

    :param compiled: what is compiled: "nothing", "its observers" or "everything"
    :param reason: why, for people
    :param observers: names of the observers that compiling makes faster
    :param onednn: leave products of float32 matrices to oneDNN
    """

    compiled: str = NOTHING
    reason: str = "the number of batches to come is not known"
    observers: tuple[str, ...] = ()
    onednn: bool = False

    def __str__(self) -> str:
        how = "eager" if self.compiled == NOTHING else f"{self.compiled} compiled"
        return f"{how}: {self.reason}"

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Decision":
        """Read the values that JSON kept."""
        return cls(**{**plain, "observers": tuple(plain["observers"])})


@dataclass(frozen=True, kw_only=True)
class Savings:
    """What compiling a model would cost and save.

    :param layers: how many distinct layers there are to compile
    :param fused: nanoseconds for a token that fusing ops saves
    :param searches: how many distinct observers compiling makes faster
    :param searched: nanoseconds for a token that this saves
    :param observers: the names of these observers
    """

    layers: int
    fused: float
    searches: int
    searched: float
    observers: tuple[str, ...]

    @classmethod
    def of(cls, plan: Plan, weight_of: Callable[[str], torch.Tensor]) -> "Savings":
        """Estimate the savings from a recipe applied to a model.

        :param weight_of: returns the weight of a module
        """
        fused = searched = 0.0
        layers, searches = set(), {}
        for name in dict.fromkeys(slot.module for slot in plan.slots.values()):
            if plan.kinds.get(name) != "linear" or plan.is_routed(name):
                continue  # how many rows it is given is not known
            weight, slots = weight_of(name), plan.of_module(name)
            unit = 1.0 if weight.device.type in ("cpu", "meta") else 1 / _ACCELERATOR
            layers.add((weight.shape, plan.signature(name)))
            fused += _FUSED * weight.shape[-1] * unit
            for part, size in (("input", weight.shape[-1]), ("output", weight.shape[0])):
                slot = slots.get(part)
                if slot is None or not slot.is_observed:
                    continue
                saved = slot.observer_class.saved_by_compiling(slot.args)
                if saved > 0:
                    searched += saved * size * unit
                    searches[(key_of(slot.args), size)] = slot.observer
        return cls(
            # A batch is run twice if observers have to see inputs equalized.
            fused=fused * (2 if plan.needs_second_run else 1),
            searched=searched * (2 if plan.needs_second_run else 1),
            layers=len(layers),
            searches=len(searches),
            observers=tuple(sorted(set(searches.values()))),
        )

    def decide(self, tokens: int) -> Decision:
        """Decide what so many tokens repay."""
        of_observers = _START + _PER_OBSERVER * self.searches
        of_all = of_observers + _PER_LAYER * self.layers
        choices = {EVERYTHING: ((self.searched + self.fused) * tokens * 1e-9, of_all)}
        if self.searches:
            choices[OBSERVERS] = (self.searched * tokens * 1e-9, of_observers)

        def surplus(compiled: str) -> float:
            saved, cost = choices[compiled]
            return saved - cost * _MARGIN

        best = max(choices, key=surplus)
        saved, cost = choices[best]
        return Decision(
            compiled=best if surplus(best) > 0 else NOTHING,
            reason=f"compiling {best} is estimated to take {cost:.0f} s and to save {saved:.0f} s "
            f"over {tokens:,} tokens",
            observers=self.observers,
            onednn=onednn_is_faster(),
        )


class Piece:
    """A piece of a traced graph, run as was decided.

    :param decision: returns the decision when the piece runs for the first time
    :param compile: compiles a graph; of one with outlined bodies, only these
    :param is_around: whether blocks run between its ops. A batch runs it once, so that only its
        observers are ever compiled
    """

    def __init__(
        self,
        gm: GraphModule,
        decision: Callable[[], Decision],
        compile: Callable[[GraphModule], Callable[..., Any]],
        *,
        is_around: bool = False,
    ) -> None:
        self.gm = gm
        self.is_compiled = False
        self.problem: str | None = None  # why it is eager although it was to be compiled
        self._decision, self._compile, self._is_around = decision, compile, is_around
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._run is None:
            self._run = self._prepare(self._decision())
        return self._run(*args)

    @property
    def has_run(self) -> bool:
        return self._run is not None

    @property
    def uses_onednn(self) -> bool:
        return any(node.target is fast_linear for node in self.gm.graph.nodes)

    def _prepare(self, decision: Decision) -> Callable[..., Any]:
        if decision.onednn:
            self.gm = SpeedUpProducts()(self.gm).graph_module
        chosen = self._to_compile(decision)
        if chosen is None:
            return self.gm.forward
        try:
            run = self._compile(chosen)
        except Exception as error:
            # Whatever ails the compiler, the calibration does not need it.
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            self.problem = f"compilation failed; continuing eagerly: {reason}"
            warnings.warn(self.problem, stacklevel=3)
            return self.gm.forward
        self.is_compiled = True
        return run

    def _to_compile(self, decision: Decision) -> GraphModule | None:
        if decision.compiled == EVERYTHING and not self._is_around:
            return self.gm
        if decision.compiled == NOTHING:
            return None
        outlined = OutlineObservers(observers=frozenset(decision.observers))(self.gm)
        return outlined.graph_module if outlined.modified else None


class Auto:
    """How a calibration with `compiler="auto"` runs, and the pieces of all its backends.

    :param is_asked: whether the calibration leaves it to "auto"
    """

    def __init__(self, savings: Savings, *, is_asked: bool) -> None:
        self._savings, self._is_asked = savings, is_asked
        self._decision: Decision | None = None
        self.expected: int | None = None  # batches
        self.pieces: list[Piece] = []

    @property
    def decision(self) -> Decision | None:
        return self._decision

    def restore(self, plain: Mapping[str, Any] | None) -> None:
        """Run as an interrupted run did, if it has decided."""
        if plain is not None:
            self._decision = Decision.from_plain(plain)

    def stored(self) -> dict[str, Any] | None:
        """Return the decision as values that JSON keeps."""
        return None if self._decision is None else asdict(self._decision)

    def decide(self, tokens: int | None) -> None:
        """Decide before the first batch how all of them run.

        Over ranks, all call it. They run as an interrupted run did from which one of them goes on,
        or as rank 0 decides for the tokens of all.

        :param tokens: how many are to come on this rank, padding included; None if it is not known
        """
        if not self._is_asked:
            return
        of_ranks = from_all_ranks((self._decision, tokens))
        counts = [count for _, count in of_ranks if count is not None]
        known = (decision for decision, _ in of_ranks if decision is not None)
        own = next(known, None) or self._decide(
            sum(counts) if len(counts) == len(of_ranks) else None
        )
        self._decision = from_all_ranks(own)[0]

    def decide_by(self, batch: Iterable[Any]) -> None:
        """Decide by the first batch and the number of batches, unless that is done."""
        if self._is_asked and self._decision is None:
            batches = self.expected
            self._decision = self._decide(None if batches is None else batches * _tokens_of(batch))

    def _decide(self, tokens: int | None) -> Decision:
        if tokens is None:
            return Decision(onednn=onednn_is_faster())
        return self._savings.decide(tokens)

    def piece(
        self,
        gm: GraphModule,
        compile: Callable[[GraphModule], Callable[..., Any]],
        *,
        is_around: bool = False,
    ) -> Piece:
        """Return a piece that runs as will have been decided by then."""
        piece = Piece(gm, lambda: self._decision or Decision(), compile, is_around=is_around)
        self.pieces.append(piece)
        return piece

    def described(self) -> list[str]:
        """Say how the pieces run, and why."""
        run = [piece for piece in self.pieces if piece.has_run]
        if not run:
            return []
        problems = (piece.problem for piece in run if piece.problem is not None)
        onednn = "products run by oneDNN, which is faster than MKL on this processor"
        used = [onednn] if any(piece.uses_onednn for piece in run) else []
        return [str(self._decision or Decision()), *used, *dict.fromkeys(problems)]

    @property
    def compilations(self) -> int:
        """How many pieces were compiled."""
        return sum(piece.is_compiled for piece in self.pieces)

    def __str__(self) -> str:
        has_run = any(piece.has_run for piece in self.pieces)
        return "compiled" if self.compilations else "eager" if has_run else ""


def _tokens_of(batch: Iterable[Any]) -> int:
    """Return how many tokens the arguments of a batch hold, by the largest of them."""
    sizes = (_positions(value) for value in batch if isinstance(value, torch.Tensor))
    return max(sizes, default=0)


def _positions(value: torch.Tensor) -> int:
    if not value.is_floating_point():
        return value.numel() if value.ndim < 3 else value.shape[:1].numel()  # not a 4-d mask
    # Each row or position of feature vectors is a token; an image is one.
    return (value.shape[:-1] if value.ndim in (2, 3) else value.shape[:1]).numel()
