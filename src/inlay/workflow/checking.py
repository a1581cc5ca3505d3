"""Check that Inlay gets a model right: against hooks, against compressed-tensors, and from disk."""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationType, apply_quantization_config
from torch import nn

from inlay.calibration import Calibration
from inlay.errors import CheckError, ConfigurationError
from inlay.observers import Observer
from inlay.recipe import Plan, Recipe, Slot
from inlay.statistics.functional import tensors_of

__all__ = ["CheckedCalibration", "check_calibration"]

_CLOSE = 1e-3  # of the norm of outputs, where a compiler or a dtype may round


@dataclass(frozen=True, kw_only=True)
class CheckedCalibration:
    """What was checked, in sentences, and what could not be, with the reason."""

    done: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def check_calibration(
    model: nn.Module,
    recipe: Recipe,
    batches: Sequence[Any],
    *,
    compiler: str = "eager",
    tolerance: float = 0.0,
) -> CheckedCalibration:
    """Calibrate a model and hold everything that comes of it against something simpler.

    Statistics are held against eager observers on hooks, the finalized graph against the forward of
    compressed-tensors, and a checkpoint, if the model is one of transformers, against the graph.

    :param batches: keyword arguments of the model by name, or positional ones; padding counts
    :param compiler: the backend of `torch.compile` to check; one that rounds needs a tolerance
    :param tolerance: how far statistics may differ, relatively; by default not at all
    :raises CheckError: if anything differs, or a slot that hooks see is missed by the graph
    :raises ConfigurationError: if the recipe equalizes, since what it is held against does not
    """
    if recipe.equalize is not None:
        raise ConfigurationError(
            "the recipe equalizes, which changes weights, and a check holds the model against its "
            "own; check the recipe without `equalize`"
        )
    calibration = Calibration(model, recipe, compiler=compiler, count_padding=True, progress=False)
    torch.compiler.reset()
    with _hooked(model, calibration.plan) as hooked, torch.no_grad():
        for batch in batches:
            _call(model, batch)
    for batch in batches:
        calibration.run(batch)
    done = [_statistics_agree(calibration, hooked, tolerance)]
    accept = ("unobserved",)  # modules that these batches do not reach
    calibration.finalize(accept=accept)
    with torch.no_grad():
        graph = torch.compile(model, backend=calibration.backend)
        found = _tensors_in(_call(graph, batches[0]))
    left_out: list[str] = []
    for check in (_forward_agrees, _checkpoint_agrees):
        text, is_done = check(calibration, batches[0], found)
        (done if is_done else left_out).append(text)
    return CheckedCalibration(done=tuple(done), left_out=tuple(left_out))


def _call(model: Callable[..., Any], batch: Any) -> Any:
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)


class _Seen:
    """An eager observer of a slot, and how many values it has seen."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.observer: Observer = slot.make_observer()
        self.values = 0

    def take_in(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.numel():
            self.values += 1
            if self.slot.is_importance:
                self.observer.observe_input(value)
            else:
                self.observer(value)


@contextmanager
def _hooked(model: nn.Module, plan: Plan) -> Iterator[dict[str, _Seen]]:
    """Observe inputs and outputs of modules by hooks, while batches run without a graph."""
    seen: dict[str, _Seen] = {}
    handles = []
    for name, module in model.named_modules():
        # Modules with the same weight are one to a recipe: the first of them speaks for all.
        owner = plan.owner(getattr(module, "weight", None), plan.kinds.get(name))
        slots = plan.of_module(owner) if owner is not None and name in plan.kinds else {}
        weight = slots.get("weight")
        watched = [slots.get("input"), weight.importance if weight is not None else None]
        for slot in filter(None, watched):
            if slot.is_observed:
                own = seen.setdefault(slot.name, _Seen(slot))
                handles.append(module.register_forward_pre_hook(partial(_input_hook, own)))
        output = slots.get("output")
        if output is not None and output.is_observed:
            own = seen.setdefault(output.name, _Seen(output))
            handles.append(module.register_forward_hook(partial(_output_hook, own)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _input_hook(seen: _Seen, module: nn.Module, args: tuple[Any, ...]) -> None:
    if args:
        seen.take_in(args[0])


def _output_hook(seen: _Seen, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    seen.take_in(output)


def _statistics_agree(
    calibration: Calibration, hooked: Mapping[str, _Seen], tolerance: float
) -> str:
    """Hold the statistics of the graph against those of eager observers."""
    snapshot = calibration.statistics.snapshot()
    missed = [name for name, seen in hooked.items() if seen.values and name not in snapshot]
    if missed:
        raise CheckError(
            f"the graph misses what hooks see at {', '.join(missed)}; look at explain() for why"
        )
    compared = 0
    for name, seen in hooked.items():
        if not seen.values:
            continue
        found = snapshot[name]
        if int(found.seen) != seen.values:
            raise CheckError(
                f"{name} saw {int(found.seen)} values in the graph and {seen.values} by hooks"
            )
        own = found.observer()
        for key, expected in tensors_of(seen.observer).items():
            if not _agree(getattr(own, key).double(), expected.double(), tolerance):
                raise CheckError(
                    f"{key} of {name} is {_short(getattr(own, key))} in the graph and "
                    f"{_short(expected)} by hooks"
                )
        compared += 1
    alone = sum(1 for name in snapshot if not getattr(hooked.get(name), "values", 0))
    more = f"; {alone} others are seen by the graph alone, such as states of attention"
    return f"statistics of {compared} slots are those of eager observers{more if alone else ''}"


def _forward_agrees(
    calibration: Calibration, batch: Any, found: list[torch.Tensor]
) -> tuple[str, bool]:
    """Hold the finalized graph against the forward that compressed-tensors gives a model."""
    plan, qparams = calibration.plan, calibration.qparams
    assert qparams is not None
    if any(slot.is_attention for slot in plan.slots.values()):
        return "the forward of compressed-tensors, which wraps attention only while serving", False
    if plan.stacks:
        return "the forward of compressed-tensors, which has no experts in one parameter", False
    missing = [s.name for s in plan.slots.values() if s.is_observed and s.name not in qparams]
    if missing:
        return f"the forward of compressed-tensors, as {missing[0]} saw no data", False
    quantized = copy.deepcopy(calibration.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply_quantization_config(quantized, calibration.recipe.config, show_progress=False)
    for slot in plan.slots.values():
        for key, value in qparams.get(slot.name, {}).items():
            if isinstance(value, torch.Tensor):
                parameter = nn.Parameter(value.clone(), requires_grad=False)
                module = quantized.get_submodule(slot.module)
                module.register_parameter(f"{slot.base_name}_{key}", parameter)
    with torch.no_grad():
        expected = _tensors_in(_call(quantized, batch))
    _require_close("the forward of compressed-tensors", found, expected)
    return "the finalized graph computes what compressed-tensors computes", True


def _loads_experts(plan: Plan) -> bool:
    """Whether transformers runs experts that are quantized like those of the plan.

    It loads packed integers without zero points, and FP8, of which it does not quantize inputs.
    """
    slots = plan.of_module(next(iter(plan.experts)))
    args = slots["weight"].args
    return "input" not in slots and bool(args.symmetric) and args.type == QuantizationType.INT


def _checkpoint_agrees(
    calibration: Calibration, batch: Any, found: list[torch.Tensor]
) -> tuple[str, bool]:
    """Write a checkpoint, load it with transformers, and hold it against the graph."""
    model: Any = calibration.model
    if not hasattr(model, "save_pretrained"):
        return "a checkpoint, as the model is not one of transformers", False
    if calibration.plan.stacks and not _loads_experts(calibration.plan):
        return "a checkpoint, as transformers runs such experts otherwise than a server", False
    with tempfile.TemporaryDirectory() as folder:
        calibration.save(f"{folder}/checkpoint", report=False)
        loaded = type(model).from_pretrained(f"{folder}/checkpoint", dtype=model.dtype).eval()
        with torch.no_grad():
            expected = _tensors_in(_call(loaded, batch))
    _require_close("the checkpoint, loaded back", found, expected)
    return "the checkpoint loads back and computes what the graph does", True


def _tensors_in(outputs: Any) -> list[torch.Tensor]:
    """Tensors of numbers in what a model returns, without caches."""
    if isinstance(outputs, torch.Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if isinstance(outputs, Mapping):
        outputs = [value for key, value in outputs.items() if key != "past_key_values"]
    if isinstance(outputs, (tuple, list)):
        return [tensor for value in outputs for tensor in _tensors_in(value)]
    return []


def _require_close(what: str, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    if len(found) != len(expected):
        raise CheckError(f"{what} returns {len(expected)} tensors, and the graph {len(found)}")
    for one, other in zip(found, expected, strict=True):
        error, norm = (one.double() - other.double()).norm(), other.double().norm()
        if not error <= _CLOSE * norm:
            raise CheckError(
                f"{what} and the finalized graph differ by {float(error / norm):.2g} of the "
                "output's norm"
            )


def _agree(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(other.abs().max()) if other.numel() else 0.0
    return bool(torch.allclose(one, other, tolerance, tolerance * scale))


def _short(tensor: torch.Tensor) -> str:
    numbers = [f"{number:.6g}" for number in tensor.double().flatten()[:3].tolist()]
    return ", ".join(numbers) + (", …" if tensor.numel() > 3 else "")
