from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from families import gpt2, llama, qwen3_moe
from torch import nn

from inlay import ConfigurationError, Recipe
from inlay.compensation.settings import GPTQ
from inlay.recipe import Plan, preset_names

SEED_RECIPE = """
quantization_stage:
  quantization_modifiers:
    QuantizationModifier:
      targets:
        - Linear
      ignore:
        - lm_head
      scheme:
        weights:
          num_bits: 8
          type: int
          symmetric: true
          strategy: channel
          observer: memoryless_mse
          observer_kwargs:
            maxshrink: 0.5
"""


def scheme(recipe: Recipe):
    (group,) = recipe.config.config_groups.values()
    return group


def test_every_preset() -> None:
    assert {"W8A8_STATIC", "FP8", "NVFP4", "W4A16"} <= set(preset_names())
    for name in preset_names():
        assert Recipe.from_preset(name).config.config_groups


def test_own_preset() -> None:
    group = scheme(Recipe.from_preset("w8a8_static"))
    assert (group.weights.num_bits, group.weights.strategy, group.weights.symmetric) == (
        8,
        "channel",
        True,
    )
    inputs = group.input_activations
    assert (inputs.num_bits, inputs.strategy, inputs.symmetric, inputs.dynamic) == (
        8,
        "tensor",
        False,
        False,
    )


def test_unknown_preset_shows_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match=r"no preset 'W8A9'.*W8A8_STATIC"):
        Recipe.from_preset("W8A9")


def test_overrides() -> None:
    recipe = Recipe.from_preset(
        "W4A16",
        targets="Linear",
        ignore=["lm_head"],
        weights={"group_size": 64, "observer": "imatrix_mse", "observer_kwargs": {"grid": 10}},
        outputs={"num_bits": 8, "observer": "static_minmax"},
        kv_cache={"num_bits": 8, "type": "float"},
    )
    weights = scheme(recipe).weights
    assert (weights.num_bits, weights.strategy, weights.group_size) == (4, "group", 64)
    assert weights.observer == "imatrix_mse"
    assert scheme(recipe).output_activations.observer == "static_minmax"
    assert recipe.config.kv_cache_scheme.type == "float"
    assert recipe.config.ignore == ["lm_head"]


@pytest.mark.parametrize(
    ("preset", "change", "expected"),
    [
        ("W4A16", {"strategy": "channel"}, ("channel", None)),
        ("W8A8", {"group_size": 32}, ("group", 32)),
        ("NVFP4A16", {"group_size": 16}, ("tensor_group", 16)),
        ("FP8_BLOCK", {"strategy": "tensor"}, ("tensor", None)),
    ],
)
def test_changing_the_strategy(preset: str, change: dict, expected: tuple) -> None:
    weights = scheme(Recipe.from_preset(preset, weights=change)).weights
    assert (weights.strategy, weights.group_size) == expected


@pytest.mark.parametrize(
    ("preset", "change", "message"),
    [
        # compressed-tensors packs groups of 32 as MXFP4, with scales that are powers of two.
        ("NVFP4A16", {"group_size": 32}, "float4 with strategy tensor_group of 32 .* NVFP4A16"),
        ("MXFP4A16", {"scale_dtype": None}, "float4 .* scales in the dtype of the model"),
        ("W4A16", {"type": "float", "zp_dtype": torch.float8_e4m3fn}, "float4 .* group of 128"),
        ("W4A16", {"num_bits": 9}, "no number format int9; .* int8, .*float8"),
    ],
)
def test_formats_that_nobody_stores_are_refused(preset: str, change: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Recipe.from_preset(preset, weights=change)


@pytest.mark.parametrize("part", ["inputs", "outputs", "kv_cache"])
def test_unknown_formats_are_refused_in_every_part(part: str) -> None:
    unknown = {"num_bits": 5, "type": "float", "zp_dtype": torch.float8_e4m3fn}
    with pytest.raises(ConfigurationError, match="no number format float5"):
        Recipe.from_preset("FP8", **{part: unknown})


def test_changing_the_bits_changes_the_zero_point() -> None:
    inputs = scheme(Recipe.from_preset("FP8", inputs={"type": "int"})).input_activations
    assert inputs.zp_dtype == torch.int8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observer": "minmaxx"}, "no observer 'minmaxx'.*static_minmax"),
        ({"observer_kwargs": {"shrink": 1}}, "does not take .* shrink"),
        ({"num_bit": 8}, "no field num_bit; did you mean num_bits.*Its fields are .*num_bits"),
        ({"num_bits": "many"}, "num_bits"),
        (8, "mapping of their fields"),
    ],
)
def test_bad_overrides(change, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Recipe.from_preset("W8A8", weights=change)


def test_arguments_are_copied() -> None:
    args = QuantizationArgs(num_bits=8)
    recipe = Recipe.from_preset("W8A8", weights=args)
    args.num_bits = 4
    assert scheme(recipe).weights.num_bits == 8
    config = QuantizationConfig(config_groups={"g": {"targets": ["Linear"], "weights": {}}})
    recipe = Recipe.from_config(config)
    config.ignore.append("lm_head")
    assert recipe.config.ignore == []


def test_recipe_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Recipe.from_preset("FP8").config = None  # type: ignore[misc]


def test_seed_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(SEED_RECIPE)
    for source in (SEED_RECIPE, file, str(file)):
        recipe = Recipe.from_yaml(source)
        assert recipe.config.ignore == ["lm_head"]
        assert scheme(recipe).weights.observer_kwargs == {"maxshrink": 0.5}


@pytest.mark.parametrize(
    "text",
    [
        "preset: FP8\nignore: [lm_head]\nweights: {observer: memoryless_mse}\n",
        "stage:\n  QuantizationModifier:\n    scheme: FP8\n    ignore: lm_head\n"
        "    weight_observer: memoryless_mse\n",
        "stage:\n  QuantizationModifier:\n    scheme: {FP8: [Linear]}\n    ignore: [lm_head]\n"
        "    observer: {weights: memoryless_mse}\n",
    ],
)
def test_forms_of_yaml(text: str) -> None:
    recipe = Recipe.from_yaml(text)
    assert recipe.config.ignore == ["lm_head"]
    assert scheme(recipe).weights.observer == "memoryless_mse"
    assert scheme(recipe).input_activations.num_bits == 8


def test_groups_may_name_presets() -> None:
    text = "config_groups: {W8A8_STATIC: ['re:.*up$'], W8A8: ['re:.*down$']}\nignore: [head]\n"
    groups = Recipe.from_yaml(text).config.config_groups
    assert {name: group.targets for name, group in groups.items()} == {
        "W8A8_STATIC": ["re:.*up$"],
        "W8A8": ["re:.*down$"],
    }
    assert groups["W8A8_STATIC"].input_activations.dynamic is False
    assert groups["W8A8"].input_activations.dynamic is True
    with pytest.raises(ConfigurationError, match="no preset 'W8A9'"):
        Recipe.from_yaml(text.replace("W8A8:", "W8A9:"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preset: [FP8\n", "not YAML"),
        ("- FP8\n- W8A8\n", "expected a mapping"),
        ("present: FP8\nignore: []\n", "unknown entries: present; use only equalize"),
        ("ignore: []\ntargets: []\n", "names no preset"),
        ("s:\n  SparseGPTModifier:\n    sparsity: 0.5\n", "reads one QuantizationModifier or"),
        (
            "s:\n  QuantizationModifier:\n    shceme: FP8\n",
            "unknown entries: shceme; use only config_groups",
        ),
        ("s:\n  QuantizationModifier:\n    targets: Linear\n", "has no scheme"),
        ("!!python/object/apply:os.getcwd []\n\n", "not YAML"),
    ],
)
def test_bad_yaml(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Recipe.from_yaml(text)


def test_missing_file() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read the recipe nowhere\.yaml"):
        Recipe.from_yaml("nowhere.yaml")


def test_a_block_that_the_last_column_cuts_off_is_refused() -> None:
    """Loaders accept such a checkpoint and fail when they run it. Rows may be cut off."""
    blocks = {"weights": {"block_structure": [24, 16]}, "inputs": {"group_size": 16}}
    Plan(llama(), Recipe.from_preset("FP8_BLOCK", ignore=["lm_head"], **blocks))
    with pytest.raises(ConfigurationError, match=r"q_proj.*: 32 columns .* blocks of 128 columns"):
        Plan(llama(), Recipe.from_preset("FP8_BLOCK", ignore=["lm_head"]))
    with pytest.raises(ConfigurationError, match=r"q_proj.*: input: 32 columns .* groups of 128"):
        Plan(llama(), Recipe.from_preset("FP8_BLOCK", **{**blocks, "inputs": None}))
    left_out = ["lm_head", "re:.*mlp.*", "re:.*self_attn.*"]
    assert not Plan(llama(), Recipe.from_preset("FP8_BLOCK", ignore=left_out)).slots


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": ["Linera"]}, r"target Linera matches no module.*Linear \(model"),
        ({"ignore": ["lm_haed"]}, r"ignore lm_haed matches no module.*Did you mean lm_head"),
        ({"targets": ["re:.*proj_q$"]}, "proj_q"),
        ({"targets": ["LlamaRMSNorm"]}, "is a LlamaRMSNorm; only Linear, Embedding and attention"),
        (
            {"weights": {"group_size": 48}},
            r"does not fit.*q_proj, .* and 5 more: 32 columns.*groups of 48.*--group-size 32",
        ),
    ],
)
def test_what_matches_nothing_or_does_not_fit(fields: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Plan(llama(), Recipe.from_preset("W8A8", **{"ignore": (), **fields}))


def test_an_ignored_pattern_that_matches_nothing_is_a_warning() -> None:
    recipe = Recipe.from_preset("W8A8", ignore=["lm_head", "re:.*router$", r"re:.*\.gate$"])
    with pytest.warns(
        UserWarning, match=r"ignore re:\.\*router\$, re:.* matches no module"
    ) as said:
        plan = Plan(llama(), recipe)
    assert len(said) == 1
    assert "lm_head" not in str(said[0].message)
    assert "lm_head.weight" not in plan.slots
    assert "model.layers.0.mlp.down_proj.weight" in plan.slots


def test_an_ignored_name_that_matches_nothing_stays_an_error_beside_a_pattern() -> None:
    recipe = Recipe.from_preset("W8A8", ignore=["lm_haed", "re:.*router$"])
    with (
        pytest.warns(UserWarning, match=r"ignore re:\.\*router\$ matches no module"),
        pytest.raises(ConfigurationError, match=r"ignore lm_haed matches.*Did you mean lm_head"),
    ):
        Plan(llama(), recipe)


def test_an_ignored_pattern_that_matches_says_nothing() -> None:
    plan = Plan(llama(), Recipe.from_preset("W8A8", ignore=["re:.*down_proj$"]))
    assert not any("down_proj" in name for name in plan.slots)


def test_the_head_is_kept_by_default() -> None:
    plan = Plan(llama(), Recipe.from_preset("W8A8"))
    assert plan.recipe == Recipe.from_preset("W8A8", ignore=["lm_head"])
    assert plan.recipe.for_model(llama()) is plan.recipe
    assert "lm_head.weight" in Plan(llama(), Recipe.from_preset("W8A8", ignore=())).slots
    named = Plan(llama(), Recipe.from_preset("W8A8", targets=["lm_head"]))
    assert {slot.module for slot in named.slots.values()} == {"lm_head"}
    # As in llm-compressor, and in a config.
    groups = {"W8A8": ["Linear"]}
    for recipe in (
        Recipe.from_yaml("preset: W8A8\n"),
        Recipe.from_config({"config_groups": groups}),
    ):
        assert "lm_head.weight" in Plan(llama(), recipe).slots


@pytest.mark.parametrize(
    ("module", "ignored"),
    [
        (nn.Sequential(nn.Linear(2, 2)), []),
        (nn.ModuleDict({"body": nn.Linear(2, 2), "lm_head": nn.Linear(2, 2)}), ["lm_head"]),
    ],
)
def test_heads_of_other_modules_go_by_their_name(module: nn.Module, ignored: list[str]) -> None:
    assert Recipe.from_preset("W8A8").for_model(module).config.ignore == ignored


def test_conv1d_is_not_linear() -> None:
    plan = Plan(gpt2(), Recipe.from_preset("W8A8", ignore=()))
    assert {slot.module for slot in plan.slots.values()} == {"lm_head"}
    with pytest.raises(ConfigurationError, match="is a Conv1D"):
        Plan(gpt2(), Recipe.from_preset("W8A8", targets=["Conv1D"]))


def test_kv_cache_needs_attention() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    recipe = Recipe.from_preset("W8A8", kv_cache={"num_bits": 8})
    with pytest.raises(ConfigurationError, match="no attention module"):
        Plan(model, recipe)
    plan = Plan(llama(), recipe)
    assert {"model.layers.0.self_attn.k", "model.layers.0.self_attn.v"} <= set(plan.slots)
    assert "model.layers.0.self_attn.q" not in plan.slots


def test_presets_take_the_method_of_the_command_line() -> None:
    def chosen(wanted: str | Recipe, **options: Any) -> tuple[Any, ...]:
        recipe = Recipe.from_preset(wanted, **options) if isinstance(wanted, str) else wanted
        (scheme,) = recipe.config.config_groups.values()
        inputs = scheme.input_activations
        return scheme.weights.observer, inputs and inputs.observer, recipe.gptq, recipe.equalize

    assert chosen("W4A16", method="best") == ("imatrix_mse", None, GPTQ(), None)
    assert chosen("W4A16", method="plain") == chosen("W4A16") == (None, None, None, None)
    assert chosen("W8A8_STATIC", method="best") == (None, "static_minmax", None, "auto")
    assert chosen("W8A8", method="best") == chosen("W8A8")  # its inputs are dynamic
    named = {"observer": "minmax"}
    assert chosen("W8A8_STATIC", method="best", inputs=named) == (None, "minmax", None, None)
    with pytest.raises(ConfigurationError, match="no method 'good'; use one of best, plain"):
        chosen("W4A16", method="good")


def test_the_name_of_a_preset_stands_for_its_best_method() -> None:
    def observer_of(model: nn.Module, *, has_data: bool) -> tuple[str, GPTQ | None]:
        recipe = Recipe.of("NVFP4A16", model, has_data=has_data)
        return recipe.config.config_groups["group_0"].weights.observer, recipe.gptq

    assert observer_of(llama(), has_data=True) == ("imatrix_mse", GPTQ())
    assert observer_of(llama(), has_data=False) == ("memoryless_mse", None)
    assert observer_of(qwen3_moe(), has_data=True) == ("memoryless_mse", None)
    static = Recipe.of("W8A8_STATIC", qwen3_moe(), has_data=True)
    assert static.equalize == "auto"
    own = Recipe.from_preset("NVFP4A16", ignore=())
    assert Recipe.of(own, llama(), has_data=True) is own
    with pytest.raises(ConfigurationError, match="the name of a preset, not dict"):
        Recipe.of({"scheme": "W4A16"}, llama(), has_data=True)  # type: ignore[arg-type]
