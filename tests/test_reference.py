"""The API reference: every public name is in it, and no link of it is dead."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import inlay

PROJECT = Path(__file__).parent.parent


def modules() -> list[str]:
    """The modules that `make docs` documents."""
    makefile = (PROJECT / "Makefile").read_text().replace("\\\n", " ")
    (names,) = re.findall(r"^REFERENCE := (.+)$", makefile, re.MULTILINE)
    return names.split()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    options = ["--docformat", "restructuredtext", "--no-show-source", "-o", str(folder)]
    code = [sys.executable, "-W", "ignore", "-m", "pdoc", *options, *modules()]
    subprocess.run(code, check=True, capture_output=True, cwd=folder)
    return folder


@pytest.mark.slow
def test_the_reference_has_every_public_name_and_no_dead_link(reference: Path) -> None:
    pages = {page: page.read_text() for page in reference.rglob("*.html")}
    anchors = {page: set(re.findall(r'id="([^"]+)"', text)) for page, text in pages.items()}
    assert set(inlay.__all__) - {"observers", "passes"} <= set().union(*anchors.values())
    dead = []
    for page, text in pages.items():
        for link in re.findall(r'href="([^"$:]+)"', text):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if target not in pages or (anchor and anchor not in anchors[target]):
                dead.append(f"{page.relative_to(reference)}: {link}")
    assert dead == []
