"""Private parts of transformers: converting stored tensors into those of a model."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Loading", "Mismatch", "model_without_data"]


@dataclass(frozen=True)
class Mismatch:
    """A stored tensor whose shape is not the one that the model has."""

    name: str
    stored: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True)
class Loading:
    """The conversion of stored tensors into those of one model, as `from_pretrained` does it.

    transformers 5.0; `from_pretrained` converts all tensors of a model at once. Without these, a
    model could not be read block by block.

    :param mapping: conversions of stored names and tensors
    :param settings: what transformers has to know to load the model; None to map names only
    """

    mapping: Any
    settings: Any = None

    @classmethod
    def of(cls, model: Any) -> "Loading":
        """Return the conversions for a model that is loaded."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        return cls(get_model_conversion_mapping(model, None, None))

    def sources(self, model: Any, stored: Iterable[str]) -> dict[str, list[str]]:
        """Map names in the model to the stored tensors that they are made of.

        Of several that are made together, the first stands for all.
        """
        from transformers import core_model_loading as core

        renamings = [each for each in self.mapping if isinstance(each, core.WeightRenaming)]
        converters = [each for each in self.mapping if isinstance(each, core.WeightConverter)]
        prefix, state = model.base_model_prefix, model.state_dict()
        found: dict[str, list[str]] = {}
        for name in stored:
            target, _ = core.rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:
                target, _ = core.rename_source_key(name, [], [], prefix, state)
            if target in state:
                found.setdefault(target, []).append(name)
        return found

    def tensors(self, model: Any, stored: Mapping[str, Any]) -> dict[str, "torch.Tensor"]:
        """Convert stored tensors to those of the model, and leave the model as it is."""
        conversions = model._weight_conversions
        before = {id(module): dict(module._parameters) for module in model.modules()}
        try:
            info = self._convert(model, stored)
            return {
                name: value.detach()
                for named in (model.named_parameters, model.named_buffers)
                for name, value in named(remove_duplicate=False)
                if name not in info.missing_keys
            }
        finally:
            for module in model.modules():
                module._parameters.update(before[id(module)])
            model._weight_conversions = conversions

    def _convert(self, model: Any, stored: Mapping[str, Any]) -> Any:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        with _without_bars():
            info, _ = convert_and_load_state_dict_in_model(model, dict(stored), self.settings)
        return info


def model_without_data(
    cls: Any, config: Any, stored: Mapping[str, "torch.Tensor"], dtype: "str | torch.dtype"
) -> tuple[Any, Loading, list[Mismatch], Collection[str]]:
    """Build a model as `from_pretrained` does, with tensors that have no data.

    transformers 5.0; in public a model is built either with all of its data or without the dtypes,
    ties and buffers that loading gives it. Without it, streaming is not possible.

    :param cls: a class of transformers, or of code that came with the model
    :param stored: the tensors of its files, on the meta device
    :returns: the model, the loading of its tensors, and the tensors whose shape is wrong or that
        are missing
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig, _get_dtype
    from transformers.utils.generic import ContextManagers

    config, chosen = _get_dtype(dtype, None, config, None, dict(stored), True)
    with ContextManagers(cls.get_init_context(chosen, False, False, None)):
        model = cls(config)
    mapping = get_model_conversion_mapping(model, None, None)
    settings = LoadStateDictConfig(
        device_map={"": "meta"},
        dtype=chosen,
        dtype_plan=model._get_dtype_plan(chosen),
        weight_mapping=mapping,
        ignore_mismatched_sizes=True,
    )
    info = Loading(mapping or [], settings)._convert(model, stored)
    wrong = [
        Mismatch(name, tuple(found), tuple(expected))
        for name, found, expected in sorted(info.mismatched_keys)
    ]
    loading = Loading(mapping or [], replace(settings, device_map={"": "cpu"}))
    if not wrong:
        with _without_bars():
            info = cls._finalize_model_loading(model, loading.settings, info)
    return model, loading, wrong, info.missing_keys


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers from drawing a bar for each part."""
    from transformers import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
