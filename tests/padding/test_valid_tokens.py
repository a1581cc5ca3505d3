"""Masks of every form tell which tokens are valid, or are refused."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import StatisticsError
from inlay.graph import MAIN
from inlay.padding.valid_tokens import has_padding, valid_tokens

LOWEST = torch.finfo(torch.float32).min


@st.composite
def paddings(draw: st.DrawFn) -> torch.Tensor:
    """Valid tokens of some rows, at either end of each."""
    rows, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    found = torch.zeros(rows, tokens, dtype=torch.bool)
    for row in found:
        count = draw(st.integers(1, tokens))
        row[:count] = True
        if draw(st.booleans()):
            row.copy_(row.flip(0))
    return found


@given(valid=paddings(), is_causal=st.booleans(), form=st.sampled_from(["bool", "additive"]))
def test_masks_of_pairs_are_those_of_tokens(
    valid: torch.Tensor, is_causal: bool, form: str
) -> None:
    tokens = valid.shape[1]
    pattern = torch.ones(tokens, tokens).bool()
    pairs = ((pattern.tril() if is_causal else pattern) & valid[:, None])[:, None]
    mask = pairs if form == "bool" else torch.zeros(pairs.shape).masked_fill(~pairs, LOWEST)
    for given_mask in (mask, mask[:, 0], mask.repeat(1, 2, 1, 1)):
        assert torch.equal(valid_tokens({"attention_mask": given_mask})[MAIN], valid)


@pytest.mark.parametrize(
    "mask",
    [
        torch.randn(2, 1, 4, 4),  # biases
        torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).tril().bool()[None, None],  # two texts
        torch.ones(6, 6).tril().triu(-1).bool()[None, None],  # a window
        torch.ones(2, 1, 3, 4).bool(),
        torch.ones(4),
        {"full_attention": torch.ones(1, 1, 4, 4).bool()},
    ],
    ids=["biases", "two texts", "window", "cache", "one row", "by kind of layer"],
)
def test_a_mask_that_does_not_tell_is_refused(mask: Any) -> None:
    with pytest.raises(StatisticsError, match="pass a mask of shape \\(batch, tokens\\)"):
        valid_tokens({"attention_mask": mask})


def test_masks_of_tokens() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    for form in (mask, mask.bool(), mask.float(), (1 - mask.float()) * LOWEST):
        found = valid_tokens({"attention_mask": form, "decoder_attention_mask": mask[:, :2]})
        assert torch.equal(found[MAIN], mask.bool())
        assert found["decoder"].all()
    assert has_padding(found)
    assert not has_padding({"decoder": found["decoder"]})
    assert valid_tokens({"input_ids": mask}) == {}
