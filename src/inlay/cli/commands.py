"""Commands that quantize a model, explain the plan, and merge statistics."""

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.checkpoint.source import Source
from inlay.cli.app import app
from inlay.cli.arguments import (
    DATA,
    LOADING,
    Accept,
    Accepted,
    Download,
    Dtype,
    DtypeOption,
    Equalize,
    ExpertsOption,
    GgufFile,
    Gptq,
    Ignore,
    KeepHessians,
    KvCacheOption,
    MethodName,
    MethodOption,
    Model,
    NoComparison,
    NoReport,
    ObserverFile,
    ObserverOption,
    OffloadActivations,
    Out,
    Overwrite,
    Quiet,
    RecipeFile,
    RemoteCode,
    Scheme,
    Stream,
    file_option,
)
from inlay.cli.outcome import interrupted, show_result
from inlay.cli.recipes import wanted_of
from inlay.cli.terminal import calm_transformers, console, reported, reported_by_all
from inlay.errors import ConfigurationError
from inlay.files import require_room
from inlay.ranks.identity import is_first

if TYPE_CHECKING:
    pass

__all__ = ["calibrate", "explain", "merge", "requantize", "source_of"]


@app.command()
@reported_by_all
def calibrate(
    model: Model,
    *,
    scheme: Scheme = None,
    recipe: RecipeFile = None,
    observer: ObserverOption = None,
    observer_file: ObserverFile = None,
    ignore: Ignore = None,
    kv_cache: KvCacheOption = None,
    equalize: Equalize = None,
    experts: ExpertsOption = None,
    gptq: Gptq = False,
    method: MethodOption = MethodName.BEST,
    data: Annotated[
        Path | None,
        file_option(
            "--data",
            help=".txt with one text per line, or .jsonl with [b]text[/b], [b]messages[/b] or "
            "[b]input_ids[/b].",
            panel=DATA,
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="How many texts to calibrate on.", rich_help_panel=DATA)
    ] = 512,
    max_length: Annotated[
        int, typer.Option(min=1, help="Cut texts after this many tokens.", rich_help_panel=DATA)
    ] = 2048,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Texts per batch.", rich_help_panel=DATA)
    ] = 1,
    count_padding: Annotated[
        bool,
        typer.Option(
            "--count-padding", help="Observe padding like any other token.", rich_help_panel=DATA
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue where an interrupted run stopped.", rich_help_panel=DATA
        ),
    ] = False,
    stream: Stream = False,
    offload_activations: OffloadActivations = False,
    no_comparison: NoComparison = False,
    keep_hessians: KeepHessians = False,
    out: Out,
    accept: Accept = None,
    compiler: Annotated[
        str,
        typer.Option(
            help="Backend of torch.compile, or [b]auto[/b]: eager, or compiled if the data "
            "is estimated to repay that."
        ),
    ] = "auto",
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
    _require_apart(out, model)
    require_room(out, overwrite=overwrite)
    source = source_of(model, gguf_file, download, trust_remote_code)
    wanted = wanted_of(
        scheme,
        recipe,
        observer,
        observer_file,
        ignore,
        kv_cache,
        equalize,
        experts,
        gptq,
        keep_hessians,
        method=method.value,
        has_data=data is not None,
    )
    from inlay.data.tokenize import read_rows

    # Refuse data that cannot be read before loading the library and the model.
    first_row = None if data is None else next(read_rows(data), None)
    wanted.require_recipe()
    settings: dict[str, Any] = {
        "max_length": max_length,
        "samples": samples,
        "batch_size": batch_size,
        "count_padding": count_padding,
        "compiler": compiler,
        "accept": _names(accept),
        "resume": resume,
        "progress": False if quiet else None,
    }
    if no_comparison:
        settings["held_out"] = 0
    calm_transformers(quiet)
    if stream:
        from inlay.cli.streaming import run_streamed

        settings |= {"offload_activations": offload_activations, "overwrite": overwrite}
        settings |= {"report": not no_report, "out": out}
        run_streamed(model, wanted, data, dtype.value, source, settings, quiet=quiet)
        return
    if offload_activations:
        raise typer.BadParameter("needs --stream", param_hint="--offload-activations")
    from inlay.checkpoint.loading import find_tokenizer, load_model, load_tokenizer
    from inlay.engine.calibrate import calibrate as calibrate_model
    from inlay.statistics.rank_files import remove_all

    # Token ids need no tokenizer; if the model has one, it still belongs beside the checkpoint.
    is_text = first_row is not None and first_row.kind != "input_ids"
    loaded = load_model(model, dtype=dtype.value, **source)
    statistics = _statistics_folder(out)
    try:
        run = calibrate_model(
            loaded,
            wanted.recipe_for(loaded),
            data,
            tokenizer=(load_tokenizer if is_text else find_tokenizer)(model, **source),
            statistics=statistics,
            **settings,
        )
        run.save(out, overwrite=overwrite, report=not no_report)
    except KeyboardInterrupt:
        interrupted(statistics, "statistics")
    if is_first():
        remove_all(statistics)  # the checkpoint holds them now
    if is_first() and not quiet:
        show_result(run, out)


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
    equalize: Equalize = None,
    experts: ExpertsOption = None,
    gptq: Gptq = False,
    gguf_file: GgufFile = None,
    download: Download = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Show what would be quantized and observed. Reads only the config of the model.

    Example: [b]inlay explain ./SmolLM2 --scheme FP8 --kv-cache fp8[/b]
    """
    source = source_of(model, gguf_file, download, trust_remote_code)
    wanted = wanted_of(
        scheme, recipe, observer, observer_file, ignore, kv_cache, equalize, experts, gptq
    )
    wanted.require_recipe()
    from inlay.checkpoint.loading import empty_model
    from inlay.cli.tree import tree_of
    from inlay.recipe import Plan

    calm_transformers(quiet=True)
    empty = empty_model(model, **source)
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
    *,
    model: Annotated[
        str,
        typer.Option(help="Model that the statistics were gathered from.", rich_help_panel=LOADING),
    ],
    scheme: Scheme = None,
    recipe: RecipeFile = None,
    observer: ObserverOption = None,
    observer_file: ObserverFile = None,
    ignore: Ignore = None,
    kv_cache: KvCacheOption = None,
    equalize: Equalize = None,
    experts: ExpertsOption = None,
    gptq: Gptq = False,
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

    Example: [b]inlay requantize SmolLM2-W8A8 --scheme W8A8_STATIC
    --observer input=histogram:method=entropy --model ./SmolLM2 --out SmolLM2-entropy[/b]
    """
    _require_apart(out, model, statistics)
    require_room(out, overwrite=overwrite)
    source = source_of(model, gguf_file, download, trust_remote_code)
    wanted = wanted_of(
        scheme, recipe, observer, observer_file, ignore, kv_cache, equalize, experts, gptq
    )
    wanted.require_recipe()
    from inlay.checkpoint.loading import find_tokenizer, load_model
    from inlay.engine.calibrate import requantize as requantize_model
    from inlay.statistics.on_disk import StoredStatistics

    calm_transformers(quiet)
    stored = StoredStatistics.load(statistics)
    loaded = load_model(model, dtype=dtype.value, **source)
    run = requantize_model(
        loaded,
        wanted.recipe_for(loaded),
        stored,
        tokenizer=find_tokenizer(model, **source),
        accept=_names(accept),
        progress=False if quiet else None,
    )
    run.save(out, overwrite=overwrite, report=not no_report)
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


def source_of(
    model: str, gguf_file: str | None, download: bool, trust_remote_code: bool
) -> dict[str, Any]:
    """Collect the options about loading, for the functions that load; refuse a missing folder."""
    options: dict[str, Any] = {
        "gguf_file": gguf_file,
        "download": download,
        "trust_remote_code": trust_remote_code,
    }
    Source.of(model, **options).require_config()
    return options


def _require_apart(out: Path, *sources: str | Path) -> None:
    """Refuse to write over anything that the command reads, even with --overwrite."""
    for origin in map(Path, sources):
        if origin.exists() and out.resolve() in (origin.resolve(), *origin.resolve().parents):
            raise ConfigurationError(f"{out} holds {origin}, which is read; name another folder")


def _statistics_folder(out: Path) -> Path:
    """Return the folder beside `out` that keeps the statistics while a run goes on."""
    place = Path(os.path.abspath(out)) if out.name in ("", "..") else out
    return place.with_name(f"{place.name}.statistics")


def _names(accept: list[Accepted] | None) -> tuple[str, ...]:
    return tuple(problem.value for problem in accept or ())
