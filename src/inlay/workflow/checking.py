"""Check that Inlay gets a model right: against hooks, against compressed-tensors, and from disk."""

import copy
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationType, apply_quantization_config
from torch import nn

from inlay.calibration import Calibration
from inlay.errors import CheckError
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
    compressed-tensors, and a checkpoint, if the model is one of transformers, against the graph. If
    the recipe equalizes, a copy of the model with scaled parameters has to compute what the model
    does, and what was observed or derived of equalized inputs is held against hooks on the copy.

    :param batches: keyword arguments of the model by name, or positional ones; padding counts
    :param compiler: the backend of `torch.compile` to check; one that rounds needs a tolerance
    :param tolerance: how far statistics may differ, relatively; by default not at all
    :raises CheckError: if anything differs, or a slot that hooks see is missed by the graph
    """
    calibration = Calibration(model, recipe, compiler=compiler, count_padding=True, progress=False)
    torch.compiler.reset()
    hooked = _observed_by_hooks(model, calibration, batches)
    for batch in batches:
        calibration.run(batch)
    if calibration.needs_second_run:
        calibration.equalize()
        for batch in batches:
            calibration.run(batch)
    scaled = _scaled_inputs(calibration)
    plain = {name: seen for name, seen in hooked.items() if name not in scaled}
    done = [_statistics_agree(calibration, plain, tolerance)]
    accept = ("unobserved",)  # modules that these batches do not reach
    calibration.finalize(accept=accept)
    if recipe.equalize is not None:
        done.append(_equalized_agrees(calibration, batches, scaled, tolerance))
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


def _observed_by_hooks(
    model: nn.Module, calibration: Calibration, batches: Sequence[Any]
) -> dict[str, "_Seen"]:
    """What eager observers see in the model of a calibration, or in a copy of it."""
    with _hooked(model, calibration) as hooked, torch.no_grad():
        for batch in batches:
            _call(model, batch)
    return hooked


def _scaled_inputs(calibration: Calibration) -> set[str]:
    """Names of the slots that were observed only once their inputs were equalized."""
    readers = {
        name for group in calibration.equalization.collected.groups for name in group.readers
    }
    slots = (slot for slot in calibration.plan.slots.values() if slot.sees_scaled)
    return {slot.name for slot in slots if slot.module in readers}


def _equalized_copy(calibration: Calibration) -> nn.Module:
    """A copy of the model that has its equalized parameters for its own."""
    equalized = copy.deepcopy(calibration.model)
    with torch.no_grad():
        for name, parameter in equalized.named_parameters():
            own = calibration.model.get_parameter(name)
            parameter.copy_(calibration.equalization.parameters.of(own))
    return equalized


def _equalized_agrees(
    calibration: Calibration, batches: Sequence[Any], scaled: Collection[str], tolerance: float
) -> str:
    """Hold the equalized model against the model, and statistics against hooks on it."""
    equalized = _equalized_copy(calibration)
    with torch.no_grad():
        found, expected = (
            _tensors_in(_call(model, batches[0])) for model in (equalized, calibration.model)
        )
    close = max(_CLOSE, _rounding(equalized))
    _require_close("the model", found, expected, by="the equalized one", close=close)
    hooked = _observed_by_hooks(equalized, calibration, batches)
    statistics = calibration.statistics
    compared = 0
    for group in (each.group for each in calibration.equalization.done):
        for slot in (calibration.plan.of_module(reader)["input"] for reader in group.readers):
            seen = hooked.get(slot.name)
            known = statistics.of(slot)
            if seen is None or not seen.values or known is None:
                continue
            # A range that follows from those of channels is rounded once more.
            far = tolerance if slot.name in scaled else max(tolerance, _rounding(equalized))
            _require_statistics(slot.name, known.observer(), seen.observer, far)
            compared += 1
    return (
        f"the equalized model computes what the model does, and {compared} equalized inputs have "
        "the statistics that eager observers see in it"
    )


def _rounding(model: nn.Module) -> float:
    dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    return max((8 * torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


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
def _hooked(model: nn.Module, calibration: Calibration) -> Iterator[dict[str, _Seen]]:
    """Observe inputs and outputs of modules by hooks, while batches run without a graph."""
    plan = calibration.plan
    seen: dict[str, _Seen] = {}
    handles = []
    for name, module in model.named_modules():
        # Modules with the same weight are one to a recipe: the first of them speaks for all. A copy
        # has weights of its own.
        weight = getattr(calibration.model.get_submodule(name), "weight", None)
        owner = plan.owner(weight, plan.kinds.get(name))
        slots = plan.of_module(owner) if owner is not None and name in plan.kinds else {}
        own_weight = slots.get("weight")
        watched = [slots.get("input"), None if own_weight is None else own_weight.importance]
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
        _require_statistics(name, found.observer(), seen.observer, tolerance)
        compared += 1
    alone = sum(1 for name in snapshot if not getattr(hooked.get(name), "values", 0))
    more = f"; {alone} others are seen by the graph alone, such as states of attention"
    return f"statistics of {compared} slots are those of eager observers{more if alone else ''}"


def _require_statistics(name: str, found: Observer, by_hooks: Observer, tolerance: float) -> None:
    for key, expected in tensors_of(by_hooks).items():
        own = getattr(found, key)
        if not _agree(own.double(), expected.double(), tolerance):
            raise CheckError(
                f"{key} of {name} is {_short(own)} in the graph and {_short(expected)} by hooks"
            )


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
    quantized = _equalized_copy(calibration)
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


def _require_close(
    what: str,
    found: list[torch.Tensor],
    expected: list[torch.Tensor],
    by: str = "the finalized graph",
    close: float = _CLOSE,
) -> None:
    if len(found) != len(expected):
        raise CheckError(f"{what} returns {len(expected)} tensors, and {by} {len(found)}")
    for one, other in zip(found, expected, strict=True):
        error, norm = (one.double() - other.double()).norm(), other.double().norm()
        if not error <= close * norm:
            raise CheckError(
                f"{what} and {by} differ by {float(error / norm):.2g} of the output's norm"
            )


def _agree(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(other.abs().max()) if other.numel() else 0.0
    return bool(torch.allclose(one, other, tolerance, tolerance * scale))


def _short(tensor: torch.Tensor) -> str:
    numbers = [f"{number:.6g}" for number in tensor.double().flatten()[:3].tolist()]
    return ", ".join(numbers) + (", …" if tensor.numel() > 3 else "")
