"""The command that calibrates a model and writes its checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.checkpoint.source import Source
from inlay.cli.app import QUANTIZE, command
from inlay.cli.arguments import (
    KeepHessians,
    MethodName,
    MethodOption,
    Model,
    NoComparison,
    ProposedOut,
    Quiet,
    RecipeOptions,
    SampleText,
    Stream,
    data_option,
)
from inlay.cli.known import compiler_names
from inlay.cli.outcome import interrupted, show_result
from inlay.cli.places import proposed, require_apart, source_of, statistics_folder
from inlay.cli.recipes import Wanted, wanted_of
from inlay.cli.terminal import announce_stages, calm_transformers, tell
from inlay.data.paths import SAMPLE, rows_of
from inlay.errors import ConfigurationError
from inlay.files import require_room
from inlay.options import LoadOptions, Options, StreamOptions, WriteOptions, keywords_of
from inlay.ranks.identity import is_first

if TYPE_CHECKING:
    from torch import nn

    from inlay.engine.run import Run
    from inlay.engine.stream import Streamed

__all__ = ["calibrate"]


@command(
    QUANTIZE,
    example="inlay calibrate ./SmolLM2 --scheme W8A8 --data chats.jsonl --out SmolLM2-W8A8",
    on_all_ranks=True,
)
def calibrate(
    model: Model,
    recipe_options: RecipeOptions,
    options: StreamOptions,
    load_options: LoadOptions,
    data: Annotated[
        Path | None,
        data_option(
            ".txt with one text per line; .jsonl or .parquet with [b]text[/b], [b]messages[/b] or "
            "[b]input_ids[/b], and with [b]images[/b] or [b]audio[/b]; a folder of these; or a "
            "saved dataset."
        ),
    ] = None,
    sample_text: SampleText = False,
    out: ProposedOut = None,
    method: MethodOption = MethodName.BEST,
    keep_hessians: KeepHessians = False,
    no_comparison: NoComparison = False,
    stream: Stream = None,
    quiet: Quiet = False,
) -> None:
    """Calibrate a model on text and write the quantized checkpoint."""
    if sample_text:
        data = _sample_text(data)
    out = out or proposed(model, recipe_options)
    require_apart(out, model)
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
    first_row = None if data is None else next(iter(rows_of(data, options)), None)
    if data is not None and first_row is None:
        raise ConfigurationError(f"{data} is empty: there is nothing to calibrate on")
    wanted.require_data()
    _require_compiler(options.compiler)
    announce_stages(quiet)
    wanted.require_recipe()
    calm_transformers(quiet)
    if stream is None and options.resume and _was_streamed(out):
        stream = True
    may_stream = stream is None and source.is_streamable
    loaded = None if stream else _loaded(source, wanted, may_stream=may_stream)
    if loaded is None:
        run: Run | Streamed = _streamed(source, wanted, data, out, options)
    else:
        # Token ids need no tokenizer; if the model has one, it still belongs beside the checkpoint.
        is_text = first_row is not None and first_row.kind != "input_ids"
        run = _in_memory(loaded, source, wanted, data, is_text, out, options)
    if is_first() and not quiet:
        show_result(run, out)


def _sample_text(data: Path | None) -> Path:
    if data is not None:
        raise typer.BadParameter("cannot be used with --data", param_hint="--sample-text")
    if is_first():
        tell(
            "warning: the sample text is for trying things out. Calibrate on your own data before "
            "you use the model"
        )
    return SAMPLE


def _was_streamed(out: Path) -> bool:
    from inlay.engine.streamed.journal import work_folder

    return work_folder(out).exists()


def _loaded(source: Source, wanted: Wanted, *, may_stream: bool) -> "nn.Module | None":
    """Load a model; return None if it may be streamed, and should be for the sake of memory."""
    from inlay.checkpoint.loading import load_model
    from inlay.engine.hessian_room import reason_to_stream

    model = load_model(source)
    reason = reason_to_stream(model, wanted.recipe_for(model)) if may_stream else None
    if reason is None:
        return model
    if is_first():
        tell(f"{reason}: streaming the model. Pass --no-stream to keep it in memory")
    return None


def _in_memory(
    loaded: "nn.Module",
    source: Source,
    wanted: Wanted,
    data: Path | None,
    is_text: bool,
    out: Path,
    options: StreamOptions,
) -> "Run":
    from inlay.checkpoint.loading import find_tokenizer, load_tokenizer
    from inlay.engine.calibrate import calibrate as calibrate_model
    from inlay.statistics.rank_files import remove_all

    statistics = statistics_folder(out)
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


def _require_compiler(name: str) -> None:
    if name in ("auto", "eager", "inductor"):
        return  # which are always there
    known = compiler_names()
    if name not in known:
        raise typer.BadParameter(
            f"there is no compiler {name!r}; use one of {', '.join(known)}", param_hint="--compiler"
        )
