"""Models and tokenizers of transformers, from a folder or by name, without surprises.

Nothing is downloaded, and no code of a model's author is run, unless that is asked for. Weights
come from safetensors, or from GGUF where a file is named.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn

from inlay.errors import ConfigurationError

__all__ = ["empty_model", "load_model", "load_tokenizer", "require_full_precision"]

_T = TypeVar("_T")
_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
# For classes that are not part of transformers: which head the end of their name speaks of.
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
    """The model with its weights, of the class that its config names, ready for inference.

    :param path_or_name: a folder, or a name on the hub whose files are in the local cache
    :param dtype: of the weights; by default as they are stored
    :param gguf_file: the file in that folder to take the weights from
    :param download: whether files may be fetched from the hub
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
    """The tokenizer that belongs to a model."""
    from transformers import AutoTokenizer

    source = _Source.of(path_or_name, trust_remote_code, gguf_file, download)
    source.require_tokenizer()
    tokenizer = source.read(
        lambda: AutoTokenizer.from_pretrained(
            source.place, trust_remote_code=trust_remote_code, **source.options
        )
    )
    if gguf_file is not None:
        _correct_tokenizer(tokenizer, source.config())
    return tokenizer


def empty_model(
    path_or_name: str | os.PathLike[str],
    *,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    download: bool = False,
) -> nn.Module:
    """The model without its weights, on the meta device. Its config is all that is needed."""
    source = _Source.of(path_or_name, trust_remote_code, gguf_file, download)
    config = source.config()
    cls, options = _class_of(config, source)
    with torch.device("meta"):
        model = cls.from_config(config, **options) if options else cls(config)
    assert isinstance(model, nn.Module)
    return model.eval()


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where a model comes from, and what may be done to get it."""

    place: str
    is_folder: bool
    trust_remote_code: bool
    gguf_file: str | None
    download: bool

    @classmethod
    def of(
        cls,
        path_or_name: str | os.PathLike[str],
        trust_remote_code: bool,
        gguf_file: str | None,
        download: bool,
    ) -> "_Source":
        place = os.path.expanduser(os.fspath(path_or_name))
        is_folder = os.path.isdir(place)
        if os.path.isfile(place):
            raise ConfigurationError(
                f"{place} is a file; give the folder it is in, and for weights in GGUF the name of "
                "that file too (--gguf-file)"
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
        """Other formats of weights run code when they are read."""
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

    def require_tokenizer(self) -> None:
        if not self.is_folder or self.gguf_file is not None:
            return
        if not any(name.startswith(_TOKENIZER_FILES) for name in os.listdir(self.place)):
            raise ConfigurationError(
                f"{self.place} has no tokenizer; save the one that belongs to the model there with "
                "save_pretrained"
            )

    def read(self, load: Callable[[], _T]) -> _T:
        """What `load` gives, with errors that say what to do."""
        try:
            return load()
        except ImportError as error:
            raise ConfigurationError(f"cannot load {self.place}: {_gist(error)}") from error
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigurationError(self._explanation(error)) from error

    def _explanation(self, error: Exception) -> str:
        if "trust_remote_code" in str(error):
            return (
                f"{self.place} comes with code of its own; read it, and if you trust it pass "
                "--trust-remote-code"
            )
        if self.is_folder or self.download or not isinstance(error, OSError):
            return f"cannot load {self.place}: {_gist(error)}"
        return (
            f"{self.place} is neither a folder nor in the cache of downloaded models; "
            "--download fetches it from the hub"
        )


def _class_of(config: Any, source: _Source) -> tuple[Any, dict[str, Any]]:
    """The class that the config names, and the options that a class of Auto… takes on top."""
    import transformers

    name = next(iter(getattr(config, "architectures", None) or []), "")
    known = getattr(transformers, name, None)
    is_own = isinstance(known, type) and issubclass(known, transformers.PreTrainedModel)
    # Whoever trusts a model's own code gets that, also where it takes a name of transformers.
    if is_own and not (source.trust_remote_code and hasattr(config, "auto_map")):
        return known, {}
    # GGUF names no class; it is a format of language models.
    usual = "AutoModel" if source.gguf_file is None else "AutoModelForCausalLM"
    head = next((auto for end, auto in _HEADS.items() if name.endswith(end)), usual)
    return getattr(transformers, head), {"trust_remote_code": source.trust_remote_code}


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise ConfigurationError(
            f"there is no dtype {dtype!r}; there are auto, {', '.join(_DTYPES)}"
        )
    found = _DTYPES[dtype]
    assert isinstance(found, torch.dtype)
    return found


def require_full_precision(config: Any, name: str) -> None:
    """Refuse a model that says of itself that it is quantized.

    :param config: that of a model of transformers
    :param name: what to call the model
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    advice = "calibrate the model that it was made from"
    if "gguf" in str(quantization).lower():
        advice = "inlay.checkpoint.loading.load_model(folder, gguf_file=…) unpacks its weights"
    raise ConfigurationError(f"{name} is quantized already; {advice}")


def _unpacked() -> dict[str, Any]:
    """What lets transformers unpack GGUF, and not call the model quantized afterwards."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)  # older ones always unpack
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _correct_tokenizer(tokenizer: Any, config: Any) -> None:
    """Undo what conversion from GGUF gets wrong.

    The end of a text may become its begin, so special tokens are taken from the file's metadata;
    and spaces before punctuation would be lost, which only WordPiece puts there.
    """
    for role in ("bos", "eos", "unk", "pad"):
        number = getattr(config, f"{role}_token_id", None)
        if isinstance(number, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(number))
    tokenizer.clean_up_tokenization_spaces = False


def _require_all_weights(model: Any, found: dict[str, Any], source: _Source) -> None:
    """Refuse a model of which a part is random: its statistics would mean nothing."""
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
    """The first sentence or so: what transformers writes after it is advice for others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
