"""Compile a quantized model ahead of time into a file that runs without Inlay."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inlay.errors import ConfigurationError
from inlay.torch_private import inductor_settings, package_exported

__all__ = ["package"]

_SUFFIX = ".pt2"


def package(
    model: nn.Module,
    path: str | os.PathLike[str],
    *args: Any,
    dynamic_shapes: Any = None,
    **kwargs: Any,
) -> Path:
    """Write a package of AOTInductor, for its `aoti_load_package` or for C++.

    It holds code for this kind of processor and the weights as they are stored. It needs neither
    Inlay nor transformers; models of transformers return tuples of tensors there.

    :param model: what `inlay.load(folder, compile=False)` or `quantized_module` returned
    :param path: the file to write, which ends in .pt2
    :param args: example inputs, by position, to call the model with; kwargs by name
    :param dynamic_shapes: as for `torch.export.export`; by default the package takes inputs of the
        shapes of the examples only
    :return: the path
    """
    if Path(path).suffix != _SUFFIX:
        raise ConfigurationError(f"the name of a package ends in {_SUFFIX}; {path} does not")
    with torch.no_grad(), inductor_settings():
        exported = torch.export.export(_Tuples(model), args, kwargs, dynamic_shapes=dynamic_shapes)
        package_exported(exported, str(path))
    return Path(path)


class _Tuples(nn.Module):
    """A model that returns tuples in place of the outputs that transformers has classes for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.model(*args, **kwargs)
        return found.to_tuple() if hasattr(found, "to_tuple") else found
