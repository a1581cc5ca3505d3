"""What a calibration is held against: the model as compressed-tensors runs it, or reads it back."""

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file
from torch import nn

from inlay.calibration import Calibration
from inlay.checking.linear_experts import linear_weights, use_linear_experts
from inlay.errors import CheckError
from inlay.recipe import Plan
from inlay.transformers_private import as_saved, saved_name, tied_names

__all__ = ["equalized_copy", "quantized_copy", "read_back"]


def equalized_copy(calibration: Calibration) -> nn.Module:
    """Return a copy of the model that has its equalized parameters for its own."""
    equalized = copy.deepcopy(calibration.model)
    with torch.no_grad():
        for name, parameter in equalized.named_parameters():
            own = calibration.model.get_parameter(name)
            parameter.copy_(calibration.equalization.parameters.of(own))
    return equalized


def quantized_copy(calibration: Calibration) -> nn.Module:
    """Return a copy of the model that compressed-tensors quantizes with the qparams found."""
    plan, qparams = calibration.plan, calibration.qparams
    assert qparams is not None
    quantized = equalized_copy(calibration)
    use_linear_experts(quantized, plan)
    _apply(quantized, calibration.recipe.config)
    for slot in plan.slots.values():
        for key, value in qparams.get(slot.name, {}).items():
            if isinstance(value, torch.Tensor):
                parameter = nn.Parameter(value.clone(), requires_grad=False)
                module = quantized.get_submodule(slot.module)
                module.register_parameter(f"{slot.base_name}_{key}", parameter)
    return quantized


def read_back(calibration: Calibration, folder: Path) -> nn.Module:
    """Return the model of a checkpoint with experts, as a server has it: each a Linear of its own.

    transformers loads experts into one parameter and does not quantize their inputs, so the folder
    is read as transformers would otherwise: compressed-tensors makes the modules that its config
    asks for, and unpacks what is stored for them.

    :raises CheckError: if tensors are missing, or nobody reads them
    """
    model: Any = copy.deepcopy(calibration.model)
    use_linear_experts(model, calibration.plan)
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(stated)
    compressor = ModelCompressor(quantization_config=config)
    _apply(model, config)
    compressor.compress_model(model)
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored.update(load_file(file))
    names = dict(_names_in_checkpoint(calibration.model, model, calibration.plan))
    wanted = {
        name: f"{names[module]}.{own}"
        for module, _, own in (key.rpartition(".") for key in model.state_dict())
        for name in [f"{module}.{own}"]
    }
    tied = set(tied_names(model))
    for name, key in wanted.items():
        if key not in stored:  # a rule of transformers may rename a weight and not its scales
            wanted[name] = _renamed(calibration.model, name, stored) or key
    converted = _converted(calibration, stored, wanted)
    wanted = {name: key for name, key in wanted.items() if name not in converted}
    missing = [key for name, key in wanted.items() if key not in stored and name not in tied]
    keys_read = {key for own, _ in converted.values() for key in own}
    unread = stored.keys() - set(wanted.values()) - keys_read
    for problem, keys in (("lacks", missing), ("has, and nothing reads,", sorted(unread))):
        if keys:
            raise CheckError(f"the checkpoint {problem} {', '.join(keys[:5])}")
    found = {name: stored[key] for name, key in wanted.items() if key in stored}
    found.update({name: tensor for name, (_, tensor) in converted.items()})
    model.load_state_dict(found, strict=False)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    compressor.decompress_model(model)
    loaded: nn.Module = model.eval()
    return loaded


def _renamed(model: nn.Module, name: str, stored: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name under which a tensor is stored if transformers renames it as it is."""
    saved = list(as_saved(model, {name: torch.empty(0, device="meta")}))
    return saved[0] if len(saved) == 1 and saved[0] in stored else None


def _converted(
    calibration: Calibration, stored: Mapping[str, torch.Tensor], wanted: Mapping[str, str]
) -> dict[str, tuple[list[str], torch.Tensor]]:
    """Return tensors that are stored in another form, or under names that no module has.

    Each is the model's own, if that is stored as transformers saves it.

    :param wanted: the names of tensors in the model, each with the name expected in the checkpoint
    :return: the names under which each is stored, and its value
    """
    own = equalized_copy(calibration).state_dict()
    found = {}
    for name, key in wanted.items():
        if key in stored or name not in own:
            continue
        saved = as_saved(calibration.model, {name: own[name]})
        if all(each in stored and torch.equal(stored[each], saved[each]) for each in saved):
            found[name] = (list(saved), own[name])
    return found


def _apply(model: nn.Module, config: QuantizationConfig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply_quantization_config(model, config, show_progress=False)


def _names_in_checkpoint(
    original: nn.Module, linear: nn.Module, plan: Plan
) -> Iterator[tuple[str, str]]:
    """Yield the names of modules, and the names that transformers gives them when saving."""
    for name, _ in linear.named_modules():
        yield name, saved_name(original, name) if name else name
    for stack in plan.stacks:
        yield from _names_of_experts(original, stack)


def _names_of_experts(original: Any, stack: str) -> Iterator[tuple[str, str]]:
    """Know each expert by its weight in what transformers would save of the plain model."""
    parameter = original.get_parameter(stack).detach()
    saved = as_saved(original, {stack: parameter})
    for own, weight in linear_weights(stack, parameter).items():
        alike = (name for name, tensor in saved.items() if torch.equal(tensor, weight))
        found = next(alike, None)
        if found is None:
            raise CheckError(f"transformers does not save {own} as a matrix of its own")
        yield own, found.removesuffix(".weight")
