"""Commands that answer, or refuse, before the library is imported."""

import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
import torch

from inlay.cli import known
from inlay.cli.recipes import ObserverChoice, Wanted
from inlay.errors import ConfigurationError
from inlay.observers import Observer

HEAVY = ("compressed_tensors", "llmcompressor", "numpy", "torch", "transformers")
# Runs the command line, then says which heavy packages it has imported.
PROGRAM = f"""
import atexit, sys
from inlay.cli import main
atexit.register(lambda: print("imported", *(name for name in {HEAVY} if name in sys.modules)))
main()
"""


def typed(*arguments: object) -> tuple[str, list[str]]:
    """Run a command in a process; return what it says and the heavy packages it imports."""
    code = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(code, capture_output=True, text=True, check=False)
    *shown, last = done.stdout.splitlines()
    said, *imported = last.split()
    assert said == "imported", done.stderr
    return "\n".join(shown) + done.stderr, imported


@pytest.mark.parametrize(
    ("command", "expected"), [("schemes", "W8A8_STATIC"), ("observers", "static_minmax")]
)
def test_listings_import_nothing_heavy(command: str, expected: str) -> None:
    shown, imported = typed(command)
    assert expected in shown
    assert imported == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is that of a model, as far as one can tell by looking at it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--scheme", "W9A9"], "there is no preset 'W9A9'; use one of FP8, "),
        (["--scheme", "W8A8", "--observer", "input=nothing"], "there is no observer 'nothing'"),
        (["--scheme", "W8A8", "--observer", "middle=minmax"], "Invalid value for --observer"),
        ([], "give exactly one of them"),
    ],
)
@pytest.mark.parametrize("command", ["calibrate", "explain"])
def test_wrong_options_import_nothing_heavy(
    command: str, arguments: list[str], problem: str, folder: Path
) -> None:
    out = ["--out", folder.parent / "out"] if command == "calibrate" else []
    shown, imported = typed(command, folder, *arguments, *out)
    assert problem in shown
    assert imported == []


def test_missing_folders_import_nothing_heavy(tmp_path: Path, folder: Path) -> None:
    rest = ("--scheme", "W8A8", "--out", tmp_path / "out")
    shown, imported = typed("calibrate", tmp_path / "none", *rest)
    assert f"there is no folder {tmp_path / 'none'}" in shown
    assert imported == []
    (tmp_path / "empty").mkdir()
    shown, imported = typed("calibrate", tmp_path / "empty", *rest)
    assert "has no config.json" in shown
    assert imported == []
    for content, problem in (("[1]", "holds a list"), ("{", "is not JSON")):
        (tmp_path / "empty" / "config.json").write_text(content)
        shown, imported = typed("calibrate", tmp_path / "empty", *rest)
        assert f"config.json {problem}" in shown
        assert imported == []
    shown, imported = typed("calibrate", folder, *rest[:2], "--out", folder.parent)
    assert "which is read; name another folder" in shown
    assert imported == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--scheme", "W8A8", "--compiler", "nope"], "there is no compiler 'nope'"),
        (["--scheme", "W8A8", "--equalize", "3"], "'3' is no strength"),
        (["--scheme", "W8A8", "--offload-activations"], "needs --stream"),
        (["--scheme", "W8A8", "--dtype", "int3"], "'int3' is not one of"),
        (["--scheme", "W8A8", "--accept", "nothing"], "'nothing' is not one of"),
        (["--scheme", "W8A8", "--data", "none.txt"], "does not exist"),
        (["--scheme", "W8A8", "--data", "empty.txt"], "empty.txt is empty"),
        (["--scheme", "W8A8_STATIC"], "W8A8_STATIC needs calibration data. Pass --data"),
        (["--scheme", "NVFP4"], "NVFP4 needs calibration data"),
        (["--scheme", "W8A8", "--kv-cache", "fp8"], "--kv-cache needs calibration data"),
        (["--scheme", "W4A16", "--gptq"], "--gptq needs calibration data"),
        (["--recipe", "typo.yaml"], "unknown entries: config_grups"),
        (["--recipe", "latin.yaml"], "is not UTF-8"),
        (["--recipe", "list.yaml"], "holds no recipe"),
    ],
)
def test_calibrate_refuses_at_once(options: list[str], problem: str, folder: Path) -> None:
    place = folder.parent
    (place / "empty.txt").write_text("\n")
    (place / "typo.yaml").write_text("config_grups: {W8A8: [Linear]}")
    (place / "latin.yaml").write_bytes("preset: W8A8 # größer".encode("latin-1"))
    (place / "list.yaml").write_text("[W8A8]")
    given = [place / each if each.endswith((".txt", ".yaml")) else each for each in options]
    shown, imported = typed("calibrate", folder, *given, "--out", place / "out")
    assert problem in " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown).split())
    assert imported == []


def test_compilers_are_written_as_they_are() -> None:
    registered = torch.compiler.list_backends(exclude_tags=())
    listed = known.COMPILERS[version("torch").partition("+")[0]]
    tools = {name for name in registered if name.endswith(("_ONLY", "minifier_backend"))}
    added = {each.name for each in entry_points(group="torch_dynamo_backends")}
    assert set(listed) == {each for each in registered if each not in tools | added}
    assert set(known.compiler_names()) == {"auto", *registered}


def test_presets_are_written_as_they_are() -> None:
    assert known.presets_in_registry() == known.PRESETS[version("compressed-tensors")]


def test_observers_are_written_as_they_are() -> None:
    found = {row[0]: row for row in known.observers_in_registry()}
    assert tuple(found[row[0]] for row in known.OBSERVERS) == known.OBSERVERS


def test_an_observer_in_a_file_of_its_own_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a change to the list, which the registry then replaces."""
    monkeypatch.delitem(sys.modules, "inlay.observers")
    assert known.observer_names() == tuple(row[0] for row in known.OBSERVERS)
    shutil.copytree(known._OBSERVERS_FOLDER, tmp_path / "observers")
    monkeypatch.setattr(known, "_OBSERVERS_FOLDER", tmp_path / "observers")
    assert known.observer_rows() is known.OBSERVERS
    (tmp_path / "observers" / "added.py").write_text('@Observer.register("added")\n')
    assert known.observer_names() == ()


def test_loaded_registries_are_asked() -> None:
    """The process of the tests has loaded them, and a test may have registered an observer."""
    assert known.preset_names() == known.observer_names() == ()
    assert known.observer_rows() == known.observers_in_registry()


def test_another_version_of_compressed_tensors_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "compressed_tensors")
    for name, rows in known.PRESETS.items():
        monkeypatch.setattr(known, "version", lambda _, name=name: name)
        assert known.preset_rows() is rows
        assert known.preset_names() == tuple(row[0] for row in rows)
    monkeypatch.setattr(known, "version", lambda _: "0.19.1")
    assert known.preset_names() == ()


@pytest.mark.parametrize("name", ["minmax", "Static_MinMax", "memoryless-mse", "imatrix mse"])
def test_names_are_spelled_as_freely_as_in_the_registries(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Observer.get_value_from_registry(name)
    monkeypatch.delitem(sys.modules, "compressed_tensors")
    monkeypatch.delitem(sys.modules, "inlay.observers")
    choices = (ObserverChoice(part="input", name=name),)
    Wanted(scheme="w8a8_static", observers=choices).require_known_names()
    with pytest.raises(ConfigurationError, match="no preset 'w8'"):
        Wanted(scheme="w8").require_known_names()


def test_a_recipe_that_makes_none_is_refused_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("preset: W8A8_STATIC\ninputs: {observer: minmax, observer_kwargs: {c: 1}}")
    with pytest.raises(ConfigurationError, match="does not take the observer_kwargs c"):
        Wanted(file=path).require_recipe()
