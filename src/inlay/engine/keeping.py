"""Keeping the statistics of a run in a folder while it goes on, and going on from them."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from inlay.collectives import from_all_ranks
from inlay.data.batch import digest
from inlay.data.sources import Batches
from inlay.engine.resuming import nothing_to_resume
from inlay.engine.run import Run
from inlay.errors import ConfigurationError, StatisticsError
from inlay.files import require_writable
from inlay.fingerprints import difference, fingerprints, weights_in
from inlay.ranks.identity import is_first
from inlay.ranks.together import meet
from inlay.recipe import Recipe
from inlay.statistics.data_seen import DataSeen
from inlay.statistics.on_disk import FILE_NAME, StoredStatistics
from inlay.statistics.rank_files import KeptFiles, file_name, kept_files, remove_files

__all__ = ["Keeper"]

# Seconds between two saves of the statistics: the most that an interruption can cost.
_SAVE_EVERY = 60.0


class Keeper:
    """Saves the statistics of a run in a folder now and then, if it has one.

    Over ranks, each keeps its own in a file of its own.

    :param model: the name of the model
    """

    def __init__(self, folder: Path | None, model: str, recipe: Recipe, batches: Batches) -> None:
        self.folder, self.model, self.data = folder, model, batches.source
        self._recipe, self._part = recipe.fields, batches.part
        self._before: dict[int, str] = {}  # batches of the interrupted run, all ranks together
        self._met: set[int] = set()  # those of them that came by again
        self._fingerprints: dict[int, str] = {}  # batches that this rank's statistics are of
        self._saved = time.monotonic()

    def begin(self, model: nn.Module, recipe: Recipe, resume: bool, **options: Any) -> Run:
        """Start a run, or go on with the one that the folder holds."""
        if self.folder is None:
            if resume:
                raise ConfigurationError(
                    "to resume, name the folder of statistics: statistics=folder"
                )
            return Run(model, recipe, **options)
        require_writable(self.folder)
        kept = kept_files(self.folder, self._part)
        self._before = dict(kept.seen.fingerprints)
        if not resume and (kept.own or kept.leftover or self._before):
            raise ConfigurationError(
                f"{self.folder} holds the statistics of an earlier run; continue it (resume=True, "
                "--resume), or remove the folder"
            )
        if resume and not any(from_all_ranks(bool(kept.own or kept.leftover))):
            raise nothing_to_resume(self.folder)
        return self._resumed(kept, model, recipe, options)

    def _resumed(
        self, kept: KeptFiles, model: nn.Module, recipe: Recipe, options: dict[str, Any]
    ) -> Run:
        stored = kept.load()
        if stored is None:
            run = Run(model, recipe, **options)
        else:
            if stored.recipe != recipe.fields:
                raise ConfigurationError(
                    f"{self.folder} was calibrated with another recipe; resume with the same one"
                )
            self._require_same_weights(model, stored)
            resumed = Run.from_statistics(model, recipe, stored, **options)
            assert isinstance(resumed, Run)
            run = resumed
            self._fingerprints = dict(stored.data_seen.fingerprints)
            run.statistics.last_batch = max(self._fingerprints, default=0)
            run.statistics.data_seen = replace(run.statistics.data_seen, fingerprints={})
        self._take_over(kept, run)
        return run

    def _require_same_weights(self, model: nn.Module, stored: StoredStatistics) -> None:
        """Refuse to mix the statistics of two models. There is no use in accepting that."""
        unlike = difference(stored.weights, fingerprints(weights_in(model)), same_dtypes=True)
        if stored.weights and unlike is not None:
            raise ConfigurationError(
                f"{self.folder} holds statistics of a model with other weights: {unlike} differ. "
                "Resume with the model that the run started with, loaded in the same dtype, or "
                "remove the folder to start anew"
            )

    def _take_over(self, kept: KeptFiles, run: Run) -> None:
        """Let this rank's file stand for all files that it took, if those are others."""
        name = file_name(self._part)
        if set(kept.own) - {name}:
            self.save(run)
        meet()  # before any file goes, all have what they need
        kept.remove(but=name)

    @property
    def left_out(self) -> int:
        """How many batches of this rank the interrupted run has observed already."""
        return sum(map(self._part.takes, self._before))

    def was_seen(self, number: int, batch: Any) -> bool:
        """Whether the interrupted run has observed a batch already.

        :raises StatisticsError: if it has observed another one in its place
        """
        if number not in self._before:
            return False
        if self._before[number] != digest(batch).hex():
            raise StatisticsError(
                f"batch {number + 1} is not that of the interrupted run; resume with the same data "
                "and settings, or start anew"
            )
        self._met.add(number)
        return True

    def note(self, run: Run, number: int, batch: Any) -> None:
        """Take down that a batch was observed, and save now and then."""
        run.statistics.last_batch = number
        if self.folder is None:
            return  # fingerprints take time
        self._fingerprints[number] = digest(batch).hex()
        if time.monotonic() - self._saved >= _SAVE_EVERY:
            self.save(run)

    def require_all_met(self) -> None:
        """Refuse data that ended before the batches of the interrupted run did."""
        missing = [n for n in self._before if self._part.takes(n) and n not in self._met]
        if missing:
            raise StatisticsError(
                f"the interrupted run had observed a batch {max(missing) + 1}, which this data "
                "does not have; resume with the same data"
            )

    def begin_second_run(self, run: Run) -> None:
        """Go through the data anew, from the first batch, with inputs equalized."""
        self._before, self._met, self._fingerprints = {}, set(), {}
        self.save(run)

    def save(self, run: Run) -> None:
        """Save the statistics of this rank."""
        self._save(run, self._fingerprints, file_name(self._part))

    def finish(self, run: Run) -> None:
        """Save the statistics of a finalized run, those of all ranks, in place of each rank's."""
        if self.folder is None:
            return
        of_ranks = from_all_ranks(self._fingerprints)
        if is_first():
            of_all = {number: text for of_rank in of_ranks for number, text in of_rank.items()}
            self._save(run, of_all, FILE_NAME)
        if self._part.size > 1:
            meet()  # what stands for all is there before any other file goes
            remove_files(self.folder, [file_name(self._part)])

    def _save(self, run: Run, fingerprints: dict[int, str], name: str) -> None:
        if self.folder is not None:
            stored = run.stored(model=self.model, data=self.data)
            seen: DataSeen = replace(stored.data_seen, fingerprints=dict(fingerprints))
            # The run may name observers that the recipe leaves to it.
            replace(stored, recipe=self._recipe, data_seen=seen).save(self.folder, file_name=name)
        self._saved = time.monotonic()
