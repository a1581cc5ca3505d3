"""What the seed of this framework promises, and what is refused."""

import pytest
import torch
from compressed_tensors import InternalModule
from compressed_tensors.quantization import QuantizationArgs

from inlay.errors import ConfigurationError, ObservationError, StatisticsError
from inlay.observers import (
    MinMaxObserver,
    Observer,
    StaticMinMaxObserver,
    flatten_for_calibration,
    fuse_weight_observers,
)
from inlay.recipe import make_observer
from inlay.testing.strategies import NVFP4

INT8 = QuantizationArgs(num_bits=8, strategy="tensor")
ALL = [
    "memoryless_minmax",
    "static_minmax",
    "minmax",
    "memoryless_mse",
    "mse",
    "imatrix_mse",
    "histogram",
]


def make(name: str, base_name: str = "input", args: QuantizationArgs = INT8, **kwargs) -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=args, **kwargs)


@pytest.mark.parametrize("name", ALL)
def test_registered_and_internal(name: str) -> None:
    of = make(name)
    assert isinstance(of, InternalModule)
    assert type(make(name.replace("_", "-"))) is type(of)
    assert not of.has_statistics


@pytest.mark.parametrize("base_name", ["weight", "input", "output", "q", "k", "v"])
def test_without_a_name_it_is_the_default_for_the_value(base_name: str) -> None:
    of = Observer.load_from_registry(None, base_name=base_name, args=INT8)
    recipe = QuantizationArgs(num_bits=8, strategy="tensor")  # names no observer either
    assert type(of) is type(make_observer(base_name, recipe))
    assert of.base_name == base_name
    assert type(of) is type(make("memoryless_minmax" if base_name == "weight" else "minmax"))


def test_forward_returns_self() -> None:
    of = make("static_minmax")
    assert of(torch.ones(2, 3)) is of
    assert of.has_statistics


def test_constructor_leaves_the_callers_arguments_alone() -> None:
    args = QuantizationArgs(observer_kwargs={"averaging_constant": 0.5})
    of = MinMaxObserver("input", args, averaging_constant=0.25)
    assert args.observer_kwargs == {"averaging_constant": 0.5}
    assert of.args.observer_kwargs == {"averaging_constant": 0.25}
    assert of.avg_constant == 0.25


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (2, 0, 4), (3, 0)])
def test_empty_value_changes_nothing(name: str, shape: tuple[int, ...]) -> None:
    of = make(name)
    assert of(torch.empty(shape)) is of
    assert not of.has_statistics


@pytest.mark.parametrize("name", ALL)
def test_no_statistics_says_what_to_call(name: str) -> None:
    with pytest.raises(StatisticsError, match=r"input: no statistics.*call observer\(value\)"):
        make(name).get_qparams()


@pytest.mark.filterwarnings("ignore:imatrix_mse searches without importance")
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_statistics_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    of = make(name)
    of.slot = "model.layers.3.mlp.down_proj.input"
    of(torch.tensor([[1.0, bad, 2.0]]))
    with pytest.raises(StatisticsError, match=r"layers\.3\.mlp\.down_proj\.input.*m(in|ax)_vals"):
        of.get_qparams()


def test_one_bad_batch_is_not_forgotten() -> None:
    of = make("static_minmax")
    for value in (1.0, torch.nan, 2.0):
        of(torch.tensor([[value]]))
    with pytest.raises(StatisticsError, match="not finite"):
        of.get_qparams()


def test_unknown_observer_lists_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match="static_minmax") as error:
        make("minmaxx")
    assert "memoryless_mse" in str(error.value)


def test_a_name_never_imports_a_file(tmp_path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("raise SystemExit('was run')")
    with pytest.raises(ConfigurationError, match="no observer"):
        make(f"{plugin}:Plugin")


@pytest.mark.parametrize("name", ALL)
def test_unknown_settings_list_what_is_allowed(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"does not take .*shrinkage.*Allowed"):
        make(name, shrinkage=1)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("minmax", "averaging_constant", -0.1),
        ("minmax", "averaging_constant", 1.5),
        ("minmax", "averaging_constant", "0.1"),
        ("mse", "averaging_constant", float("nan")),
        ("mse", "maxshrink", 1.01),
        ("mse", "grid", 0),
        ("mse", "patience", -1),
        ("mse", "patience", 2.5),
        ("mse", "norm", float("inf")),
        ("mse", "norm", 0),
        ("mse", "expand", 0.9),
        ("imatrix_mse", "strict", "yes"),
        ("imatrix_mse", "grid", True),
    ],
)
def test_settings_out_of_range_are_refused(name: str, setting: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"{setting} must be"):
        make(name, **{setting: value})
    with pytest.raises(ConfigurationError, match=f"{setting} must be"):
        make(name, args=QuantizationArgs(observer_kwargs={setting: value}))


def test_a_subclass_may_have_settings_of_its_own() -> None:
    class Wider(MinMaxObserver):
        def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
            super().update_statistics_from_observed(observed * self.args.observer_kwargs["factor"])

    of = Wider("input", INT8, factor=3, averaging_constant=0.5)(torch.ones(1, 2))
    assert float(of.max_vals) == 3
    assert of.avg_constant == 0.5
    with pytest.raises(ConfigurationError, match="averaging_constant"):
        Wider("input", INT8, averaging_constant=7)


@pytest.mark.parametrize("name", ["static_minmax", "minmax", "memoryless_mse", "histogram"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_integers_are_observed_as_floats(name: str, dtype: torch.dtype) -> None:
    value = torch.tensor([[1, 100, 3], [0, 5, 7]])
    found = make(name)(value.to(dtype)).get_qparams()
    expected = make(name)(value.float()).get_qparams()
    assert torch.equal(found["scale"], expected["scale"])
    assert torch.equal(found["zero_point"], expected["zero_point"])


def test_errors_are_what_callers_of_the_peer_catch() -> None:
    for raising in (
        lambda: make("minmax").get_qparams(),
        lambda: make("minmax", averaging_constant=7),
        lambda: make("minmax")(torch.ones(2, dtype=torch.bool)),
    ):
        with pytest.raises(ValueError, match=r"minmax|input|averaging"):
            raising()


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ObservationError, match=r"input: cannot observe.*bfloat16"):
        make("minmax")(torch.ones(2, 2, dtype=dtype))


@pytest.mark.parametrize(
    ("base_name", "fields", "shape", "message"),
    [
        ("weight", {"strategy": "channel"}, (8,), "2 or more dimensions"),
        ("weight", {"strategy": "group", "group_size": 4}, (8,), "2 or more dimensions"),
        ("weight", {"strategy": "block", "block_structure": [2, 2]}, (2, 2, 2), "2 dimensions"),
        ("weight", {"strategy": "tensor"}, (), "1 or more"),
        ("weight", {"strategy": "group", "group_size": 3}, (2, 8), "groups of 3"),
        ("weight", {"strategy": "token", "dynamic": True}, (2, 8), "one of tensor, channel"),
        ("weight", {"strategy": "attn_head"}, (2, 8), "does not apply"),
        ("input", {"strategy": "channel"}, (2, 8), "does not apply"),
        ("input", {"strategy": "block", "block_structure": [2, 2]}, (2, 8), "does not apply"),
        ("input", {"strategy": "token", "dynamic": True}, (8,), "2 or more"),
        ("output", {"strategy": "group", "group_size": 3}, (2, 8), "output: 8 columns"),
        ("k", {"strategy": "attn_head"}, (2, 3, 8), "4 dimensions"),
        ("v", {"strategy": "group", "group_size": 4}, (1, 2, 3, 4), "one of tensor, attn_head"),
        ("bias", {"strategy": "tensor"}, (4,), "unknown base name 'bias'"),
    ],
)
def test_values_that_do_not_fit_are_refused(base_name, fields, shape, message) -> None:
    with pytest.raises(ObservationError, match=message):
        flatten_for_calibration(torch.ones(shape), base_name, QuantizationArgs(**fields))


def test_activation_groups_of_any_rank() -> None:
    args = QuantizationArgs(strategy="group", group_size=4)
    for shape in [(8,), (3, 8), (2, 3, 8), (2, 2, 3, 8)]:
        of = make("static_minmax", args=args)(torch.randn(shape))
        assert of.min_vals.shape == (2,), shape


def test_a_range_too_wide_for_its_dtype_is_refused() -> None:
    args = QuantizationArgs(num_bits=8, strategy="tensor", symmetric=False)
    of = make("static_minmax", args=args)(torch.tensor([[-3e38, 3e38]]))
    with pytest.raises(StatisticsError, match="too wide"):
        of.get_qparams()


@pytest.mark.parametrize("name", ["memoryless_mse", "imatrix_mse"])
@pytest.mark.filterwarnings("ignore:imatrix_mse searches without importance")
def test_enormous_values_keep_their_range(name: str) -> None:
    """The error overflows, so nothing can be found better than the whole range."""
    value = torch.tensor([[-1e30, 2e30, 1.0]])
    of = make(name, "weight")(value)
    assert float(of.min_vals) == float(value.min())
    assert float(of.max_vals) == float(value.max())
    assert torch.isfinite(of.get_qparams()["scale"]).all()


def test_observing_does_not_change_the_value_or_ask_for_gradients() -> None:
    value = torch.randn(3, 4, requires_grad=True)
    before = value.detach().clone()
    of = make("mse")(value)
    assert torch.equal(value, before)
    assert not of.min_vals.requires_grad


def test_inference_mode_does_not_stick() -> None:
    of = make("minmax")
    with torch.inference_mode():
        of(torch.ones(2, 2))
    of(torch.full((2, 2), 3.0))
    assert float(of.max_vals) == pytest.approx(1.02)


def attention(**strategies: str | None) -> torch.nn.Module:
    block = torch.nn.Module()
    for name, strategy in strategies.items():
        linear = torch.nn.Linear(16, 4, bias=False)
        if strategy == "absent":
            block.register_module(name, None)
            continue
        if strategy == "tensor_group":
            linear.weight_observer = make("memoryless_minmax", "weight", QuantizationArgs(**NVFP4))
        elif strategy is not None:
            args = QuantizationArgs(strategy=strategy)
            linear.weight_observer = make("memoryless_minmax", "weight", args)
        block.register_module(name, linear)
    model = torch.nn.Module()
    model.self_attn = block
    return model


def partners(model: torch.nn.Module, name: str) -> int:
    return len(getattr(model.self_attn, name).weight_observer._fused_observers)


def test_fusing_links_the_group() -> None:
    model = attention(q_proj="tensor_group", k_proj="tensor_group", v_proj="tensor_group")
    fuse_weight_observers(model)
    fuse_weight_observers(model)
    assert [partners(model, name) for name in ("q_proj", "k_proj", "v_proj")] == [2, 2, 2]


def test_fusing_leaves_out_a_member_that_is_none() -> None:
    model = attention(q_proj="tensor_group", k_proj="tensor_group", v_proj="absent")
    fuse_weight_observers(model)
    assert partners(model, "q_proj") == partners(model, "k_proj") == 1


def test_fusing_leaves_other_strategies_alone() -> None:
    model = attention(q_proj="channel", k_proj=None, v_proj="channel")
    fuse_weight_observers(model)
    assert partners(model, "q_proj") == 0


@pytest.mark.parametrize("odd", ["channel", None])
def test_fusing_refuses_a_mixed_group(odd: str | None) -> None:
    model = attention(q_proj="tensor_group", k_proj=odd, v_proj="tensor_group")
    with pytest.raises(ConfigurationError, match=r"self_attn: q_proj, k_proj, v_proj share"):
        fuse_weight_observers(model)


def test_fused_observers_must_all_have_seen_their_weight() -> None:
    model = attention(q_proj="tensor_group", k_proj="tensor_group", v_proj="tensor_group")
    fuse_weight_observers(model)
    model.self_attn.k_proj.weight_observer.slot = "self_attn.k_proj.weight"
    model.self_attn.q_proj.weight_observer(torch.ones(4, 16))
    with pytest.raises(StatisticsError, match=r"no statistics"):
        model.self_attn.q_proj.weight_observer.get_qparams()


def test_static_minmax_is_a_memoryless_minmax() -> None:
    from inlay.observers import MemorylessMinMaxObserver

    assert issubclass(StaticMinMaxObserver, MemorylessMinMaxObserver)
