"""Commands that quantize a model, explain the plan, and merge statistics."""

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.checkpoint.source import Source
from inlay.cli.app import app
from inlay.cli.arguments import (
    DATA,
    KeepHessians,
    MethodName,
    MethodOption,
    Model,
    NoComparison,
    Out,
    Quiet,
    RecipeOptions,
    Stream,
    file_option,
)
from inlay.cli.flags import Only, Without, with_flags
from inlay.cli.known import compiler_names
from inlay.cli.outcome import interrupted, show_result
from inlay.cli.recipes import Wanted, wanted_of
from inlay.cli.terminal import calm_transformers, console, reported, reported_by_all
from inlay.data.rows import read_rows
from inlay.errors import ConfigurationError
from inlay.files import require_room
from inlay.options import LoadOptions, Options, StreamOptions, WriteOptions, keywords_of
from inlay.ranks.identity import is_first

if TYPE_CHECKING:
    from inlay.engine.run import Run
    from inlay.engine.stream import Streamed

__all__ = ["calibrate", "explain", "merge", "requantize", "source_of"]


@app.command()
@reported_by_all
@with_flags
def calibrate(
    model: Model,
    recipe_options: RecipeOptions,
    options: StreamOptions,
    load_options: LoadOptions,
    out: Out,
    data: Annotated[
        Path | None,
        file_option(
            "--data",
            help=".txt with one text per line, or .jsonl with [b]text[/b], [b]messages[/b] or "
            "[b]input_ids[/b].",
            panel=DATA,
        ),
    ] = None,
    method: MethodOption = MethodName.BEST,
    keep_hessians: KeepHessians = False,
    no_comparison: NoComparison = False,
    stream: Stream = False,
    quiet: Quiet = False,
) -> None:
    """Calibrate a model on text and write the quantized checkpoint.

    Example: [b]inlay calibrate ./SmolLM2 --scheme W8A8 --data chats.jsonl --out SmolLM2-W8A8[/b]
    """
    _require_apart(out, model)
    require_room(out, overwrite=options.overwrite)
    source = source_of(model, load_options)
    if options.offload_activations and not stream:
        raise typer.BadParameter("needs --stream", param_hint="--offload-activations")
    if stream:
        source.require_streamable()
    wanted = wanted_of(
        recipe_options,
        keep_hessians=keep_hessians,
        method=method.value,
        has_data=data is not None,
    )
    if no_comparison:
        options = replace(options, held_out=0)
    options = replace(options, progress=False if quiet else None)
    # Refuse data that cannot be read before loading the library and the model.
    first_row = None if data is None else next(read_rows(data), None)
    if data is not None and first_row is None:
        raise ConfigurationError(f"{data} is empty: there is nothing to calibrate on")
    wanted.require_data()
    _require_compiler(options.compiler)
    wanted.require_recipe()
    calm_transformers(quiet)
    if stream:
        run: Run | Streamed = _streamed(source, wanted, data, out, options)
    else:
        # Token ids need no tokenizer; if the model has one, it still belongs beside the checkpoint.
        is_text = first_row is not None and first_row.kind != "input_ids"
        run = _in_memory(source, wanted, data, is_text, out, options)
    if is_first() and not quiet:
        show_result(run, out)


def _in_memory(
    source: Source,
    wanted: Wanted,
    data: Path | None,
    is_text: bool,
    out: Path,
    options: StreamOptions,
) -> "Run":
    from inlay.checkpoint.loading import find_tokenizer, load_model, load_tokenizer
    from inlay.engine.calibrate import calibrate as calibrate_model
    from inlay.statistics.rank_files import remove_all

    loaded = load_model(source)
    statistics = _statistics_folder(out)
    try:
        run = calibrate_model(
            loaded,
            wanted.recipe_for(loaded),
            data,
            tokenizer=(load_tokenizer if is_text else find_tokenizer)(source),
            statistics=statistics,
            **keywords_of(options, Options),
        )
        run.save(out, **keywords_of(options, WriteOptions))
    except KeyboardInterrupt:
        interrupted(statistics, "statistics")
    if is_first():
        remove_all(statistics)  # the checkpoint holds them now
    return run


def _streamed(
    source: Source, wanted: Wanted, data: Path | None, out: Path, options: StreamOptions
) -> "Streamed":
    from inlay.checkpoint.stored_model import StoredModel
    from inlay.engine.stream import stream
    from inlay.engine.streamed.journal import work_folder

    stored = StoredModel.open(source)
    try:
        recipe = wanted.recipe_for(stored.model)
        return stream(stored, recipe, data, out=out, **keywords_of(options, StreamOptions))
    except KeyboardInterrupt:
        interrupted(work_folder(out), "blocks")


@app.command()
@reported
@with_flags
def explain(
    model: Model,
    recipe_options: RecipeOptions,
    load_options: Annotated[LoadOptions, Without("dtype")],
) -> None:
    """Show what would be quantized and observed. Reads only the config of the model.

    Example: [b]inlay explain ./SmolLM2 --scheme FP8 --kv-cache fp8[/b]
    """
    source = source_of(model, load_options)
    wanted = wanted_of(recipe_options)
    wanted.require_recipe()
    from inlay.checkpoint.loading import empty_model
    from inlay.cli.tree import tree_of
    from inlay.recipe import Plan

    calm_transformers(quiet=True)
    empty = empty_model(source)
    plan = Plan(empty, wanted.recipe_for(empty))
    screen = console()
    screen.print(tree_of(plan, type(empty).__name__))
    modules = {slot.module for slot in plan.slots.values()}
    observed = sum(1 for _ in plan.activation_slots())
    screen.print(
        f"{len(plan.slots)} slots in {len(modules)} modules are quantized, {observed} of them "
        "observed while data runs"
    )
    if plan.recipe.equalize is not None:
        screen.print(
            "Which inputs can be equalized shows in the graph, when data runs: the report says it"
        )
    if plan.needs_second_run:
        screen.print(
            "Data is run twice: the observers of equalized inputs have to see them scaled "
            "(static_minmax does not)"
        )
    left = [name for name, kind in plan.kinds.items() if kind == "linear" and name not in modules]
    if left:
        more = f" and {len(left) - 8} more" if len(left) > 8 else ""
        screen.print(f"Linear in full precision: {', '.join(left[:8])}{more}", soft_wrap=True)


@app.command()
@reported_by_all
@with_flags
def requantize(
    statistics: Annotated[
        Path,
        typer.Argument(
            metavar="STATISTICS",
            help="Folder of a checkpoint or of saved statistics.",
            exists=True,
            show_default=False,
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Model that the statistics were gathered from.",
            rich_help_panel="Loading the model",
        ),
    ],
    recipe_options: RecipeOptions,
    options: Annotated[StreamOptions, Only("accept", "overwrite", "max_shard_size", "report")],
    load_options: LoadOptions,
    out: Out,
    quiet: Quiet = False,
) -> None:
    """Write another checkpoint from saved statistics, without running the model.

    Example: [b]inlay requantize SmolLM2-W8A8 --scheme W8A8_STATIC
    --observer input=histogram:method=entropy --model ./SmolLM2 --out SmolLM2-entropy[/b]
    """
    _require_apart(out, model, statistics)
    require_room(out, overwrite=options.overwrite)
    source = source_of(model, load_options)
    wanted = wanted_of(recipe_options)
    wanted.require_recipe()
    from inlay.checkpoint.loading import find_tokenizer, load_model
    from inlay.engine.calibrate import requantize as requantize_model
    from inlay.statistics.on_disk import StoredStatistics

    calm_transformers(quiet)
    stored = StoredStatistics.load(statistics)
    loaded = load_model(source)
    run = requantize_model(
        loaded,
        wanted.recipe_for(loaded),
        stored,
        tokenizer=find_tokenizer(source),
        accept=options.accept,
        progress=False if quiet else None,
    )
    run.save(out, **keywords_of(options, WriteOptions))
    if is_first() and not quiet:
        show_result(run, out)


@app.command()
@reported
def merge(
    statistics: Annotated[
        list[Path],
        typer.Argument(
            metavar="STATISTICS",
            help="Folders of checkpoints or of saved statistics.",
            exists=True,
            show_default=False,
        ),
    ],
    out: Out,
) -> None:
    """Merge statistics of several runs with the same recipe, as if one run had seen all the data.

    Example: [b]inlay merge first.statistics second.statistics --out both.statistics[/b]
    """
    if len(statistics) < 2:
        raise typer.BadParameter("give at least two", param_hint="STATISTICS")
    _require_apart(out, *statistics)
    if out.exists() and any(out.iterdir()):
        raise ConfigurationError(f"{out} is not empty; choose another folder")
    require_room(out)
    from inlay.statistics.on_disk import StoredStatistics

    loaded = map(StoredStatistics.load, statistics)
    functools.reduce(lambda one, other: one.merge(other), loaded).save(out)
    typer.echo(out)


def _require_compiler(name: str) -> None:
    if name in ("auto", "eager", "inductor"):
        return  # which are always there
    known = compiler_names()
    if name not in known:
        raise typer.BadParameter(
            f"there is no compiler {name!r}; use one of {', '.join(known)}", param_hint="--compiler"
        )


def source_of(model: str, options: LoadOptions) -> Source:
    """Return the source of a model; refuse a missing folder."""
    source = Source(place=os.path.expanduser(model), **keywords_of(options, LoadOptions))
    source.require_config()
    return source


def _require_apart(out: Path, *sources: str | Path) -> None:
    """Refuse to write over anything that the command reads, even with --overwrite."""
    for origin in map(Path, sources):
        if origin.exists() and out.resolve() in (origin.resolve(), *origin.resolve().parents):
            raise ConfigurationError(f"{out} holds {origin}, which is read; name another folder")


def _statistics_folder(out: Path) -> Path:
    """Return the folder beside `out` that keeps the statistics while a run goes on."""
    place = Path(os.path.abspath(out)) if out.name in ("", "..") else out
    return place.with_name(f"{place.name}.statistics")
