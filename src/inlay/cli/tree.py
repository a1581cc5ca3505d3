"""A plan as a tree for the terminal."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rich.tree import Tree

from inlay.recipe import Plan, Slot, format_in_words

__all__ = ["slot_in_words", "tree_of"]


def slot_in_words(slot: Slot) -> str:
    """Describe a slot: its part of the module, its format, and its observer."""
    words = f"{slot.base_name} {format_in_words(slot.args, slot.base_name)}"
    if not slot.is_observed:
        return words
    return f"{words} ({slot.observer})"


def tree_of(plan: Plan, root: str) -> Tree:
    """Draw the quantized modules of a plan as a tree; modules that look alike share a line."""
    tree = Tree(root)
    _add(tree, _modules(plan.slots.values()))
    return tree


@dataclass
class _Module:
    """A module as the tree shows it. Equal modules look alike."""

    slots: list[str] = field(default_factory=list)
    inner: dict[str, "_Module"] = field(default_factory=dict)


def _modules(slots: Iterable[Slot]) -> _Module:
    root = _Module()
    for slot in slots:
        module = root
        for part in slot.module.split("."):
            module = module.inner.setdefault(part, _Module())
        module.slots.append(slot_in_words(slot))
    return root


def _add(tree: Tree, module: _Module) -> None:
    for name, inner in _rows(module.inner):
        # A module that only holds another one needs no line.
        while not inner.slots and (held := _only(inner)) is not None:
            name, inner = f"{name}.{held[0]}", held[1]
        label = f"{name}: {'; '.join(inner.slots)}" if inner.slots else name
        _add(tree.add(label), inner)


def _only(module: _Module) -> tuple[str, _Module] | None:
    rows = list(_rows(module.inner))
    return rows[0] if len(rows) == 1 and "," not in rows[0][0] else None


def _rows(inner: dict[str, _Module]) -> Iterator[tuple[str, _Module]]:
    """Yield modules by name, with neighbours that look alike as one: `0 … 29` or `gate, up`."""
    run: list[str] = []
    for name in inner:
        if run and not _continues(run[-1], name, inner):
            yield _label(run), inner[run[0]]
            run = []
        run.append(name)
    if run:
        yield _label(run), inner[run[0]]


def _continues(before: str, name: str, inner: dict[str, _Module]) -> bool:
    if inner[name] != inner[before]:
        return False
    if before.isdecimal() and name.isdecimal():
        return int(name) == int(before) + 1
    return not inner[name].inner  # modules that hold others get a line each


def _label(run: list[str]) -> str:
    if len(run) > 1 and run[0].isdecimal():
        return f"{run[0]} … {run[-1]}"
    return ", ".join(run)
