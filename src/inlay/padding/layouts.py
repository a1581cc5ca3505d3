"""The layouts of a model's values: which dimension is the batch, which the tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from inlay.errors import StatisticsError
from inlay.graph import PaddingMask
from inlay.recipe import Slot

__all__ = ["Layout", "Layouts", "Seen", "Sizes", "layout_of", "layouts_of", "name_of"]

# Where a value has the tokens of a batch; None if it has none; or why that is unknown.
Layout = PaddingMask | None | str


@dataclass(frozen=True)
class Sizes:
    """The sizes of a probe: of its batch, and the tokens of each sequence."""

    batch: int
    tokens: Mapping[str, int]


@dataclass(frozen=True)
class Seen:
    """A value in one call of a module in one probe.

    :param shape: without the last dimension, and without the heads of attention
    :param order: of tokens that were flattened: "rows" if sequence by sequence, "columns" if step
        by step; None if they were not, or if that is unknown
    """

    shape: tuple[int, ...]
    order: str | None = None


@dataclass(frozen=True)
class Layouts:
    """Where the values of a model have their tokens, by the names of `name_of`.

    :param masked: the sequences that the batch has a mask for; of others, all tokens are valid
    """

    found: Mapping[str, Layout]
    masked: frozenset[str]

    def of(self, slot: Slot) -> PaddingMask | None:
        """Return the mask that a slot needs; None if all of its values are valid.

        :raises StatisticsError: if it is unknown where the slot has the tokens
        """
        problem = self.problem(slot)
        if problem is not None:
            raise StatisticsError(problem)
        layout = self.found[name_of(slot)]
        assert not isinstance(layout, str)
        return layout if layout is not None and layout.sequence in self.masked else None

    def mask_of_input(self, module: str) -> PaddingMask | None:
        """Return the mask for the input of a module; None if there is none, or it is unknown."""
        layout = self.found.get(f"{module}.input")
        if isinstance(layout, PaddingMask) and layout.sequence in self.masked:
            return layout
        return None

    def has(self, slot: Slot) -> bool:
        """Return whether the module of a slot was called in small batches."""
        return name_of(slot) in self.found

    def problem(self, slot: Slot) -> str | None:
        """Return why it is unknown where a slot has the tokens, if it is."""
        layout = self.found.get(name_of(slot), "no call of its module was seen in a small batch")
        if not isinstance(layout, str):
            return None
        return (
            f"cannot leave padding out of {slot.name}: {layout}. Use batch_size=1, or count "
            "padding with count_padding=True"
        )

    def signature(self, slots: Iterable[Slot]) -> tuple[Layout, ...]:
        """Return what tells apart modules whose graph is the same and whose padding is not."""
        return tuple(self.found.get(name_of(slot)) for slot in slots)


def name_of(slot: Slot) -> str:
    """Return the name under which a slot's layout is known: outputs are laid out like inputs."""
    return slot.name if slot.is_attention else f"{slot.module}.input"


def layouts_of(
    probes: Sequence[tuple[Sizes, Mapping[str, Sequence[Seen]]]], tied: Mapping[str, str]
) -> dict[str, Layout]:
    """Find the layouts of all values that were seen in every probe.

    :param probes: their sizes, and what was seen by name; the first two differ in the batch alone
    :param tied: sequences with no mask of their own that may or may not share another's, and why
    """
    names = dict.fromkeys(name for _, seen in probes for name in seen)
    found: dict[str, Layout] = {}
    for name in names:
        calls = [seen.get(name, ()) for _, seen in probes]
        if len({len(of_probe) for of_probe in calls}) > 1:
            found[name] = "how often its module is called depends on the sizes of the batch"
            continue
        layouts = {
            layout_of([sizes for sizes, _ in probes], of_call)
            for of_call in zip(*calls, strict=True)
        }
        layout = layouts.pop()
        if layouts:
            layout = "its module is called with values that are laid out differently"
        if isinstance(layout, PaddingMask) and layout.sequence in tied:
            layout = tied[layout.sequence]
        found[name] = layout
    return found


def layout_of(sizes: Sequence[Sizes], seen: Sequence[Seen]) -> Layout:
    """Find the layout of a value from its shapes in probes of different sizes."""
    shapes = [each.shape for each in seen]
    if len({len(shape) for shape in shapes}) > 1:
        return "how many dimensions it has depends on the sizes of the batch"
    known = _known(sizes)
    varying = [of_axis for of_axis in zip(*shapes, strict=True) if len(set(of_axis)) > 1]
    # The first two probes differ in the batch alone. A value without one holds no data.
    if not any(of_axis[0] != of_axis[1] for of_axis in varying):
        return None
    shown = tuple(tuple(shape) for shape in shapes[:3])
    strange = f"its leading sizes {shown} are not those of batch and tokens of small batches"
    if any(of_axis not in known for of_axis in varying):
        return strange
    axes = [known.get(of_axis, ("", "")) for of_axis in zip(*shapes, strict=True)]
    kinds = sorted(kind for kind, _ in axes if kind)
    if kinds == ["batch"]:
        return None  # it stands for whole sequences, such as the input of a pooler
    if kinds not in (["flat"], ["batch", "tokens"]):
        return strange
    (sequence,) = {sequence for _, sequence in axes if sequence}
    mask = PaddingMask(sequence, tuple(kind for kind, _ in axes))
    if kinds == ["batch", "tokens"]:
        return mask
    orders = {each.order for each in seen}
    if len(orders) > 1 or None in orders:
        return "its tokens are flattened in an order that is unknown"
    (order,) = orders
    return replace(mask, axes=tuple(order or "" if kind else "" for kind, _ in axes))


def _known(sizes: Sequence[Sizes]) -> dict[tuple[int, ...], tuple[str, str]]:
    """Map the sizes of a dimension in all probes to its kind and its sequence."""
    known = {tuple(each.batch for each in sizes): ("batch", "")}
    for sequence in sizes[0].tokens:
        known[tuple(each.tokens[sequence] for each in sizes)] = ("tokens", sequence)
        flat = tuple(each.batch * each.tokens[sequence] for each in sizes)
        known[flat] = ("flat", sequence)
    return known
