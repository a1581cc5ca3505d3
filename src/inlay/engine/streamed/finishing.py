"""The end of a streamed run: what belongs to the whole model, and the report."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from inlay.checkpoint.writing import size_of_model
from inlay.engine.saving import write_report, write_statistics
from inlay.engine.streamed.comparison import PassingBlocks
from inlay.engine.streamed.kept import Shown, merged
from inlay.engine.streamed.peak import MemoryWatch
from inlay.engine.streamed.streaming import Streaming
from inlay.evaluation.compare import Comparison, compare
from inlay.evaluation.summary import report_of
from inlay.files import move_into_place
from inlay.ranks.identity import is_first
from inlay.report.data import ReportData

__all__ = ["finish"]

_COMPARING = "comparing"


def finish(engine: Streaming, out: Path, *, overwrite: bool, memory: MemoryWatch) -> None:
    """Write what belongs to the whole, and put the folder in its place.

    Rank 0 does so, and compares; the others wait for it.
    """
    memory.hear_of_others()
    if not is_first():
        return
    run, journal, options = engine.run, engine.journal, engine.options
    kept = [journal.kept(region.number) for region in engine.regions]
    device = next(run.model.parameters()).device
    qparams = merged(each.qparams(device) for each in kept)
    run.graphs.weights.compensated.update(merged(each.compensated(device) for each in kept))
    run.statistics.qparams, run.statistics.is_second_run = qparams, run.plan.needs_second_run
    run.statistics.accepted = frozenset(options.accept)
    with run.stages("writing"):
        size = engine.writer.finish(qparams, run.tokenizer)
        weights = engine.stored.fingerprints_of_buffers()
        weights |= merged(each.fingerprints() for each in kept)
        statistics = run.stored(model=run.record.model, data=run.data)
        write_statistics(journal.checkpoint, replace(statistics, weights=weights), run.recipe)
    if options.report:
        data = _report(engine, [each.shown() for each in kept], (size_of_model(run.model), size))
        write_report(journal.checkpoint, replace(data, peak_memory=memory.peak))
    move_into_place(journal.checkpoint, out, overwrite=overwrite)
    journal.remove()


def _report(engine: Streaming, shown: Sequence[Shown], sizes: tuple[int, int]) -> ReportData:
    """Compare the model before and after, if data is held out, and return the report."""
    run, of_all = engine.run, Shown.of_all(shown)
    run.graphs.weights.compensations.update(of_all.compensations)
    places = run.plan.places
    slots = tuple(sorted(of_all.slots, key=lambda slot: places[slot.module]))
    layers = tuple(sorted(of_all.layers, key=lambda layer: places[layer.module]))
    comparison = Comparison(batches=0, layers=layers)
    if run.held_out:
        with run.stages(_COMPARING):
            passing = PassingBlocks(engine)
            comparison = compare(run.model, run, run.held_out, passing)
    seconds = sum(took for name, took in run.record.stages if name != _COMPARING)
    data = report_of(run, comparison, record=run.record, sizes=sizes, slots=slots)
    speed = run.record.tokens / seconds if run.record.tokens else None
    return replace(data, tokens_per_second=speed)
