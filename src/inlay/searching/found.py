"""The result of a search."""

from dataclasses import dataclass
from pathlib import Path

from inlay.files import write_atomically
from inlay.recipe import Recipe
from inlay.report.data import Estimate
from inlay.searching.page import render_search
from inlay.searching.recipes import modifier_text
from inlay.searching.scores import Scores
from inlay.searching.solving import Choice
from inlay.searching.targets import Target, corrected

__all__ = ["Found"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Found:
    """What a search found.

    :param recipe: gives each layer its format
    :param scores: with all choices that were measured
    :param choice: the place of the format among those that fit, by unit
    """

    recipe: Recipe
    scores: Scores
    choice: Choice
    target: Target

    @property
    def bits(self) -> float:
        """Mean bits of a weight, without scales."""
        return self.scores.bits_of(self.choice)

    @property
    def size(self) -> int:
        """Bytes of all tensors of the checkpoint."""
        return self.scores.size_of(self.choice)

    @property
    def predicted_kl(self) -> float | None:
        """Predicted KL divergence, corrected by what was measured; None if there is none."""
        if self.scores.forward_only and not self.scores.checks:
            return None
        return corrected(self.scores, self.scores.predicted(self.choice))

    @property
    def kl(self) -> Estimate | None:
        """The KL divergence on held-out rows, if it was measured."""
        check = self.scores.check_of(self.choice)
        return None if check is None else check.kl

    @property
    def formats(self) -> dict[str, str]:
        """Return the name of the format of each layer."""
        names = self.scores.formats
        return {
            layer: names[self.scores.format_of(number, self.choice)]
            for number, unit in enumerate(self.scores.units)
            for layer in unit.layers
        }

    def to_yaml(self) -> str:
        """Return the recipe as YAML that Inlay and llm-compressor read."""
        comments = (
            f"Found by inlay search for {self.target}",
            f"{self.scores.model}: {self.bits:.3f} bits per weight, {self.size:,} bytes, "
            f"{self._loss()}",
        )
        return modifier_text(self.recipe, comments)

    def save(self, path: str | Path) -> Path:
        """Write the recipe, and beside it a page, and the scores for other targets."""
        path = Path(path)
        write_atomically(path, self.to_yaml())
        write_atomically(path.with_suffix(".html"), render_search(self))
        self.scores.save(path.with_suffix(".scores.json"))
        return path

    def _loss(self) -> str:
        if self.kl is not None:
            return f"KL divergence {self.kl.value:.3g} on held-out rows"
        if self.predicted_kl is not None:
            return f"predicted KL divergence {self.predicted_kl:.3g}"
        return "KL divergence unknown"
