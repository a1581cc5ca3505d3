"""Groups of a quantization config that a loader ignores or takes for other layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compared import TEXTS, changed_config, decisive, in_folder, quantized, scheme
from compressed_tensors.quantization import QuantizationConfig

import inlay
from inlay import Recipe
from inlay.checkpoint.source import Source
from inlay.comparison.groups import group_problems
from inlay.comparison.result import failures
from inlay.options import CompareOptions

# Layer 0 in eight bits, all other projections in four.
FIRST, ALL = r"re:.*layers\.0\..*proj$", "re:.*proj$"
GROUPS = {
    "group_0": {"targets": [FIRST], "weights": scheme(8)},
    "group_1": {"targets": [ALL], "weights": scheme(4, 16)},
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = QuantizationConfig(config_groups=GROUPS, ignore=["lm_head"])
    return quantized(decisive(), tmp_path_factory.mktemp("models") / "mixed", Recipe(config=config))


def groups_in(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def changed(config: dict[str, Any]) -> None:
        quantization = config["quantization_config"]
        quantization["config_groups"] = change(quantization["config_groups"])

    return changed


def problems(folder: Path) -> dict[str, str]:
    found = group_problems(Source.of(folder), "B")
    return {each.text: each.severity for each in found}


def test_a_mixed_checkpoint_has_no_problems(mixed: Path) -> None:
    assert problems(mixed) == {}


def test_a_group_name_with_a_suffix(mixed: Path, tmp_path: Path) -> None:
    """Sorted by name, the group of all layers comes first, and vLLM takes it for layer 0."""
    suffixed = changed_config(
        mixed,
        tmp_path / "suffixed",
        groups_in(
            lambda groups: {
                "group_W4A16": groups["group_1"],
                "group_W8A16": groups["group_0"],
            }
        ),
    )
    plain = in_folder(decisive(), tmp_path / "plain")
    assert inlay.compare(plain, mixed, TEXTS).warnings == ()
    found = inlay.compare(plain, suffixed, TEXTS)
    names, disagreement = (each.text for each in found.warnings)
    assert "group_W4A16, group_W8A16 are not named group_0, group_1" in names
    assert "model.layers.0.mlp.down_proj" in disagreement
    assert "group_W8A16 for transformers, group_W4A16 for vLLM" in disagreement
    assert "They are stored in 8 bits." in disagreement
    assert len(failures(found, CompareOptions(strict=True))) == 2


def test_groups_that_change_places_when_they_are_sorted(mixed: Path, tmp_path: Path) -> None:
    changed = changed_config(
        mixed,
        tmp_path / "changed",
        groups_in(lambda groups: {"group_10": groups["group_0"], "group_2": groups["group_1"]}),
    )
    assert problems(changed) == {}  # "group_10" comes before "group_2"
    changed = changed_config(
        mixed,
        tmp_path / "other",
        groups_in(lambda groups: {"group_2": groups["group_0"], "group_10": groups["group_1"]}),
    )
    (text,) = problems(changed)
    assert "group_2 for vLLM, group_10 for vLLM, once the groups are sorted" in text


def test_a_target_that_matches_nothing(mixed: Path, tmp_path: Path) -> None:
    def suffixed(groups: dict[str, Any]) -> dict[str, Any]:
        groups["group_1"]["targets"] = [r"re:.*layers\.1\..*proj_packed$"]
        return groups

    changed = changed_config(mixed, tmp_path / "changed", groups_in(suffixed))
    found = problems(changed)
    lost, unused = found
    assert lost.startswith("model.layers.1.mlp.down_proj, model.layers.1.mlp.gate_proj")
    assert "are stored quantized, but no group matches them" in lost
    assert r"re:.*layers\.1\..*proj_packed$ matches no module" in unused
    assert set(found.values()) == {"warning"}
    plain = in_folder(decisive(), tmp_path / "plain")
    with pytest.raises(inlay.ConfigurationError, match=r"What is known of it: .*no group matches"):
        inlay.compare(plain, changed, TEXTS)


def test_layers_that_are_ignored_or_not_quantized(mixed: Path, tmp_path: Path) -> None:
    def ignore(config: dict[str, Any]) -> None:
        config["quantization_config"]["ignore"] = ["re:.*q_proj"]
        config["quantization_config"]["config_groups"]["group_0"]["targets"].append("lm_head")

    found = problems(changed_config(mixed, tmp_path / "changed", ignore))
    ignored, plain = found
    assert "q_proj, model.layers.1.self_attn.q_proj are stored quantized, but `ignore`" in ignored
    assert "lm_head is in a group, but stored in full precision" in plain
