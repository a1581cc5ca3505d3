"""The place of a model, and what may be done to load it. Importing this takes no time."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError

from inlay.checkpoint.files.sentence_folders import TOKENIZER_FILES, SentenceFolder
from inlay.errors import ConfigurationError, InlayError
from inlay.options import DTYPES, LoadKeywords, LoadOptions
from inlay.transformers_private import asks_for_trust, gist

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Source"]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Source(LoadOptions):
    """The place of a model, and what may be done to load it.

    :param place: a folder, or a name on the hub whose files are in the local cache
    """

    place: str

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str) and self.dtype not in DTYPES:
            raise ConfigurationError(
                f"there is no dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}"
            )
        if os.path.isfile(self.place):
            raise ConfigurationError(
                f"{self.place} is a file; give its folder, and for weights in GGUF also the name "
                "of the file (--gguf-file)"
            )
        if not self.is_folder and _looks_like_a_path(self.place):
            raise ConfigurationError(f"there is no folder {self.place}")
        sentences = self.sentence_folder()
        if sentences is not None:
            object.__setattr__(self, "place", str(sentences.transformer))
        gguf = None if self.gguf_file is None else Path(self.place, self.gguf_file)
        if self.is_folder and gguf is not None and not gguf.is_file():
            raise ConfigurationError(f"there is no file {self.gguf_file} in {self.place}")

    @classmethod
    def of(
        cls, path_or_name: "str | os.PathLike[str] | Source", **options: "Unpack[LoadKeywords]"
    ) -> "Source":
        """Return the source of a model by its folder or its name on the hub.

        :param path_or_name: or a source, which is returned as it is
        """
        if isinstance(path_or_name, Source):
            return replace(path_or_name, **options)
        return cls(place=os.path.expanduser(os.fspath(path_or_name)), **options)

    @property
    def is_folder(self) -> bool:
        """Whether the place is a folder, not a name on the hub."""
        return os.path.isdir(self.place)

    @property
    def options(self) -> dict[str, Any]:
        """The options of `from_pretrained` that allow downloads and name the file."""
        options: dict[str, Any] = {"local_files_only": not self.download}
        return options if self.gguf_file is None else {**options, "gguf_file": self.gguf_file}

    def sentence_folder(self) -> SentenceFolder | None:
        """Return the folder of sentence-transformers that the model belongs to, if any."""
        return SentenceFolder.at(Path(self.place)) if self.is_folder else None

    def require_config(self) -> None:
        """Refuse a folder that is not that of a model."""
        if not self.is_folder or self.gguf_file is not None:
            return
        path = Path(self.place, "config.json")
        if not path.exists():
            raise ConfigurationError(
                f"{self.place} has no config.json: it is not the folder of a model"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ConfigurationError(
                f"{path} holds a {type(content).__name__}; the config of a model is an object"
            )

    def config(self) -> Any:
        self.require_config()
        from transformers import AutoConfig

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

    @property
    def is_streamable(self) -> bool:
        """Whether the weights can be read block by block."""
        return self.gguf_file is None

    def require_streamable(self) -> None:
        """Refuse weights that cannot be read block by block."""
        if not self.is_streamable:
            raise ConfigurationError(
                f"weights are streamed from safetensors, and {self.gguf_file} is GGUF. Load the "
                "model and save it with save_pretrained, or calibrate in memory with --no-stream"
            )

    def folder(self, *, download: bool = False) -> Path:
        """Return the folder of the files; for a name on the hub, that in the cache."""
        if self.is_folder:
            return Path(self.place)
        from huggingface_hub import snapshot_download

        return Path(self.read(lambda: snapshot_download(self.place, local_files_only=not download)))

    def may_have_tokenizer(self) -> bool:
        """Return False only for a folder that has no file of a tokenizer."""
        if not self.is_folder or self.gguf_file is not None:
            return True
        return any(name.startswith(TOKENIZER_FILES) for name in os.listdir(self.place))

    def has_processor(self) -> bool:
        """Return whether a folder has the processor of a model that reads more than text."""
        names = ("processor_config.json", "preprocessor_config.json")
        return self.is_folder and any(Path(self.place, name).is_file() for name in names)

    def read(self, load: Callable[[], _T]) -> _T:
        """Call `load` and turn its errors into ones that say what to do."""
        try:
            return load()
        except InlayError:
            raise  # it says what to do already
        except ImportError as error:
            raise ConfigurationError(f"cannot load {self.place}: {gist(error)}") from error
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigurationError(self._explanation(error)) from error

    def _explanation(self, error: Exception) -> str:
        if asks_for_trust(error):
            return (
                f"{self.place} comes with code of its own; read it, and if you trust it, pass "
                "trust_remote_code=True (--trust-remote-code)"
            )
        if self.is_folder or self.download or not isinstance(error, OSError):
            return f"cannot load {self.place}: {gist(error)}"
        return (
            f"{self.place} is neither a folder nor in the cache of downloaded models; "
            "download=True (--download) fetches it from the hub"
        )


def _looks_like_a_path(place: str) -> bool:
    return os.path.isabs(place) or place.startswith(".") or place.count("/") > 1 or "\\" in place
