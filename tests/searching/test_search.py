"""A search from data to a recipe, on small models."""

import itertools
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from compared import TEXTS, decisive, in_folder
from families import bert, deepseek_v3
from safetensors.torch import load_file
from tokens import word_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import inlay
from inlay.cli import app
from inlay.engine import hessian_room
from inlay.errors import ConfigurationError
from inlay.searching import Found, Scores
from inlay.searching.page import render_search

ROWS = torch.randint(0, 60, (28, 24), generator=torch.Generator().manual_seed(0))
BATCHES = [{"input_ids": rows} for rows in ROWS.split(4)]
FORMATS = "W4A16:group_size=16,W8A16:group_size=32,bf16"
RUN: dict[str, Any] = {"samples": 16, "held_out": 12, "compiler": "eager", "progress": False}
ATTENTION = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
MLP = ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")


def found_for(model: torch.nn.Module, formats: str = FORMATS, **wanted: Any) -> Found:
    return inlay.search(model, BATCHES, formats=formats, **{**RUN, **wanted})


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return decisive()


@pytest.fixture(scope="module")
def found(model: torch.nn.Module) -> Found:
    return found_for(model, bits=6)


def test_a_recipe_calibrates_to_what_the_search_measured(
    model: torch.nn.Module, found: Found, tmp_path: Path
) -> None:
    assert len(set(found.formats.values())) > 1
    recipe = inlay.Recipe.from_yaml(found.to_yaml())
    run = inlay.calibrate(model, recipe, BATCHES, **RUN)
    mixed = run.save(tmp_path / "mixed", report=False)
    word_tokenizer().save_pretrained(mixed)
    tensors = load_file(mixed / "model.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) == found.size
    plain = in_folder(model, tmp_path / "plain")
    compared = inlay.compare(plain, mixed, BATCHES[4:], progress=False)
    assert found.kl is not None
    assert found.kl.value == pytest.approx(compared.estimates["kl"].value, rel=1e-3)
    loaded = AutoModelForCausalLM.from_pretrained(mixed)
    formats = found.formats
    for name in formats:
        bits = {"W4A16:group_size=16": 4, "W8A16:group_size=32": 8}.get(formats[name])
        scheme = getattr(loaded.get_submodule(name), "quantization_scheme", None)
        assert (None if scheme is None else scheme.weights.num_bits) == bits


def test_bits_and_sizes_are_within_the_target(model: torch.nn.Module, found: Found) -> None:
    formats = found.formats.values()
    names = itertools.groupby(sorted(formats))
    assert {name for name, _ in names} <= set(FORMATS.split(","))
    values = {name: model.get_parameter(f"{name}.weight").numel() for name in found.formats}
    bits = {"W4A16:group_size=16": 4, "W8A16:group_size=32": 8, "bf16": 32}
    mean = sum(bits[found.formats[name]] * count for name, count in values.items())
    assert found.bits == mean / sum(values.values()) <= 6
    for target in (found.size - 1, found.size + 500):
        smaller = inlay.search(model, scores=found.scores, formats=FORMATS, size=target)
        assert smaller.size <= target
        assert smaller.kl is None or smaller.choice == found.choice


def test_the_smallest_model_within_a_divergence(model: torch.nn.Module) -> None:
    limit = 0.01
    found = found_for(model, max_kl=limit)
    checks = sorted(found.scores.checks, key=lambda check: check.predicted)
    measured = [check.kl.value for check in checks]
    assert len(measured) > 1
    assert measured == sorted(measured)
    assert all(0.4 < check.predicted / check.kl.value < 2.5 for check in checks)
    assert found.kl is not None
    assert found.kl.value <= limit
    smaller = [c for c in checks if found.scores.size_of(c.choice) < found.size]
    assert smaller
    assert all(check.kl.value > limit for check in smaller)
    again = inlay.search(model, scores=found.scores, formats=FORMATS, max_kl=limit)
    assert again.choice == found.choice


def test_scores_are_not_those_of_tokens_that_gptq_fits(model: torch.nn.Module) -> None:
    """From 96 tokens, errors on the same tokens would predict little more than half the loss."""
    found = found_for(model, "W4A16:group_size=16,W8A16:group_size=32", bits=4, samples=4)
    (check,) = found.scores.checks
    assert found.recipe.gptq is not None
    assert 0.7 < check.predicted / check.kl.value < 1.4


def test_layers_that_are_served_as_one_share_a_format(found: Found) -> None:
    units = {unit.layers for unit in found.scores.units}
    assert {ATTENTION, MLP, ("model.layers.0.mlp.down_proj",)} <= units
    assert len(units) == 8


def test_experts_of_a_layer_are_one_unit_that_is_always_quantized() -> None:
    found = found_for(decisive(deepseek_v3), bits=16)
    units = {unit.layers: unit for unit in found.scores.units}
    (experts,) = (unit for unit in found.scores.units if ".experts." in unit.layers[0])
    assert (len(experts.layers), len(experts.costs)) == (12, 2)
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp.shared_experts"
    assert (f"{attention}.q_a_proj", f"{attention}.kv_a_proj_with_mqa") in units
    assert (f"{mlp}.gate_proj", f"{mlp}.up_proj") in units
    recipe = inlay.Recipe.from_yaml(found.to_yaml())
    targets = [t for group in recipe.config.config_groups.values() for t in group.targets]
    assert "re:^model\\.layers\\.1\\.mlp\\.experts[.].*" in targets
    assert found.kl is not None


def test_formats_that_do_not_fit_or_do_not_reach() -> None:
    """Only the down projection has columns for groups of 64."""
    small, formats = decisive(), "W4A16:group_size=64,W8A16:group_size=32"
    found = found_for(small, formats, bits=8)
    counts = {unit.layers[0].rpartition(".")[2]: len(unit.costs) for unit in found.scores.units}
    assert counts == {"q_proj": 1, "o_proj": 1, "gate_proj": 1, "down_proj": 2}
    with pytest.raises(ConfigurationError, match=r"smallest formats take 7\.111 bits"):
        inlay.search(small, scores=found.scores, formats=formats, bits=6)
    with pytest.raises(ConfigurationError, match=r"largest formats.*Add a format of more bits"):
        found_for(small, formats, max_kl=1e-9)


def test_hessians_that_do_not_fit_are_refused(model: torch.nn.Module, monkeypatch: Any) -> None:
    monkeypatch.setattr(hessian_room, "_free", lambda: 1000)
    with pytest.raises(
        ConfigurationError, match=r"they do not fit. Leave some layers out \(ignore"
    ):
        found_for(model, bits=6)


def test_forward_only_scores_relative_errors(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.autograd, "grad", None)
    found = found_for(decisive(num_hidden_layers=1), bits=6, forward_only=True, method="plain")
    assert found.recipe.gptq is None
    costs = [unit.costs[0] for unit in found.scores.units]
    assert all(1e-4 < cost < 0.5 for cost in costs)
    assert found.kl is not None


def test_encoders_are_searched_by_their_vectors() -> None:
    model = bert(initializer_range=0.25, num_hidden_layers=2)
    found = found_for(model, bits=6)
    assert found.kl is None
    assert found.scores.left.keys() == {"pooler.dense"}
    assert "pooler.dense" in (found.recipe.config.ignore or ())
    with pytest.raises(ConfigurationError, match="a model that predicts probabilities"):
        found_for(model, max_kl=0.1)


def test_scores_come_back_from_a_file(model: torch.nn.Module, found: Found, tmp_path: Path) -> None:
    scores = Scores.load(found.scores.save(tmp_path / "scores.json"))
    assert scores == found.scores
    again = inlay.search(model, scores=scores, formats=FORMATS, bits=6)
    assert (again.choice, again.kl) == (found.choice, found.kl)
    with pytest.raises(ConfigurationError, match="the scores are for method best, not plain"):
        inlay.search(model, scores=scores, formats=FORMATS, bits=6, method="plain")
    with pytest.raises(ConfigurationError, match="a model with other weights"):
        inlay.search(decisive(num_hidden_layers=1), scores=scores, formats=FORMATS, bits=6)


def test_the_command_writes_a_recipe(model: torch.nn.Module, tmp_path: Path) -> None:
    folder, data = in_folder(model, tmp_path / "plain"), tmp_path / "texts.txt"
    data.write_text("\n".join(TEXTS * 3))
    recipe, other = tmp_path / "recipe.yaml", tmp_path / "other.yaml"

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["search", *map(str, arguments)])

    both = ("--formats", FORMATS, "--held-out", 2)
    done = run(folder, "--data", data, "--bits", 6, "--out", recipe, *both)
    assert done.exit_code == 0, done.output
    for words in ("recipe", "target", "6 bits per weight", "KL divergence", "held-out rows"):
        assert words in done.stdout
    chosen = inlay.Recipe.from_yaml(recipe)
    assert {g.weights.num_bits for g in chosen.config.config_groups.values()} == {4, 8}
    scores = recipe.with_suffix(".scores.json")
    page = recipe.with_suffix(".html").read_text()
    assert "Frontier" in page
    done = run(folder, "--scores", scores, "--size", "40KB", "--out", other, "--formats", FORMATS)
    assert done.exit_code == 0, done.output
    assert "predicted" in done.stdout
    assert other.exists()
    refused = run(folder, "--scores", scores, "--bits", 5, "--out", other, "--formats", FORMATS)
    assert refused.exit_code == 1
    assert "pass --overwrite" in refused.stderr
    assert run(folder, "--data", data, "--out", tmp_path / "new.yaml").exit_code == 2


def test_the_page_shows_the_frontier_and_the_format_of_each_layer(found: Found) -> None:
    page = render_search(found)
    (drawing,) = re.findall(r"<svg.*</svg>", page, re.DOTALL)
    root = ElementTree.fromstring(drawing)
    (line,) = (each for each in root if each.get("class") == "frontier")
    points = [tuple(map(float, each.split(","))) for each in str(line.get("points")).split()]
    assert len(points) > 5
    # More bits are further to the right, and lose less, which is further down.
    assert points == sorted(points)
    assert [y for _, y in points] == sorted(y for _, y in points)
    (choice,) = (each for each in root if each.get("class") == "choice")
    (check,) = (each for each in root if each.get("class") == "check")
    assert (choice.get("cx"), choice.get("cy")) == (check.get("cx"), check.get("cy"))
    for name, chosen in found.formats.items():
        place = found.scores.formats.index(chosen)
        assert re.search(
            rf'class="format-{place}" title="[^"]*{re.escape(name)}[^"]*: {chosen}', page
        )
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({}, "a search has one target"),
        ({"bits": 4, "size": "1GB"}, "not bits and size"),
        ({"bits": -1}, "bits must be a positive number"),
        ({"bits": 4, "formats": "W4A16"}, "at least two formats"),
        ({"bits": 4, "formats": "W4A16,W5A55"}, "there is no format 'W5A55'"),
        ({"bits": 4, "formats": "W4A16,W8A8"}, "W8A8 also quantizes activations"),
        ({"bits": 4, "formats": "bf16,fp16"}, "all stand for layers that stay"),
        ({"bits": 4, "formats": "W4A16:group_size,bf16"}, "is not KEY=VALUE"),
    ],
)
def test_wrong_wishes_are_refused_at_once(
    model: torch.nn.Module, wanted: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        inlay.search(model, **wanted)


def test_llmcompressor_reads_the_recipe(found: Found) -> None:
    from llmcompressor.recipe import Recipe as PeerRecipe

    (modifier,) = PeerRecipe.create_instance(found.to_yaml()).modifiers
    theirs = modifier.config_groups
    ours = found.recipe.config.config_groups
    assert theirs.keys() == ours.keys()
    for name, scheme in ours.items():
        assert theirs[name].targets == scheme.targets
        assert theirs[name].weights == scheme.weights
    assert modifier.dampening_frac == 0.05
