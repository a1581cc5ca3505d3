"""Private parts of transformers: the names and the form in which it saves tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["as_saved", "copy_remote_code", "read_as_linear", "saved_name", "without_ties"]


def as_saved(model: Any, tensors: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Return tensors of a model under the names, and in the form, that a checkpoint has.

    transformers 5.0; `save_pretrained` does the same, but to all tensors of a model at once, and
    writes them. Without it, models would be written under the names that they have in memory.
    """
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return saved


def saved_name(model: Any, module: str) -> str:
    """Return the name that a module of the model has in a checkpoint.

    transformers 5.0; as `as_saved`. Without it, the config would name modules that servers rename.
    """
    import torch

    key = f"{module}.weight"
    saved = list(as_saved(model, {key: torch.empty(0, device="meta")}))
    return saved[0].removesuffix(".weight") if len(saved) == 1 else module


def without_ties(model: Any, state: dict[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Return a state dict without the tied tensors that a checkpoint leaves out.

    transformers 5.0; only the model's class knows which of the names a loader fills in. Without it,
    tied tensors would be stored under each of their names.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    kept: dict[str, torch.Tensor] = remove_tied_weights_from_state_dict(state, model)
    return kept


def read_as_linear(model: Any) -> list[str]:
    """Return the modules in whose place transformers puts Linear modules in a quantized model.

    transformers 5.0; documented nowhere. Without it, experts of Llama 4 that stay in full precision
    would be written as a tensor that transformers does not read.
    """
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

    patched = {
        name
        for name, patch in MODULES_TO_PATCH_FOR_QUANTIZATION.items()
        if "compressed-tensors"
        in [str(getattr(m, "value", m)) for m in patch["quantization_methods"]]
    }
    return [name for name, module in model.named_modules() if type(module).__name__ in patched]


def copy_remote_code(model: Any, folder: Path, config: Any) -> None:
    """Copy the code that came with a model into a folder, and name it in the config.

    transformers 4.18; in public only `save_pretrained` does so. Without it, a checkpoint of such a
    model needs the files copied by hand.
    """
    from transformers.dynamic_module_utils import custom_object_save

    custom_object_save(model, folder, config=config)
