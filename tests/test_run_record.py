"""The record of a run: names and times."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from inlay.run_record import Stages, model_name


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("/home/somebody/models/tiny", "tiny"),
        ("models/tiny/", "tiny"),
        ("acme/tiny", "tiny"),
        ("tiny", "tiny"),
        ("", "SimpleNamespace"),
        ("/", "SimpleNamespace"),
        (None, "SimpleNamespace"),
    ],
)
def test_a_model_is_named_after_its_folder(place: str | None, name: str) -> None:
    assert model_name(SimpleNamespace(name_or_path=place)) == name


def test_the_working_directory_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_name(SimpleNamespace(name_or_path=".")) == tmp_path.name
    assert model_name(object()) == "object"


def test_a_stage_goes_on_until_it_is_forgotten() -> None:
    stages = Stages()
    stages.add("reading", 1.0)
    stages.add("writing", 2.0)
    stages.add("reading", 0.5)
    with stages("comparing"):
        pass
    assert stages.as_tuple()[:2] == (("reading", 1.5), ("writing", 2.0))
    assert stages.seconds["comparing"] >= 0
    stages.forget("reading", "comparing", "never entered")
    assert stages.as_tuple() == (("writing", 2.0),)
