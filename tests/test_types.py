"""Types, checked beside the other tests: two processes share the time."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_mypy_finds_nothing() -> None:
    code = [sys.executable, "-m", "mypy", "-p", "inlay"]
    done = subprocess.run(
        code, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
