"""The groups of a model, collected from its graphs, as far as all uses of a parameter agree."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from inlay.equalization.group import Group, Producer
from inlay.graph import Equalizable, FoundGroup, Lookup

__all__ = ["CollectedGroups"]

Named = Callable[[torch.Tensor | None], str | None]


class CollectedGroups:
    """Groups of a model, from all its graphs, and why there are no more.

    A parameter is scaled only if all ops that use it are in the same group: a weight that is tied
    or shared keeps its value if one of its uses could not make up for the scale.

    :param parameter: names a parameter of the model
    :param modules: names the modules that multiply by a weight
    :param parameter_of: names the parameter that holds the weight of a reader
    """

    def __init__(
        self,
        parameter: Named,
        modules: Callable[[torch.Tensor | None], Sequence[str]],
        parameter_of: Callable[[str], str],
    ) -> None:
        self._parameter, self._modules, self._parameter_of = parameter, modules, parameter_of
        self._uses: dict[tuple[str, str], set[Group | None]] = {}
        self._groups: dict[Group, None] = {}
        self._refused: dict[str, str] = {}

    def add(self, found: Equalizable, lookup: Lookup) -> None:
        """Take in what a graph says, for the parameters that it is called with."""
        groups = [self._named(group, lookup) for group in found.groups]
        self._groups.update(dict.fromkeys(group for group in groups if group is not None))
        for source, reason in found.refused:
            self._refused.update(dict.fromkeys(self._modules(lookup(source)), reason))
        for use in found.uses:
            name = self._parameter(lookup(use.source))
            if name is not None:
                group = None if use.group is None else groups[use.group]
                self._uses.setdefault((name, use.role), set()).add(group)

    def restore(self, groups: Iterable[Group]) -> None:
        """Take in groups of an earlier run of the same model."""
        for group in groups:
            self._groups[group] = None
            for reader in group.readers:
                use = self._parameter_of(reader), "columns"
                self._uses.setdefault(use, set()).add(group)

    def restore_refused(self, refused: Mapping[str, str]) -> None:
        """Take in why an earlier run did not equalize the inputs of some modules."""
        self._refused.update(refused)

    def agree_on(self, groups: Iterable[Group]) -> None:
        """Keep these groups and no others, in this order: it decides how scales are rounded."""
        self._groups.clear()
        self.restore(groups)

    @property
    def groups(self) -> list[Group]:
        """The groups that can be equalized."""
        disagreeing = self._disagreeing()
        return [group for group in self._groups if group not in disagreeing]

    @property
    def refused(self) -> dict[str, str]:
        """Why inputs of modules cannot be equalized, by module."""
        found = dict(self._refused)
        for group, reason in self._disagreeing().items():
            found.update(dict.fromkeys(group.readers, reason))
        equalized = {reader for group in self.groups for reader in group.readers}
        return {reader: reason for reader, reason in found.items() if reader not in equalized}

    @property
    def is_empty(self) -> bool:
        """Whether no graph has said anything yet."""
        return not self._uses

    def parameters_of(self, group: Group) -> set[str]:
        """Return the names of all parameters that a group scales."""
        readers = map(self._parameter_of, group.readers)
        return {*readers, *(producer.parameter for producer in group.producers)}

    def _named(self, found: FoundGroup, lookup: Lookup) -> Group | None:
        readers: list[str] = []
        producers = []
        for source in found.readers:
            weight = lookup(source)
            modules, name = self._modules(weight), self._parameter(weight)
            if len(modules) > 1:
                reason = f"{', '.join(modules)} share one weight, and may read other values"
                self._refused.update(dict.fromkeys(modules, reason))
            if len(modules) != 1 or name is None:
                return None
            readers += modules
        for producer in found.producers:
            name = self._parameter(lookup(producer.source))
            if name is None:
                for reader in readers:
                    self._refused[reader] = "it is computed with a tensor that is no parameter"
                return None
            producers.append(
                Producer(
                    parameter=name,
                    axes=producer.axes,
                    offset=producer.offset,
                    rows=producer.rows,
                )
            )
        return Group(
            readers=tuple(dict.fromkeys(readers)),
            producers=tuple(dict.fromkeys(producers)),
            shape=found.shape,
            tied=found.tied,
            stacked=found.stacked,
        )

    def _disagreeing(self) -> dict[Group, str]:
        """Groups with a parameter that something else uses otherwise, each with the reason."""
        out: dict[Group, str] = {}
        others = {name for name, role in self._uses if role == "other"}
        while True:
            known = len(out)
            for (name, _), users in self._uses.items():
                left = {None if group in out else group for group in users}
                if name in others or len(left) > 1:
                    reason = f"{name} is also used where it cannot be scaled alike"
                    out.update({group: reason for group in left if group is not None})
            if len(out) == known:
                return out
