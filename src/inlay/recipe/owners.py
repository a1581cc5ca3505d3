"""Find the module that a weight belongs to, also where several modules share it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Locate", "Owners"]

Locate = Callable[[str], str]  # from the path of a module in a trace to its name in the model


class Owners:
    """The modules of a model by their parameters, and by the paths that a trace has for them.

    A compiled graph is called with the weights themselves, and one graph may serve many blocks, so
    a module is known by its weight. Where several modules share a weight, the path of the module
    that was called tells them apart.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.is_any_shared = False  # whether any parameter belongs to several modules
        # A module may have several names. The first one stands for it everywhere.
        self._first_name: dict[str, str] = {}
        self._names: dict[str, list[str]] = {}
        known: dict[int, str] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            first = known.setdefault(id(module), name)
            self._first_name[name] = first
            self._names.setdefault(first, []).append(name)
            if first == name:
                for parameter in _parameters(module):
                    self.add(name, parameter)

    def add(self, module: str, weight: torch.Tensor) -> None:
        """Take in a module that has a weight."""
        if weight not in self._modules:
            self._modules[weight] = []
        names = self._modules[weight]
        if module not in names:
            names.append(module)
            self.is_any_shared |= len(names) > 1

    def having(self, weight: torch.Tensor) -> list[str]:
        """Return the names of the modules that have a parameter, each module once."""
        known: Mapping[torch.Tensor, list[str]] = self._modules
        return known.get(weight, [])

    def called(self, names: Sequence[str], path: str) -> str | None:
        """Return the one of some modules that a path means; None if it means another.

        The path may lack what stands before it in the model, or have more there.
        """
        first = self._first_name.get(path, path)
        if first in names:
            return first
        lengths = {name: self._common(name, path) for name in names}
        longest = max(lengths.values())
        alike = [name for name, length in lengths.items() if length == longest]
        return alike[0] if longest and len(alike) == 1 else None

    def _common(self, module: str, path: str) -> int:
        """Count the last components that a path has in common with a name of a module."""
        return max(_common(name, path) for name in self._names.get(module, [module]))

    def locator(self, reads: Iterable[tuple[str, torch.Tensor]]) -> Locate:
        """Return a function from paths in a trace to names in the model.

        A part of the model may be traced, or more than it, or one block that stands for many.

        :param reads: parameters that were read, and the paths of the modules that read them
        """
        moves = Counter(
            move
            for path, parameter in reads
            if len(names := self.having(parameter)) == 1
            and (move := self._move(path, names[0])) is not None
        )
        if not moves:
            return lambda path: path
        # Most moves replace nothing, or by nothing. Others may come from functions of weights.
        old, new = max(moves, key=lambda move: (not all(move), moves[move]))

        def located(path: str) -> str:
            inside = not old or path == old or path.startswith(f"{old}.")
            rest = path.removeprefix(old).removeprefix(".")
            return ".".join(filter(None, (new, rest))) if inside else path

        return located

    def _move(self, path: str, module: str) -> tuple[str, str] | None:
        """Return what stands before the common part of a path and a name, if there is one."""
        name = max(self._names.get(module, [module]), key=lambda name: _common(name, path))
        length = _common(name, path)
        if not length:
            return None
        old, new = path.split("."), name.split(".")
        return ".".join(old[:-length]), ".".join(new[:-length])


def _parameters(module: nn.Module) -> Iterable[torch.Tensor]:
    """Yield the parameters of a module, and its weight if that is a tensor of another kind."""
    found = [*module._parameters.values(), getattr(module, "weight", None)]
    return (each for each in found if isinstance(each, torch.Tensor))


def _common(name: str, path: str) -> int:
    one, other = name.split("."), path.split(".")
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length
