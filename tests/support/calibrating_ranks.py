"""Runs of `inlay.calibrate` on ranks and alone. In a module of its own, for them to import."""

import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from families import llama, mixtral, qwen3_moe
from plain_llama import plain_llama
from torch import distributed as dist
from torch import nn

import inlay
from inlay.checkpoint import shards
from inlay.engine import keeping
from inlay.ranks import together
from inlay.steps.choose_ranges import _Ranges

WORDS = 24
WITH_EXPERTS = {
    "mixtral": lambda: mixtral(num_hidden_layers=1, num_local_experts=8),
    "qwen3_moe": lambda: qwen3_moe(num_hidden_layers=1, num_experts=8),
}


class Words(nn.Module):
    """Layers of which the last one is reached only by batches of six words and more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 8)
        self.first, self.second, self.seldom = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        x = self.second(torch.relu(self.first(x)))
        return self.seldom(x) if input_ids.shape[1] > 5 else x


def rows(count: int, length: int = 5) -> list[dict[str, list[int]]]:
    """Rows of token ids; with a row of length 6, once, that alone reaches all layers."""
    found = [[(3 * row + 5 * place) % WORDS for place in range(length)] for row in range(count)]
    if count:
        found[count // 2] = list(range(6))
    return [{"input_ids": ids} for ids in found]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of `calibrate`.

    :param own: ready batches for each rank, in place of rows that are divided
    :param stop: ranks, with the number of the batch after which each stops, and the way it does
    """

    data: Any = None
    own: tuple[Any, ...] = ()
    scheme: str = "W8A8_STATIC"
    llama: int = 0  # blocks of one, in place of a model of few words
    experts: str = ""  # the family of a model that has some, in place of either
    inputs: dict[str, Any] | None = None
    weights: dict[str, Any] | None = None
    equalize: Any = None
    gptq: Any = None
    stop: dict[int, tuple[int, str]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def run(job: Job) -> dict[str, Any]:
    """Calibrate, and say everything that should be the same on all ranks, and some more."""
    changes = {"inputs": job.inputs, "weights": job.weights, "equalize": job.equalize}
    changes["gptq"] = job.gptq
    ignore = ["lm_head", "re:.*[.]gate$"] if job.experts else ["lm_head"] * bool(job.llama)
    if job.experts and not job.equalize:  # those that share a range are not equalized
        changes["experts"] = "fill"
    recipe = inlay.Recipe.from_preset(
        job.scheme, ignore=ignore, **{k: v for k, v in changes.items() if v}
    )
    torch._dynamo.reset()
    data = job.own[_rank()] if job.own else job.data
    model = plain_llama(job.llama) if job.llama else Words()
    model = WITH_EXPERTS[job.experts]() if job.experts else model
    with _stopping(job.stop), _noting() as noted:
        done = inlay.calibrate(model, recipe, data, **{"compiler": "eager", **job.options})
    stored = done.stored()
    return {
        "same": {
            "qparams": {
                name: {key: value.tolist() for key, value in found.items() if value is not None}
                for name, found in (done.qparams or {}).items()
            },
            "statistics": {
                name: ({k: t.tolist() for k, t in known.tensors.items()}, int(known.tokens))
                for name, known in stored.slots.items()
            },
            "seen": (done.record.samples, done.record.tokens, stored.data_seen.batches),
            "compensated": {n: t.tolist() for n, t in done.graphs.weights.compensated.items()},
            "equalized": [str(each) for each in done.equalization.done],
            "scales": {
                group.name: scales.values.tolist()
                for group, scales in done.equalization._scales.items()
            },
        },
        "data": done.record.data,
        "held out": len(done.held_out),
        **noted,
    }


def save_llama(how: tuple[str, str, str]) -> dict[str, bytes]:
    """Quantize and save a model of transformers; return what its files with weights hold then.

    :param how: the folder, the scheme, and the largest size of a file
    """
    folder, scheme, size = how
    recipe = inlay.Recipe.from_preset(scheme, ignore=["lm_head"])
    run = inlay.calibrate(llama(num_hidden_layers=3), recipe)
    run.save(folder, report=False, max_shard_size=size)
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("model*"))}


def save_with_full_disk(folder: str) -> None:
    """Save a model where one rank finds the disk full once it has written."""
    write = shards.write_tensors

    def full(*args: Any, **options: Any) -> Any:
        write(*args, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if _rank() == 2:
        shards.write_tensors = full
    try:
        save_llama((folder, "W8A8", "20KB"))
    finally:
        shards.write_tensors = write


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def _noting() -> Iterator[dict[str, Any]]:
    """Note which weights are searched here, and count collectives."""
    observe, counts = _Ranges._observe_weights, Counter[str]()
    noted: dict[str, Any] = {"weights": [], "collectives": counts}

    def observed(self: Any, observers: Any) -> None:
        noted["weights"] += list(observers)
        observe(self, observers)

    kept = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_object")}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return kept[name](*args, **kwargs)

        return call

    _Ranges._observe_weights = observed  # type: ignore[method-assign]
    for name in kept:
        setattr(dist, name, counted(name))
    try:
        yield noted
    finally:
        _Ranges._observe_weights = observe  # type: ignore[method-assign]
        for name, function in kept.items():
            setattr(dist, name, function)


@contextmanager
def _stopping(stop: dict[int, tuple[int, str]]) -> Iterator[None]:
    """Save after every batch, and stop after a certain one, if this rank is to."""
    note, every, lost = keeping.Keeper.note, keeping._SAVE_EVERY, together._LOST
    after, how = stop.get(_rank(), (10**9, ""))

    def noted(self: Any, run: Any, number: int, batch: Any) -> None:
        note(self, run, number, batch)
        if number < after:
            return
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how != "be slow":
            raise MemoryError(how)
        time.sleep(1.5 * together._LOST)

    keeping.Keeper.note, keeping._SAVE_EVERY = noted, 0.0  # type: ignore[method-assign]
    if any(way in ("kill", "be slow") for _, way in stop.values()):
        together._LOST = 5.0  # a busy machine may keep a process from running for a while
    try:
        yield
    finally:
        keeping.Keeper.note, keeping._SAVE_EVERY = note, every  # type: ignore[method-assign]
        together._LOST = lost


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))
