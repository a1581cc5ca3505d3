"""Options of commands, made of the fields of dataclasses."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import partial, wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from inlay.errors import ConfigurationError
from inlay.options import PANELS

__all__ = ["Only", "Without", "with_flags"]


@dataclass(frozen=True, init=False)
class Only:
    """The fields of a dataclass that a command has as options."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def has(self, name: str) -> bool:
        return name in self.names


class Without(Only):
    """The fields of a dataclass that a command has no option for."""

    def has(self, name: str) -> bool:
        return name not in self.names


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of the dataclasses that it takes.

    A parameter `options: Options` becomes the options of the fields, with their defaults and help.
    `Annotated[Options, Only("accept")]` chooses among the fields. The help shows the panels of
    options in the order of `PANELS`.
    """
    groups: dict[str, tuple[Any, list[inspect.Parameter]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        cls, chosen = _dataclass_in(parameter.annotation)
        own = [parameter] if cls is None else list(_parameters(cls, chosen))
        if cls is not None:
            groups[parameter.name] = cls, own
        parameters += (each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own)

    @wraps(command)
    def run(**given: Any) -> None:
        for name, (cls, own) in groups.items():
            typed = {each.name: given.pop(each.name) for each in own}
            try:
                given[name] = cls(**{key: _stored(cls, key, value) for key, value in typed.items()})
            except ConfigurationError as error:  # of a value that no number or name may have
                raise typer.BadParameter(str(error)) from error
        command(**given)

    parameters.sort(key=_panel)  # which keeps the order within a panel
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _panel(parameter: inspect.Parameter) -> int:
    """Return the place of an option's panel. Arguments come first, options without a panel last."""
    for said in get_args(parameter.annotation)[1:]:
        if isinstance(said, ArgumentInfo):
            return -1
        panel = getattr(said, "rich_help_panel", None)
        if panel in PANELS:
            return PANELS.index(panel)
    return len(PANELS)


def _dataclass_in(annotation: Any) -> tuple[Any, Only]:
    chosen: Only = Without()
    if get_origin(annotation) is Annotated:
        annotation, *extra = get_args(annotation)
        chosen = next((each for each in extra if isinstance(each, Only)), chosen)
    return (annotation if is_dataclass(annotation) else None), chosen


def _parameters(cls: Any, chosen: Only) -> Iterator[inspect.Parameter]:
    for own in fields(cls):
        panel = own.metadata.get("panel")
        if chosen.has(own.name) and ("help" not in own.metadata or panel is not None):
            yield inspect.Parameter(
                own.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_shown(own.default),
                annotation=_annotation(cls, own),
            )


def _annotation(cls: Any, own: Field[Any]) -> Any:
    """Return a field's own annotation for typer, or one made of what the field says of itself."""
    if "help" not in own.metadata:
        return get_type_hints(cls, include_extras=True)[own.name]
    name = f"--{own.name.replace('_', '-')}"
    said = own.metadata
    settings: dict[str, Any] = {"help": said["help"], "rich_help_panel": said["panel"]}
    if isinstance(own.default, bool):
        switch = name
        if own.default:  # a switch that is on has an option that turns it off
            switch = f"--no-{name[2:]}"
            settings["help"] = f"Do not {said['help'][0].lower()}{said['help'][1:]}"
        return Annotated[bool, typer.Option(switch, show_default=False, **settings)]
    if own.default in (None, ()):
        settings["show_default"] = False
    kind: Any = str
    is_optional = own.default is None
    if said["choices"]:
        kind = _choice(said["choices"])
    elif said["least"] is not None and "None" in str(own.type) and not is_optional:
        settings |= {"parser": partial(_count_or_all, said["least"]), "metavar": "INTEGER|all"}
    elif said["least"] is not None:
        kind, settings["min"] = int, said["least"]
    elif "float" in str(own.type):
        kind = float
    if isinstance(own.default, tuple):
        kind = list[kind]
    return Annotated[kind | None if is_optional else kind, typer.Option(name, **settings)]


def _choice(names: Sequence[str]) -> Any:
    make: Any = Enum  # of names that mypy cannot know
    return make("Choice", {name: name for name in names}, type=str)


def _shown(default: Any) -> Any:
    """Return the default of an option for the default of a field."""
    if isinstance(default, bool):
        return False
    return list(default) if isinstance(default, tuple) else default


def _stored(cls: Any, name: str, value: Any) -> Any:
    """Return the value of a field for what was typed."""
    own = next(each for each in fields(cls) if each.name == name)
    if "help" not in own.metadata:
        return value
    if own.default is True:
        return not value
    if isinstance(own.default, tuple):
        return tuple(each.value for each in value or ())
    if value == _ALL:
        return None
    return value.value if isinstance(value, Enum) else value


_ALL = "all"


def _count_or_all(least: int, text: Any) -> int | str:
    """Read a whole number, or `all`, which stands for None."""
    if text == _ALL:
        return _ALL
    try:
        count = int(text)
    except ValueError:
        count = least - 1
    if count < least:
        raise typer.BadParameter(f"{text} is neither a whole number from {least} nor {_ALL}")
    return count
