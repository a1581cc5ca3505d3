"""The package as a newcomer meets it."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest

import inlay

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


def test_import_is_light() -> None:
    code = (
        "import sys, inlay; "
        "heavy = {'torch', 'transformers', 'llmcompressor', 'torch._inductor'} & set(sys.modules); "
        "assert not heavy, heavy; dir(inlay); inlay.Observer"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_observers_do_not_import_the_peer_or_start_a_compiler() -> None:
    code = (
        "import sys, inlay.observers, inlay.passes; "
        "heavy = {'llmcompressor', 'torch._inductor.compile_fx'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'obseverrs'"):
        inlay.obseverrs  # noqa: B018


def test_the_old_functorch_distribution_is_not_asked_for() -> None:
    assert not any(line.startswith("functorch") for line in requires("inlay") or [])


def imported_at_once(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports when it is itself imported."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("inlay"):
            _, *parts = (statement.module or "").split(".")
            yield from parts[:1] or [alias.name for alias in statement.names]


def test_imports_go_one_way() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = re.search(r"holds this list to: (.*?)\.\n", text, re.DOTALL)
    assert listed is not None
    layers = [re.findall(r"\w+", layer) for layer in listed.group(1).split("→")]
    place = {name: number for number, layer in enumerate(layers) for name in layer}
    files = [*(ROOT / "src" / "inlay").rglob("[a-z]*.py"), *(ROOT / "passes").glob("*.py")]
    seen = set()
    for path in files:
        folder = path.relative_to(ROOT / "src" / "inlay" if "src" in path.parts else ROOT)
        name = folder.parts[0].removesuffix(".py")
        seen.add(name)
        for other in set(imported_at_once(path)) - {name, "_version"}:
            assert place[other] < place[name], f"{name} imports {other}, which is listed after it"
    assert seen == set(place)
