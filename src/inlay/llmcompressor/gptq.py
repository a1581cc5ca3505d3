"""GPTQModifier of llm-compressor, with Hessians from the graph and Inlay's solver."""

from collections.abc import Iterable

from compressed_tensors.quantization import ActivationOrdering
from compressed_tensors.utils import match_named_modules
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.gptq.helpers import update_batch_qparams
from torch import nn

from inlay.calibration import Calibration
from inlay.compensation.settings import GPTQ
from inlay.steps.compensate import compensate
from inlay.steps.finalizing import Finalizing

__all__ = ["compensate_by", "problem_with_gptq", "settings_of"]

_STATIC = (ActivationOrdering.STATIC, ActivationOrdering.WEIGHT)  # two names of one order
# What GPTQModifier does with Hessians is in these; one that overrides them does something else.
_OWN = ("calibrate_module", "compress_modules", "compress_module_list")


def settings_of(modifiers: Iterable[Modifier]) -> GPTQ | None:
    """Return the settings of a GPTQModifier, which runs without others; None without one."""
    for modifier in modifiers:
        if isinstance(modifier, GPTQModifier):
            return GPTQ.of_llmcompressor(modifier.dampening_frac)
    return None


def problem_with_gptq(modifier: GPTQModifier) -> str | None:
    """Why Inlay cannot run a GPTQModifier in the graph; None if it can."""
    overridden = [
        name for name in _OWN if getattr(type(modifier), name) is not getattr(GPTQModifier, name)
    ]
    if overridden:
        return f"it overrides {', '.join(overridden)}"
    for scheme in modifier.resolved_config.config_groups.values():
        if scheme.weights is not None and scheme.weights.actorder not in _STATIC:
            return f"it sets actorder to {scheme.weights.actorder}, and Inlay's order is static"
    return None


def compensate_by(calibration: Calibration, modifier: GPTQModifier, model: nn.Module) -> None:
    """Put the weights of a modifier's modules on the grids that its observers found."""
    modules = dict(match_named_modules(model, modifier.resolved_targets, modifier.ignore))
    state = Finalizing(
        statistics=calibration.statistics,
        plan=calibration.plan,
        weights=calibration.graphs.weights,
        equalize=lambda: None,
        progress=calibration.show_progress,
    )
    for slot in calibration.plan.weight_slots():
        if calibration.plan.compensates(slot.module):
            state.qparams[slot.name] = modules[slot.module].weight_observer.get_qparams()
    compensate(state)
    for name, weight in state.weights.take_compensated().items():
        qparams = state.qparams[f"{name}.weight"]
        global_scale = qparams.get("global_scale")
        update_batch_qparams(
            [modules[name]],
            weight.unsqueeze(0),
            qparams["scale"].unsqueeze(0),
            qparams["zero_point"].unsqueeze(0),
            None if global_scale is None else global_scale.reshape(-1)[:1],
            modules[name].quantization_scheme.weights,
        )
