"""Folders of sentence-transformers: a transformer, and the modules that make embeddings of it."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.errors import CheckpointError

__all__ = ["TOKENIZER_FILES", "SentenceFolder", "leads_outside"]

# How the names of the files of a tokenizer start.
TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece", "merges", "tekken")
_MORE_OF_TOKENIZERS = ("special_tokens_map", "added_tokens", "chat_template")
_MODULES = "modules.json"
_SETTINGS = "config_sentence_transformers.json"


@dataclass(frozen=True, kw_only=True)
class SentenceFolder:
    """A folder of sentence-transformers.

    :param modules: what `modules.json` lists, the transformer first
    """

    root: Path
    modules: tuple[Mapping[str, Any], ...]

    @classmethod
    def at(cls, folder: Path) -> "SentenceFolder | None":
        """Return the folder that a transformer belongs to, given that of either; None if to none.

        :raises CheckpointError: if a module is outside the folder
        """
        for root in (folder, folder.absolute().parent):
            found = _modules_of(root)
            if not found:
                continue
            own = cls(root=root, modules=found)
            if (own.transformer / "config.json").is_file() and own.owns(folder):
                return own
        return None

    @property
    def transformer(self) -> Path:
        """The folder of the transformer, which may be the root."""
        return self.root / str(self.modules[0]["path"])

    @property
    def has_no_head(self) -> bool:
        """Whether the transformer is the one that `AutoModel` loads."""
        return str(self.modules[0].get("type")).endswith(".Transformer")

    def owns(self, folder: Path) -> bool:
        return folder.resolve() in (self.root.resolve(), self.transformer.resolve())

    def copy_to(self, out: Path, *, with_tokenizer: bool) -> None:
        """Copy everything but the transformer, whose place is now the root.

        :param with_tokenizer: copy its tokenizer, too
        """
        first, *others = self.modules
        for module in others:
            source = self.root / module["path"]
            if module["path"] and source.is_dir():
                shutil.copytree(source, out / module["path"], dirs_exist_ok=True)
        modules = [{**first, "path": ""}, *others]
        (out / _MODULES).write_text(json.dumps(modules, indent=2), encoding="utf-8")
        for file in (self.root / _SETTINGS, *self._own_files(with_tokenizer)):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
        _decompress_when_loaded(out / "config.json")

    def _own_files(self, with_tokenizer: bool) -> list[Path]:
        """Return the files beside the transformer that belong to the folder."""
        tokenizer = (*TOKENIZER_FILES, *_MORE_OF_TOKENIZERS) if with_tokenizer else ()
        has_code = not str(self.modules[0].get("type")).startswith("sentence_transformers.")
        return [
            file
            for file in self.transformer.iterdir()
            if (file.name.startswith("sentence_") and file.name.endswith("_config.json"))
            or (tokenizer and file.name.startswith(tokenizer))
            or (has_code and file.suffix == ".py")
        ]


def _decompress_when_loaded(file: Path) -> None:
    """Let transformers decompress weights as it loads them, instead of in a hook of the model.

    sentence-transformers calls `forward` of the model, which runs no hooks.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    config["quantization_config"]["dequantize"] = True
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def leads_outside(file: str) -> bool:
    """Return whether the text of a path leaves its folder; links of a cache may lead anywhere."""
    parts = file.replace("\\", "/").split("/")
    return file.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]


def _modules_of(root: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the modules that a folder lists; none if it is not one of sentence-transformers."""
    try:
        listed = json.loads((root / _MODULES).read_text(encoding="utf-8"))
        modules = tuple(dict(module) for module in listed)
        paths = [str(module["path"]) for module in modules]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    for path in paths:
        if leads_outside(path):
            raise CheckpointError(
                f"{root / _MODULES} says that a module is in {path}, outside of the folder; copy "
                "or download the model again"
            )
    return modules
