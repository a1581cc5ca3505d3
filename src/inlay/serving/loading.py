"""Load a quantized checkpoint onto kernels, ready to run."""

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

from compressed_tensors.compressors import decompress_module
from torch import nn
from typing_extensions import Unpack

from inlay.checkpoint.loading import Place, class_of, dtype_of, require_all_weights
from inlay.checkpoint.source import Source
from inlay.errors import ConfigurationError
from inlay.options import LoadKeywords
from inlay.serving.layers import IntegerLinear, PackedLinear, kernel_layer

__all__ = ["compiled_in_parts", "load", "use_kernels", "weight_bytes"]


def load(place: Place, *, compile: bool = True, **options: Unpack[LoadKeywords]) -> nn.Module:
    """Load a checkpoint of compressed-tensors, by Inlay or llm-compressor, to run it fast.

    Linear layers with int8 weights and inputs run on integer kernels and keep their weights in
    int8. Layers whose weights alone are quantized keep them packed: a kernel reads them for few
    rows, and for many they are dequantized first. Others are decompressed, as transformers does it,
    with a warning that says why. The model is that of transformers: call it, or its `generate`.

    :param place: a folder, or a name on the hub whose files are in the local cache
    :param compile: compile with Inductor, when the model first runs: of a model that generates,
        layers and what computes values from values alone; of others, the whole
    :param options: the fields of `inlay.options.LoadOptions`; `dtype` is that of everything that
        is not quantized
    """
    source = Source.of(place, **options)
    config = source.config()
    _require_compressed(config, source)
    config.quantization_config.pop("dequantize", None)  # kernels take compressed weights
    source.require_safetensors()
    cls, own = class_of(config, source)
    model, found = source.read(
        lambda: cls.from_pretrained(
            source.place,
            config=config,
            dtype=dtype_of(source),
            output_loading_info=True,
            use_safetensors=True,
            **source.options,
            **own,
        )
    )
    require_all_weights(model, found["missing_keys"], source)
    kept = use_kernels(model)
    for problem, names in kept.items():
        shown = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
        warnings.warn(f"no integer kernel computes {shown}: {problem}", stacklevel=2)
    model.eval().requires_grad_(False)
    if compile:
        parts = compiled_in_parts(model) if model.can_generate() else [("", model)]
        for _, part in parts:
            part.compile()
    assert isinstance(model, nn.Module)
    return model


def use_kernels(model: Any) -> dict[str, list[str]]:
    """Replace the compressed layers of a model by kernels, and decompress all others.

    :return: the names of those that were decompressed, by the reason
    """
    model.hf_quantizer.compressor.remove_decompression_hook(model)
    kept: dict[str, list[str]] = {}
    for name, layer in list(model.named_modules()):
        if getattr(layer, "quantization_scheme", None) is None:
            continue
        if isinstance(layer, nn.Linear):
            computed, problem = kernel_layer(layer)
            model.set_submodule(name, computed)
        else:
            decompress_module(layer)
            problem = f"it is a {type(layer).__name__}"
        if problem is not None:
            kept.setdefault(problem, []).append(name)
    return kept


def weight_bytes(model: nn.Module) -> int:
    """Return how many bytes the weights of a model take, and its other tensors."""
    tensors = {id(each): each for each in [*model.parameters(), *model.buffers()]}
    return sum(each.numel() * each.element_size() for each in tensors.values())


def _require_compressed(config: Any, source: Source) -> None:
    quantization = getattr(config, "quantization_config", None)
    fields = quantization if isinstance(quantization, dict) else vars(quantization or object)
    method = fields.get("quant_method")
    if getattr(method, "value", method) != "compressed-tensors":
        was = "is not quantized" if quantization is None else f"is quantized by {method}"
        raise ConfigurationError(
            f"{source.place} {was}; load a checkpoint of compressed-tensors, such as `inlay "
            "calibrate` writes"
        )


def compiled_in_parts(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules with kernels that take tensors, and no cache, mask or option.

    All blocks run one code, so such a part compiles once for every block. Whole blocks would
    compile once each, because each has a number by which it finds its cache.
    """
    for own, child in module.named_children():
        kernels = (IntegerLinear, PackedLinear)
        if not any(isinstance(each, kernels) for each in child.modules()):
            continue
        path = f"{name}.{own}" if name else own
        if not isinstance(child, nn.ModuleList) and _takes_values(child):
            yield path, child
        else:
            yield from compiled_in_parts(child, path)


def _takes_values(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return all(
        each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty
        for each in parameters
    )
