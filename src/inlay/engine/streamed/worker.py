"""The work of a streamed run: region by region, then all that belongs to the whole."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from inlay import report as report_page
from inlay.checkpoint.shards import complete
from inlay.checkpoint.stored_model import StoredModel
from inlay.checkpoint.writing import size_of_model
from inlay.collectives import to_first_rank
from inlay.data.batch import count_tokens
from inlay.engine.run import Run
from inlay.engine.streamed.activations import Activations
from inlay.engine.streamed.comparison import PassingBlocks
from inlay.engine.streamed.equalizing import StreamedEqualization
from inlay.engine.streamed.journal import Journal, Written
from inlay.engine.streamed.parts import (
    CheckpointParts,
    load_qparams,
    load_tensors,
    save_qparams,
    save_tensors,
)
from inlay.engine.streamed.passage import Passage
from inlay.engine.streamed.peak import MemoryWatch
from inlay.engine.streamed.regions import Regions, uses_of_all_ranks
from inlay.engine.streamed.stages import Starting
from inlay.errors import ConfigurationError
from inlay.evaluation.compare import Comparison, compare
from inlay.evaluation.layer_errors import weight_errors
from inlay.evaluation.summary import report_of, slot_records
from inlay.files import move_into_place, write_atomically
from inlay.memory import keeping_freed_memory, return_freed_memory, returning_freed_memory
from inlay.observers import QParamsDict
from inlay.progress import Bar
from inlay.ranks.identity import is_first
from inlay.recipe import Plan, recipe_text
from inlay.report.data import LayerError, SlotRecord
from inlay.report.plain import from_plain, to_plain
from inlay.statistics.on_disk import FILE_NAME, FOLDER_NAME, StoredStatistics
from inlay.statistics.value import Statistics
from inlay.steps import run_steps
from inlay.steps.accepting import known_words
from inlay.steps.finalizing import Compensation

__all__ = ["Settings", "Worker"]

# Of a region.
_QPARAMS, _SHOWN, _WEIGHTS = "qparams.safetensors", "shown.json", "weights.safetensors"
_READING, _SEARCHING, _WRITING = "reading weights", "searching ranges", "writing"
_COMPARING = "comparing"

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is streamed.

    :param offload: keep what flows between blocks on disk alone
    """

    max_shard_size: int | str
    accept: tuple[str, ...]
    offload: bool
    count_padding: bool
    report: bool

    def identity(self) -> dict[str, Any]:
        """The settings that the result depends on."""
        return {
            "max_shard_size": self.max_shard_size,
            "accept": sorted(self.accept),
            "count_padding": self.count_padding,
            "report": self.report,
        }


class Worker:
    """Takes a model through a streamed run.

    Over ranks, all take their own batches through each region and merge what they observed in it.
    Each searches a part of its ranges, and compresses and writes a part of its layers.

    :param batches: those that calibrate, by their numbers among those of all ranks; none if the
        recipe needs no data
    """

    def __init__(
        self, run: Run, stored: StoredModel, batches: Mapping[int, Any], settings: Settings
    ) -> None:
        known_words(settings.accept)
        self._run, self._stored, self._settings = run, stored, settings
        self._batches = batches
        self._starting = Starting(self._run.padding)
        self._passage: Passage | None = None

    def prepare(self) -> None:
        """Trace the model without its weights and cut it into regions.

        :raises ConfigurationError: if that is not possible; nothing has been read then
        """
        started = None
        self._run.run_in_stages(self._starting.arrange)
        if self._batches:
            with self._run.stages("tracing and compiling"):
                self._passage = Passage(self._run, self._stored, self._starting, self._batches)
                started = self._passage.rehearse()
        uses = uses_of_all_ranks(self._stored, started)
        self._regions = Regions(self._stored, uses, self._run.plan)
        self._require_padding_left_out()
        self._equalization = StreamedEqualization(self._run, self._stored, self._regions)

    def work(self, journal: Journal) -> None:
        """Run, quantize and write all regions that the journal does not have yet."""
        self._parts = CheckpointParts(
            self._run,
            self._regions,
            journal,
            max_shard_size=self._settings.max_shard_size,
            accept=self._settings.accept,
        )
        activations = Activations(
            journal.folder / "activations", in_memory=not self._settings.offload
        )
        self._take_up(journal, activations)
        with self._bar(journal) as bar:
            for number in range(len(journal.written), len(self._regions)):
                region = self._regions[number]
                with self._run.stages(_READING):
                    self._regions.load(region)
                for batch, how in self._through(number, activations):
                    tokens, _ = self._count_tokens(self._batches[batch])
                    place = f"{number + 1} of {len(self._regions)}, {region.name}"
                    bar.advance(tokens, f"{place}{how}")
                self._quantize(number, journal, activations)
                self._stored.release(set(region.parameters) - self._regions.needed_after(number))
                self._run.forget_equalized_copies()
                return_freed_memory()

    def _through(self, number: int, activations: Activations) -> Iterator[tuple[int, str]]:
        """Run all batches through a region, and once more to observe what it equalizes.

        :return: after each, its number and a remark for people
        """
        region = self._regions[number]
        if region.stage is None:
            return
        known = len(self._run.graphs)
        if self._passage is not None:
            yield from ((batch, "") for batch in self._passage.through(region, activations))
        if self._run.plan.needs_second_run:
            with self._run.stages("equalizing"), returning_freed_memory():
                self._equalization.settle(number)
            if self._passage is not None:
                outside = self._equalization.scaled_outside
                passing = self._passage.through_equalized(region, activations, outside)
                yield from ((batch, ", equalized") for batch in passing)
        if len(self._run.graphs) > known:
            self._require_padding_left_out()

    def _quantize(self, number: int, journal: Journal, activations: Activations) -> None:
        """Quantize and write a region through which all batches have run."""
        run, region = self._run, self._regions[number]
        plan = run.plan.part(self._regions.belongs_to(number))
        # What batches have freed is returned too: weights need it now.
        with run.stages(_SEARCHING), returning_freed_memory():
            state = run.finalizing(
                plan=plan,
                accept=known_words(self._settings.accept),
                equalize=lambda: self._equalization.apply(plan),
                progress=False,
            )
            done = run_steps(state)
            qparams = done.qparams
            run.compensations.update(done.compensations)
        statistics = {**run.statistics.snapshot(plan), **self._observed_outside(number)}
        # Kept, as weights are compressed and judged some rows at a time, each in the same steps.
        with run.stages(_WRITING), keeping_freed_memory():
            own = self._parts.own_part(plan)
            files = self._parts.write(number, plan, own, qparams)
            shown = self._show(own, qparams) if self._settings.report else None
            compensated = run.weights.take_compensated()
            digests = _of_all(file.digests for file in files)
            of_ranks = to_first_rank((digests, shown, activations.complete()))
            if not is_first():
                return
            all_digests, all_shown, checks = zip(*of_ranks, strict=True)
            self._keep(number, plan, qparams, statistics, all_shown, journal)
            if compensated and run.held_out:  # for the comparison, which runs the blocks again
                save_tensors(compensated, journal.region_folder(number) / _WEIGHTS)
            complete(files)
            of_tensors = _of_all(all_digests)
            written = {f.path.name: (f.layout.size, f.layout.digest(of_tensors)) for f in files}
        journal.add(Written(region=region.name, files=written, values=_of_all(checks)))
        if region.stage is not None:
            activations.drop(region.stage)

    def _show(self, own: Plan, qparams: Mapping[str, QParamsDict]) -> "_Shown":
        """Return what a report shows of the part of a region that is this rank's."""
        run = self._run
        refused = run.equalization.refused.items()
        return _Shown(
            slots=slot_records(run, own, qparams),
            layers=weight_errors(own, qparams, run.weights),
            unequalized={name: why for name, why in refused if own.of_module(name)},
            compensations={n: c for n, c in run.compensations.items() if own.of_module(n)},
        )

    def _keep(
        self,
        number: int,
        plan: Plan,
        qparams: Mapping[str, QParamsDict],
        statistics: Mapping[str, Statistics],
        shown: Sequence["_Shown | None"],
        journal: Journal,
    ) -> None:
        """Keep what the whole needs of a region in the end, and an interrupted run before."""
        run = self._run
        folder = journal.region_folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        save_qparams(qparams, folder / _QPARAMS)
        StoredStatistics(
            recipe=run.recipe.fields,
            slots=statistics,
            weights=self._stored.fingerprints(self._regions[number].writes),
            **run.equalization.decided(self._equalization.decided_in(number, plan)),
        ).save(folder)
        parts = [part for part in shown if part is not None]
        if parts:
            of_all = _Shown(
                slots=tuple(slot for part in parts for slot in part.slots),
                layers=tuple(layer for part in parts for layer in part.layers),
                unequalized=_of_all(part.unequalized for part in parts),
                compensations=_of_all(part.compensations for part in parts),
            )
            write_atomically(folder / _SHOWN, json.dumps(to_plain(of_all)))

    def _observed_outside(self, number: int) -> dict[str, Statistics]:
        """What all ranks have observed outside of the blocks, up to and including a region.

        It belongs to the last region, but batches pass there once, so an interrupted run needs it.
        """
        last = len(self._regions) - 1
        part = self._run.plan.part(self._regions.belongs_to(last))
        if number == last or not part.needs_data:
            return {}
        self._run.statistics.merge_ranks(part, last_batch=self._run.last_batch)
        return self._run.statistics.snapshot(part)

    def _take_up(self, journal: Journal, activations: Activations) -> None:
        """Go on where an interrupted run has stopped, if there was one."""
        done = len(journal.written)
        names = [region.name for region in self._regions[:done]]
        if names != [written.region for written in journal.written]:
            raise ConfigurationError(
                f"{journal.folder} was made with a model that is cut elsewhere; resume with the "
                "versions it was made with, or remove the folder"
            )
        for number in range(done):
            stored = StoredStatistics.load(journal.region_folder(number))
            # What all ranks have seen so far outside of the blocks counts once.
            self._run.statistics.restore(
                {
                    name: known
                    for name, known in stored.slots.items()
                    if is_first() or self._regions.number_of(known.slot.module) < done
                }
            )
            self._run.equalization.take_up(stored, self._run.statistics)
            if self._settings.report:
                refused = self._shown(journal, number).unequalized
                self._run.equalization.collected.restore_refused(refused)
        stages = [region.stage for region in self._regions[done:] if region.stage is not None]
        if self._passage is None or not stages:
            return
        with self._run.stages("tracing and compiling"):
            self._passage.start()
        if stages[0] > 0:
            for equalized in (False, True) if self._run.plan.needs_second_run else (False,):
                activations.restore(
                    stages[0], self._batches, journal.written[-1].values, equalized=equalized
                )

    def _bar(self, journal: Journal) -> Bar:
        left = self._regions[len(journal.written) :]
        times = 2 if self._run.plan.needs_second_run else 1
        steps = sum(times * len(self._batches) for region in left if region.stage is not None)
        return Bar("streaming", total=steps or None, unit="tokens", show=self._run.show_progress)

    def _count_tokens(self, batch: Any) -> tuple[int, int]:
        counts = self._settings.count_padding
        return count_tokens(self._run.model, batch, count_padding=counts)

    def _require_padding_left_out(self) -> None:
        padded = any(self._count_tokens(batch)[1] for batch in self._batches.values())
        if padded and not self._settings.count_padding:
            self._run.require_padding_left_out()

    def finish(self, journal: Journal, out: Path, *, overwrite: bool, memory: MemoryWatch) -> None:
        """Write what belongs to the whole, and put the folder in its place.

        The first rank does so, and compares; the others wait for it.
        """
        memory.hear_of_others()
        if not is_first():
            return
        run, folder = self._run, journal.checkpoint
        device = next(run.model.parameters()).device
        numbers = range(len(self._regions))
        qparams: dict[str, QParamsDict] = {}
        for number in numbers:
            qparams.update(load_qparams(journal.region_folder(number) / _QPARAMS, device))
            weights = journal.region_folder(number) / _WEIGHTS
            if weights.exists():
                run.weights.compensated.update(load_tensors(weights, device))
        run.statistics.qparams, run.statistics.is_second_run = qparams, run.plan.needs_second_run
        run.statistics.accepted = frozenset(self._settings.accept)
        with run.stages(_WRITING):
            size = self._parts.finish(qparams, run.tokenizer)
            stored = run.stored(model=run.record.model, data=run.data)
            replace(stored, weights=self._weights(journal)).save(folder / FOLDER_NAME)
            text = recipe_text(run.recipe)
            write_atomically(folder / "recipe.yaml", text)
        if self._settings.report:
            self._report(journal, (size_of_model(run.model), size), memory)
        move_into_place(folder, out, overwrite=overwrite)
        journal.remove()

    def _weights(self, journal: Journal) -> dict[str, str]:
        """Collect the fingerprints of weights: regions have kept those that they have written."""
        found = self._stored.fingerprints_of_buffers()
        for number in range(len(self._regions)):
            found |= StoredStatistics.weights_in(journal.region_folder(number) / FILE_NAME)
        return found

    @staticmethod
    def _shown(journal: Journal, number: int) -> "_Shown":
        file = journal.region_folder(number) / _SHOWN
        return from_plain(_Shown, json.loads(file.read_text(encoding="utf-8")), file.name)

    def _report(self, journal: Journal, sizes: tuple[int, int], memory: MemoryWatch) -> None:
        run = self._run
        slots: list[SlotRecord] = []
        layers: list[LayerError] = []
        for number in range(len(self._regions)):
            shown = self._shown(journal, number)
            slots += shown.slots
            layers += shown.layers
            run.compensations.update(shown.compensations)
        slots.sort(key=lambda slot: run.plan.places[slot.module])
        layers.sort(key=lambda layer: run.plan.places[layer.module])
        comparison = Comparison(batches=0, layers=tuple(layers))
        if run.held_out:
            with run.stages(_COMPARING):
                passing = PassingBlocks(
                    run,
                    self._stored,
                    self._starting,
                    journal.folder / "comparing",
                    offload=self._settings.offload,
                )
                comparison = compare(run.model, run, run.held_out, passing)
        seconds = sum(took for name, took in run.record.stages if name != _COMPARING)
        data = replace(
            report_of(run, comparison, record=run.record, sizes=sizes, slots=tuple(slots)),
            peak_memory=memory.peak,
            tokens_per_second=run.record.tokens / seconds if run.record.tokens else None,
        )
        write_atomically(journal.checkpoint / "report.json", data.to_json())
        report_page.write(data, journal.checkpoint / "report.html")


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """What a report shows of a region.

    :param unequalized: why the inputs of modules are not equalized, by module
    """

    slots: tuple[SlotRecord, ...]
    layers: tuple[LayerError, ...]
    unequalized: dict[str, str]
    compensations: dict[str, Compensation]


def _of_all(of_ranks: Iterable[Mapping[str, _T]]) -> dict[str, _T]:
    return {name: value for of_rank in of_ranks for name, value in of_rank.items()}
