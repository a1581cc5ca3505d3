"""Small models quantized by llm-compressor's `oneshot`, in one pipeline or another."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch import nn
from torch.utils.data import DataLoader

from inlay.llmcompressor import register_pipeline

EAGER = "inlay_eager"
register_pipeline(EAGER, compiler="eager")
register_pipeline("inlay_eager_without_padding", compiler="eager", count_padding=False)

STATIC = {"num_bits": 8, "strategy": "tensor", "symmetric": False}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 16}
HEAD = "re:.*lm_head"


def static(
    observer: str = "static_minmax", targets: Sequence[str] = ("Linear",), **fields: Any
) -> QuantizationModifier:
    """Weights and inputs in int8, with scales that are known beforehand."""
    scheme = {
        "targets": list(targets),
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {**STATIC, "observer": observer},
    }
    return QuantizationModifier(config_groups={"a": scheme}, **{"ignore": [HEAD], **fields})


def grouped(observer: str, **fields: Any) -> QuantizationModifier:
    """Weights alone, in int4 and in groups."""
    weights = {**GROUPS, "observer": observer, "observer_kwargs": fields.pop("kwargs", {})}
    scheme = {"targets": fields.pop("targets", ["Linear"]), "weights": weights}
    return QuantizationModifier(config_groups={"a": scheme}, **{"ignore": [HEAD], **fields})


def preset(name: str, **fields: Any) -> QuantizationModifier:
    return QuantizationModifier(scheme=name, **{"ignore": [HEAD], **fields})


def batches(count: int = 2, *, padded: bool = True) -> list[dict[str, torch.Tensor]]:
    """Token ids, the second batch with padding on the left."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for index in range(count):
        ids = torch.randint(0, 96, (2, 6), generator=generator)
        mask = torch.ones_like(ids)
        if padded and index == 1:
            mask[0, :2] = 0
        result.append({"input_ids": ids, "attention_mask": mask})
    return result


def quantized(
    model: nn.Module,
    recipe: Any,
    pipeline: str | None,
    data: Sequence[Any] | None = None,
    save_to: Path | None = None,
    **options: Any,
) -> Any:
    """The model, after `oneshot` has quantized it and, if asked to, saved it."""
    given = DataLoader(batches() if data is None else data, batch_size=None)  # type: ignore
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)  # it looks there whether the model is quantized
        model.config._name_or_path = model.name_or_path = folder
        result = oneshot(
            model=model,
            recipe=recipe,
            pipeline=pipeline,
            processor=object(),  # the data is tokens already, but it is asked for
            **{"dataset": given, **options},
        )
        if save_to is not None:
            result.save_pretrained(save_to, save_compressed=True)
        return result


def qparams(model: nn.Module) -> dict[str, torch.Tensor]:
    names = ("_scale", "_zero_point")
    return {name: t for name, t in model.state_dict().items() if name.endswith(names)}


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected
    assert found.keys() == expected.keys()
    different = [
        name
        for name, tensor in expected.items()
        if tensor.dtype != found[name].dtype
        or tensor.shape != found[name].shape
        or not torch.equal(_bits(tensor), _bits(found[name]))
    ]
    assert different == []


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
