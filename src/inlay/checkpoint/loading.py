"""Loading models and tokenizers of transformers, from a folder or by name, without surprises.

Loading downloads nothing and runs no code of a model's author unless asked to. Weights come from
safetensors, or from a GGUF file if one is named.
"""

import logging
import os
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from inlay.checkpoint.files.dequantized import is_readable
from inlay.checkpoint.files.left_over import warn_of_unused
from inlay.checkpoint.files.weight_files import require_shards, stored_names
from inlay.checkpoint.source import Source
from inlay.errors import ConfigurationError
from inlay.options import LoadKeywords
from inlay.transformers_private import Loading, correct_tokenizer

__all__ = [
    "Place",
    "class_of",
    "dequantized_config",
    "dtype_of",
    "empty_model",
    "find_tokenizer",
    "load_as_stored",
    "load_model",
    "load_tokenizer",
    "random_model",
    "require_all_weights",
    "require_full_precision",
    "require_in_memory",
]

_log = logging.getLogger(__name__)

# A folder, or a name on the hub whose files are in the local cache; or all of a source.
Place = str | os.PathLike[str] | Source
# For classes that are not part of transformers, the end of the name tells the kind of head.
_HEADS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForImageClassification": "AutoModelForImageClassification",
}


def load_model(place: Place, **options: Unpack[LoadKeywords]) -> nn.Module:
    """Load a model with its weights, in the class that its config names, ready for inference.

    :param place: a folder, or a name on the hub whose files are in the local cache
    :param options: the fields of `LoadOptions`
    """
    source = Source.of(place, **options)
    _log.info("loading the model")
    config = source.config()
    if dequantized_config(config, source.place):
        from inlay.checkpoint.stored_model import StoredModel

        return StoredModel.open(source).load_all()
    in_cache = source.is_folder or not source.download
    if source.gguf_file is None and in_cache:
        require_shards(source.folder())
    model = _loaded(source, config)
    if source.gguf_file is None:
        folder = source.folder()
        warn_of_unused(model, stored_names(folder), Loading.of(model), folder)
    return model


def load_as_stored(place: Place, **options: Unpack[LoadKeywords]) -> nn.Module:
    """Load a model as `load_model` does, or a quantized one as transformers runs it."""
    source = Source.of(place, **options)
    return _loaded(source, source.config())


def _loaded(source: Source, config: Any) -> nn.Module:
    source.require_safetensors()
    cls, own = class_of(config, source)
    own.update({"use_safetensors": True} if source.gguf_file is None else _unpacked())
    model, found = source.read(
        lambda: cls.from_pretrained(
            source.place,
            dtype=dtype_of(source),
            output_loading_info=True,
            **source.options,
            **own,
        )
    )
    require_all_weights(model, found["missing_keys"], source)
    assert isinstance(model, nn.Module)
    return model.eval()


def load_tokenizer(place: Place, **options: Unpack[LoadKeywords]) -> Any:
    """Load the tokenizer or processor of a model. The parameters are those of `load_model`."""
    from transformers import AutoProcessor, AutoTokenizer

    source = Source.of(place, **options)
    if not source.may_have_tokenizer():
        raise ConfigurationError(
            f"{source.place} has no tokenizer; save the one that belongs to the model there with "
            "save_pretrained"
        )
    tokenizer = source.read(
        lambda: (AutoProcessor if source.has_processor() else AutoTokenizer).from_pretrained(
            source.place, trust_remote_code=source.trust_remote_code, **source.options
        )
    )
    if source.gguf_file is not None:
        correct_tokenizer(tokenizer, source.config())
    return tokenizer


def find_tokenizer(place: Place, **options: Unpack[LoadKeywords]) -> Any | None:
    """Load the tokenizer of a model if it has one that loads. Warn if it has one that does not."""
    source = Source.of(place, **options)
    if not source.may_have_tokenizer():
        return None
    try:
        return load_tokenizer(source)
    except ConfigurationError as error:
        warnings.warn(f"continuing without a tokenizer: {error}", stacklevel=2)
        return None


def empty_model(place: Place, **options: Unpack[LoadKeywords]) -> nn.Module:
    """Build a model without its weights, on the meta device, from its config alone."""
    source = Source.of(place, **options)
    config = source.config()
    cls, own = class_of(config, source)
    with torch.device("meta"):
        model = cls.from_config(config, **own) if own else cls(config)
    assert isinstance(model, nn.Module)
    return model.eval()


def random_model(
    place: Place,
    *,
    layers: int | None = None,
    **options: Unpack[LoadKeywords],
) -> nn.Module:
    """Build a model with random weights, the same every time, from its config alone.

    :param layers: how many of its layers to build at most; None for all of them
    """
    source = Source.of(place, **options)
    config = source.config()
    depth = getattr(config, "num_hidden_layers", None)
    if layers is not None and isinstance(depth, int) and depth > layers:
        config.num_hidden_layers = layers
        kinds = getattr(config, "layer_types", None)
        if isinstance(kinds, list):  # one for each layer
            config.layer_types = kinds[:layers]
    cls, own = class_of(config, source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls.from_config(config, **own) if own else cls(config)
    assert isinstance(model, nn.Module)
    return model.eval()


def class_of(config: Any, source: Source) -> tuple[Any, dict[str, Any]]:
    """Return the class that the config names, and the extra options of an Auto… class."""
    import transformers

    sentences = source.sentence_folder()
    if sentences is not None and sentences.has_no_head:
        return transformers.AutoModel, {"trust_remote_code": source.trust_remote_code}
    name = next(iter(getattr(config, "architectures", None) or []), "")
    known = getattr(transformers, name, None)
    is_own = isinstance(known, type) and issubclass(known, transformers.PreTrainedModel)
    # Trusted code of the model wins, even if its class has a name of transformers.
    if is_own and not (source.trust_remote_code and hasattr(config, "auto_map")):
        return known, {}
    # GGUF names no class; it is a format for language models.
    usual = "AutoModel" if source.gguf_file is None else "AutoModelForCausalLM"
    head = next((auto for end, auto in _HEADS.items() if name.endswith(end)), usual)
    return getattr(transformers, head), {"trust_remote_code": source.trust_remote_code}


def dtype_of(source: Source) -> str | torch.dtype:
    """Return the dtype to load weights in; "auto" stays as it is."""
    if not isinstance(source.dtype, str) or source.dtype == "auto":
        return source.dtype
    found = getattr(torch, source.dtype)
    assert isinstance(found, torch.dtype)
    return found


def dequantized_config(config: Any, name: str) -> bool:
    """Remove the quantization from a config if its weights can be dequantized as they are read.

    :param name: name of the model in the error
    :return: whether there was one
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return False
    if not is_readable(quantization):
        require_full_precision(config, name)
    del config.quantization_config
    return True


def require_full_precision(config: Any, name: str) -> None:
    """Refuse a model whose config says that it is quantized.

    :param config: the config of a model of transformers, or None
    :param name: name of the model in the error
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    advice = "calibrate the model it was made from"
    if is_readable(quantization):
        advice = "inlay.checkpoint.loading.load_model(folder) dequantizes its weights"
    if "gguf" in str(quantization).lower():
        advice = "inlay.checkpoint.loading.load_model(folder, gguf_file=…) unpacks its weights"
    raise ConfigurationError(f"{name} is quantized already; {advice}")


def require_in_memory(model: nn.Module) -> None:
    """Refuse a model whose weights accelerate keeps elsewhere until a module runs."""
    offloaded = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if offloaded:
        place = getattr(model, "name_or_path", "") or "FOLDER"
        more = f" and {len(offloaded) - 1} others" if len(offloaded) > 1 else ""
        raise ConfigurationError(
            f"{offloaded[0]}{more} of {type(model).__name__} are offloaded, not in memory. Stream "
            f"the model from its folder: inlay calibrate {place} --stream, or inlay.stream("
            f"{place!r}, …); or load it without device_map"
        )


def _unpacked() -> dict[str, Any]:
    """Return options that make transformers unpack GGUF and not call the model quantized."""
    import transformers

    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def require_all_weights(model: Any, missing: Collection[str], source: Source) -> None:
    """Refuse a model with random parts: its statistics would mean nothing.

    :param missing: names of the weights that the files do not have
    """
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigurationError(
            f"{source.place} has no weights for {', '.join(sorted(missing)[:3])}{more} of "
            f"{type(model).__name__}; correct `architectures` in its config.json, or load the "
            "model in Python and pass it to inlay.calibrate"
        )
