"""Find the layouts of a model's values by running it on small batches."""

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from inlay.errors import StatisticsError
from inlay.graph import MAIN
from inlay.padding.layouts import Layout, Layouts, Seen, Sizes, layouts_of
from inlay.padding.small_batches import BatchForm, forms_of, sizes_of_probes
from inlay.padding.watching import watching
from inlay.recipe import Plan
from inlay.torch_private import FakeTensorMode, quiet_about_failures

__all__ = ["Prober"]

_Probes = list[tuple[Sizes, Mapping[str, Sequence[Seen]]]]


class Prober:
    """Finds the layouts of a model's values, once for all batches of a form.

    :param model: returns the model; a copy that shares its parameters runs
    """

    def __init__(self, model: Callable[[], nn.Module], plan: Plan) -> None:
        self._model, self._plan = model, plan
        self._found: dict[Any, Layouts] = {}
        self._known: set[Any] = set()  # forms of batches that can have no other

    def layouts(self, batch: Mapping[str, Any], valid: Mapping[str, torch.Tensor]) -> Layouts:
        """Return the layouts for batches like this one.

        :param batch: arguments of the model by name
        :param valid: the valid tokens of its sequences
        :raises StatisticsError: if the model cannot run small batches like this one
        """
        forms = forms_of(self._model(), batch, valid)
        if len(forms) > 1:  # a batch of other sizes may have told them apart
            forms = [form for form in forms if form.key in self._known] or forms
        else:
            self._known.update(form.key for form in forms)
        masked = frozenset(valid)
        key = (tuple(form.key for form in forms), masked)
        if key not in self._found:
            self._found[key] = Layouts(self._layouts(forms, batch, valid), masked)
        return self._found[key]

    def _layouts(
        self,
        forms: Sequence[BatchForm],
        batch: Mapping[str, Any],
        valid: Mapping[str, torch.Tensor],
    ) -> dict[str, Layout]:
        found, reason = [], "none of its arguments has the rows and tokens of the mask"
        for form in forms:
            try:
                found.append(self._layouts_of_form(form, batch, valid))
            except _FailedError as error:
                reason = str(error)
        if not found:
            raise StatisticsError(
                "cannot find where the model has the padding of this batch, because it does not "
                f"run smaller batches like it: {reason}. Use batch_size=1, or count padding with "
                "count_padding=True"
            )
        names = dict.fromkeys(name for layouts in found for name in layouts)
        unclear = (
            "the batch has as many rows as tokens, so either may come first; start with a batch "
            "that has not"
        )
        return {
            name: found[0].get(name) if len({each.get(name) for each in found}) == 1 else unclear
            for name in names
        }

    def _layouts_of_form(
        self, form: BatchForm, batch: Mapping[str, Any], valid: Mapping[str, torch.Tensor]
    ) -> dict[str, Layout]:
        # Some models have a table for few positions.
        shortest = min(mask.shape[1] for mask in valid.values())
        for most in (None, shortest):
            for sequence in form.uncertain:
                form = self._settled(form, sequence, batch, most)
            try:
                probes = self._probes(form, batch, most)
                if most is None and _calls_vary(probes):
                    # Short texts may take other ways through the model than those of the batch.
                    longest = max(mask.shape[1] for mask in valid.values())
                    probes = self._probes(form, batch, None, longest)
                break
            except _FailedError:
                if most is not None:
                    raise
        tied = {
            sequence: f"it has the tokens of {sequence}, which attention_mask may not cover"
            for sequence in form.uncertain
        }
        return layouts_of(probes, tied)

    def _settled(
        self, form: BatchForm, sequence: str, batch: Mapping[str, Any], most: int | None
    ) -> BatchForm:
        """Return the form in which a sequence is the main one, if the model takes no other length.

        Arguments of other names may be as long as the tokens by chance.
        """
        try:
            self._probes(form, batch, most)
        except _FailedError:
            return form.joined(sequence)
        return form

    def _probes(
        self, form: BatchForm, batch: Mapping[str, Any], most: int | None, least: int = 5
    ) -> _Probes:
        model = self._model()
        sequences = form.sequences or [MAIN]
        sizes = sizes_of_probes(model, sequences, most, least)
        try:
            return [self._run(form.small(batch, each), each, fake=True) for each in sizes]
        except _FailedError:
            # A model that looks at data, such as whether a mask has padding, needs some.
            if not _has_weights(model):
                raise
            return [self._run(form.small(batch, each), each, fake=False) for each in sizes]

    def _run(
        self, batch: Mapping[str, Any], sizes: Sizes, *, fake: bool
    ) -> tuple[Sizes, Mapping[str, Sequence[Seen]]]:
        model = _shallow_copy(self._model())
        mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
        if isinstance(mode, FakeTensorMode):
            batch = {
                name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for name, value in batch.items()
            }
        try:
            with (
                warnings.catch_warnings(),
                quiet_about_failures(),
                torch.compiler.set_stance("force_eager"),
                torch.random.fork_rng(devices=[]),
                torch.no_grad(),
                mode,
                watching(model, self._plan, sizes) as seen,
            ):
                warnings.simplefilter("ignore")
                model(**batch)
        except Exception as error:
            # A model may refuse a batch in any way.
            raise _FailedError(f"{type(error).__name__}: {error}".split("\n")[0]) from error
        return sizes, dict(seen)


class _FailedError(Exception):
    """The model does not run a small batch."""


def _has_weights(model: nn.Module) -> bool:
    """Whether the parameters of a model are in memory; a streamed model reads them when needed."""
    return all(
        parameter.untyped_storage().size() >= parameter.nbytes and not parameter.is_meta
        for parameter in model.parameters()
    )


def _calls_vary(probes: _Probes) -> bool:
    """Tell whether some module is called more often in one small batch than in another."""
    names = {name for _, seen in probes for name in seen}
    return any(len({len(seen.get(name, ())) for _, seen in probes}) > 1 for name in names)


def _shallow_copy(model: nn.Module) -> nn.Module:
    """Return a model of modules of its own that shares the parameters, without hooks.

    What a model keeps of a batch stays on the copy.
    """
    made: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        copied = made[module] = object.__new__(type(module))
        state = dict(vars(module))
        state["_parameters"] = dict(module._parameters)
        state["_buffers"] = {
            name: None if buffer is None else buffer.clone()
            for name, buffer in module._buffers.items()
        }
        state.update({name: type(value)() for name, value in state.items() if _is_hooks(name)})
        vars(copied).update(state)
    for module, copied in made.items():
        vars(copied)["_modules"] = {
            name: None if child is None else made[child] for name, child in module._modules.items()
        }
    return made[model]


def _is_hooks(name: str) -> bool:
    return name.startswith(("_forward_", "_backward_")) and "hook" in name
