"""The engine of a streamed run: blocks are read from disk, and written back quantized."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inlay.checkpoint.shards import complete
from inlay.checkpoint.stored_model import StoredModel
from inlay.collectives import from_all_ranks, to_first_rank
from inlay.data.batch import count_tokens, digest
from inlay.data.sources import Batches
from inlay.engine.batches import describe_data, require_data, seen_with
from inlay.engine.driver import Engine, Region
from inlay.engine.run import Run
from inlay.engine.streamed.activations import Activations
from inlay.engine.streamed.equalizing import StreamedEqualization
from inlay.engine.streamed.journal import Journal, Written
from inlay.engine.streamed.kept import Kept, Shown, merged
from inlay.engine.streamed.passage import Passage
from inlay.engine.streamed.regions import Regions, segments_of_all_ranks
from inlay.engine.streamed.stages import Starting
from inlay.engine.streamed.writer import RegionWriter
from inlay.errors import ConfigurationError
from inlay.evaluation.layer_errors import weight_errors
from inlay.evaluation.summary import slot_records
from inlay.memory import keeping_freed_memory, return_freed_memory, returning_freed_memory
from inlay.observers import QParamsDict
from inlay.options import StreamOptions
from inlay.progress import Bar
from inlay.ranks.identity import is_first
from inlay.recipe import Plan
from inlay.run_record import Agreement
from inlay.statistics.on_disk import StoredStatistics
from inlay.statistics.value import Statistics
from inlay.steps import run_steps
from inlay.steps.accepting import known_words
from inlay.steps.finalizing import Finalizing

__all__ = ["Streaming"]


class Streaming(Engine):
    """Runs, quantizes and writes a model block by block.

    To make one traces the model without its weights and cuts it into regions.

    :param batches: those of this rank
    :raises ConfigurationError: if the model cannot be cut; nothing has been read then
    """

    def __init__(
        self, run: Run, stored: StoredModel, batches: Batches, options: StreamOptions
    ) -> None:
        super().__init__(run)
        self._accept = known_words(options.accept)
        self.stored, self.options = stored, options
        # By their numbers among the batches of all ranks.
        self._batches = dict(batches.numbered) if run.plan.needs_data else {}
        self._note_data(batches)
        self.starting, self._passage, started = Starting(run.graphs.bindings.padding), None, None
        run.graphs.run_in_stages(self.starting.arrange)
        if self._batches:
            with run.stages("tracing and compiling"):
                self._passage = Passage(run, stored, self.starting, self._batches)
                started = self._passage.rehearse()
        self._regions = Regions(stored, segments_of_all_ranks(stored, started), run.plan)
        self._require_padding_left_out()
        self._equalization = StreamedEqualization(run, stored, self._regions)

    def _note_data(self, batches: Batches) -> None:
        """Count the data before it runs: each region sees all of it."""
        run = self.run
        for batch in self._batches.values():
            run.statistics.data_seen = seen_with(run, batch)
        seen = run.statistics.data_seen
        run.graphs.auto.decide(seen.tokens + seen.padding_tokens)
        run.statistics.last_batch = max(self._batches, default=0)
        run.statistics.merge_data()
        describe_data(run, batches)
        if run.plan.needs_data:
            require_data(run.statistics.data_seen)
            run.graphs.agreement = Agreement(
                unknown="a streamed model is not in memory, so it cannot run eagerly"
            )

    @property
    def regions(self) -> Sequence[Region]:
        return self._regions

    def identity(self) -> dict[str, Any]:
        """Return what must stay the same for a run to be resumed. Every rank calls it."""
        files, model = self.stored.files, self.stored.model
        digests = {number: digest(batch).hex() for number, batch in self._batches.items()}
        of_all = merged(from_all_ranks(digests))
        return {
            "model": f"{files.identity()} {model.dtype}",
            "weights": files.fingerprints() if is_first() else {},
            "recipe": self.run.recipe.fields,
            "data": [of_all[number] for number in sorted(of_all)],
            "settings": _identity(self.options),
        }

    def go_on(self, journal: Journal) -> None:
        """Run, quantize and write all regions that the journal does not have yet."""
        options, self.journal = self.options, journal
        self.writer = RegionWriter(
            self.run,
            self._regions,
            journal,
            max_shard_size=options.max_shard_size,
            accept=options.accept,
        )
        place = journal.folder / "activations"
        self._activations = Activations(place, in_memory=not options.offload_activations)
        self._take_up()
        done = len(journal.written)
        times = 2 if self.run.plan.needs_second_run else 1
        left = [region for region in self._regions[done:] if region.stage is not None]
        steps = times * len(self._batches) * len(left)
        show = self.run.show_progress
        with Bar("streaming", total=steps or None, unit="tokens", show=show) as self._bar:
            self.work(done)

    def load(self, region: Region) -> None:
        with self.run.stages("reading weights"):
            self._regions.load(region)

    def observe(self, region: Region) -> None:
        place = f"{region.number + 1} of {len(self._regions)}, {region.name}"
        for batch, how in self._passing(region):
            tokens, _ = self._count_tokens(self._batches[batch])
            self._bar.advance(tokens, f"{place}{how}")

    def finalize(self, region: Region) -> Mapping[str, QParamsDict]:
        plan = self._regions.plan_of(region)
        # What batches have freed is returned too: weights need it now.
        with self.run.stages("searching ranges"), returning_freed_memory():
            state = Finalizing(
                statistics=self.run.statistics,
                weights=self.run.graphs.weights,
                plan=plan,
                accept=self._accept,
                equalize=lambda: self._equalization.apply(plan),
                progress=False,
            )
            return run_steps(state).qparams

    def write(self, region: Region, qparams: Mapping[str, QParamsDict]) -> None:
        run, plan = self.run, self._regions.plan_of(region)
        statistics = {**run.statistics.snapshot(plan), **self._observed_outside(region)}
        # Kept, as weights are compressed and judged some rows at a time, each in the same steps.
        with run.stages("writing"), keeping_freed_memory():
            own = self.writer.own_part(plan)
            files = self.writer.write(region, plan, own, qparams)
            shown = self._show(own, qparams) if self.options.report else None
            compensated = run.graphs.weights.take_compensated()
            digests = merged(file.digests for file in files)
            of_ranks = to_first_rank((digests, shown, self._activations.complete()))
            if not is_first():
                return
            all_digests, all_shown, checks = zip(*of_ranks, strict=True)
            self.journal.kept(region.number).save(
                qparams=qparams,
                statistics=self._stored_statistics(region, plan, statistics),
                compensated=compensated if run.held_out else {},
                shown=[own for own in all_shown if own is not None],
            )
            complete(files)
            of_tensors = merged(all_digests)
            written = {f.path.name: (f.layout.size, f.layout.digest(of_tensors)) for f in files}
        self.journal.add(Written(region=region.name, files=written, values=merged(checks)))
        if region.stage is not None:
            self._activations.drop(region.stage)

    def free(self, region: Region) -> None:
        needed = self._regions.needed_after(region.number)
        self.stored.release(set(region.parameters) - needed)
        self.run.graphs.forget_equalized_copies()
        return_freed_memory()

    def _passing(self, region: Region) -> Iterator[tuple[int, str]]:
        """Run all batches through a region, and once more to observe what it equalizes.

        :return: after each, its number and a remark for people
        """
        if region.stage is None:
            return
        known = len(self.run.graphs)
        if self._passage is not None:
            passing = self._passage.through(region, self._activations)
            yield from ((batch, "") for batch in passing)
        if self.run.plan.needs_second_run:
            with self.run.stages("equalizing"), returning_freed_memory():
                self._equalization.settle(region.number)
            if self._passage is not None:
                outside = self._equalization.scaled_outside
                passing = self._passage.through_equalized(region, self._activations, outside)
                yield from ((batch, ", equalized") for batch in passing)
        if len(self.run.graphs) > known:
            self._require_padding_left_out()

    def _show(self, own: Plan, qparams: Mapping[str, QParamsDict]) -> Shown:
        """Return what a report shows of the part of a region that this rank compresses."""
        run = self.run
        refused = run.equalization.refused.items()
        gains = run.graphs.weights.compensations.items()
        return Shown(
            slots=slot_records(run, own, qparams),
            layers=weight_errors(own, qparams, run.graphs.weights),
            unequalized={name: why for name, why in refused if own.of_module(name)},
            compensations={name: gain for name, gain in gains if own.of_module(name)},
        )

    def _stored_statistics(
        self, region: Region, plan: Plan, statistics: Mapping[str, Statistics]
    ) -> StoredStatistics:
        decided = self._equalization.decided_in(region.number, plan)
        return StoredStatistics(
            recipe=self.run.recipe.fields,
            slots=statistics,
            weights=self.stored.fingerprints(region.writes),
            **self.run.equalization.decided(decided),
        )

    def _observed_outside(self, region: Region) -> dict[str, Statistics]:
        """Return what all ranks have observed outside the blocks, up to and including a region.

        It belongs to the last region, but batches pass there once, so an interrupted run needs it.
        """
        last = self._regions[-1]
        plan = self._regions.plan_of(last)
        if region == last or not plan.needs_data:
            return {}
        self.run.statistics.merge_ranks(plan)
        return self.run.statistics.snapshot(plan)

    def _take_up(self) -> None:
        """Go on where an interrupted run has stopped, if there was one."""
        journal, run = self.journal, self.run
        done = len(journal.written)
        names = [region.name for region in self._regions[:done]]
        if names != [written.region for written in journal.written]:
            raise ConfigurationError(
                f"{journal.folder} was made with a model that is cut elsewhere; resume with the "
                "versions it was made with, or remove the folder"
            )
        for number in range(done):
            self._restore(journal.kept(number), done)
        stages = [region.stage for region in self._regions[done:] if region.stage is not None]
        if self._passage is None or not stages:
            return
        with run.stages("tracing and compiling"):
            self._passage.start()
        if stages[0] > 0:
            for equalized in (False, True) if run.plan.needs_second_run else (False,):
                checks = journal.written[-1].values
                self._activations.restore(stages[0], self._batches, checks, equalized=equalized)

    def _restore(self, kept: Kept, done: int) -> None:
        """Restore the results of a finished region."""
        run, stored = self.run, kept.statistics()
        # What all ranks have seen so far outside of the blocks counts once.
        run.statistics.restore(
            {
                name: known
                for name, known in stored.slots.items()
                if is_first() or self._regions.number_of(known.slot.module) < done
            }
        )
        run.equalization.take_up(stored, run.statistics)
        if self.options.report:
            run.equalization.collected.restore_refused(kept.shown().unequalized)

    def _count_tokens(self, batch: Any) -> tuple[int, int]:
        counts = self.options.count_padding
        return count_tokens(self.run.model, batch, count_padding=counts)

    def _require_padding_left_out(self) -> None:
        padded = any(self._count_tokens(batch)[1] for batch in self._batches.values())
        if padded and not self.options.count_padding:
            self.run.graphs.require_padding_left_out()


def _identity(options: StreamOptions) -> dict[str, Any]:
    """Return the options, besides those of the data, that the result depends on."""
    return {
        "max_shard_size": options.max_shard_size,
        "accept": sorted(options.accept),
        "count_padding": options.count_padding,
        "report": options.report,
    }
