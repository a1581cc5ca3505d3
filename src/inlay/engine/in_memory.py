"""The engine of a run in memory, where the whole model is one region."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from inlay.calibration.tracing.strategies import call
from inlay.collectives import from_all_ranks
from inlay.data.batch import count_tokens, on_device_of, varying_sizes
from inlay.data.sources import Batches
from inlay.engine.batches import describe_data, require_data, seen_with
from inlay.engine.driver import Engine, Region
from inlay.engine.hessian_room import require_room_for_hessians
from inlay.engine.keeping import Keeper
from inlay.engine.run import Run
from inlay.engine.trace_check import check_trace
from inlay.errors import ConfigurationError, StatisticsError
from inlay.observers import QParamsDict
from inlay.progress import Bar
from inlay.ranks.identity import is_first
from inlay.ranks.together import look_around
from inlay.statistics.data_seen import DataSeen
from inlay.steps.accepting import known_words

__all__ = ["InMemory"]

_WHOLE = Region(number=0, name="the model", stage=0)


class InMemory(Engine):
    """Runs and quantizes a model that is in memory. `Run.save` writes its weights.

    :param keeper: keeps the statistics by batch, from which an interrupted run resumes
    :param accept: see `Calibration.finalize`
    """

    def __init__(
        self, run: Run, batches: Batches, keeper: Keeper, *, accept: Collection[str]
    ) -> None:
        super().__init__(run)
        self._batches, self._keeper, self._accept = batches, keeper, accept

    @property
    def regions(self) -> tuple[Region]:
        return (_WHOLE,)

    def load(self, region: Region) -> None:
        """Refuse Hessians that do not fit beside the model, which is loaded already."""
        require_room_for_hessians(self.run.plan, self.run.model)

    def observe(self, region: Region) -> None:
        run = self.run
        if not run.plan.needs_data:
            return
        known_words(self._accept)  # before hours of observing
        shortest = self._observe_all()
        if is_first():
            with run.stages("checking the trace"):
                check_trace(run, shortest, accept=self._accept)

    def finalize(self, region: Region) -> Mapping[str, QParamsDict]:
        with self.run.stages("searching ranges"):
            return self.run.finalize(accept=self._accept)

    def write(self, region: Region, qparams: Mapping[str, QParamsDict]) -> None:
        """Save the statistics of all ranks, if the run has a folder for them."""
        describe_data(self.run, self._batches)
        self._keeper.finish(self.run)

    def free(self, region: Region) -> None:
        """Leave the model as it is: it is the user's."""

    def _observe_all(self) -> Any:
        """Run the data, and once more if observers have to see inputs that are equalized by then.

        :return: the shortest batch
        """
        run, batches = self.run, self._batches
        if not run.needs_second_run:  # or the second one was interrupted
            return self._observe()
        if not batches.can_repeat:
            raise ConfigurationError(
                "the data is run twice, as the observers of equalized inputs have to see them, and "
                f"{batches.source} can be read only once; pass a list, set the number of samples, "
                "or observe inputs with static_minmax, which needs one run"
            )
        self._observe()
        seen = run.statistics.data_seen
        with run.stages("equalizing"):
            run.equalize()
        self._keeper.begin_second_run(run)
        shortest = self._observe()
        again = run.statistics.data_seen
        if again != seen:
            raise StatisticsError(
                f"the data was not the same when it was run a second time: {again.tokens} tokens "
                f"in {again.batches} batches after {seen.tokens} in {seen.batches}; give data "
                "that can be read twice, such as a list"
            )
        return shortest

    def _observe(self) -> Any:
        """Run the data, and return its shortest batch."""
        run, batches, keeper = self.run, self._batches, self._keeper
        model, count_padding = run.model, run.graphs.count_padding
        shortest: tuple[int, Any] | None = None
        checked = 0  # graphs that are known to leave out padding
        total = _count(batches)
        varying = varying_sizes(batches if total else ())
        show = run.show_progress
        counted = partial(count_tokens, model, count_padding=count_padding)
        run.graphs.auto.decide(
            None if total is None else sum(sum(counted(batch)) for batch in batches)
        )
        with Bar(_label(run), total=total, unit="tokens", show=show) as bar:
            for number, batch in batches.numbered:
                look_around()
                if keeper.was_seen(number, batch):
                    bar.advance(0)
                    continue
                tokens, padding = counted(batch)
                if shortest is None or tokens < shortest[0]:
                    shortest = tokens, batch
                with run.timing_batch():
                    call(run.observe, on_device_of(model, batch, varying))
                if padding and not count_padding and checked < len(run.graphs):
                    run.graphs.require_padding_left_out()
                    checked = len(run.graphs)
                run.statistics.data_seen = seen_with(run, batch)
                bar.advance(tokens, str(run.graphs.auto))
                keeper.note(run, number, batch)
        keeper.require_all_met()
        require_data(DataSeen.of_all(from_all_ranks(run.statistics.data_seen)))
        return None if shortest is None else shortest[1]


def _label(run: Run) -> str:
    if not run.plan.needs_second_run:
        return "calibrating"
    return "calibrating, run 2 of 2" if run.statistics.is_second_run else "calibrating, run 1 of 2"


def _count(batches: Batches) -> int | None:
    try:
        return len(batches)
    except TypeError:
        return None
