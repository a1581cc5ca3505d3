"""Statistics on disk: kept while a run goes on, taken up again, merged, asked anew."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import distributed as dist

from inlay._version import __version__
from inlay.errors import ConfigurationError, StatisticsError
from inlay.observers import Observer, default_observer

__all__ = ["FILE_NAME", "FOLDER_NAME", "DataSeen", "SlotStatistics", "StoredStatistics"]

FILE_NAME = "statistics.safetensors"
FOLDER_NAME = "statistics"  # in the folder of a checkpoint, where vLLM takes all safetensors for it
_JSON_NAME = "statistics.json"
_VERSION = 1
_METADATA = "inlay"


@dataclass(frozen=True, kw_only=True)
class DataSeen:
    """How far a run got through its data.

    :param digest: of all batches so far, to know the same data again
    """

    batches: int = 0
    samples: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    digest: str = ""

    def after(self, batch_digest: bytes, *, samples: int, tokens: int, padding: int) -> "DataSeen":
        together = hashlib.sha256(bytes.fromhex(self.digest) + batch_digest).hexdigest()
        return DataSeen(
            batches=self.batches + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            padding_tokens=self.padding_tokens + padding,
            digest=together,
        )


@dataclass(frozen=True, kw_only=True)
class SlotStatistics:
    """Statistics of one slot, and the rule they were gathered by.

    :param seen: how many values
    :param tokens: how many tokens, without padding
    """

    base_name: str
    args: QuantizationArgs
    seen: int
    tokens: int
    tensors: Mapping[str, torch.Tensor] = field(repr=False)

    @property
    def observer(self) -> str:
        return self.args.observer or default_observer(self.base_name)

    def problem(self, args: QuantizationArgs, base_name: str) -> str | None:
        """Why these statistics do not carry qparams for other arguments, if they do not."""
        wanted = args.observer or default_observer(base_name)
        ours, theirs = (Observer.get_value_from_registry(n) for n in (self.observer, wanted))
        if base_name == "importance" and issubclass(ours, theirs):
            return None  # what is weighed does not depend on how the weight is quantized
        if args.strategy != self.args.strategy or args.group_size != self.args.group_size:
            return f"they are per {_name(self.args.strategy)}, not per {_name(args.strategy)}"
        if not issubclass(ours, theirs) or not theirs._act_sync_dict:
            return f"{self.observer} gathered them, which is not what {wanted} needs"
        if ours.any_format and theirs.any_format:
            return None
        same = _format(args) == _format(self.args)
        return None if same else f"{self.observer} gathered them for another format"


@dataclass(frozen=True, kw_only=True)
class StoredStatistics:
    """Statistics of all slots of a run, with its recipe.

    :param recipe: the fields of the `QuantizationConfig`
    :param slots: by name; slots that share their statistics have the same tensors
    """

    recipe: Mapping[str, Any]
    slots: Mapping[str, SlotStatistics]
    model: str = ""
    data: str = ""
    data_seen: DataSeen = DataSeen()

    def save(self, folder: str | Path) -> Path:
        """Write `statistics.safetensors` and, for people, `statistics.json`.

        The first holds everything and is complete at any time; the second follows it.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        places: dict[int, str] = {}
        described: dict[str, Any] = {}
        for name, slot in self.slots.items():
            keys = {}
            for key, tensor in slot.tensors.items():
                place = places.setdefault(id(tensor), f"{name}/{key}")
                tensors.setdefault(place, tensor.detach().contiguous())
                keys[key] = place
            described[name] = {
                "base_name": slot.base_name,
                "args": slot.args.model_dump(mode="json"),
                "seen": slot.seen,
                "tokens": slot.tokens,
                "tensors": keys,
            }
        content = {
            "version": _VERSION,
            "inlay": __version__,
            "model": self.model,
            "data": self.data,
            "data_seen": asdict(self.data_seen),
            "recipe": self.recipe,
            "slots": described,
        }
        text = json.dumps(content, indent=1)
        path = folder / FILE_NAME
        partial = folder / f".{FILE_NAME}.{os.getpid()}.partial"
        try:
            save_file(tensors, partial, metadata={_METADATA: text})
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        partial = folder / f".{_JSON_NAME}.{os.getpid()}.partial"
        partial.write_text(text)
        os.replace(partial, folder / _JSON_NAME)
        return path

    @classmethod
    def load(cls, path: str | Path) -> "StoredStatistics":
        """Read what `save` wrote: from the file, its folder, or the folder of a checkpoint."""
        path = Path(path)
        inside = path / FOLDER_NAME / FILE_NAME
        file = inside if inside.exists() else path / FILE_NAME if path.is_dir() else path
        try:
            with safe_open(file, framework="pt") as opened:
                text = (opened.metadata() or {}).get(_METADATA)
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigurationError(f"cannot read the statistics {file}: {error}") from error
        if text is None:
            raise ConfigurationError(f"{file} holds no statistics of a calibration")
        content = json.loads(text)
        if content.get("version") != _VERSION:
            raise ConfigurationError(
                f"{file} has version {content.get('version')}, and this is version {_VERSION}; "
                "read it with the Inlay that wrote it"
            )
        slots = {
            name: SlotStatistics(
                base_name=slot["base_name"],
                args=QuantizationArgs.model_validate(slot["args"]),
                seen=slot["seen"],
                tokens=slot["tokens"],
                tensors={key: tensors[place] for key, place in slot["tensors"].items()},
            )
            for name, slot in content["slots"].items()
        }
        return cls(
            recipe=content["recipe"],
            slots=slots,
            model=content["model"],
            data=content["data"],
            data_seen=DataSeen(**content["data_seen"]),
        )

    def merge(self, *others: "StoredStatistics") -> "StoredStatistics":
        """Statistics of several runs as one, as ranks of one run are merged."""
        runs = [self, *others]
        problems = []
        merged = {}
        for name in dict.fromkeys(name for run in runs for name in run.slots):
            parts = [run.slots[name] for run in runs if name in run.slots]
            try:
                merged[name] = _merged(parts)
            except StatisticsError as error:
                problems.append(f"{name}: {error}")
        if problems:
            raise StatisticsError("these statistics cannot be merged: " + "; ".join(problems))
        of = [run.data_seen for run in runs]
        return replace(
            self,
            slots=merged,
            data=" and ".join(dict.fromkeys(run.data for run in runs if run.data)),
            data_seen=DataSeen(
                batches=sum(p.batches for p in of),
                samples=sum(p.samples for p in of),
                tokens=sum(p.tokens for p in of),
                padding_tokens=sum(p.padding_tokens for p in of),
                digest=hashlib.sha256("".join(p.digest for p in of).encode()).hexdigest(),
            ),
        )


def _merged(parts: list[SlotStatistics]) -> SlotStatistics:
    first = parts[0]
    for part in parts[1:]:
        if part.args != first.args:
            raise StatisticsError("they were gathered by other rules")
    cls = Observer.get_value_from_registry(first.observer)
    missing = sorted(set(first.tensors) - set(cls._act_sync_dict))
    if missing and len(parts) > 1:
        raise StatisticsError(f"{first.observer} keeps {', '.join(missing)} of the last batch only")
    tensors = {
        key: _reduced(cls._act_sync_dict.get(key), [(p.tensors[key], p.seen) for p in parts])
        for key in first.tensors
    }
    return replace(
        first,
        seen=sum(part.seen for part in parts),
        tokens=sum(part.tokens for part in parts),
        tensors=tensors,
    )


def _reduced(operation: Any, values: Iterable[tuple[torch.Tensor, int]]) -> torch.Tensor:
    tensors, weights = zip(*values, strict=True)
    if len(tensors) == 1:
        return tensors[0]  # type: ignore[no-any-return]
    stacked = torch.stack([tensor.double() for tensor in tensors])
    if operation == dist.ReduceOp.AVG:
        shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        stacked = stacked * shares.reshape(-1, *[1] * tensors[0].ndim)
    reduce = {dist.ReduceOp.MIN: torch.amin, dist.ReduceOp.MAX: torch.amax}.get(
        operation, torch.sum
    )
    result: torch.Tensor = reduce(stacked, dim=0)
    return result.to(tensors[0].dtype)


def _format(args: QuantizationArgs) -> dict[str, Any]:
    fields: dict[str, Any] = args.model_dump(mode="json")
    return fields


def _name(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))
