"""A model whose weights stay on disk, and come into memory by name, a part at a time."""

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from inlay.checkpoint.files.dequantized import open_files
from inlay.checkpoint.files.left_over import warn_of_unused
from inlay.checkpoint.files.weight_files import WeightFiles
from inlay.checkpoint.loading import (
    Place,
    class_of,
    dequantized_config,
    dtype_of,
    require_all_weights,
)
from inlay.checkpoint.source import Source
from inlay.errors import CheckpointError
from inlay.fingerprints import fingerprints, weights_in
from inlay.memory import returning_freed_memory
from inlay.options import LoadKeywords
from inlay.transformers_private import Loading, Mismatch, model_without_data, tied_names

__all__ = ["StoredModel"]


class StoredModel:
    """A model as `load_model` gives it, with parameters that have data only while they are loaded.

    Parameters stay the same objects all the time: what knows them by identity, or was traced with
    them, need not know whether they are loaded.

    :param model: the model; its buffers are in memory
    :param source: where it comes from, and what may be done to load it
    """

    def __init__(
        self, model: nn.Module, files: WeightFiles, loading: Loading, source: Source
    ) -> None:
        self.model, self.files, self._loading = model, files, loading
        self.source = source
        self.reads: dict[str, int] = defaultdict(int)  # how often each stored tensor was read
        self._sources = loading.sources(model, files.tensors)
        warn_of_unused(model, files.tensors, loading, files.folder)
        self._tie_equal_weights()
        self._parameters = _with_own_parameters(model)
        first = {id(parameter): name for name, parameter in self._parameters.items()}
        self._names = {
            name: first[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self.loaded: set[str] = set()
        persistent = [name for name in self._sources if name not in self._names]
        self._read(persistent, mapped=False)  # buffers: small, and needed in several places

    @classmethod
    def open(cls, place: Place, **options: Unpack[LoadKeywords]) -> "StoredModel":
        """Find the files of a model and build it without weights; read headers alone.

        :param place: a folder, or a name on the hub whose files are in the local cache
        :param options: the fields of `LoadOptions`
        :raises CheckpointError: if a file is missing, damaged, or not of this model
        """
        source = Source.of(place, **options)
        source.require_streamable()
        config = source.config()
        source.require_safetensors()
        dequantized_config(config, source.place)
        files = open_files(source.folder(download=source.download))
        model, loading = source.read(lambda: _built(config, source, files))
        return cls(model, files, loading, source)

    def load_all(self) -> nn.Module:
        """Load all parameters, and return the model."""
        self.load(list(self._parameters))
        return self.model

    def names_of(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """The names of parameters; of a tied one, the first that it has."""
        wanted = {id(parameter) for parameter in parameters}
        return [name for name, own in self._parameters.items() if id(own) in wanted]

    def load(self, names: Collection[str], *, mapped: bool = False) -> None:
        """Read parameters from disk, through the conversions of transformers.

        :param mapped: leave in their files those that need no conversion, as far as the device
            allows; they are read where they are used
        :raises CheckpointError: if that is not possible for these parameters alone
        """
        missing = [name for name in names if name not in self.loaded]
        sources = [target for target in self._sources if self._names.get(target) in set(missing)]
        values = self._read(sources, mapped)
        for target, value in values.items():
            name = self._names.get(target)
            if name in missing:
                self._parameters[name].data = value
                self.loaded.add(name)
        absent = sorted(set(missing) - self.loaded)
        if absent:
            raise CheckpointError(
                f"the files of the model do not give {absent[0]} without loading others; load the "
                "whole model and calibrate it in memory"
            )

    def release(self, names: Collection[str]) -> None:
        """Free parameters. Their shape, dtype and device stay."""
        for name in names:
            _empty(self._parameters[name])
            self.loaded.discard(name)

    def fingerprints(self, names: Collection[str]) -> dict[str, str]:
        """Return fingerprints of loaded parameters, under all names that they have."""
        wanted = {id(self._parameters[name]) for name in names if name in self.loaded}
        return fingerprints(
            (name, tensor) for name, tensor in weights_in(self.model) if id(tensor) in wanted
        )

    def fingerprints_of_buffers(self) -> dict[str, str]:
        """Return fingerprints of the persistent buffers, which are always in memory."""
        return fingerprints(
            (name, tensor) for name, tensor in weights_in(self.model) if name not in self._names
        )

    @contextlib.contextmanager
    def pretended(self, names: Collection[str]) -> Iterator[None]:
        """Give parameters memory of the right layout, without reading, so that they can be traced.

        On a CPU memory that nobody has written to takes no room.
        """
        for name in names:
            parameter = self._parameters[name]
            parameter.data = torch.empty(
                parameter.shape, dtype=parameter.dtype, device=parameter.device
            )
        try:
            yield
        finally:
            self.release(names)

    def _read(self, targets: Collection[str], mapped: bool) -> dict[str, torch.Tensor]:
        """Read what belongs to these names, and leave the parameters of the model as they are."""
        if not targets:
            return {}
        names = [name for target in targets for name in self._sources[target]]
        unpacks = not all(map(self.files.is_mapped, names))
        # Intermediate values of unpacking would leave holes that no other tensor fits in.
        returning = returning_freed_memory() if unpacks else contextlib.nullcontext()
        with returning, self.files.reading() as read:
            unread = {
                name: _Unread(name, read, self.reads, mapped or not self.files.is_mapped(name))
                for name in names
            }
            return self._loading.tensors(self.model, unread)

    def _tie_equal_weights(self) -> None:
        """Tie weights that the config ties and the files hold twice, if these are equal.

        transformers does so when it has loaded both.
        """
        model: Any = self.model
        tied = tied_names(model)
        for target, origin in list(tied.items()):
            sources = [self._sources.get(name, ()) for name in (target, origin)]
            if model.get_parameter(target) is model.get_parameter(origin) or not all(sources):
                continue
            with self.files.reading() as read:
                ((one,), (other,)) = ([read(name) for name in names] for names in sources)
                if not torch.equal(one, other):
                    tied.pop(target)
                    continue
            parent, _, name = target.rpartition(".")
            setattr(model.get_submodule(parent), name, model.get_parameter(origin))
            del self._sources[target]


class _Unread:
    """Stands for a tensor in a file; transformers reads it by taking all of it."""

    def __init__(self, name: str, read: Any, reads: dict[str, int], mapped: bool) -> None:
        self._name, self._read, self._reads, self._mapped = name, read, reads, mapped

    def __getitem__(self, _: Any) -> torch.Tensor:
        self._reads[self._name] += 1
        tensor: torch.Tensor = self._read(self._name)
        # A block is read at once, in the order of the file, and not page by page as it runs.
        return tensor if self._mapped else tensor.clone()


def _built(config: Any, source: Source, files: WeightFiles) -> tuple[nn.Module, Loading]:
    """Do what `from_pretrained` does, with tensors that have no data."""
    cls, options = class_of(config, source)
    if options:  # an Auto… class, which knows its models when it has built one
        with torch.device("meta"):
            cls = type(cls.from_config(config, **options))
    state = {name: stored.without_data() for name, stored in files.tensors.items()}
    model, loading, mismatches, missing = model_without_data(cls, config, state, dtype_of(source))
    _require_fitting(mismatches, files)
    require_all_weights(model, missing, source)
    model.config.name_or_path = source.place
    _find_generation_config(model, source)
    return model.eval(), loading


def _require_fitting(mismatches: Sequence[Mismatch], files: WeightFiles) -> None:
    for each in mismatches:
        file = files.tensors[each.name].file if each.name in files.tensors else files.folder
        raise CheckpointError(
            f"{each.name} in {file} has the shape {each.stored}, and the model that config.json "
            f"describes has {each.expected} there; the file is of another model"
        )


def _find_generation_config(model: Any, source: Source) -> None:
    from transformers import GenerationConfig

    if model.can_generate():
        with contextlib.suppress(OSError):  # not every model has one
            model.generation_config = GenerationConfig.from_pretrained(
                source.place, local_files_only=not source.download
            )


def _with_own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Give the model parameters without data that are not on the meta device, tied as they were."""
    own: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in own:
                device = torch.device("cpu") if parameter.is_meta else parameter.device
                shell = torch.empty((), dtype=parameter.dtype, device=device)
                own[id(parameter)] = nn.Parameter(
                    shell.expand(parameter.shape), requires_grad=parameter.requires_grad
                )
            module._parameters[name] = own[id(parameter)]
    return dict(model.named_parameters())


def _empty(parameter: nn.Parameter) -> None:
    shell = torch.empty((), dtype=parameter.dtype, device=parameter.device)
    parameter.data = shell.expand(parameter.shape)
