"""Runs of `inlay.stream` on ranks and alone. In a module of its own, for them to import."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import inlay
from inlay.checkpoint import shards
from inlay.checkpoint.loading import load_model
from inlay.checkpoint.stored_model import StoredModel
from inlay.engine.streamed import streaming
from inlay.engine.streamed.regions import Regions
from inlay.engine.streamed.streaming import Streaming
from inlay.engine.streamed.writer import RegionWriter
from inlay.ranks import together


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of `stream`.

    :param own: ready batches for each rank, in place of rows that are divided
    :param stop: a rank, the number of a region, and how it ends there: with an error or "kill"
        before it is quantized, "kill, written" when the rank has written its part, "kill, complete"
        when the files of all are complete and nobody has noted it
    """

    model: Path
    out: Path
    recipe: inlay.Recipe
    data: Any = None
    own: tuple[Any, ...] = ()
    stop: tuple[int, int, str] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def run(job: Job) -> dict[str, Any]:
    """Stream, and say what is known on this rank then."""
    torch._dynamo.reset()
    rank = dist.get_rank() if dist.is_initialized() else 0
    stored = StoredModel.open(job.model)
    data = job.own[rank] if job.own else job.data
    options = {"compiler": "eager", "held_out": 0, **job.options}
    with _stopping(job.stop, rank), _noting() as noted:
        done = inlay.stream(stored, job.recipe, data, out=job.out, **options)
    return {"data": done.record.data, "tokens": done.record.tokens, **noted}


def run_in_memory(job: Job) -> None:
    """Calibrate with the whole model in memory, and write the same folder."""
    torch._dynamo.reset()
    options = {"compiler": "eager", "held_out": 0, **job.options}
    inlay.calibrate(load_model(job.model), job.recipe, job.data, **options).save(job.out)


@contextmanager
def _noting() -> Iterator[dict[str, Any]]:
    """Count collectives, and note which parameters of blocks were copied from their files."""
    noted: dict[str, Any] = {"collectives": Counter(), "copied": [], "written": []}
    names = ("all_reduce", "all_gather_object", "gather_object")
    kept = {name: getattr(dist, name) for name in names}
    load, write = Regions.load, shards.write_tensors

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            noted["collectives"][name] += 1
            return kept[name](*args, **kwargs)

        return call

    def loaded(self: Regions, region: Any) -> None:
        load(self, region)
        mapped = list(_mapped_from_files())
        for name in region.parameters:
            place = self._stored.model.get_parameter(name).data_ptr()
            if not any(place in part for part in mapped):
                noted["copied"].append(name)

    def written(file: Path, layout: Any, tensors: dict[str, Any], **options: Any) -> Any:
        noted["written"] += list(tensors)
        return write(file, layout, tensors, **options)

    Regions.load = loaded  # type: ignore[method-assign]
    shards.write_tensors = written
    for name in names:
        setattr(dist, name, counted(name))
    try:
        yield noted
    finally:
        Regions.load = load  # type: ignore[method-assign]
        shards.write_tensors = write
        for name, function in kept.items():
            setattr(dist, name, function)


def _mapped_from_files() -> Iterator[range]:
    """The addresses of this process that stand for parts of safetensors files."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            yield range(begin, end)


@contextmanager
def _stopping(stop: tuple[int, int, str] | None, rank: int) -> Iterator[None]:
    """End a rank when its batches have run through a region, if one is to end."""
    finalize, lost = Streaming.finalize, together._LOST
    write, complete = RegionWriter.write, streaming.complete
    here = [False]

    def end(how: str) -> None:
        if stop is not None and here[0] and stop[2] == how:
            os.kill(os.getpid(), signal.SIGKILL)

    def stopped(self: Any, region: Any) -> Any:
        here[0] = stop is not None and stop[:2] == (rank, region.number)
        end("kill")
        if stop is not None and here[0] and not stop[2].startswith("kill"):
            raise MemoryError(stop[2])
        return finalize(self, region)

    def written(self: Any, *args: Any) -> Any:
        result = write(self, *args)
        end("kill, written")
        return result

    def completed(*args: Any) -> Any:
        result = complete(*args)
        end("kill, complete")
        return result

    Streaming.finalize = stopped  # type: ignore[method-assign]
    RegionWriter.write = written  # type: ignore[method-assign]
    streaming.complete = completed
    if stop is not None and stop[2].startswith("kill"):
        together._LOST = 5.0  # a busy machine may keep a process from running for a while
    try:
        yield
    finally:
        Streaming.finalize, together._LOST = finalize, lost  # type: ignore[method-assign]
        RegionWriter.write = write  # type: ignore[method-assign]
        streaming.complete = complete
