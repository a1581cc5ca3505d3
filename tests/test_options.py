"""Options have one list, one default and one help, in Python and on the command line."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, get_args, get_type_hints

import pytest
import torch

import inlay
from inlay.checkpoint.loading import load_model
from inlay.checkpoint.source import Source
from inlay.checkpoint.stored_model import StoredModel
from inlay.cli.arguments import Model
from inlay.cli.commands import calibrate, check, compare, requantize, search, show
from inlay.cli.flags import Only, Without, with_flags
from inlay.data.sources import batches_of
from inlay.options import (
    CompareKeywords,
    CompareOptions,
    DataKeywords,
    DataOptions,
    LoadKeywords,
    LoadOptions,
    Options,
    RunKeywords,
    SearchKeywords,
    SearchOptions,
    StreamKeywords,
    StreamOptions,
    WriteKeywords,
    WriteOptions,
)

GROUPS = [
    (DataOptions, DataKeywords, batches_of),
    (LoadOptions, LoadKeywords, load_model),
    (LoadOptions, LoadKeywords, StoredModel.open),
    (LoadOptions, LoadKeywords, inlay.load),
    (Options, RunKeywords, inlay.calibrate),
    (StreamOptions, StreamKeywords, inlay.stream),
    (CompareOptions, CompareKeywords, inlay.compare),
    (SearchOptions, SearchKeywords, inlay.search),
    (WriteOptions, WriteKeywords, inlay.Calibration.save),
]


@pytest.mark.parametrize(("options", "keywords", "function"), GROUPS)
def test_keywords_are_the_fields(options: type, keywords: type, function: Any) -> None:
    known = {"torch": torch}
    assert get_type_hints(keywords, None, known) == get_type_hints(options, None, known)
    # A function that lists them itself has the same defaults.
    taken = inspect.signature(function).parameters
    for own in fields(options):
        if own.name in taken:
            assert taken[own.name].default == own.default


@pytest.mark.parametrize(("options", "_", "function"), GROUPS[:8])
def test_unknown_keywords_are_refused(options: type, _: type, function: Any) -> None:
    given: dict[str, Any] = {"out": "out"} if function is inlay.stream else {}
    needed = ["nowhere"] * {DataOptions: 1, LoadOptions: 1, CompareOptions: 3}.get(options, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sampels'"):
        function(*needed, sampels=1, **given)


COMMANDS = [
    calibrate.calibrate,
    show.explain,
    requantize.requantize,
    check.check,
    compare.compare,
    search.search,
]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_has_the_same_defaults(command: Callable[..., None]) -> None:
    shown = inspect.signature(command).parameters
    own_groups = {compare.compare: [CompareOptions], search.search: [SearchOptions, LoadOptions]}
    groups = own_groups.get(command, [StreamOptions, LoadOptions])
    for own in (own for group in groups for own in fields(group)):
        if own.name not in shown or (own.name == "compiler" and command is check.check):
            continue
        (said,) = get_args(shown[own.name].annotation)[1:]
        default = shown[own.name].default
        if isinstance(own.default, bool):
            assert default is False  # of a switch, which is `--no-…` if the field is true
            assert own.metadata["help"].lower()[-20:] in said.help.lower()
        else:
            assert default == (list(own.default) if own.default == () else own.default)
            assert said.help == own.metadata["help"]


def test_all_options_are_on_the_command_line() -> None:
    shown = set(inspect.signature(calibrate.calibrate).parameters)
    # `--quiet` draws no bars.
    assert {own.name for own in fields(StreamOptions)} - shown == {"progress"}
    assert {own.name for own in fields(LoadOptions)} <= shown


def test_options_become_the_fields_of_a_dataclass() -> None:
    got: list[Any] = []

    @with_flags
    def command(
        place: Model,
        some: Annotated[StreamOptions, Only("samples", "accept", "report")],
        load: Annotated[LoadOptions, Without("download", "gguf_file")],
        last: int = 3,
    ) -> None:
        got.append((place, some, load, last))

    names = list(inspect.signature(command).parameters)
    assert names == ["place", "dtype", "trust_remote_code", "samples", "accept", "report", "last"]
    word = Enum("word", {"unfused": "unfused", "float16": "float16"})
    command(
        place="here", report=True, samples="all", accept=[word.unfused],
        dtype=word.float16, trust_remote_code=True, last=4,
    )  # fmt: skip
    assert got == [
        (
            "here",
            StreamOptions(report=False, samples=None, accept=("unfused",)),
            LoadOptions(dtype="float16", trust_remote_code=True),
            4,
        )
    ]


def test_no_function_takes_more_than_twelve_parameters() -> None:
    """A command takes its options as dataclasses; before, one took 31."""
    taken = [inspect.signature(each.__wrapped__.__wrapped__) for each in COMMANDS]
    assert all(len(signature.parameters) <= 12 for signature in taken)
    assert all(
        is_dataclass(cls)
        for signature in taken
        for name, cls in ((n, p.annotation) for n, p in signature.parameters.items())
        if name.endswith("options") and isinstance(cls, type)
    )


def test_a_source_is_used_as_it_is(tmp_path: Any) -> None:
    source = Source.of(tmp_path, dtype="float16", download=True)
    assert Source.of(source) == source
    assert Source.of(source, download=False) == Source.of(tmp_path, dtype="float16")
    assert source.is_folder
