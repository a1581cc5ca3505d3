"""Statistics on disk: kept while a run goes on, taken up again, merged, asked anew."""

import functools
import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed import ReduceOp

from inlay._version import __version__
from inlay.errors import ConfigurationError, StatisticsError
from inlay.files import new_file, write_atomically
from inlay.fingerprints import difference, fingerprints, weights_in
from inlay.observers import Observer
from inlay.ranges.args import key_of
from inlay.recipe import Gathers, Recipe, Slot, make_observer
from inlay.statistics.data_seen import DataSeen
from inlay.statistics.value import Statistics, merge

__all__ = [
    "FILE_NAME",
    "FOLDER_NAME",
    "OTHER_WEIGHTS",
    "StoredStatistics",
    "problem_with",
    "require_same_weights",
    "with_gathering_observers",
]

FILE_NAME = "statistics.safetensors"
FOLDER_NAME = "statistics"  # in the folder of a checkpoint, where vLLM takes all safetensors for it
_VERSION = 3
_READABLE = (2, 3)
_METADATA = "inlay"
_SCALES = "equalized/"  # before the name of a group
OTHER_WEIGHTS = "other_weights"  # the word by which a user accepts statistics of another model
_USUAL = {"equalize": None, "experts": "routed"}  # fields that a recipe has only if they are set


@dataclass(frozen=True, kw_only=True)
class StoredStatistics:
    """Statistics of all slots of a run, with its recipe.

    :param recipe: the fields of the `QuantizationConfig`
    :param slots: by name; slots that share their statistics have the same tensors
    :param groups: groups that can be equalized, as values that JSON keeps
    :param is_second_run: whether inputs were observed with their channels scaled
    :param scales: by group, if so
    :param strengths: that the scales come from, by group
    :param weights: fingerprints of the model's tensors; empty in files of older versions
    :param decision: how the batches ran, as values that JSON keeps, if that was left to "auto"
    """

    recipe: Mapping[str, Any]
    slots: Mapping[str, Statistics]
    model: str = ""
    data: str = ""
    data_seen: DataSeen = field(default_factory=DataSeen)
    groups: Sequence[Mapping[str, Any]] = ()
    is_second_run: bool = False
    scales: Mapping[str, torch.Tensor] = field(default_factory=dict)
    strengths: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict, repr=False)
    decision: Mapping[str, Any] | None = None

    def save(self, folder: str | Path, *, file_name: str = FILE_NAME) -> Path:
        """Write `statistics.safetensors` and, for people, `statistics.json`.

        The first holds everything and is complete at any time; the second follows it.

        :param file_name: another name for the first; the second gets the same with another ending
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        places: dict[int, str] = {}  # slots that share their statistics have the same tensors
        described: dict[str, Any] = {}
        for name, known in self.slots.items():
            keys = {}
            for key, tensor in known.tensors.items():
                place = places.setdefault(id(tensor), f"{name}/{key}")
                tensors.setdefault(place, tensor.detach().contiguous())
                keys[key] = place
            described[name] = {
                "module": known.slot.module if name == known.slot.name else name.rpartition(".")[0],
                "base_name": name.rpartition(".")[2].partition(":")[0],
                "gathers": known.slot.gathers.value,
                "args": known.slot.args.model_dump(mode="json"),
                "seen": int(known.seen),
                "tokens": int(known.tokens),
                "is_complete": known.is_complete,
                "tensors": keys,
            }
        tensors.update({f"{_SCALES}{name}": scale for name, scale in self.scales.items()})
        content = {
            "version": _VERSION,
            "inlay": __version__,
            "model": self.model,
            "data": self.data,
            "data_seen": self.data_seen.to_plain(),
            "recipe": self.recipe,
            "groups": list(self.groups),
            "is_second_run": self.is_second_run,
            "strengths": dict(self.strengths),
            "weights": dict(sorted(self.weights.items())),
            "decision": self.decision,
            "slots": described,
        }
        text = json.dumps(content, indent=1)
        path = folder / file_name
        with new_file(path) as partial:
            save_file(tensors, partial, metadata={_METADATA: text})
        write_atomically(path.with_suffix(".json"), text)
        return path

    @classmethod
    def load(cls, path: str | Path) -> "StoredStatistics":
        """Read what `save` wrote: from the file, its folder, or the folder of a checkpoint."""
        path = Path(path)
        inside = path / FOLDER_NAME / FILE_NAME
        file = inside if inside.exists() else path / FILE_NAME if path.is_dir() else path
        with _opened(file) as (content, opened):
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        slots = {
            name: Statistics(
                slot=Slot(
                    slot["module"],
                    slot["base_name"],
                    QuantizationArgs.model_validate(slot["args"]),
                    Gathers(slot["gathers"]),
                ),
                seen=torch.tensor(slot["seen"]),
                tokens=torch.tensor(slot["tokens"]),
                tensors={key: tensors[place] for key, place in slot["tensors"].items()},
                is_complete=slot["is_complete"],
            )
            for name, slot in content["slots"].items()
        }
        return cls(
            recipe=content["recipe"],
            slots=slots,
            model=content["model"],
            data=content["data"],
            data_seen=DataSeen.from_plain(content["data_seen"]),
            groups=content.get("groups", ()),
            is_second_run=content.get("is_second_run", False),
            scales={
                key.removeprefix(_SCALES): tensor
                for key, tensor in tensors.items()
                if key.startswith(_SCALES)
            },
            strengths=content.get("strengths", {}),
            weights=content.get("weights", {}),
            decision=content.get("decision"),
        )

    @staticmethod
    def data_seen_in(file: Path) -> DataSeen:
        """Read only what data the statistics in a file are of."""
        with _opened(file) as (content, _):
            return DataSeen.from_plain(content["data_seen"])

    @staticmethod
    def weights_in(file: Path) -> dict[str, str]:
        """Read only the fingerprints of weights in a file."""
        with _opened(file) as (content, _):
            return dict(content.get("weights", {}))

    def merge(self, *others: "StoredStatistics") -> "StoredStatistics":
        """Merge the statistics of several runs, as those of the ranks of one run are merged.

        :raises StatisticsError: if the runs had another model or recipe, or slots do not merge
        """
        runs = [self, *others]
        problems = [problem for other in others for problem in self._unlike(other)]
        merged = {}
        for name in dict.fromkeys(name for run in runs for name in run.slots):
            parts = [run.slots[name] for run in runs if name in run.slots]
            try:
                merged[name] = functools.reduce(merge, parts)
            except StatisticsError as error:
                problems.append(f"{name}: {error}")
        if any(
            self.is_second_run != run.is_second_run or not _are_equal(self.scales, run.scales)
            for run in others
        ):
            problems.append(
                "they are of inputs that were equalized with other scales; calibrate in one run, "
                "or with static_minmax, whose statistics are of inputs as they were"
            )
        if problems:
            raise StatisticsError("these statistics cannot be merged: " + "; ".join(problems))
        groups = {json.dumps(group): group for run in runs for group in run.groups}
        return replace(
            self,
            slots=merged,
            groups=tuple(groups.values()),
            data=" and ".join(dict.fromkeys(run.data for run in runs if run.data)),
            data_seen=replace(DataSeen.of_all(run.data_seen for run in runs), fingerprints={}),
            weights=self.weights if all(run.weights for run in runs) else {},
        )

    def _unlike(self, other: "StoredStatistics") -> Iterator[str]:
        """Yield in what the model and the recipe of another run are different."""
        if not (self.weights and other.weights):
            _warn_unchecked("one model")
            if self.model != other.model:
                yield f"they are of different models, {self.model} and {other.model}"
        elif (unlike := difference(self.weights, other.weights)) is not None:
            yield f"the models had different weights in {unlike}; merge runs of one model"
        mine, theirs = _compared_fields(self.recipe), _compared_fields(other.recipe)
        for key in sorted(mine.keys() | theirs.keys()):
            one, two = mine.get(key, _USUAL.get(key)), theirs.get(key, _USUAL.get(key))
            if one != two:
                values = "" if isinstance(one or two, (dict, list)) else f": {one} and {two}"
                yield f"the recipes have different {key}{values}; merge runs with one recipe"


def _are_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """Open a file of statistics: what it says about itself, and its tensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            text = (opened.metadata() or {}).get(_METADATA)
            if text is None:
                raise ConfigurationError(f"{file} holds no statistics of a calibration")
            content = json.loads(text)
            if content.get("version") not in _READABLE:
                raise ConfigurationError(
                    f"{file} has version {content.get('version')}, and this is version {_VERSION}; "
                    "read it with the Inlay that wrote it"
                )
            yield content, opened
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"cannot read the statistics {file}: {error}") from error


def _compared_fields(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe that runs must agree on to be merged.

    Merging compares the observers of each slot; a recipe may leave their choice open.
    """
    return {
        key: _without_observers(value)
        for key, value in recipe.items()
        if key in ("config_groups", "ignore", "kv_cache_scheme", *_USUAL) and value is not None
    }


def _without_observers(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {
            key: each for key, each in value.items() if not key.startswith(("observer", "format"))
        }
        return {key: _without_observers(each) for key, each in kept.items()}
    return value


def _warn_unchecked(what: str) -> None:
    warnings.warn(
        f"an older Inlay wrote these statistics, without fingerprints of weights; that they are of "
        f"{what} was not checked",
        stacklevel=3,
    )


def require_same_weights(
    model: nn.Module, stored: StoredStatistics, accept: Collection[str] = ()
) -> None:
    """Refuse statistics that were gathered with other weights than those of the model.

    :param accept: problems to accept; `other_weights` is this one
    """
    if OTHER_WEIGHTS in accept:
        return
    if not stored.weights:
        _warn_unchecked("this model")
        return
    unlike = difference(stored.weights, fingerprints(weights_in(model)))
    if unlike is not None:
        raise StatisticsError(
            f"the statistics were gathered with other weights: {unlike} differ. Give the model "
            "that they were gathered from, loaded in the same dtype, or calibrate this one. To use "
            f'them all the same, pass accept={{"{OTHER_WEIGHTS}"}} (--accept {OTHER_WEIGHTS})'
        )


def problem_with(stored: Statistics, slot: Slot) -> str | None:
    """Why stored statistics do not carry the qparams of a slot, if they do not."""
    gathered, wanted = stored.slot.observer_class, slot.observer_class
    if slot.watches_input and issubclass(gathered, wanted):
        return None  # what is known of channels does not depend on how anything is quantized
    if not stored.is_complete:
        return f"{stored.slot.observer} keeps what it learns outside of tensors, and so not on disk"
    by, args = stored.slot.args, slot.args
    of_same_values = issubclass(gathered, wanted) and bool(wanted._act_sync_dict)
    any_format = gathered.any_format and wanted.any_format
    keeps_extremes = set(wanted._act_sync_dict.values()) <= {ReduceOp.MIN, ReduceOp.MAX}
    if (
        of_same_values
        and any_format
        and keeps_extremes
        and slot.needed_qparams == ("global_scale",)
    ):
        return None  # it follows from the extremes of all values; averages of ranges do not
    if args.strategy != by.strategy or args.group_size != by.group_size:
        return f"they are per {_value(by.strategy)}, not per {_value(args.strategy)}"
    if not of_same_values:
        return f"{stored.slot.observer} gathered them, which is not what {slot.observer} needs"
    if any_format or key_of(args) == key_of(by):
        return None
    return f"{stored.slot.observer} gathered them for another format"


def with_gathering_observers(recipe: Recipe, stored: Mapping[str, Statistics]) -> Recipe:
    """The recipe, asking for the observers that gathered the statistics where it names none."""
    config = recipe.config.model_copy(deep=True)
    for scheme in config.config_groups.values():
        for base_name, part in (("input", "input_activations"), ("output", "output_activations")):
            args = getattr(scheme, part)
            if args is None or args.observer is None or part in recipe.preset_observers:
                setattr(scheme, part, _as_gathered(args, base_name, stored))
    if config.kv_cache_scheme is not None and config.kv_cache_scheme.observer is None:
        config.kv_cache_scheme = _as_gathered(config.kv_cache_scheme, "k", stored)
    return replace(recipe, config=config)


def _as_gathered(
    args: QuantizationArgs | None, base_name: str, stored: Mapping[str, Statistics]
) -> QuantizationArgs | None:
    if args is None or args.dynamic is True:
        return args
    of_kind = [known for known in stored.values() if known.slot.base_name == base_name]
    choices = {
        (known.slot.observer, str(known.slot.args.observer_kwargs)): known for known in of_kind
    }
    if len(choices) != 1:
        return args
    (known,) = choices.values()
    slot = known.slot
    wanted = {"observer": slot.observer, "observer_kwargs": slot.args.observer_kwargs}
    for change in (wanted, {}, *_simpler_observers(slot)):
        chosen = args.model_copy(update=change)
        try:
            make_observer(base_name, chosen)
            problem = problem_with(known, replace(slot, args=chosen))
        except ConfigurationError:  # the observer does not work with this strategy
            continue
        if problem is None:
            return chosen
    return args.model_copy(update=wanted)


def _simpler_observers(slot: Slot) -> Iterator[dict[str, Any]]:
    """Observers whose statistics are among those of the slot's observer."""
    bases = slot.observer_class.__mro__[1:]
    for name in sorted(Observer.registered_names()):
        if Observer.get_value_from_registry(name) in bases:
            yield {"observer": name.replace("-", "_"), "observer_kwargs": {}}


def _value(member: Any) -> str:
    return str(getattr(member, "value", member))
