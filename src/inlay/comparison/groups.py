"""Problems of the groups in a quantization config: layers whose format loaders disagree about.

A layer may match targets of several groups. transformers (compressed-tensors) prefers exact names,
then patterns in the order of their text, then classes. vLLM takes the first matching name or
pattern in the order of the groups, then a class. Saving sorts groups by name, so the name of a
group can decide which format its layers get, though the weights are the same.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.checkpoint.files.weight_files import WeightFiles
from inlay.checkpoint.source import Source
from inlay.comparison.weights import listed, stored_files
from inlay.report.data import Finding

__all__ = ["group_problems"]

_PLAIN_NAME = re.compile(r"(config_)?group_\d+")
_QUANTIZED = (".weight_packed", ".weight_scale")
_ABOUT = "quantization groups"
# Bits of stored types that are not packed.
_BITS = {"torch.int8": 8, "torch.float8_e4m3fn": 8, "torch.uint8": 4}


@dataclass(frozen=True)
class _Group:
    name: str
    targets: tuple[str, ...]
    scheme: Mapping[str, Any]

    @property
    def bits(self) -> Any:
        return (self.scheme.get("weights") or {}).get("num_bits")


def group_problems(source: Source, letter: str) -> Iterator[Finding]:
    """Find layers that a loader would ignore or read in another format than they are stored in."""
    files = stored_files(source)
    config = _quantization(source)
    if files is None or config is None:
        return
    groups = list(_groups(config))
    layers = sorted(
        {
            name.removesuffix(end)
            for name in files.tensors
            for end in _QUANTIZED
            if name.endswith(end)
        }
    )
    for finding in (
        *_names(groups),
        *_orphans(groups, layers, files, config.get("ignore") or ()),
        *_disagreements(groups, layers, files),
    ):
        yield Finding(severity=finding.severity, about=f"{_ABOUT} of {letter}", text=finding.text)


def _quantization(source: Source) -> dict[str, Any] | None:
    try:
        text = (source.folder() / "config.json").read_text(encoding="utf-8")
        config = json.loads(text).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return None
    if not isinstance(config, dict) or config.get("quant_method") != "compressed-tensors":
        return None
    return config if isinstance(config.get("config_groups"), dict) else None


def _groups(config: Mapping[str, Any]) -> Iterator[_Group]:
    for name, content in config["config_groups"].items():
        if isinstance(content, Mapping):
            scheme = {key: value for key, value in content.items() if key != "targets"}
            yield _Group(name, tuple(content.get("targets") or ()), scheme)
        else:  # a preset by name, with its targets
            yield _Group(name, tuple(content), {"preset": name})


def _names(groups: Sequence[_Group]) -> Iterator[Finding]:
    odd = [group.name for group in groups if not _PLAIN_NAME.fullmatch(group.name)]
    if odd:
        yield _warning(
            f"{listed(odd)} {'is' if len(odd) == 1 else 'are'} not named group_0, group_1, …. "
            "Saving sorts groups by name, and vLLM takes the first that matches, so such a name "
            "can give layers another format; rename it in config.json."
        )


def _orphans(
    groups: Sequence[_Group], layers: Sequence[str], files: WeightFiles, ignore: Iterable[str]
) -> Iterator[Finding]:
    targets = [target for group in groups for target in group.targets]
    ignored = [name for name in layers if any(_matches(name, each) for each in ignore)]
    lost = [name for name in layers if _by_vllm(name, groups) is None]
    if ignored:
        yield _warning(
            f"{listed(ignored)} {_stored(ignored)} quantized, but `ignore` names "
            f"{_them(ignored)}: loaders read the integers as weights. Correct config.json."
        )
    if lost:
        yield _warning(
            f"{listed(lost)} {_stored(lost)} quantized, but no group matches {_them(lost)}: "
            "loaders read the integers as weights, or find none. Correct its targets."
        )
    modules = _modules(files)
    unused = [
        each for each in targets if _is_name(each) and not any(_matches(m, each) for m in modules)
    ]
    if unused:
        text = f"The target {listed(unused)} matches no module of the stored tensors."
        yield Finding(severity="warning" if lost else "note", text=text)
    quantized = set(layers)
    plain = [
        name
        for name in sorted(modules - quantized)
        if (own := files.tensors.get(f"{name}.weight")) is not None
        and len(own.shape) == 2
        and any(_is_name(each) and _matches(name, each) for each in targets)
        and not any(_matches(name, each) for each in ignore)
    ]
    if plain:
        yield _warning(
            f"{listed(plain)} {'is' if len(plain) == 1 else 'are'} in a group, but stored in full "
            "precision: loaders find no scales."
        )


def _disagreements(
    groups: Sequence[_Group], layers: Sequence[str], files: WeightFiles
) -> Iterator[Finding]:
    """Find layers whose group depends on the loader, or on the order of the groups."""
    ordered = sorted(groups, key=lambda group: group.name)
    loaders: dict[str, Callable[[str], _Group | None]] = {
        "transformers": lambda name: _by_transformers(name, groups),
        "vLLM": lambda name: _by_vllm(name, groups),
        "vLLM, once the groups are sorted": lambda name: _by_vllm(name, ordered),
    }
    bits = _stored_bits(layers, files)
    found: dict[str, list[str]] = {}
    for name in layers:
        chosen = {
            loader: group for loader, of in loaders.items() if (group := of(name)) is not None
        }
        schemes = [group.scheme for group in chosen.values()]
        stored = bits.get(name)
        wrong = [
            who for who, group in chosen.items() if stored and group.bits not in (None, stored)
        ]
        if any(scheme != schemes[0] for scheme in schemes) or wrong:
            said = ", ".join(f"{group.name} for {who}" for who, group in chosen.items())
            width = f" They are stored in {stored} bits." if stored else ""
            found.setdefault(f"{said}.{width}", []).append(name)
    for text, names in found.items():
        yield _warning(
            f"{listed(names)} match several groups, or one of another format: {text} Name the "
            "groups group_0, group_1, … in the order in which they apply, and keep their targets "
            "apart."
        )


def _by_transformers(name: str, groups: Sequence[_Group]) -> _Group | None:
    of = {target: group for group in groups for target in group.targets}
    ranked = sorted(of, key=lambda target: (target.startswith("re:"), target))
    names = (of[target] for target in ranked if _is_name(target) and _matches(name, target))
    classes = (of[target] for target in ranked if not _is_name(target))
    return next(names, None) or next(classes, None)


def _by_vllm(name: str, groups: Sequence[_Group]) -> _Group | None:
    pairs = [(target, group) for group in groups for target in group.targets]
    names = (group for target, group in pairs if _is_name(target) and _matches(name, target))
    classes = (group for target, group in pairs if not _is_name(target))
    return next(names, None) or next(classes, None)


def _is_name(target: str) -> bool:
    """Return whether a target is a name or a pattern, and not a class such as Linear."""
    return target.startswith("re:") or "." in target or not target[:1].isupper()


def _matches(name: str, target: str) -> bool:
    if not target.startswith("re:"):
        return name == target
    try:
        return re.match(target[3:], name) is not None
    except re.error:
        return False


def _modules(files: WeightFiles) -> set[str]:
    found: set[str] = set()
    for name in files.tensors:
        parts = name.split(".")[:-1]
        found.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return found


def _stored_bits(layers: Iterable[str], files: WeightFiles) -> dict[str, int]:
    """Return how many bits the weights of layers have, as far as their tensors say so."""
    found: dict[str, int] = {}
    with files.reading() as read:
        for name in layers:
            packed = files.tensors.get(f"{name}.weight_packed")
            stored = packed or files.tensors.get(f"{name}.weight")
            if stored is None:
                continue
            if str(stored.dtype) in _BITS:
                found[name] = _BITS[str(stored.dtype)]
            elif packed is not None and f"{name}.weight_shape" in files.tensors:
                columns = int(read(f"{name}.weight_shape")[-1])
                found[name] = 32 * packed.shape[-1] // columns
    return found


def _stored(names: Sequence[str]) -> str:
    return "is stored" if len(names) == 1 else "are stored"


def _them(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _warning(text: str) -> Finding:
    return Finding(severity="warning", text=text)
