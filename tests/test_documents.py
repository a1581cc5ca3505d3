"""The documents: their code runs, their commands parse, and their links lead somewhere."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from families import llama
from tokens import text_of, word_tokenizer

from inlay.cli import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/README.md",
    "passes/README.md",
    "tests/benchmarks/README.md",
)
EXAMPLES = [path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))]


def blocks(document: str, kind: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands() -> Iterator[str]:
    """Yield the arguments of each call of the command line that a document shows."""
    for document in DOCUMENTS:
        for block in blocks(document, "console"):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.match(r"\$ (?:inlay|torchrun .*-m inlay) ([^#]*)", line)
                if found:
                    yield found[1]


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    """A folder with the models and files that documents name."""
    monkeypatch.chdir(tmp_path)
    llama(num_hidden_layers=1).save_pretrained("SmolLM2")
    word_tokenizer().save_pretrained("SmolLM2")
    rows = (f'{{"text": "{text_of(list(range(start, start + 9)))}"}}' for start in range(20))
    Path("chats.jsonl").write_text("\n".join(rows))
    Path("SmolLM2-W8A8").mkdir()
    return tmp_path


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.filterwarnings("ignore:.*is not registered with the registry")
def test_code_runs(document: str, place: Path) -> None:
    """Blocks run in order and share names, as a reader would type them.

    `tests/test_examples.py` runs the examples that a document repeats.
    """
    names: dict[str, object] = {"__name__": "document"}
    for block in blocks(document, "python"):
        if not any(block.strip() in example for example in EXAMPLES):
            exec(compile(block, document, "exec"), names)


@pytest.mark.parametrize("line", list(commands()))
def test_commands_parse(line: str, place: Path) -> None:
    group = typer.main.get_command(app)
    for name in re.findall(r"\S+\.(?:yaml|txt|jsonl)", line):
        Path(name).touch()
    name, *arguments = shlex.split(line)
    command = group.get_command(None, name)
    assert command is not None, f"there is no command {name}"
    command.make_context(name, arguments)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / document).parent / name if name else ROOT / document
        assert file.exists(), f"{document} links to {target}"
        assert not anchor or anchor in anchors(file), f"{document} links to {target}"


def anchors(file: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in headings}
