"""The equalization of a streamed run: groups are settled in the region that all batches passed."""

from collections.abc import Callable

from inlay.checkpoint.stored_model import StoredModel
from inlay.engine.run import Run
from inlay.engine.streamed.regions import Regions
from inlay.equalization.group import Group
from inlay.recipe import Plan

__all__ = ["StreamedEqualization"]


class StreamedEqualization:
    """Chooses how the regions of a model are equalized, one after another.

    :param run: the calibration, which has traced its first batch
    :raises ConfigurationError: if equalized inputs are to be observed and cannot be
    """

    def __init__(self, run: Run, stored: StoredModel, regions: Regions) -> None:
        self._run, self._stored, self._regions = run, stored, regions
        self._scaled: dict[int, set[str]] = {}
        if run.recipe.equalize is None:
            return
        run.equalization.hear_of_groups()
        if run.plan.needs_second_run:
            collected = run.equalization.collected
            groups = {group.name: collected.parameters_of(group) for group in collected.groups}
            self._scaled = regions.scaled_in(groups)
            run.equalization.is_settled = True  # region by region

    @property
    def scaled_outside(self) -> set[str]:
        """The parameters outside of the blocks that are scaled by now."""
        return set(filter(self._regions.is_outside, self._run.equalization.parameters.changed))

    def settle(self, number: int) -> None:
        """Choose how a region is equalized that all batches of all ranks have run through."""
        run, own = self._run, {number, len(self._regions) - 1}
        passed = run.plan.part(lambda module: self._regions.number_of(module) in own)
        run.statistics.merge_ranks(passed)
        absent = self._scaled.get(number, set()) - self._stored.loaded
        self._stored.load(absent, mapped=True)
        run.equalization.choose(run.statistics, run.graphs.weights.of_module, self._runs_in(number))
        self._stored.release(absent - self._regions.needed_after(number))
        # Here and not when batches run, which keeps the room that wider copies take meanwhile.
        parameters = run.equalization.parameters
        for name in parameters.changed.intersection(self._regions[number].runs):
            parameters.named(name)

    def apply(self, plan: Plan) -> None:
        """Say what slots of a region would have seen of the values that are equalized."""
        equalization, statistics = self._run.equalization, self._run.statistics
        if not equalization.is_settled:
            equalization.choose(statistics, self._run.graphs.weights.of_module, _readers_in(plan))
        equalization.apply(statistics, _readers_in(plan))

    def decided_in(self, number: int, plan: Plan) -> Callable[[Group], bool]:
        """Return what tells whether the scales of a group were chosen in a region."""
        is_settled = self._run.equalization.is_settled
        return self._runs_in(number) if is_settled else _readers_in(plan)

    def _runs_in(self, number: int) -> Callable[[Group], bool]:
        runs, collected = set(self._regions[number].runs), self._run.equalization.collected
        return lambda group: not runs.isdisjoint(collected.parameters_of(group))


def _readers_in(plan: Plan) -> Callable[[Group], bool]:
    """Return what tells whether a group is read in a part of the plan."""
    return lambda group: any(map(plan.of_module, group.readers))
