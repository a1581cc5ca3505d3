"""Scores: size and predicted loss of each format of each unit, stored for further targets."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from inlay.errors import ConfigurationError
from inlay.files import write_atomically
from inlay.report.data import Estimate
from inlay.report.plain import from_plain, to_plain
from inlay.searching.solving import Choice, Option

__all__ = ["Check", "Scores", "UnitScore"]

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class UnitScore:
    """What the formats of a unit take and cost.

    :param layers: the names of modules that share a format
    :param targets: how a recipe names them
    :param weights: how many values their weights have
    :param places: the places of the formats that fit, among all formats
    :param bits: of one value, without scales, by format that fits
    :param sizes: bytes in a checkpoint, with scales, by format that fits
    :param costs: predicted KL divergence per token, by format that fits
    """

    layers: tuple[str, ...]
    targets: tuple[str, ...]
    weights: int
    places: tuple[int, ...]
    bits: tuple[int, ...]
    sizes: tuple[int, ...]
    costs: tuple[float, ...]

    def by_bits(self) -> list[Option]:
        pairs = zip(self.bits, self.costs, strict=True)
        return [Option(self.weights * bits, cost) for bits, cost in pairs]

    def by_size(self) -> list[Option]:
        return [Option(size, cost) for size, cost in zip(self.sizes, self.costs, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A choice of formats that was measured on held-out rows.

    :param choice: the place of the format among those that fit, by unit
    :param predicted: the sum of its costs
    :param kl: KL divergence from the model in full precision, in nats per position
    """

    choice: tuple[int, ...]
    predicted: float
    kl: Estimate
    perplexity_ratio: Estimate | None = None
    agreement: Estimate | None = None


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Everything that a search knows of a model.

    :param model: its name
    :param data: description of the data
    :param tokens: how many tokens the scores come from
    :param formats: as the user wrote them
    :param forward_only: whether costs are relative errors of outputs, not KL divergences
    :param kept: bytes of what stays as it is in every choice
    :param left: layers that stay as they are in every choice, with the reasons
    :param weights: fingerprints of the model's tensors
    :param settings: what else the scores depend on, by name
    :param checks: choices that were measured so far
    """

    model: str
    data: str
    tokens: int
    formats: tuple[str, ...]
    forward_only: bool
    kept: int
    units: tuple[UnitScore, ...]
    left: dict[str, str]
    weights: dict[str, str]
    settings: dict[str, str]
    checks: tuple[Check, ...] = ()

    @property
    def count(self) -> int:
        """How many values all weights have that are searched."""
        return sum(unit.weights for unit in self.units)

    def bits_of(self, choice: Choice) -> float:
        """Return the mean bits of a value, without scales."""
        pairs = zip(self.units, choice, strict=True)
        return sum(unit.weights * unit.bits[place] for unit, place in pairs) / self.count

    def size_of(self, choice: Choice) -> int:
        """Return the bytes of all tensors of the checkpoint."""
        pairs = zip(self.units, choice, strict=True)
        return self.kept + sum(unit.sizes[place] for unit, place in pairs)

    def predicted(self, choice: Choice) -> float:
        pairs = zip(self.units, choice, strict=True)
        return sum(unit.costs[place] for unit, place in pairs)

    def format_of(self, unit: int, choice: Choice) -> int:
        """Return the place of a unit's format among all formats."""
        return self.units[unit].places[choice[unit]]

    def check_of(self, choice: Choice) -> Check | None:
        """Return what was measured of a choice, if it was."""
        return next((check for check in self.checks if check.choice == choice), None)

    def with_check(self, check: Check) -> "Scores":
        return replace(self, checks=(*self.checks, check))

    def save(self, path: str | Path) -> Path:
        """Write the scores as JSON, atomically."""
        path = Path(path)
        content = {"version": _VERSION, "scores": to_plain(self)}
        write_atomically(path, json.dumps(content, allow_nan=False, indent=1))
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Scores":
        """Read what `save` wrote."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot read the scores {path}: {error}") from error
        version = document.get("version") if isinstance(document, dict) else None
        if version != _VERSION:
            raise ConfigurationError(
                f"{path} holds scores of version {version!r}, but this Inlay reads {_VERSION}; "
                "remove the file, and search again"
            )
        return from_plain(cls, document.get("scores"), "scores")
