"""Which modifiers of a recipe Inlay can calibrate, and why it leaves the others alone."""

import warnings
from collections.abc import Iterator

from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.observers import Observer as PeerObserver
from llmcompressor.observers.imatrix import IMatrixMSEObserver
from torch import nn

from inlay.errors import ConfigurationError
from inlay.llmcompressor.gptq import problem_with_gptq
from inlay.llmcompressor.observers import InlayObserver, counterpart
from inlay.llmcompressor.tracing import is_in_place

__all__ = ["problem_with", "problem_with_model"]

_KNOWN = (QuantizationModifier, GPTQModifier)
# What a modifier does with data is in these; one that overrides them does something else.
_LIFECYCLE = (
    "on_event",
    "on_calibration_start",
    "on_sequential_epoch_end",
    "on_calibration_end",
    "start_calibration",
    "end_calibration",
)


def problem_with(modifier: Modifier) -> str | None:
    """Why a modifier needs more than the statistics that Inlay gathers; None if it does not."""
    base = next((cls for cls in _KNOWN if isinstance(modifier, cls)), None)
    if base is None:
        return "it needs more of the data than statistics"
    overridden = [
        name for name in _LIFECYCLE if getattr(type(modifier), name) is not getattr(base, name)
    ]
    if overridden:
        return f"it does more than {base.__name__} in {', '.join(overridden)}"
    problem = problem_with_gptq(modifier) if isinstance(modifier, GPTQModifier) else None
    if problem is not None:
        return problem
    problems = (_problem_with_observer(base_name, args) for base_name, args in _parts(modifier))
    return next((problem for problem in problems if problem is not None), None)


def problem_with_model(model: nn.Module) -> str | None:
    """Why a model cannot be traced as it is; None if it can."""
    if is_in_place(model):
        return None
    return "weights of the model are offloaded, and only weights that stay in place are traced"


def _parts(modifier: QuantizationModifier | GPTQModifier) -> Iterator[tuple[str, QuantizationArgs]]:
    config = modifier.resolved_config
    for scheme in config.config_groups.values():
        yield "weight", scheme.weights
        yield "input", scheme.input_activations
        yield "output", scheme.output_activations
    yield "k", config.kv_cache_scheme


def _problem_with_observer(base_name: str, args: QuantizationArgs | None) -> str | None:
    if args is None or args.dynamic is True:
        return None
    default = "memoryless_minmax" if base_name == "weight" else "minmax"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come again when it is attached
            observer = PeerObserver.load_from_registry(
                args.observer or default, base_name=base_name, args=args.model_copy(deep=True)
            )
        if base_name != "weight" or isinstance(observer, (InlayObserver, IMatrixMSEObserver)):
            counterpart(observer)
    except ConfigurationError as error:
        return str(error)
    looks_elsewhere = type(observer).attach is not PeerObserver.attach
    if looks_elsewhere and not isinstance(observer, (InlayObserver, IMatrixMSEObserver)):
        return f"the observer {type(observer).__name__} has hooks of its own"
    return None
