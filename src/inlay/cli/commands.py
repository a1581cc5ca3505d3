"""The command line.

What the library needs for its work takes seconds to import, so commands import it themselves:
`inlay --help` answers at once.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from inlay._version import __version__
from inlay.cli.arguments import (
    DATA,
    LOADING,
    Accept,
    Accepted,
    Download,
    Dtype,
    DtypeOption,
    GgufFile,
    Ignore,
    KvCache,
    KvCacheOption,
    Model,
    NoReport,
    ObserverFile,
    ObserverOption,
    Out,
    Overwrite,
    Quiet,
    RecipeFile,
    RemoteCode,
    Scheme,
    file_option,
)
from inlay.cli.outcome import report_data, show_result
from inlay.cli.terminal import calm_transformers, console, reported, table, tell
from inlay.errors import ConfigurationError

if TYPE_CHECKING:
    from inlay.cli.recipes import Wanted

__all__ = [
    "app",
    "calibrate",
    "explain",
    "main",
    "merge",
    "observers",
    "report",
    "requantize",
    "schemes",
]

app = typer.Typer(
    name="inlay",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line."""
    app(prog_name="inlay")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Calibrates models for quantization: a model and some text in, a checkpoint out.

    Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted.
    """


@app.command()
@reported
def calibrate(
    model: Model,
    *,
    scheme: Scheme = None,
    recipe: RecipeFile = None,
    observer: ObserverOption = None,
    observer_file: ObserverFile = None,
    ignore: Ignore = None,
    kv_cache: KvCacheOption = None,
    data: Annotated[
        Path | None,
        file_option(
            "--data",
            help=".txt with a text a line, or .jsonl with [b]text[/b] or [b]messages[/b].",
            panel=DATA,
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="How many texts calibrate.", rich_help_panel=DATA)
    ] = 512,
    max_length: Annotated[
        int, typer.Option(min=1, help="Tokens to cut texts to.", rich_help_panel=DATA)
    ] = 2048,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Texts a batch.", rich_help_panel=DATA)
    ] = 1,
    count_padding: Annotated[
        bool,
        typer.Option(
            "--count-padding", help="Observe padding like any token.", rich_help_panel=DATA
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on where an interrupted run stopped.", rich_help_panel=DATA
        ),
    ] = False,
    out: Out,
    accept: Accept = None,
    compiler: Annotated[str, typer.Option(help="Backend of torch.compile.")] = "inductor",
    dtype: DtypeOption = Dtype.AUTO,
    gguf_file: GgufFile = None,
    download: Download = False,
    trust_remote_code: RemoteCode = False,
    overwrite: Overwrite = False,
    no_report: NoReport = False,
    quiet: Quiet = False,
) -> None:
    """Calibrate a model on text and write the quantized checkpoint.

    Example: [b]inlay calibrate ./SmolLM2 --scheme W8A8 --data chats.jsonl --out SmolLM2-W8A8[/b]
    """
    _require_free(out, model, overwrite=overwrite)
    wanted = _wanted(scheme, recipe, observer, observer_file, ignore, kv_cache)
    from inlay.loading import load_model, load_tokenizer
    from inlay.rows import read_rows
    from inlay.run import calibrate as run

    if data is not None:
        next(read_rows(data), None)  # what cannot be read is refused before the model is loaded
    calm_transformers(quiet)
    source: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "gguf_file": gguf_file,
        "download": download,
    }
    loaded = load_model(model, dtype=dtype.value, **source)
    statistics = out.with_name(f"{out.name}.statistics")
    try:
        calibration = run(
            loaded,
            wanted.recipe_for(loaded),
            data,
            tokenizer=load_tokenizer(model, **source),
            max_length=max_length,
            samples=samples,
            batch_size=batch_size,
            count_padding=count_padding,
            compiler=compiler,
            accept=_names(accept),
            statistics=statistics,
            resume=resume,
            progress=False if quiet else None,
        )
        calibration.save(out, overwrite=overwrite, report=not no_report)
    except KeyboardInterrupt:
        _interrupted(statistics)
    if not quiet:
        show_result(calibration, out, statistics)


@app.command()
@reported
def explain(
    model: Model,
    scheme: Scheme = None,
    recipe: RecipeFile = None,
    observer: ObserverOption = None,
    observer_file: ObserverFile = None,
    ignore: Ignore = None,
    kv_cache: KvCacheOption = None,
    gguf_file: GgufFile = None,
    download: Download = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Show what would be quantized and observed. Of the model it reads only the config.

    Example: [b]inlay explain ./SmolLM2 --scheme FP8 --kv-cache fp8[/b]
    """
    wanted = _wanted(scheme, recipe, observer, observer_file, ignore, kv_cache)
    from inlay.cli.words import tree_of
    from inlay.loading import empty_model
    from inlay.slots import Plan

    calm_transformers(quiet=True)
    empty = empty_model(
        model, trust_remote_code=trust_remote_code, gguf_file=gguf_file, download=download
    )
    plan = Plan(empty, wanted.recipe_for(empty))
    screen = console()
    screen.print(tree_of(plan, type(empty).__name__))
    modules = {slot.module for slot in plan.slots.values()}
    observed = sum(1 for _ in plan.activation_slots())
    screen.print(
        f"{len(plan.slots)} slots in {len(modules)} modules are quantized, {observed} of them "
        "observed while data runs"
    )
    left = [name for name, kind in plan.kinds.items() if kind == "linear" and name not in modules]
    if left:
        more = f" and {len(left) - 8} more" if len(left) > 8 else ""
        screen.print(f"Linear in full precision: {', '.join(left[:8])}{more}", soft_wrap=True)


@app.command()
@reported
def requantize(
    statistics: Annotated[
        Path,
        typer.Argument(
            metavar="STATISTICS",
            help="Folder of saved statistics.",
            exists=True,
            show_default=False,
        ),
    ],
    *,
    model: Annotated[
        str,
        typer.Option(help="The model they were observed in.", rich_help_panel=LOADING),
    ],
    scheme: Scheme = None,
    recipe: RecipeFile = None,
    observer: ObserverOption = None,
    observer_file: ObserverFile = None,
    ignore: Ignore = None,
    kv_cache: KvCacheOption = None,
    out: Out,
    accept: Accept = None,
    dtype: DtypeOption = Dtype.AUTO,
    gguf_file: GgufFile = None,
    download: Download = False,
    trust_remote_code: RemoteCode = False,
    overwrite: Overwrite = False,
    no_report: NoReport = False,
    quiet: Quiet = False,
) -> None:
    """Write another checkpoint from saved statistics, without running the model.

    Example: [b]inlay requantize SmolLM2-W8A8.statistics --scheme W8A8_STATIC
    --observer input=histogram:method=entropy --model ./SmolLM2 --out SmolLM2-entropy[/b]
    """
    _require_free(out, model, statistics, overwrite=overwrite)
    wanted = _wanted(scheme, recipe, observer, observer_file, ignore, kv_cache)
    from inlay.calibration import Calibration
    from inlay.loading import load_model, load_tokenizer
    from inlay.stored import StoredStatistics

    calm_transformers(quiet)
    stored = StoredStatistics.load(statistics)
    source: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "gguf_file": gguf_file,
        "download": download,
    }
    loaded = load_model(model, dtype=dtype.value, **source)
    calibration = Calibration.from_statistics(loaded, wanted.recipe_for(loaded), stored)
    calibration.tokenizer = load_tokenizer(model, **source)
    calibration.finalize(accept=_names(accept))
    calibration.save(out, overwrite=overwrite, report=not no_report)
    if not quiet:
        show_result(calibration, out, statistics)


@app.command()
@reported
def merge(
    statistics: Annotated[
        list[Path],
        typer.Argument(
            metavar="STATISTICS",
            help="Folders of saved statistics.",
            exists=True,
            show_default=False,
        ),
    ],
    out: Out,
) -> None:
    """Merge statistics of several runs with the same recipe, as if one had seen all their data.

    Example: [b]inlay merge first.statistics second.statistics --out both.statistics[/b]
    """
    if len(statistics) < 2:
        raise typer.BadParameter("give at least two", param_hint="STATISTICS")
    _require_free(out, *statistics)
    from inlay.stored import StoredStatistics

    loaded = map(StoredStatistics.load, statistics)
    functools.reduce(lambda one, other: one.merge(other), loaded).save(out)
    typer.echo(out)


@app.command()
@reported
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Folder of a checkpoint.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ],
) -> None:
    """Write report.html of a checkpoint again, from its report.json.

    Example: [b]inlay report SmolLM2-W8A8[/b]
    """
    from inlay.report import write

    data = report_data(folder)
    if data is None:
        raise ConfigurationError(
            f"{folder} has no report.json; checkpoints that were saved with a report have one"
        )
    typer.echo(write(data, folder / "report.html"))


@app.command()
@reported
def schemes() -> None:
    """List the presets for --scheme.

    Example: [b]inlay schemes[/b]
    """
    from inlay.cli.words import format_in_words
    from inlay.recipe import Recipe, preset_names

    rows = table("scheme", "weights", "input activations")
    for name in preset_names():
        (group,) = Recipe.from_preset(name).config.config_groups.values()
        parts = (group.weights, group.input_activations)
        rows.add_row(name, *map(format_in_words, parts))
    console().print(rows)


@app.command()
@reported
def observers(observer_file: ObserverFile = None) -> None:
    """List the observers for --observer, with their settings.

    Example: [b]inlay observers --observer-file my_observer.py[/b]
    """
    from inlay.cli.recipes import run_observer_file
    from inlay.observers import Observer

    if observer_file is not None:
        run_observer_file(observer_file)
    rows = table("observer", "for", "settings", "what its range is")
    # The registry writes hyphens and takes either; everywhere else they are underscores.
    for name in sorted(name.replace("-", "_") for name in Observer.registered_names()):
        cls = Observer.get_value_from_registry(name)
        settings = ", ".join(f"{kwarg.name}={kwarg.default}" for kwarg in cls._kwargs)
        about = (cls.__doc__ or "").strip().partition("\n")[0]
        # One that only keeps what it saw last does not serve for values that come in batches.
        of_weights = cls.observes_input or not cls._act_sync_dict
        rows.add_row(name, "weights" if of_weights else "activations", settings, about)
    console().print(rows)


def _wanted(
    scheme: str | None,
    recipe: Path | None,
    observers: list[str] | None,
    observer_file: Path | None,
    ignore: list[str] | None,
    kv_cache: KvCache | None,
) -> "Wanted":
    """What to quantize, as far as that can be said without the model."""
    if (scheme is None) == (recipe is None):
        raise typer.BadParameter("give exactly one of them", param_hint="--scheme or --recipe")
    from inlay.cli.recipes import ObserverChoice, Wanted, run_observer_file

    try:
        choices = [ObserverChoice.parse(text) for text in observers or ()]
    except ConfigurationError as error:
        raise typer.BadParameter(str(error), param_hint="--observer") from error
    if observer_file is not None:
        run_observer_file(observer_file)
    return Wanted(
        scheme=scheme,
        file=recipe,
        observers=tuple(choices),
        ignore=tuple(ignore or ()),
        kv_cache=None if kv_cache is None else kv_cache.value,
    )


def _require_free(out: Path, *sources: str | Path, overwrite: bool | None = None) -> None:
    """Refuse a folder that is in use before hours are spent, and what is read in any case."""
    for origin in map(Path, sources):
        if origin.exists() and out.resolve() in (origin.resolve(), *origin.resolve().parents):
            raise ConfigurationError(f"{origin} is read, and is in {out}; write to another folder")
    if not overwrite and out.exists() and any(out.iterdir()):
        hint = (
            "choose another folder" if overwrite is None else "--overwrite replaces what is there"
        )
        raise ConfigurationError(f"{out} is not empty; {hint}")


def _interrupted(statistics: Path) -> NoReturn:
    if statistics.exists():
        tell(f"interrupted; {statistics} holds what was seen: go on with --resume")
    else:
        tell("interrupted before any statistics were saved; nothing was written")
    raise typer.Exit(130)


def _names(accept: list[Accepted] | None) -> tuple[str, ...]:
    return tuple(problem.value for problem in accept or ())
