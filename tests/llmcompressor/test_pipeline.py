"""`oneshot` with Inlay's pipeline gives what it gives with `basic`, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from families import bert, gemma3, llama, mixtral, qwen3, qwen3_moe
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.observers import mse
from peer import (
    CACHE,
    EAGER,
    HEAD,
    STATIC,
    assert_same_tensors,
    batches,
    grouped,
    preset,
    qparams,
    quantized,
    static,
)
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, PreTrainedModel

from inlay import Calibration
from inlay.errors import ConfigurationError, StatisticsError
from inlay.graph import observes
from inlay.llmcompressor import pipeline as pipeline_module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what the peer warns of is theirs
]

FAMILIES = {"llama": llama, "qwen3": qwen3, "gemma3": gemma3, "bert": bert, "mixtral": mixtral}
RECIPES: dict[str, Callable[[], Any]] = {
    "W8A8 static": static,
    "W8A8": lambda: preset("W8A8"),
    "FP8": lambda: preset("FP8"),
    "NVFP4": lambda: preset("NVFP4"),
    "W4A16, imatrix": lambda: grouped("imatrix_mse"),
    "FP8, cache": lambda: preset("FP8", kv_cache_scheme=CACHE),
}
CASES = [(f, r) for f in FAMILIES for r in RECIPES if (f, r) != ("bert", "FP8, cache")]
INPUTS = ["minmax", "memoryless_minmax", "memoryless_mse", "mse", "imatrix_mse"]
WEIGHTS = ["minmax", "memoryless_mse", "nvfp4_expanded_mse", "fouroversix", "imatrix_mse"]


def small(family: str = "llama", **sizes: Any) -> nn.Module:
    return FAMILIES[family](**{"num_hidden_layers": 1, **sizes})


def assert_equal_to(
    pipeline: str, recipe: Callable[[], Any], build: Callable[[], Any] = small, **options: Any
) -> None:
    expected = quantized(build(), recipe(), pipeline, **options)
    found = quantized(build(), recipe(), EAGER, **options)
    assert qparams(expected)
    assert_same_tensors(found.state_dict(), expected.state_dict())


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[Calibration]:
    """The calibrations that the pipeline makes."""
    made = []

    def make(*args: Any, **options: Any) -> Calibration:
        made.append(Calibration(*args, **options))
        return made[-1]

    monkeypatch.setattr(pipeline_module, "Calibration", make)
    return made


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_equal_to_basic(family: str, recipe: str) -> None:
    assert_equal_to("basic", RECIPES[recipe], lambda: small(family))


def test_equal_to_basic_in_bfloat16() -> None:
    assert_equal_to("basic", lambda: static("minmax"), lambda: small().to(torch.bfloat16))


@pytest.mark.parametrize("observer", INPUTS)
def test_every_observer_of_inputs(observer: str) -> None:
    assert_equal_to("basic", lambda: static(observer))


@pytest.mark.parametrize("observer", WEIGHTS)
def test_every_observer_of_weights(observer: str) -> None:
    assert_equal_to("basic", lambda: grouped(observer))


@pytest.mark.parametrize("observer", ["nvfp4_expanded_mse", "nvfp4_expanded_imatrix"])
def test_observers_for_nvfp4(observer: str) -> None:
    targets = ["re:.*self_attn.*_proj"]  # the peer searches long
    assert_equal_to("basic", lambda: preset("NVFP4", weight_observer=observer, targets=targets))


@pytest.mark.parametrize(
    "kwargs",
    [{"maxshrink": 0.5, "grid": 10.0, "norm": 2.0}, {"patience": 0}, {"triton_error_buffer": 0.5}],
)
def test_settings_of_observers(kwargs: dict[str, Any]) -> None:
    assert_equal_to("basic", lambda: grouped("memoryless_mse", kwargs=kwargs))


@pytest.mark.parametrize("name", sorted(set(PRESET_SCHEMES) - {"UNQUANTIZED"}))
def test_every_preset(name: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    recipe = {"scheme": {name: ["re:.*(q|k|v|down)_proj"]}}
    assert_equal_to("basic", lambda: QuantizationModifier(**recipe), lambda: small(**sizes))


def test_embeddings_and_the_head_of_a_language_model_are_untied() -> None:
    weights = {"num_bits": 8, "strategy": "channel"}
    linear = {"targets": ["Linear"], "weights": weights, "input_activations": STATIC}
    groups = {"a": linear, "b": {"targets": ["Embedding"], "weights": weights}}
    assert_equal_to(
        "basic",
        lambda: QuantizationModifier(config_groups=groups),
        lambda: small(tie_word_embeddings=True),
    )


def test_experts_that_see_their_own_tokens_only() -> None:
    options = {"moe_calibrate_all_experts": False}
    assert_equal_to("basic", static, lambda: small("mixtral"), **options)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("name", ["FP8", "NVFP4"])
def test_static_inputs_of_experts(name: str, everywhere: bool) -> None:
    """The peer takes experts out of their parameter, so they are modules to Inlay."""

    def build() -> nn.Module:
        return qwen3_moe(num_hidden_layers=1)

    def recipe() -> Any:
        return preset(name, ignore=[HEAD, "re:.*mlp[.]gate$"])

    assert_equal_to("basic", recipe, build, moe_calibrate_all_experts=everywhere)


def test_batches_of_different_lengths() -> None:
    data = [{"input_ids": torch.arange(2 * n).reshape(2, n)} for n in (3, 5, 4)]
    assert_equal_to("basic", lambda: static("minmax"), data=data)


def test_several_modifiers_share_one_run(calibrations: list[Calibration]) -> None:
    def recipe() -> list[Any]:
        attention = preset("FP8", targets=["re:.*self_attn.*_proj"], kv_cache_scheme=CACHE)
        return [static("minmax", targets=["re:.*mlp.*"]), attention]

    assert_equal_to("basic", recipe)
    assert len(calibrations) == 1


def test_several_modifiers_where_one_weighs_weights() -> None:
    """The peer's `basic` fails here: the second modifier asks for statistics that are gone."""

    def recipe() -> list[Any]:
        attention = preset("FP8", targets=["re:.*self_attn.*_proj"])
        return [grouped("imatrix_mse", targets=["re:.*mlp.*"]), attention]

    assert_equal_to("independent", recipe)


def test_of_modifiers_with_the_same_target_the_last_counts() -> None:
    """The peer's `basic` feeds every batch twice into such an observer, or leaves hooks behind."""

    def recipe() -> list[Any]:
        return [static("minmax"), grouped("imatrix_mse", targets=["re:.*mlp.*"])]

    assert_equal_to("independent", recipe)


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_queries_keys_and_values(strategy: str, calibrations: list[Calibration]) -> None:
    def recipe() -> Any:
        args = {"num_bits": 8, "strategy": strategy, "observer": "static_minmax"}
        scheme = {"targets": ["re:.*self_attn$"], "input_activations": args}
        return QuantizationModifier(config_groups={"a": scheme})

    expected = qparams(quantized(small(), recipe(), "basic"))
    found = qparams(quantized(small(), recipe(), EAGER))
    # Under eager attention, which it forces, the peer never sees queries.
    query = "model.layers.0.self_attn.q_scale"
    own = calibrations[0].finalize()["model.layers.0.self_attn.q"]["scale"]
    assert torch.equal(found.pop(query), own)
    del expected[query]
    assert_same_tensors(found, expected)


@pytest.mark.parametrize("recipe", ["W8A8 static", "NVFP4", "FP8, cache"])
def test_the_same_checkpoint(recipe: str, tmp_path: Path) -> None:
    for pipeline in ("basic", EAGER):
        model = small().to(torch.bfloat16)
        quantized(model, RECIPES[recipe](), pipeline, save_to=tmp_path / pipeline)
    ours, theirs = (load_file(tmp_path / who / "model.safetensors") for who in (EAGER, "basic"))
    assert_same_tensors(ours, theirs)
    configs = [json.loads((tmp_path / who / "config.json").read_text()) for who in (EAGER, "basic")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_close_with_the_compiler() -> None:
    """Inductor rounds what it fuses in another way, by an ulp or two of float32."""
    expected = qparams(quantized(small(), static("minmax"), "basic"))
    found = qparams(quantized(small(), static("minmax"), "inlay"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        slack = {"rtol": 1e-5, "atol": 0} if name.endswith("scale") else {"rtol": 0, "atol": 1}
        torch.testing.assert_close(found[name].float(), tensor.float(), **slack)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("recipe", ["W8A8 static", "FP8, cache"])
def test_one_graph_without_what_nothing_observed_needs(
    family: str, recipe: str, calibrations: list[Calibration]
) -> None:
    quantized(small(family), RECIPES[recipe](), EAGER)
    graphs = calibrations[0].graphs
    assert len(graphs) <= 2  # the model, and the block that it repeats
    variants = [variant for graph in graphs for variant in graph.variants.values()]
    assert len(variants) == len(graphs)
    nodes = [node for variant in variants for node in variant.graph_module.graph.nodes]
    text = calibrations[0].explain()
    assert "scaled_dot_product_attention(" not in text  # it only marks keys and values
    assert "lm_head" not in text
    shared = [slots for node in nodes if len(slots := observes(node)) > 1]
    assert {slot.module.rpartition(".")[2] for slot in shared[0]} == {"q_proj", "k_proj", "v_proj"}


class _Untouchable(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("the data was read")


def test_data_is_not_read_where_none_is_needed() -> None:
    data = _Untouchable(batches())
    found = quantized(small(), preset("FP8_DYNAMIC"), EAGER, data)
    assert_same_tensors(qparams(found), qparams(quantized(small(), preset("FP8_DYNAMIC"), "basic")))


def test_missing_data_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="give oneshot a dataset"):
        quantized(small(), static(), EAGER, dataset=None)


def test_padding_can_be_left_out() -> None:
    """A padded batch then has the statistics of its sequences one by one."""
    one, padded = ({**batch, "input_ids": batch["input_ids"].clamp(min=1)} for batch in batches())
    padded["input_ids"] *= padded["attention_mask"]
    rows = [{key: value[index : index + 1] for key, value in padded.items()} for index in (0, 1)]
    rows[0] = {key: value[:, 2:] for key, value in rows[0].items()}

    def run(pipeline: str, data: list[Any]) -> dict[str, torch.Tensor]:
        model: Any = small()
        with torch.no_grad():
            model.model.embed_tokens.weight[0] = 9 * torch.eye(32)[0]  # padding is an outlier
        return qparams(quantized(model, static(), pipeline, data))

    without, alone = run("inlay_eager_without_padding", [one, padded]), run(EAGER, [one, *rows])
    for name, tensor in alone.items():
        torch.testing.assert_close(without[name].float(), tensor.float(), rtol=1e-5, atol=1e-6)
    counted = run(EAGER, [one, padded])
    scale = "model.layers.0.self_attn.q_proj.input_scale"
    assert float(counted[scale]) > 1.2 * float(without[scale])


def test_padding_that_cannot_be_left_out_is_an_error() -> None:
    data = [{"x": torch.ones(1, 2, 4), "attention_mask": torch.randn(1, 1, 2, 2)}]
    with pytest.raises(StatisticsError, match="does not tell for certain"):
        quantized(Projection(), static(), "inlay_eager_without_padding", data)


def test_a_script_may_quantize_many_models() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        found = [qparams(quantized(Projection(), static(), EAGER, VALUES)) for _ in range(3)]
    assert_same_tensors(found[2], found[0])


def test_a_graph_that_breaks() -> None:
    assert_equal_to("basic", lambda: static("minmax"), Breaking, data=VALUES)


def test_weights_are_searched_by_inlay(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = qparams(quantized(small(), grouped("memoryless_mse"), "basic"))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("llm-compressor searches")

    monkeypatch.setattr(mse, "_grid_search_mse", refuse)
    assert_same_tensors(qparams(quantized(small(), grouped("memoryless_mse"), EAGER)), expected)


VALUES = [{"x": x, "attention_mask": torch.ones(1, 2)} for x in torch.randn(3, 1, 2, 4)]


class Projection(PreTrainedModel):
    """A model that takes a mask and does nothing with it."""

    def __init__(self) -> None:
        super().__init__(BertConfig())
        torch.manual_seed(0)
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Breaking(Projection):
    """A model that no tracer takes whole."""

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        torch._dynamo.graph_break()
        return self.down(hidden)


def test_progress_is_shown_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    quantized(small(), static(), EAGER)
    assert "Calibrating: 100%" in capsys.readouterr().err


def test_a_name_that_is_taken() -> None:
    from inlay.llmcompressor import register_pipeline

    with pytest.raises(ConfigurationError, match="there is a pipeline 'basic' already"):
        register_pipeline("basic")
