"""Loading models and tokenizers of transformers, from a folder or by name, without surprises.

Loading downloads nothing and runs no code of a model's author unless asked to. Weights come from
safetensors, or from a GGUF file if one is named.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn

from inlay.errors import ConfigurationError

__all__ = [
    "empty_model",
    "find_tokenizer",
    "load_model",
    "load_tokenizer",
    "require_full_precision",
]

_T = TypeVar("_T")
_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
# For classes that are not part of transformers, the end of the name tells the kind of head.
_HEADS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}
_TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece", "merges", "tekken")


def load_model(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    download: bool = False,
) -> nn.Module:
    """Load a model with its weights, in the class that its config names, ready for inference.

    :param path_or_name: a folder, or a name on the hub whose files are in the local cache
    :param dtype: dtype of the weights; by default the stored one
    :param trust_remote_code: run code that comes with the model
    :param gguf_file: a file in that folder to take the weights from
    :param download: fetch missing files from the hub
    """
    source = _Source.of(path_or_name, trust_remote_code, gguf_file, download)
    chosen = _dtype(dtype)
    config = source.config()
    require_full_precision(config, source.place)
    source.require_safetensors()
    cls, options = _class_of(config, source)
    options.update({"use_safetensors": True} if gguf_file is None else _unpacked())
    model, found = source.read(
        lambda: cls.from_pretrained(
            source.place, dtype=chosen, output_loading_info=True, **source.options, **options
        )
    )
    _require_all_weights(model, found, source)
    assert isinstance(model, nn.Module)
    return model.eval()


def load_tokenizer(
    path_or_name: str | os.PathLike[str],
    *,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    download: bool = False,
) -> Any:
    """Load the tokenizer that belongs to a model; the parameters are those of `load_model`."""
    from transformers import AutoTokenizer

    source = _Source.of(path_or_name, trust_remote_code, gguf_file, download)
    if not source.may_have_tokenizer():
        raise ConfigurationError(
            f"{source.place} has no tokenizer; save the one that belongs to the model there with "
            "save_pretrained"
        )
    tokenizer = source.read(
        lambda: AutoTokenizer.from_pretrained(
            source.place, trust_remote_code=trust_remote_code, **source.options
        )
    )
    if gguf_file is not None:
        _correct_tokenizer(tokenizer, source.config())
    return tokenizer


def find_tokenizer(path_or_name: str | os.PathLike[str], **source: Any) -> Any | None:
    """Load the tokenizer of a model if it has one that loads, for whoever can do without.

    :param source: the other parameters of `load_tokenizer`
    """
    if not _Source.of(path_or_name, **source).may_have_tokenizer():
        return None
    try:
        return load_tokenizer(path_or_name, **source)
    except ConfigurationError as error:
        warnings.warn(f"continuing without a tokenizer: {error}", stacklevel=2)
        return None


def empty_model(
    path_or_name: str | os.PathLike[str],
    *,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    download: bool = False,
) -> nn.Module:
    """Build a model without its weights, on the meta device, from its config alone."""
    source = _Source.of(path_or_name, trust_remote_code, gguf_file, download)
    config = source.config()
    cls, options = _class_of(config, source)
    with torch.device("meta"):
        model = cls.from_config(config, **options) if options else cls(config)
    assert isinstance(model, nn.Module)
    return model.eval()


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The place of a model, and what may be done to load it."""

    place: str
    is_folder: bool
    trust_remote_code: bool
    gguf_file: str | None
    download: bool

    @classmethod
    def of(
        cls,
        path_or_name: str | os.PathLike[str],
        trust_remote_code: bool = False,
        gguf_file: str | None = None,
        download: bool = False,
    ) -> "_Source":
        place = os.path.expanduser(os.fspath(path_or_name))
        is_folder = os.path.isdir(place)
        if os.path.isfile(place):
            raise ConfigurationError(
                f"{place} is a file; give its folder, and for weights in GGUF also the name of the "
                "file (--gguf-file)"
            )
        if not is_folder and _looks_like_a_path(place):
            raise ConfigurationError(f"there is no folder {place}")
        if is_folder and gguf_file is not None and not Path(place, gguf_file).is_file():
            raise ConfigurationError(f"there is no file {gguf_file} in {place}")
        return cls(
            place=place,
            is_folder=is_folder,
            trust_remote_code=trust_remote_code,
            gguf_file=gguf_file,
            download=download,
        )

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"local_files_only": not self.download}
        return options if self.gguf_file is None else {**options, "gguf_file": self.gguf_file}

    def config(self) -> Any:
        from transformers import AutoConfig

        if (
            self.is_folder
            and self.gguf_file is None
            and not Path(self.place, "config.json").exists()
        ):
            raise ConfigurationError(
                f"{self.place} has no config.json: it is not the folder of a model"
            )
        return self.read(
            lambda: AutoConfig.from_pretrained(
                self.place, trust_remote_code=self.trust_remote_code, **self.options
            )
        )

    def require_safetensors(self) -> None:
        """Refuse other formats of weights: reading them can run code."""
        if not self.is_folder or self.gguf_file is not None:
            return
        names = sorted(os.listdir(self.place))
        if any(name.endswith(".safetensors") for name in names):
            return
        others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
        raise ConfigurationError(
            f"{self.place} has no weights in safetensors"
            + (f", only {', '.join(others)}" if others else "")
            + "; save it with save_pretrained, or name a GGUF file with --gguf-file"
        )

    def may_have_tokenizer(self) -> bool:
        """Return False only for a folder that has no file of a tokenizer."""
        if not self.is_folder or self.gguf_file is not None:
            return True
        return any(name.startswith(_TOKENIZER_FILES) for name in os.listdir(self.place))

    def read(self, load: Callable[[], _T]) -> _T:
        """Call `load` and turn its errors into ones that say what to do."""
        try:
            return load()
        except ImportError as error:
            raise ConfigurationError(f"cannot load {self.place}: {_gist(error)}") from error
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigurationError(self._explanation(error)) from error

    def _explanation(self, error: Exception) -> str:
        if "trust_remote_code" in str(error):
            return (
                f"{self.place} comes with code of its own; read it, and if you trust it, pass "
                "trust_remote_code=True (--trust-remote-code)"
            )
        if self.is_folder or self.download or not isinstance(error, OSError):
            return f"cannot load {self.place}: {_gist(error)}"
        return (
            f"{self.place} is neither a folder nor in the cache of downloaded models; "
            "download=True (--download) fetches it from the hub"
        )


def _class_of(config: Any, source: _Source) -> tuple[Any, dict[str, Any]]:
    """Return the class that the config names, and the extra options of an Auto… class."""
    import transformers

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


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise ConfigurationError(
            f"there is no dtype {dtype!r}; choose one of auto, {', '.join(_DTYPES)}"
        )
    found = _DTYPES[dtype]
    assert isinstance(found, torch.dtype)
    return found


def require_full_precision(config: Any, name: str) -> None:
    """Refuse a model whose config says that it is quantized.

    :param config: the config of a model of transformers, or None
    :param name: name of the model in the error
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    advice = "calibrate the model it was made from"
    if "gguf" in str(quantization).lower():
        advice = "inlay.checkpoint.loading.load_model(folder, gguf_file=…) unpacks its weights"
    raise ConfigurationError(f"{name} is quantized already; {advice}")


def _unpacked() -> dict[str, Any]:
    """Return options that make transformers unpack GGUF and not call the model quantized."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)  # older versions always unpack
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _correct_tokenizer(tokenizer: Any, config: Any) -> None:
    """Correct two errors of the conversion from GGUF.

    It may take the end token of a text for the start token, so special tokens come from the file's
    metadata. It also removes spaces before punctuation, which is right only for WordPiece.
    """
    for role in ("bos", "eos", "unk", "pad"):
        number = getattr(config, f"{role}_token_id", None)
        if isinstance(number, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(number))
    tokenizer.clean_up_tokenization_spaces = False


def _require_all_weights(model: Any, found: dict[str, Any], source: _Source) -> None:
    """Refuse a model with random parts: its statistics would mean nothing."""
    missing = sorted(found.get("missing_keys") or [])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigurationError(
            f"{source.place} has no weights for {', '.join(missing[:3])}{more} of "
            f"{type(model).__name__}; correct `architectures` in its config.json, or load the "
            "model in Python and pass it to inlay.calibrate"
        )


def _looks_like_a_path(place: str) -> bool:
    return os.path.isabs(place) or place.startswith(".") or place.count("/") > 1 or "\\" in place


def _gist(error: Exception) -> str:
    """Return the first line of an error: transformers continues with advice for others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
