"""The command line, as it is typed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from families import llama
from folders import assert_same_folder
from report_sample import sample_report
from tokens import CHAT, word_tokenizer
from torch import nn
from typer.testing import CliRunner, Result

import inlay
from inlay.cli import app
from inlay.cli.arguments import KvCache
from inlay.cli.known import preset_rows, use_of_data
from inlay.cli.outcome import show_result
from inlay.cli.recipes import KV_CACHES, ObserverChoice, Wanted, run_observer_file
from inlay.compensation.settings import GPTQ
from inlay.data.paths import SAMPLE
from inlay.engine import hessian_room
from inlay.errors import ConfigurationError, StatisticsError
from inlay.observers import Observer
from inlay.options import PANELS
from inlay.recipe import Plan, Recipe, preset_names, recipe_text

OBSERVER_FILE = """
from inlay.observers import StaticMinMaxObserver, Observer

@Observer.register("{name}")
class Twice(StaticMinMaxObserver):
    \"\"\"Twice the range.\"\"\"
"""


# What commands say while they work.
STAGES = {"inlay: importing torch and transformers", "inlay: loading the model"}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def succeeds(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert set(result.stderr.splitlines()) <= STAGES
    return result.stdout


def fails(*arguments: object, code: int = 1) -> str:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    # Boxes of usage errors are drawn around lines that are broken anywhere.
    said = "\n".join(line for line in result.stderr.splitlines() if line not in STAGES)
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", said).split())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small language model with its tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    llama().save_pretrained(path)
    word_tokenizer(chat_template=CHAT).save_pretrained(path)
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("w1 w2 w3\n" * 20)
    return path


@dataclass
class Record:
    model: str = "tiny"
    data: str = "texts.txt, 20 texts"
    samples: int = 18
    tokens: int = 1234
    padding_tokens: int = 7
    stages: tuple[tuple[str, float], ...] = (("calibrating", 2.5), ("writing", 75.0))
    advice: tuple[str, ...] = ()


@dataclass
class FakeRun:
    """Stands in for a run; saving writes hardly anything."""

    recipe: Any
    record: Record = field(default_factory=Record)

    def save(self, folder: Path, *, overwrite: bool, report: bool, max_shard_size: str) -> None:
        folder.mkdir(exist_ok=overwrite)
        (folder / "model.safetensors").write_bytes(b"")
        if report:
            (folder / "report.json").write_text(sample_report().to_json())


@dataclass
class Runs:
    """Stands in for `inlay.engine.calibrate`, and remembers how it was called."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    error: BaseException | None = None

    def __call__(self, *arguments: Any, **options: Any) -> FakeRun:
        self.calls.append((arguments, options))
        if self.error is not None:
            raise self.error
        return FakeRun(recipe=arguments[1])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    fake = Runs()
    module = ModuleType("inlay.engine.calibrate")
    module.calibrate = module.requantize = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "inlay.engine.calibrate", module)
    return fake


class StoredStatistics:
    """Stands in for saved statistics: a folder with a list of numbers."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    @classmethod
    def load(cls, path: Path) -> "StoredStatistics":
        return cls(json.loads((path / "statistics.json").read_text()))

    def merge(self, other: "StoredStatistics") -> "StoredStatistics":
        return StoredStatistics(self.numbers + other.numbers)

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "statistics.json").write_text(json.dumps(self.numbers))


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> type[StoredStatistics]:
    module = ModuleType("inlay.statistics.on_disk")
    module.StoredStatistics = StoredStatistics  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "inlay.statistics.on_disk", module)
    return StoredStatistics


def test_help_is_at_once() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from inlay.cli import app; "
        "outputs = [CliRunner().invoke(app, [*c, '--help']).output for c in ([], ['calibrate'])]; "
        "assert all('Usage' in output for output in outputs), outputs; "
        "heavy = {'torch', 'transformers', 'numpy', 'compressed_tensors'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_help_groups_commands_and_options() -> None:
    headings = re.findall(r"─ (\w+) ─", succeeds("--help"))
    assert headings == ["Options", "Quantize", "Inspect", "Verify", "Run"]
    for info in app.registered_commands:
        assert info.callback is not None
        name = info.callback.__name__
        shown = succeeds(name, "--help")
        # The help starts with the example, right after the usage.
        assert re.match(rf"\s*Usage: inlay {name} [^\n]*\n\s+Example: inlay {name}\b", shown)
        panels = [each for each in re.findall(r"─ (\w+) ─", shown) if each in PANELS]
        assert panels == sorted(panels, key=PANELS.index)
        assert "Run" in panels  # with --debug


def test_version() -> None:
    assert succeeds("--version") == f"{inlay.__version__}\n"


def test_as_a_module_and_completion() -> None:
    code = [sys.executable, "-m", "inlay"]
    shown = subprocess.run([*code, "--version"], check=True, capture_output=True, text=True)
    assert shown.stdout == f"{inlay.__version__}\n"
    words = {"COMP_WORDS": "inlay re", "COMP_CWORD": "1", "_INLAY_COMPLETE": "complete_bash"}
    completed = subprocess.run(
        code, env={**os.environ, **words}, capture_output=True, text=True, check=False
    )
    assert sorted(completed.stdout.split()) == ["report", "requantize"]


def test_schemes() -> None:
    output = succeeds("schemes")
    words = [line.split() for line in output.splitlines() if line.strip()]
    lines = {scheme: " ".join(parts) for scheme, *parts in words}
    assert set(preset_names()) <= set(lines)
    assert lines["W8A8_STATIC"] == (
        "int8 per channel, symmetric int8 per tensor, asymmetric, static needed"
    )
    assert lines["W4A16"] == "int4 in groups of 128, symmetric – better"  # noqa: RUF001
    assert lines["FP8_BLOCK"] == (
        "float8 in blocks of 128 by 128, symmetric float8 in groups of 128, symmetric, dynamic "
        "not needed"
    )
    assert lines["NVFP4"].endswith("needed")
    assert lines["imatrix_mse"].startswith("weights The range")


@pytest.mark.parametrize("preset", sorted({*preset_names()} - {"FP8_BLOCK", "UNQUANTIZED"}))
def test_the_list_of_schemes_says_what_needs_data(preset: str, folder: Path) -> None:
    (row,) = (row for row in preset_rows() if row[0] == preset)
    said, model = use_of_data(row), llama()
    plain = Plan(model, Recipe.from_preset(preset, weights=_fitting(preset)))
    best = Plan(model, plain.recipe.with_best_method(has_data=True))
    assert (said == "needed") == plain.needs_data
    assert (said == "better") == (best.needs_data and not plain.needs_data)


def _fitting(preset: str) -> dict[str, Any] | None:
    """Groups that divide the columns of the small model."""
    return {"group_size": 16} if re.match(r"W[2-8]A(16|4|8|FP8)(_ASYM)?$", preset) else None


def test_the_size_of_groups(folder: Path, tmp_path: Path, runs: Runs) -> None:
    common = ("calibrate", folder, "--out", tmp_path / "out")
    succeeds(*common, "--scheme", "W4A16", "--group-size", 16)
    (scheme,) = runs.calls[0][0][1].config.config_groups.values()
    assert (scheme.weights.group_size, scheme.weights.observer) == (16, "memoryless_mse")
    problem = fails("explain", folder, "--scheme", "W4A16")
    assert "cannot be divided into groups of 128" in problem
    assert "Groups of 32 divide the columns of all layers: pass --group-size 32" in problem
    problem = fails(*common, "--scheme", "W8A8", "--group-size", 16, "--overwrite")
    assert "W8A8 has no integer weights in groups" in problem


def test_the_sample_text_is_for_trying_things_out(
    folder: Path, texts: Path, tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("calibrate", folder, "--scheme", "W8A8_STATIC", "--sample-text")
    assert result.exit_code == 0, result.output
    assert "the sample text is for trying things out" in result.stderr
    assert runs.calls[0][0][2] == SAMPLE
    assert "vllm serve tiny-W8A8_STATIC" in result.stdout
    common = ("calibrate", folder, "--scheme", "W8A8", "--sample-text", "--data", texts)
    assert "cannot be used with --data" in fails(*common, code=2)


def test_observers(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OBSERVER_FILE.format(name="twice_listed"))
    assert "twice_listed" not in succeeds("observers")
    output = succeeds("observers", "--observer-file", path)
    assert re.search(r"twice_listed +activations +Twice the range\.", output)
    assert re.search(r"memoryless_minmax +weights +Minimum and maximum", output)
    assert re.search(r"imatrix_mse +weights +maxshrink=0.95, patience=5", output)
    assert re.search(r"histogram +activations +method=mse, percentile=99.99", output)


def test_observer_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import nothing_of_that_name")
    assert "mine.py fails with ModuleNotFoundError" in fails("observers", "--observer-file", path)
    path.write_text("x = 1")
    with pytest.raises(ConfigurationError, match=r"mine\.py registers no observer"):
        run_observer_file(path)
    with pytest.raises(ConfigurationError, match=r"mine.txt is not a Python file"):
        run_observer_file(tmp_path / "mine.txt")
    assert "does not exist" in fails("observers", "--observer-file", tmp_path / "no.py", code=2)


def test_explain_needs_no_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    output = succeeds(
        "explain", tmp_path, "--scheme", "W8A8_STATIC", "--kv-cache", "fp8",
        "--observer", "input=histogram",
    )  # fmt: skip
    projection = (
        "weight int8 per channel, symmetric (memoryless_minmax); "
        "input int8 per tensor, asymmetric, static (histogram)"
    )
    assert output.splitlines() == [
        "LlamaForCausalLM",
        "└── model.layers.0 … 1",
        "    ├── self_attn: k float8 per tensor, symmetric, static (minmax); "
        "v float8 per tensor, symmetric, static (minmax)",
        f"    │   └── q_proj, k_proj, v_proj, o_proj: {projection}",
        "    └── mlp",
        f"        └── gate_proj, up_proj, down_proj: {projection}",
        "32 slots in 16 modules are quantized, 18 of them observed while data runs",
        "Linear in full precision: lm_head",
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # loading the checkpoint back warns of what it does
def test_check_needs_no_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    result = run("check", tmp_path, "--scheme", "W8A8_STATIC", "--layers", 1)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "LlamaForCausalLM with random weights and at most 1 layers:",
        "  right: statistics of 7 slots are those of eager observers",
        "  right: without padding, statistics of 7 slots are those of the tokens alone",
        "  right: the finalized graph computes what compressed-tensors computes",
        "  right: the checkpoint loads back and computes what the graph does",
        "  not checked: sequences one by one, as all observers weigh batches by their order",
    ]


def test_explain_shows_what_differs(folder: Path) -> None:
    output = succeeds(
        "explain", folder, "--scheme", "W8A8", "--ignore", "none",
        "--ignore", "re:.*layers.0.mlp.*",
    )  # fmt: skip
    assert "lm_head: weight int8 per channel" in output
    assert "0.self_attn" in output
    assert re.search(r"── 1\n", output)
    assert "input int8 per token, symmetric, dynamic" in output
    assert "Linear in full precision: model.layers.0.mlp.gate_proj, " in output


def test_the_head_is_left_out_unless_none_is() -> None:
    model = llama()
    plain = Wanted(scheme="W8A8")
    assert plain.recipe_for(model).config.ignore == ["lm_head"]
    assert Wanted(scheme="W8A8", ignore=("re:.*mlp.*",)).recipe_for(model).config.ignore == [
        "re:.*mlp.*",
        "lm_head",
    ]
    assert Wanted(scheme="W8A8", ignore=("none",)).recipe_for(model).config.ignore == []
    assert plain.recipe_for(nn.Sequential(nn.Linear(2, 2))).config.ignore == []


def test_a_recipe_says_itself_what_it_ignores(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("preset: W8A8\nignore: [model.layers.0.mlp.up_proj]\n")
    wanted = Wanted(file=path, ignore=("lm_head",), kv_cache="int8")
    config = wanted.recipe_for(llama()).config
    assert config.ignore == ["model.layers.0.mlp.up_proj", "lm_head"]
    assert (config.kv_cache_scheme.type, config.kv_cache_scheme.num_bits) == ("int", 8)
    assert Wanted(file=path).recipe_for(llama()).config.ignore == ["model.layers.0.mlp.up_proj"]


def test_equalize_is_a_number_or_auto(tmp_path: Path) -> None:
    model = llama()
    assert Wanted(scheme="W8A8_STATIC", equalize=0.8).recipe_for(model).equalize == 0.8
    file = tmp_path / "recipe.yaml"
    file.write_text("preset: W8A8_STATIC\nequalize: auto\n")
    assert Wanted(file=file).recipe_for(model).equalize == "auto"
    assert Wanted(file=file, equalize=0.5).recipe_for(model).equalize == 0.5
    shown = fails("explain", "nowhere", "--scheme", "W8A8_STATIC", "--equalize", "much", code=2)
    assert "give a number from 0 to 1, or auto" in shown


def test_observers_are_chosen_by_part() -> None:
    wanted = Wanted(
        scheme="W8A8_STATIC",
        kv_cache="fp8",
        observers=(
            ObserverChoice.parse("weights=memoryless_mse:grid=50,norm=2.0"),
            ObserverChoice.parse("input=histogram:method=entropy"),
            ObserverChoice.parse("kv-cache=static_minmax"),
        ),
    )
    config = wanted.recipe_for(llama()).config
    (group,) = config.config_groups.values()
    assert group.weights.observer == "memoryless_mse"
    assert group.weights.observer_kwargs == {"grid": 50, "norm": 2.0}
    assert group.input_activations.observer == "histogram"
    assert group.input_activations.observer_kwargs == {"method": "entropy"}
    assert config.kv_cache_scheme.observer == "static_minmax"


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ("output=minmax", "W8A8_STATIC does not quantize output"),
        ("kv_cache=minmax", "does not quantize kv_cache; add --kv-cache"),
        ("input=nothing", "there is no observer 'nothing'"),
        ("input=minmax:constant=1", "does not take the observer_kwargs constant"),
    ],
)
def test_choices_that_do_not_fit(choice: str, problem: str, folder: Path) -> None:
    arguments = ("explain", folder, "--scheme", "W8A8_STATIC", "--observer", choice)
    assert problem in fails(*arguments)
    dynamic = ("explain", folder, "--scheme", "W8A8", "--observer", "input=minmax")
    assert "W8A8 quantizes input dynamically, which needs no observer" in fails(*dynamic)


@pytest.mark.parametrize("choice", ["minmax", "inputs", "middle=minmax", "input=minmax:grid"])
def test_choices_that_cannot_be_read(choice: str, folder: Path) -> None:
    found = fails("explain", folder, "--scheme", "W8A8", "--observer", choice, code=2)
    assert "Invalid value for --observer" in found


def test_usage_is_checked_first(folder: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    common = ("calibrate", folder, "--data", texts, "--out", out)
    assert "--scheme or --recipe: give exactly one of them" in fails(*common, code=2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("preset: W8A8")
    both = ("--scheme", "W8A8", "--recipe", recipe)
    assert "give exactly one of them" in fails(*common, *both, code=2)
    assert "Missing option '--out'" in fails("merge", texts, texts, code=2)
    assert "No such command 'calibrat'" in fails("calibrat", code=2)
    assert "Invalid value for '--samples'" in fails(*common, "--samples", 0, code=2)
    assert not out.exists()


def test_calibrate(folder: Path, texts: Path, tmp_path: Path, runs: Runs) -> None:
    out = tmp_path / "out"
    output = succeeds(
        "calibrate", folder, "--scheme", "W8A8_STATIC", "--data", texts, "--out", out,
        "--samples", 18, "--max-length", 4, "--batch-size", 2, "--count-padding",
        "--accept", "unobserved", "--accept", "unfused", "--compiler", "eager",
        "--dtype", "bfloat16", "--kv-cache", "fp8", "--ignore", "re:.*up_proj", "--resume",
        "--seed", 3, "--text-column", "prompt",
    )  # fmt: skip
    ((model, recipe, data), options) = runs.calls[0]
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16
    assert recipe.config.ignore == ["re:.*up_proj", "lm_head"]
    assert data == texts
    assert options.pop("tokenizer").decode([1, 2]) == "w1 w2"
    assert options == {
        "max_length": 4,
        "samples": 18,
        "seed": 3,
        "split": None,
        "text_column": "prompt",
        "batch_size": 2,
        "held_out": 16,
        "count_padding": True,
        "compiler": "eager",
        "accept": ("unobserved", "unfused"),
        "statistics": tmp_path / "out.statistics",
        "resume": True,
        "progress": None,
    }
    lines = {line[:16].strip(): line[16:].strip() for line in output.splitlines()}
    assert lines["full precision"] == "re:.*up_proj, lm_head"
    assert lines["tokens"] == "1,234 and 7 of padding, 18 samples"
    assert lines["data"] == "texts.txt, 20 texts"
    assert lines["time"] == "calibrating 2.5 s, writing 1 min 15 s"
    assert "dtype" not in lines
    assert " → " in lines["size"]
    assert str(out / "report.html") in output
    assert all(change.name in output for change in sample_report().changes)


def test_the_result_names_unused_data_and_the_only_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {"group_0": {"format": "nvfp4-pack-quantized"}}
    config = {"dtype": "bfloat16", "quantization_config": {"config_groups": groups}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = "texts.txt, 20 texts, not calibrated on: no need"
    record = Record(samples=0, tokens=0, data=words, advice=("Texts are short",))
    show_result(FakeRun(Recipe.from_preset("NVFP4A16"), record), tmp_path)
    *shown, last = capsys.readouterr().out.splitlines()
    assert last == "warning: Texts are short."
    lines = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in shown)
    assert lines["data"] == words
    assert re.match("bfloat16 only: .* nvfp4-pack-quantized to it", lines["dtype"])
    assert "tokens" not in lines


@pytest.mark.parametrize(
    ("options", "observer", "gptq"),
    [
        (["--data"], "imatrix_mse", GPTQ()),
        ([], "memoryless_mse", None),
        (["--method", "plain", "--data"], None, None),
        (["--method", "plain", "--gptq", "--data"], None, GPTQ()),
        (["--observer", "weights=memoryless_minmax", "--data"], "memoryless_minmax", None),
        (["--gptq", "--keep-hessians", "--data"], "imatrix_mse", GPTQ(keep_hessians=True)),
    ],
)
def test_presets_of_few_bits_take_the_best_method(
    options: list[str],
    observer: str | None,
    gptq: GPTQ | None,
    folder: Path,
    texts: Path,
    tmp_path: Path,
    runs: Runs,
) -> None:
    given = [*options, texts] if options[-1:] == ["--data"] else options
    shown = succeeds("calibrate", folder, "--scheme", "NVFP4A16", *given, "--out", tmp_path / "out")
    recipe = runs.calls[0][0][1]
    (scheme,) = recipe.config.config_groups.values()
    assert (scheme.weights.observer, recipe.gptq) == (observer, gptq)
    assert ("GPTQ (damping 0.05)" if gptq else "rounded to nearest") in shown


@pytest.mark.parametrize(
    ("options", "observer", "equalize"),
    [
        ([], "static_minmax", "auto"),
        (["--equalize", "0.3"], "static_minmax", 0.3),
        (["--observer", "input=histogram"], "histogram", None),
        (["--method", "plain"], None, None),
    ],
)
def test_static_inputs_are_equalized_by_the_best_method(
    options: list[str],
    observer: str | None,
    equalize: Any,
    folder: Path,
    texts: Path,
    tmp_path: Path,
    runs: Runs,
) -> None:
    common = ("--scheme", "W8A8_STATIC", "--data", texts, "--out", tmp_path / "out")
    succeeds("calibrate", folder, *common, *options)
    recipe = runs.calls[0][0][1]
    (scheme,) = recipe.config.config_groups.values()
    assert (scheme.input_activations.observer, recipe.equalize) == (observer, equalize)


def test_a_model_with_large_hessians_is_streamed(
    folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hessian_room, "_free", lambda: 100_000)
    recipe = Recipe.from_preset("W4A16", weights={"group_size": 16}, gptq=True)
    (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
    common = ("calibrate", folder, "--recipe", tmp_path / "recipe.yaml", "--data", texts)
    common = (*common, "--held-out", 0, "--compiler", "eager")
    result = run(*common, "--out", tmp_path / "streamed")
    assert result.exit_code == 0, result.output
    assert "more than a quarter of the free memory: streaming the model" in result.stderr
    result = run(*common, "--out", tmp_path / "whole", "--no-stream")
    assert result.exit_code == 0, result.output
    assert "streaming the model" not in result.stderr
    assert_same_folder(tmp_path / "streamed", tmp_path / "whole")


def test_calibrate_says_nothing_when_asked_to(
    folder: Path, texts: Path, tmp_path: Path, runs: Runs
) -> None:
    common = ("calibrate", folder, "--scheme", "W8A8", "--data", texts)
    assert succeeds(*common, "--out", tmp_path / "quiet", "--quiet") == ""
    assert runs.calls[0][1]["progress"] is False
    plain = succeeds(*common, "--out", tmp_path / "plain", "--no-report")
    assert "report" not in plain
    assert "1,234" in plain


def test_an_observer_of_the_users_own(
    folder: Path, texts: Path, tmp_path: Path, runs: Runs
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OBSERVER_FILE.format(name="twice_chosen"))
    succeeds(
        "calibrate", folder, "--scheme", "FP8", "--data", texts, "--out", tmp_path / "out",
        "--observer-file", path, "--observer", "input=twice_chosen",
    )  # fmt: skip
    (group,) = runs.calls[0][0][1].config.config_groups.values()
    assert group.input_activations.observer == "twice_chosen"
    assert "twice-chosen" in Observer.registered_names()


def test_what_is_in_the_way_is_not_overwritten(
    folder: Path, texts: Path, tmp_path: Path, runs: Runs
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("")
    common = ("calibrate", folder, "--scheme", "W8A8", "--data", texts, "--out")
    assert "is not empty. Name another folder, or replace it" in fails(*common, out)
    for place in (folder, folder.parent):
        assert "which is read; name another folder" in fails(*common, place, "--overwrite")
    assert "is a file" in fails(*common, texts, code=2)
    assert runs.calls == []
    succeeds(*common, out, "--overwrite")


@pytest.mark.parametrize("place", ["texts.txt/deep/out", "/proc/deep/out"])
def test_a_folder_that_cannot_be_made_is_refused_first(
    folder: Path, texts: Path, tmp_path: Path, place: str, stored: type[StoredStatistics]
) -> None:
    out = tmp_path / place
    common = ("--scheme", "W8A8", "--out", out)
    refusal = f"inlay: error: cannot write the folder {out}: "
    assert fails("calibrate", "none/such", *common).startswith(refusal)
    stored([1]).save(tmp_path / "one")
    stored([2]).save(tmp_path / "two")
    requantize = ("requantize", tmp_path / "one", "--model", "none/such", *common)
    assert fails(*requantize).startswith(refusal)
    merge = ("merge", tmp_path / "one", tmp_path / "two", "--out", out)
    assert fails(*merge).startswith(refusal)


def test_token_ids_need_no_tokenizer(tmp_path: Path, runs: Runs) -> None:
    model = tmp_path / "bare"
    llama().save_pretrained(model)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2, 3]}\n')
    common = ("calibrate", model, "--scheme", "W8A8", "--out")
    for name, options in (("ids", ("--data", rows)), ("weights", ())):
        succeeds(*common, tmp_path / name, *options)
        assert runs.calls[-1][1]["tokenizer"] is None
    rows.write_text('{"text": "w1"}\n')
    assert "bare has no tokenizer; save the one" in fails(*common, tmp_path / "t", "--data", rows)
    word_tokenizer().save_pretrained(model)
    rows.write_text('{"input_ids": [1, 2, 3]}\n')
    succeeds(*common, tmp_path / "both", "--data", rows)
    assert runs.calls[-1][1]["tokenizer"].decode([1, 2]) == "w1 w2"


def test_data_is_looked_at_before_the_model(tmp_path: Path, runs: Runs) -> None:
    data = tmp_path / "data.csv"
    data.write_text("w1")
    arguments = ("calibrate", "none/such", "--scheme", "W8A8", "--data", data, "--out", "out")
    assert "data.csv is neither .txt" in fails(*arguments)


def test_errors_are_told_in_a_line(folder: Path, texts: Path, tmp_path: Path, runs: Runs) -> None:
    common = ("calibrate", folder, "--scheme", "W8A8", "--data", texts, "--out", tmp_path / "out")
    runs.error = StatisticsError('2 slots saw no data; or finalize(accept={"unobserved"})')
    assert fails(*common) == "inlay: error: 2 slots saw no data; or --accept unobserved"
    runs.error = RuntimeError("out of memory\nsecond line")
    assert fails(*common) == (
        "inlay: error: RuntimeError: out of memory --debug shows the traceback"
    )
    runs.error = ConfigurationError("x" * 5000)
    assert len(fails(*common)) < 600
    shown = run(*common, "--debug")
    assert shown.exit_code == 1
    assert "Traceback" in shown.stderr
    assert "x" * 5000 in shown.stderr


def test_an_interruption_says_how_to_go_on(
    folder: Path, texts: Path, tmp_path: Path, runs: Runs
) -> None:
    common = ("calibrate", folder, "--scheme", "W8A8", "--data", texts, "--out", tmp_path / "out")
    runs.error = KeyboardInterrupt()
    assert "before any statistics were saved" in fails(*common, code=130)
    (tmp_path / "out.statistics").mkdir()
    assert "continue with --resume" in fails(*common, code=130)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_signals_in_a_real_process(number: signal.Signals, tmp_path: Path) -> None:
    """Interrupted while a file of observers runs, which tells when it has begun."""
    path, begun = tmp_path / "slow.py", tmp_path / "begun"
    path.write_text(f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(60)")
    with subprocess.Popen(
        [sys.executable, "-m", "inlay", "observers", "--observer-file", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where tests run in the background, the signal is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not begun.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(number)
            output, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, output, errors) == (128 + number, "", "inlay: interrupted\n")


def test_warnings_are_told_in_a_line(
    folder: Path, texts: Path, tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    import warnings

    def warn(*arguments: Any, **options: Any) -> FakeRun:
        warnings.simplefilter("default")
        warnings.warn("an observer cannot be traced", stacklevel=1)
        return FakeRun(recipe=arguments[1])

    monkeypatch.setattr(sys.modules["inlay.engine.calibrate"], "calibrate", warn)
    result = run(
        "calibrate", folder, "--scheme", "W8A8", "--data", texts, "--out", tmp_path / "out"
    )
    assert result.stderr.splitlines()[-1] == "inlay: warning: an observer cannot be traced"


def test_requantize(
    folder: Path, tmp_path: Path, stored: type[StoredStatistics], runs: Runs
) -> None:
    statistics = tmp_path / "one"
    stored([1]).save(statistics)
    common = ("requantize", statistics, "--scheme", "W8A8_STATIC", "--model", folder)
    output = succeeds(*common, "--out", tmp_path / "out", "--accept", "not_finite")
    ((model, recipe, found), options) = runs.calls[0]
    assert type(model).__name__ == "LlamaForCausalLM"
    assert recipe.config.ignore == ["lm_head"]
    assert found.numbers == [1]
    assert options.pop("tokenizer").decode([1, 2]) == "w1 w2"
    assert options == {"accept": ("not_finite",), "progress": None}
    assert str(tmp_path / "out" / "report.html") in output
    assert "name another folder" in fails(*common, "--out", statistics, "--overwrite")


def test_merge(tmp_path: Path, stored: type[StoredStatistics]) -> None:
    parts = [tmp_path / name for name in "abc"]
    for number, part in enumerate(parts):
        stored([number]).save(part)
    out = tmp_path / "all"
    assert succeeds("merge", *parts, "--out", out) == f"{out}\n"
    assert stored.load(out).numbers == [0, 1, 2]
    assert "give at least two" in fails("merge", parts[0], "--out", out, code=2)
    assert "is not empty" in fails("merge", *parts, "--out", out)
    assert "read; name another folder" in fails("merge", *parts, "--out", parts[0], "--overwrite")
    assert succeeds("merge", *parts[:2], "--out", out, "--overwrite") == f"{out}\n"
    assert stored.load(out).numbers == [0, 1]


def test_report(tmp_path: Path) -> None:
    assert "has no report.json" in fails("report", tmp_path)
    (tmp_path / "report.json").write_text(sample_report().to_json())
    page = tmp_path / "report.html"
    assert succeeds("report", tmp_path) == f"{page}\n"
    assert page.read_text().startswith("<!")
    (tmp_path / "report.json").write_text("{}")
    assert "has version None" in fails("report", tmp_path)


def test_choices_on_the_command_line_are_those_of_the_library() -> None:
    assert {kind.value for kind in KvCache} == set(KV_CACHES)
