"""A model that multiplies by transposed weights, from batches to the quantized model."""

import pytest
import torch
from families import batch, falcon
from graphs import STATIC
from specification import assert_same_qparams, expected_qparams, quantized_copy

from inlay import Calibration, Recipe

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(("compiler", "bias"), [("eager", False), ("aot_eager", True)])
def test_falcon_is_observed_and_quantized_as_eagerly(compiler: str, bias: bool) -> None:
    model = falcon(bias=bias)
    config = STATIC.config.model_copy(update={"ignore": ["lm_head"]})
    recipe = Recipe.from_config(config)
    batches = [batch(model, index) for index in range(3)]
    expected = expected_qparams(model, recipe, batches)
    assert len(expected) == 8

    calibration = Calibration(model, recipe, compiler=compiler)
    for one in batches:
        calibration.observe(**one)
    qparams = calibration.finalize()
    assert_same_qparams(qparams, expected)

    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        reference = quantized_copy(model, qparams, recipe)(**batches[0]).logits
        found = compiled(**batches[0]).logits
        plain = model(**batches[0]).logits
    assert torch.equal(found, reference)
    assert not torch.equal(found, plain)
