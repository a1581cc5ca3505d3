import warnings

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from inlay.errors import StatisticsError
from inlay.observers import IMatrixMSEObserver

GROUPS = QuantizationArgs(num_bits=4, strategy="group", group_size=4)


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 6)


def test_one_pass_gathers_and_uses() -> None:
    module, x = linear(), torch.randn(2, 3, 8)
    of = IMatrixMSEObserver("weight", GROUPS, strict=True)
    of.attach(module)
    module(x)
    module(input=x[0])
    torch.testing.assert_close(of._imatrix_sum, x.pow(2).sum((0, 1)) + x[0].pow(2).sum(0))
    assert int(of._imatrix_count) == 9
    of(module.weight)
    assert of.get_qparams()["scale"].shape == (6, 2)


def test_two_passes_hand_the_sums_over() -> None:
    module, x = linear(), torch.randn(2, 3, 8)
    gathering = IMatrixMSEObserver("weight", GROUPS)
    gathering.attach(module)
    module(x)
    gathering.detach(module)
    module(x)  # after detach nothing is summed
    assert int(module._imatrix_count) == 6

    using = IMatrixMSEObserver("weight", GROUPS, strict=True)
    using.attach(module)
    assert not hasattr(module, "_imatrix_sum")
    module(x)  # no hook in the second pass
    assert torch.equal(using._imatrix_sum, gathering._imatrix_sum)
    assert int(using._imatrix_count) == 6
    using(module.weight)
    using.detach(module)
    assert not hasattr(module, "_imatrix_hook")


def test_a_module_without_channels_is_left_alone() -> None:
    module = torch.nn.Embedding(4, 8)
    IMatrixMSEObserver("weight", GROUPS).attach(module)
    assert not module._forward_pre_hooks


@pytest.mark.parametrize(
    ("total", "seen", "reason"),
    [
        (None, 0, "no importance was gathered"),
        (torch.ones(8), 0, "no importance was gathered"),
        (torch.full((8,), torch.nan), 1, "not finite"),
        (-torch.ones(8), 1, "negative"),
        (torch.zeros(8), 1, "zero everywhere"),
        (torch.ones(6), 1, "6 channels, but the weight has 8"),
    ],
)
def test_unusable_importance_falls_back_or_raises(total, seen: int, reason: str) -> None:
    for strict in (False, True):
        of = IMatrixMSEObserver("weight", GROUPS, strict=strict)
        of.slot = "layer.weight"
        of._imatrix_sum, of._imatrix_count = total, torch.tensor(seen)
        if strict:
            with pytest.raises(StatisticsError, match=rf"layer\.weight.*{reason}"):
                of(torch.randn(6, 8))
        else:
            with pytest.warns(UserWarning, match=reason):
                of(torch.randn(6, 8))
            assert of.has_statistics


@pytest.mark.parametrize("strategy", ["tensor", "block"])
def test_strategies_without_importance(strategy: str) -> None:
    blocks = [2, 2] if strategy == "block" else None
    args = QuantizationArgs(strategy=strategy, block_structure=blocks)
    with pytest.warns(UserWarning, match="has no importance per input channel"):
        IMatrixMSEObserver("weight", args)(torch.randn(6, 8))


def test_only_weights_have_importance() -> None:
    args = QuantizationArgs(strategy="tensor")
    with pytest.raises(StatisticsError, match="only weights"):
        IMatrixMSEObserver("input", args, strict=True)(torch.randn(6, 8))


def test_the_warning_is_given_once() -> None:
    of = IMatrixMSEObserver("weight", GROUPS)
    with pytest.warns(UserWarning, match="without importance"):
        of(torch.randn(6, 8))
    of(torch.randn(6, 8))  # a second warning would be an error here
    # Other observers say the same words, which Python's own filter then shows once.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            IMatrixMSEObserver("weight", GROUPS)(torch.randn(6, 8))
    assert len(caught) == 1
