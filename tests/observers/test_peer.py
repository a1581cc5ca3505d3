"""The observers against llm-compressor's own."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.observers import Observer as PeerObserver
from llmcompressor.observers import flatten_for_calibration as peer_flatten
from llmcompressor.observers import fuse_weight_observers as peer_fuse_weight_observers
from llmcompressor.observers import helpers as peer_helpers

from inlay.observers import (
    FUSED_LAYER_NAMES,
    Observer,
    flatten_for_calibration,
    fuse_weight_observers,
)
from inlay.testing.strategies import CASES, MXFP4, NVFP4, SHAPES, make_args

MIN_MAX = ["memoryless_minmax", "static_minmax", "minmax"]
SEARCHING = ["memoryless_mse", "mse", "imatrix_mse"]
EXPANDED = ["nvfp4_expanded_mse", "nvfp4_expanded_imatrix"]


def batches(base_name: str, count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn(SHAPES[base_name], generator=generator) for _ in range(count)]
    for index, tensor in enumerate(tensors):
        tensor[..., 3] *= 20  # outliers, so that shrinking the range pays
        tensor.mul_(index + 1)
    return [tensor.to(dtype) for tensor in tensors]


def pair(name: str, base_name: str, args: QuantizationArgs) -> tuple[Observer, PeerObserver]:
    own = Observer.load_from_registry(name, base_name=base_name, args=args)
    peer = PeerObserver.load_from_registry(name, base_name=base_name, args=args.model_copy())
    return own, peer


def feed(own: Observer, peer: PeerObserver, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        own(tensor)
        # The peer's forward looks at a weight only once; its statistics take as many as they get.
        peer.update_statistics_from_observed(peer_flatten(tensor, peer.base_name, peer.args))


def assert_same(own: torch.Tensor | None, peer: torch.Tensor | None) -> None:
    assert (own is None) == (peer is None)
    if own is not None and peer is not None:
        assert own.dtype == peer.dtype
        assert own.shape == peer.shape
        assert torch.equal(own.float(), peer.float())


def assert_equal_observers(own: Observer, peer: PeerObserver) -> None:
    assert_same(own.min_vals, peer.min_vals)
    assert_same(own.max_vals, peer.max_vals)
    qparams, peer_qparams = own.get_qparams(), peer.get_qparams()
    assert qparams.keys() == peer_qparams.keys()
    for key, value in qparams.items():
        assert_same(value, peer_qparams[key])


@pytest.mark.filterwarnings("ignore:imatrix_mse searches without importance")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MIN_MAX + SEARCHING)
def test_statistics_and_qparams_are_equal(name: str, case: str, count: int) -> None:
    base_name, fields = CASES[case]
    own, peer = pair(name, base_name, make_args(fields))
    feed(own, peer, batches(base_name, count))
    assert_equal_observers(own, peer)


@pytest.mark.filterwarnings("ignore:.*searches without importance")
@pytest.mark.parametrize("case", ["weight-nvfp4", "weight-mxfp4", "weight-int4-group-asymmetric"])
@pytest.mark.parametrize("name", EXPANDED)
def test_expanded_searches_are_equal(name: str, case: str) -> None:
    base_name, fields = CASES[case]
    own, peer = pair(name, base_name, make_args(fields))
    feed(own, peer, batches(base_name, 1))
    assert_equal_observers(own, peer)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("minmax", {"averaging_constant": 0.3}),
        ("minmax", {"averaging_constant": 1.0}),
        ("mse", {"averaging_constant": 0.3, "maxshrink": 0.8, "grid": 25, "norm": 2}),
        ("mse", {"averaging_constant": 1.0, "patience": 1}),
        ("memoryless_mse", {"maxshrink": 0.9, "patience": 0, "norm": 3.5}),
        ("memoryless_mse", {"maxshrink": 0.0}),
        ("memoryless_mse", {"maxshrink": 0.5, "expand": 1.6, "patience": 100}),
        ("imatrix_mse", {"maxshrink": 1.0, "grid": 10, "patience": 0, "norm": 1}),
        ("imatrix_mse", {"maxshrink": 0.0, "expand": 1.25}),
    ],
)
@pytest.mark.parametrize("case", ["weight-int4-group-symmetric", "weight-int4-group-asymmetric"])
@pytest.mark.filterwarnings("ignore:imatrix_mse searches without importance")
def test_settings_mean_the_same(name: str, kwargs: dict, case: str) -> None:
    _, fields = CASES[case]
    own, peer = pair(name, "weight", make_args(fields, observer_kwargs=kwargs))
    feed(own, peer, batches("weight", 3))
    assert_equal_observers(own, peer)


@pytest.mark.parametrize(
    "case",
    [
        name
        for name in CASES
        if name.startswith("weight") and ("channel" in name or "group" in name or "fp4" in name)
    ],
)
def test_importance_is_equal(case: str) -> None:
    _, fields = CASES[case]
    own, peer = pair("imatrix_mse", "weight", make_args(fields))
    linear = torch.nn.Linear(SHAPES["weight"][1], SHAPES["weight"][0])
    generator = torch.Generator().manual_seed(1)
    own.attach(linear)
    peer.attach(linear)
    for _ in range(3):
        x = torch.randn(2, 7, linear.in_features, generator=generator)
        linear(x * torch.linspace(0.1, 4, linear.in_features))
    own.detach(linear)
    peer.detach(linear)
    assert_same(own._imatrix_sum, peer._imatrix_sum)
    assert_same(own._imatrix_count, peer._imatrix_count)

    feed(own, peer, batches("weight", 1))
    assert_equal_observers(own, peer)
    plain = Observer.load_from_registry("imatrix_mse", base_name="weight", args=make_args(fields))
    with pytest.warns(UserWarning, match="without importance"):
        plain(batches("weight", 1)[0])
    if fields["num_bits"] == 4 and fields is not MXFP4:  # power-of-two scales have few choices
        assert not torch.equal(own.max_vals, plain.max_vals), "importance made no difference"


def attention(args: QuantizationArgs, observer_class: type) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    block = torch.nn.Module()
    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        linear = torch.nn.Linear(64, 16, bias=False)
        linear.weight = torch.nn.Parameter(torch.randn(16, 64, generator=generator) * (index + 1))
        linear.weight_observer = observer_class.load_from_registry(
            "memoryless_mse", base_name="weight", args=args.model_copy()
        )
        block.register_module(name, linear)
    return block


def test_fused_global_scale_is_equal() -> None:
    args = make_args(NVFP4)
    own, peer = attention(args, Observer), attention(args, PeerObserver)
    fuse_weight_observers(own)
    peer_fuse_weight_observers(peer)
    for block in (own, peer):
        for linear in block.children():
            linear.weight_observer(linear.weight)
    scales = set()
    for own_linear, peer_linear in zip(own.children(), peer.children(), strict=True):
        assert_equal_observers(own_linear.weight_observer, peer_linear.weight_observer)
        scales.add(float(own_linear.weight_observer.get_qparams()["global_scale"]))
    assert len(scales) == 1


@pytest.mark.parametrize("case", CASES)
def test_flattening_is_equal(case: str) -> None:
    base_name, fields = CASES[case]
    args, (value,) = make_args(fields), batches(base_name, 1)
    assert_same(
        flatten_for_calibration(value, base_name, args), peer_flatten(value, base_name, args)
    )


def test_fused_layer_names_are_the_peers() -> None:
    assert set(FUSED_LAYER_NAMES) == set(peer_helpers.FUSED_LAYER_NAMES)


@pytest.mark.parametrize("name", MIN_MAX)
@pytest.mark.parametrize("case", [case for case in CASES if "mxfp" not in case or "weight" in case])
def test_bfloat16_extremes_are_equal(name: str, case: str) -> None:
    """Minimum, maximum and their averages of bfloat16 values: equal bit for bit."""
    base_name, fields = CASES[case]
    own, peer = pair(name, base_name, make_args(fields))
    feed(own, peer, batches(base_name, 3, torch.bfloat16))
    assert_equal_observers(own, peer)


@pytest.mark.parametrize("norm", [2.0, 2.4])
@pytest.mark.parametrize(
    "case",
    [
        "weight-int4-group-symmetric",
        "weight-int8-channel-asymmetric",
        "weight-fp8-tensor-symmetric",
        "weight-nvfp4",
    ],
)
def test_bfloat16_search_is_as_good(case: str, norm: float) -> None:
    """Searching bfloat16 values: as good, not equal.

    The peer sums the errors in bfloat16 and cannot tell close candidates apart; here they are
    summed in float32. Both choose among the same candidates, and judged in float64 this choice
    is never the worse one. Patience is out of the way: it stops either search at other places.
    """
    base_name, fields = CASES[case]
    kwargs = {"maxshrink": 0.6, "norm": norm, "patience": 1000}
    own, peer = pair("memoryless_mse", base_name, make_args(fields, observer_kwargs=kwargs))
    (value,) = batches(base_name, 1, torch.bfloat16)
    feed(own, peer, [value])
    observed = flatten_for_calibration(value, base_name, own.args)
    assert own.min_vals.dtype == torch.bfloat16

    def true_error(min_vals: torch.Tensor, max_vals: torch.Tensor) -> torch.Tensor:
        from compressed_tensors.quantization.lifecycle import fake_quantize
        from compressed_tensors.quantization.utils import calculate_qparams

        args = own.args.model_copy(update={"strategy": "token"})
        args = args.model_copy(update={"scale_dtype": None})
        scale, zero_point = calculate_qparams(min_vals, max_vals, args)
        quantized = fake_quantize(observed, scale.unsqueeze(-1), zero_point.unsqueeze(-1), args)
        return (quantized.double() - observed.double()).abs().pow(norm).sum(dim=(0, -1))

    ours = true_error(own.min_vals, own.max_vals)
    theirs = true_error(peer.min_vals, peer.max_vals)
    assert bool((ours <= theirs * (1 + 1e-6)).all())
