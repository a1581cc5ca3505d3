"""Calibration: observe a model while it runs, then let it run quantized."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from inlay.calibration.backend import AUTO, Backend
from inlay.calibration.bindings import Bindings
from inlay.calibration.explain import explain
from inlay.calibration.graph_store import GraphStore
from inlay.calibration.tracing.running import evaluating
from inlay.equalization.equalization import Equalization
from inlay.errors import ConfigurationError, StatisticsError
from inlay.fingerprints import fingerprints, weights_in
from inlay.graph import Pass
from inlay.memory import return_freed_memory
from inlay.observers import QParamsDict
from inlay.padding.of_batch import Padding
from inlay.passes import PREPARE
from inlay.ranks.together import together
from inlay.recipe import Plan, Recipe
from inlay.statistics.by_slot import StatisticsBySlot
from inlay.statistics.coverage import require_same_tokens
from inlay.statistics.data_seen import DataSeen
from inlay.statistics.on_disk import (
    StoredStatistics,
    require_same_weights,
    with_gathering_observers,
)
from inlay.steps import run_steps
from inlay.steps.accepting import known_words
from inlay.steps.finalizing import Finalizing
from inlay.steps.weights import Weights

__all__ = ["Calibration"]


class Calibration:
    """One run: a model, a recipe, and the statistics of what flows through.

    :param model: the model; it is not changed
    :param recipe: what to quantize and how
    :param compiler: the Dynamo backend that compiles graphs with observers in them, or "auto", the
        default: `observe` runs eagerly, or compiles with Inductor what the batches that
        `graphs.expect` announces are estimated to repay
    :param passes: passes that insert observers into a traced graph, as types or as instances, in
        place of `inlay.passes.PREPARE`. Types are given the fields that the calibration knows
    :param count_padding: whether padding tokens count, as the attention mask tells them
    :param progress: whether to draw progress bars; by default where there is a terminal
    :ivar graphs: the traced graphs, and how they run
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        compiler: str = AUTO,
        passes: Sequence[type[Pass] | Pass] = PREPARE,
        count_padding: bool = False,
        progress: bool | None = None,
    ) -> None:
        self._model: Callable[[], nn.Module | None] = lambda: model
        self.plan = Plan(model, recipe)
        self.recipe = self.plan.recipe
        self.statistics = StatisticsBySlot(self.plan)
        self.show_progress = progress
        self.equalization = Equalization(model, self.plan)
        weights = Weights(model, self.plan, self.equalization.parameters)
        padding = Padding(lambda: self.model, self.plan)
        bindings = Bindings(self.statistics, weights, self.equalization, padding)
        self.graphs = GraphStore(
            lambda: self.model,
            bindings,
            compiler=compiler,
            passes=passes,
            count_padding=count_padding,
        )

    @classmethod
    def from_statistics(
        cls,
        model: nn.Module,
        recipe: Recipe,
        stored: StoredStatistics,
        *,
        accept: Collection[str] = (),
        **options: Any,
    ) -> "Calibration":
        """Start from stored statistics. Finalize them as they are, or observe more batches before.

        Where the recipe names no observer, the one that gathered the statistics stays.

        :param accept: `other_weights` accepts statistics of a model with other weights
        """
        calibration = cls(model, with_gathering_observers(recipe, stored.slots), **options)
        require_same_tokens(calibration.plan, stored)
        calibration.statistics.restore(stored.slots)
        require_same_weights(model, stored, accept)
        calibration.equalization.restore(stored)
        calibration.statistics.is_second_run = calibration.equalization.is_settled
        calibration.statistics.data_seen = stored.data_seen
        calibration.graphs.auto.restore(stored.decision)
        return calibration

    def stored(self, *, model: str = "", data: str = "") -> StoredStatistics:
        """Return the statistics so far: those of this rank, and once finalized those of all."""
        settled = self.equalization.settled()
        return StoredStatistics(
            recipe=self.recipe.fields,
            slots=self.statistics.snapshot(),
            model=model,
            data=data,
            data_seen=self.statistics.data_seen,
            groups=self.equalization.stored(),
            is_second_run=self.statistics.is_second_run,
            scales={name: scales.values for name, scales in settled.items()},
            strengths={name: scales.strength for name, scales in settled.items()},
            weights=fingerprints(weights_in(self.model)),
            decision=self.graphs.auto.stored(),
        )

    @property
    def backend(self) -> Backend:
        """The backend for `torch.compile`: outputs stay as they are, and are observed."""
        return self.graphs.backend

    @property
    def qparams(self) -> dict[str, QParamsDict] | None:
        """Qparams by slot, once the calibration is finalized."""
        return self.statistics.qparams

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Run a batch in evaluation mode, for its statistics alone; skip what they do not need."""
        if self.statistics.is_final:
            raise ConfigurationError(
                "the calibration is finalized; make a new one to observe more batches"
            )
        self.graphs.run(*args, **kwargs)

    @property
    def needs_second_run(self) -> bool:
        """Whether `equalize` and a second run over the data must come before `finalize`."""
        return self.plan.needs_second_run and not self.statistics.is_second_run

    def equalize(self) -> None:
        """Choose how inputs are equalized, and observe the equalized model from now on.

        Call it on all ranks after the first run over the data, then run the same data again.
        The second run observes only the inputs that are equalized.
        """
        if not self.needs_second_run:
            raise ConfigurationError(
                "the recipe needs no second run over the data, or it has begun; finalize instead"
            )
        self.statistics.merge_ranks()
        try:
            self.equalization.choose(self.statistics, self.graphs.weights.of_module)
        finally:
            self.statistics.forget_ranks()
        self.statistics.is_second_run = self.equalization.is_settled = True
        self.statistics.data_seen = DataSeen()

    @property
    def model(self) -> nn.Module:
        """The model that is calibrated."""
        model = self._model()
        if model is None:
            raise ConfigurationError("the model is gone; keep it for as long as it is calibrated")
        return model

    def finalize(self, *, accept: Collection[str] = ()) -> dict[str, QParamsDict]:
        """Compute all qparams. From then on the compiled model runs quantized.

        Over ranks, every rank calls it, and all get the same qparams: those of all the data. Each
        weight is searched by one rank.

        :param accept: problems to accept instead of raising: `unobserved`, `not_finite`, `unfused`
        :return: `{slot: {"scale": …, "zero_point": …, "global_scale": …}}`
        """
        if self.needs_second_run:
            raise StatisticsError(
                "the observers of equalized inputs have not seen them yet; call equalize(), run "
                "the same batches again, and finalize then. static_minmax needs no second run"
            )
        if not self.statistics.is_final:
            return_freed_memory()  # of batches; weights need it now
            with together():
                self._finalize(accept)
        assert self.statistics.qparams is not None
        return self.statistics.qparams

    def _finalize(self, accept: Collection[str]) -> None:
        accepted = known_words(accept)
        state = Finalizing(
            statistics=self.statistics,
            plan=self.plan,
            weights=self.graphs.weights,
            equalize=self._equalize,
            accept=accepted,
            progress=self.show_progress,
        )
        self.statistics.qparams, self.statistics.accepted = run_steps(state).qparams, accepted
        self.graphs.unbind()  # from statistics that were dropped
        self.statistics.merge_data()

    def _equalize(self) -> None:
        if not self.equalization.is_settled:
            self.equalization.choose(self.statistics, self.graphs.weights.of_module)
        self.equalization.apply(self.statistics)

    def quantized_module(self, *args: Any, **kwargs: Any) -> GraphModule:
        """The finalized model as a module of its own, with scales and weights as constants.

        `torch.export` traces it with these inputs, in evaluation mode, and also takes the result.
        """
        if self.statistics.qparams is None:
            raise ConfigurationError("finalize the calibration before asking for the result")
        with evaluating(self.model):
            gm = torch.export.export(self.model, args, kwargs).module(check_guards=False)
        assert isinstance(gm, GraphModule)
        pipeline = self.graphs.pipeline(kernels=self.backend.uses_kernels)
        return self.graphs.bindings.bound(pipeline(gm).graph_module)

    def save(
        self,
        folder: str | Path,
        *,
        overwrite: bool = False,
        max_shard_size: int | str = "5GB",
        report: bool = True,
    ) -> Path:
        """Write the quantized model, its statistics and a report into a new folder.

        Modules with a slot that `finalize` was told to accept without statistics are written in
        full precision.

        :param folder: refused if it has something in it, unless `overwrite`
        :param report: whether to compare the model before and after, and show what was found
        :return: the folder
        """
        from inlay.engine.saving import save

        return save(
            self,
            folder,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            report=report,
        )

    def explain(self) -> str:
        """What is observed where, by which pass, shared with what, and the graphs."""
        return explain(self.statistics, self.graphs, self.equalization.described())
