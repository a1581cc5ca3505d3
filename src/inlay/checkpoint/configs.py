"""What stands beside the weights of a checkpoint: configs for those who load it."""

import copy
import warnings
from pathlib import Path
from typing import Any

from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig

from inlay.recipe import Plan

__all__ = ["warn_of_experts", "write_configs"]


def write_configs(folder: Path, model: Any, keep_ties: bool) -> None:
    """Write the configs of a model; one whose ties are not kept says that it has none."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if not keep_ties:
        for part in (config, config.get_text_config(decoder=True)):
            part.tie_word_embeddings = False
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def warn_of_experts(plan: Plan, config: QuantizationConfig) -> None:
    """Warn of experts in full precision that transformers would not load.

    It expects all experts of a compressed checkpoint to be quantized, and accepts experts without
    scales only in FP8 checkpoints.
    """
    experts = list(plan.experts_left)
    formats = {scheme.format for scheme in config.config_groups.values()}
    if experts and formats - {CompressionFormat.float_quantized.value}:
        warnings.warn(
            f"{experts[0]} and {len(experts) - 1} more stay in full precision: "
            f"{plan.experts_left[experts[0]]}. transformers expects quantized experts in such a "
            "checkpoint and would start with random ones",
            stacklevel=4,
        )
