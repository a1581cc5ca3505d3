"""The formats that a search chooses among, as a user writes them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

from inlay.compensation.settings import GPTQ
from inlay.errors import ConfigurationError
from inlay.formats.storage import columns_problem
from inlay.recipe import preset_names
from inlay.recipe.presets import METHODS, Method, change, checked, preset, with_best_rounding

__all__ = ["PLAIN", "Format", "parse_formats"]

# Names for layers that stay as they are, in the dtype of the model.
PLAIN = ("bf16", "fp16", "fp32", "full")


@dataclass(frozen=True, eq=False)
class Format:
    """A way to store the weight of a layer.

    :param name: as the user wrote it
    :param scheme: how the layer is quantized, without targets; None if it stays as it is
    """

    name: str
    scheme: QuantizationScheme | None

    @property
    def is_plain(self) -> bool:
        return self.scheme is None

    def bits(self, itemsize: int) -> int:
        """Return the bits of one value, without scales.

        :param itemsize: bytes of a value in the model's own dtype
        """
        return 8 * itemsize if self.scheme is None else int(self.scheme.weights.num_bits)

    def fits(self, columns: int) -> bool:
        """Tell whether a weight with so many columns can be stored in this format."""
        return self.scheme is None or columns_problem(columns, self.scheme.weights) is None

    def targeting(self, targets: Iterable[str]) -> QuantizationScheme:
        """Return the scheme with targets."""
        assert self.scheme is not None
        found: QuantizationScheme = self.scheme.model_copy(deep=True)
        found.targets = list(targets)
        return found


def parse_formats(text: str, method: Method) -> tuple[tuple[Format, ...], GPTQ | None]:
    """Read formats such as `W4A16:group_size=64,W8A16,bf16`.

    :param text: presets with changes of their weights behind a colon, separated by commas
    :param method: `best` chooses observers and GPTQ for few bits where no observer is named
    :return: the formats, and how rounding errors are compensated: alike in all layers
    """
    if method not in METHODS:
        raise ConfigurationError(f"there is no method {method!r}; use one of {', '.join(METHODS)}")
    found: list[Format] = []
    gptq: GPTQ | None = None
    for entry in _entries(text):
        if entry.lower() in PLAIN:
            found.append(Format(entry, None))
            continue
        scheme = _scheme(entry)
        config = checked(QuantizationConfig, config_groups={"group_0": scheme})
        if method == "best":
            config, gptq = with_best_rounding(config, gptq, has_data=True)
        found.append(Format(entry, config.config_groups["group_0"]))
    names = [each.name for each in found]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated or sum(each.is_plain for each in found) > 1:
        raise ConfigurationError(
            f"the formats {', '.join(names)} name one twice; {', '.join(PLAIN)} all stand for "
            "layers that stay as they are"
        )
    if len(found) < 2:
        raise ConfigurationError(
            "a search chooses among at least two formats, such as W4A16,W8A16,bf16, and only "
            f"{', '.join(names) or 'none'} is given"
        )
    return tuple(found), gptq


def _entries(text: str) -> list[str]:
    """Return one text for each format; a part without a name belongs to the format before it."""
    entries: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        if entries and "=" in part and ":" not in part:
            entries[-1] += f",{part}"
        else:
            entries.append(part)
    return entries


def _scheme(entry: str) -> QuantizationScheme:
    name, _, changes = entry.partition(":")
    try:
        scheme = preset(name, [])
    except ConfigurationError as error:
        raise ConfigurationError(
            f"there is no format {name!r}; use {PLAIN[0]}, or a preset such as "
            f"{', '.join(preset_names())}"
        ) from error
    scheme.weights = change(scheme.weights, dict(_changes(entry, changes)) or None, "weights")
    if scheme.weights is None or scheme.weights.num_bits is None:
        raise ConfigurationError(f"{name} quantizes no weights; a search chooses formats of these")
    if scheme.input_activations is not None or scheme.output_activations is not None:
        raise ConfigurationError(
            f"{name} also quantizes activations, whose errors the scores do not cover; search "
            "among formats of weights, such as W4A16, W8A16, NVFP4A16 and bf16"
        )
    return scheme


def _changes(entry: str, text: str) -> Iterator[tuple[str, Any]]:
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigurationError(f"{part!r} in the format {entry!r} is not KEY=VALUE")
        yield key, yaml.safe_load(value)
