"""The package as a newcomer meets it."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest

import inlay
from inlay.steps import STEPS

ROOT = Path(__file__).parent.parent


def modules() -> list[str]:
    found = [name for _, name, _ in pkgutil.walk_packages(inlay.__path__, "inlay.")]
    assert "inlay.observers.mse" in found
    assert "inlay.passes" in found
    return ["inlay", *(name for name in found if not name.endswith("_version"))]


@pytest.mark.parametrize("name", modules())
def test_all_names_what_is_there(name: str) -> None:
    module = importlib.import_module(name)
    exported = module.__all__
    assert sorted(set(exported)) == sorted(exported)
    for public in exported:
        assert hasattr(module, public)


@pytest.mark.parametrize("name", modules())
def test_all_is_complete(name: str) -> None:
    """What a module defines without an underscore is public, and `__all__` says so."""
    module = importlib.import_module(name)
    defined = {
        public
        for public, value in vars(module).items()
        if not public.startswith("_") and getattr(value, "__module__", None) == name
    }
    assert defined <= set(module.__all__)


@pytest.mark.slow
def test_import_is_light() -> None:
    """And observers and passes import neither the peer nor start a compiler."""
    code = (
        "import sys, inlay; "
        "heavy = {'torch', 'transformers', 'llmcompressor', 'torch._inductor'} & set(sys.modules); "
        "assert not heavy, heavy; dir(inlay); inlay.Observer; "
        "import inlay.observers, inlay.passes; "
        "heavy = {'llmcompressor', 'torch._inductor.compile_fx'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'obseverrs'"):
        inlay.obseverrs  # noqa: B018


def test_the_old_functorch_distribution_is_not_asked_for() -> None:
    assert not any(line.startswith("functorch") for line in requires("inlay") or [])


def imports_of(path: Path) -> Iterator[str]:
    """Folders and modules of the package that a file imports, at once or inside a function."""
    for statement in ast.walk(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            modules = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module == "inlay":
            modules = [f"inlay.{alias.name}" for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            modules = [statement.module or ""]
        else:
            continue
        for module in modules:
            package, _, inside = module.partition(".")
            if package == "inlay" and inside:
                yield inside.partition(".")[0]


def package_files() -> dict[Path, str]:
    """Files of the package, each with the folder or module of it that they belong to."""
    source = ROOT / "src" / "inlay"
    inside = {path: path.relative_to(source).parts[0] for path in source.rglob("[a-z]*.py")}
    passes = dict.fromkeys((ROOT / "passes").glob("[a-z]*.py"), "passes")
    return {path: name.removesuffix(".py") for path, name in (inside | passes).items()}


# `Calibration.save` leads from the middle of the package to its end, by an import of its own.
DOORS = {("calibration", "engine")}


def test_imports_go_one_way() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = re.search(r"holds this list to: (.*?)\.\n", text, re.DOTALL)
    assert listed is not None
    layers = [re.findall(r"\w+", layer) for layer in listed.group(1).split("→")]
    place = {name: number for number, layer in enumerate(layers) for name in layer}
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}, which is listed after {name}"
        for path, name in package_files().items()
        for other in set(imports_of(path)) - {name, "_version"}
        if (name, other) not in DOORS and place[other] >= place[name]
    ]
    assert wrong == []
    assert set(package_files().values()) == set(place)


def test_folders_can_be_taken_in_at_a_glance() -> None:
    """Three to twelve modules in a folder, and none so long that it holds two ideas.

    Passes have a file each, and one name for all files says what they are.
    """
    folders: dict[Path, list[Path]] = {}
    for path in package_files():
        folders.setdefault(path.parent, []).append(path)
        assert len(path.read_text().splitlines()) <= 400, path
    for folder, files in folders.items():
        assert 3 <= len(files) <= (20 if folder.name == "passes" else 12), folder


def test_private_torch_is_in_one_folder() -> None:
    private = re.compile(
        r"(?:^|[^.\w])torch\._(?!_)|from torch\._|experimental|\._(?:tracer_cls|codegen|schema)\b"
    )
    found = [
        str(path.relative_to(ROOT))
        for path in package_files()
        if path.parent.name != "torch_private" and private.search(path.read_text())
    ]
    assert found == []


def test_private_transformers_is_in_one_folder() -> None:
    """What `import transformers` offers is public; its modules, and some attributes, are not."""
    private = re.compile(
        r"from transformers\.|import transformers\.|"
        r"_weight_conversions|_keys_to_ignore_on_save|all_tied_weights_keys"
    )
    found = [
        str(path.relative_to(ROOT))
        for path in package_files()
        if path.parent.name != "transformers_private" and private.search(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_private_parts_are_explained(library: str) -> None:
    """Each function says since which release of the library it works as used here."""
    package = importlib.import_module(f"inlay.{library}_private")
    functions = {name: getattr(package, name) for name in package.__all__}
    unexplained = [
        name
        for name, function in functions.items()
        if inspect.isfunction(function)
        and re.search(rf"\b{library} \d", function.__doc__ or "") is None
    ]
    assert unexplained == []


# Packages that another one brings along, by that one.
BROUGHT = {"huggingface_hub": "transformers", "tqdm": "llmcompressor"}
OPTIONAL = {"PIL", "hypothesis", "llmcompressor", "pytest"}  # of extras


def test_what_is_imported_is_declared() -> None:
    """compressed-tensors imports transformers, so nothing but `import inlay` works without it."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    assert listed is not None
    declared = {
        name.replace("-", "_").replace("pyyaml", "yaml")
        for name in re.findall(r'^    "([\w-]+)', listed[1], re.M)
    }
    imported = {
        name.partition(".")[0]
        for path in package_files()
        for statement in ast.walk(ast.parse(path.read_text()))
        for name in _names_imported(statement)
    }
    foreign = imported - set(sys.stdlib_module_names) - {"inlay"}
    assert {BROUGHT.get(name, name) for name in foreign} - OPTIONAL == declared & foreign


def _names_imported(statement: ast.AST) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    return [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []


def walkthroughs() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return [part for part in text.split("\n\n") if re.match("To (add|change) ", part)]


def test_walkthroughs_are_short_and_name_what_is_there() -> None:
    """In ten lines each; the files, functions and classes that they name exist."""
    found = {part.split(",")[0] for part in walkthroughs()}
    assert {f"To add {what}" for what in ("an observer", "a weight layout", "an option")} <= found
    assert "To add a step of finalize" in found
    texts = [*package_files(), *(ROOT / "tests").rglob("*.py")]
    words = {word for path in texts for word in re.findall(r"\w+", path.read_text())}
    places = (ROOT, ROOT / "src" / "inlay", ROOT / "src" / "inlay" / "steps")
    for part in walkthroughs():
        assert len(part.splitlines()) <= 10, part
        for named in re.findall(r"`([^`]+)`", part):
            if named.endswith((".py", "/")):
                assert any((place / named).exists() for place in places), named
            elif re.fullmatch(r"[\w.]+", named):
                assert set(named.split(".")) <= words, named


def test_the_steps_of_finalize_are_listed_in_order() -> None:
    (part,) = (part for part in walkthroughs() if "STEPS" in part)
    listed = re.findall(r"`(\w+)`", part[part.index("in order:") : part.index("A step reads")])
    assert listed == [step.__name__ for step in STEPS]
