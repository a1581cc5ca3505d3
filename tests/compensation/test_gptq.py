"""GPTQ: laws of the solver, and the same integers as llm-compressor."""

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import ActivationOrdering, QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from hypothesis import given
from hypothesis import strategies as st
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from profiles import examples

from inlay.compensation.damping import choose_damping
from inlay.compensation.factor import factorize
from inlay.compensation.gptq import Compensated, compensate, output_errors
from inlay.compensation.grid import Grid
from inlay.recipe.slot import make_observer
from inlay.testing.strategies import FP8, INT4, MXFP4, NVFP4, Fields, make_args

FORMATS: dict[str, Fields] = {
    "int2": {"num_bits": 2, "type": "int", "strategy": "group", "group_size": 16},
    "int3": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32},
    "int4": {**INT4, "strategy": "group", "group_size": 32},
    "int4-asymmetric": {**INT4, "strategy": "group", "group_size": 32, "symmetric": False},
    "int5": {"num_bits": 5, "type": "int", "strategy": "channel"},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int8-tensor": {"num_bits": 8, "type": "int", "strategy": "tensor"},
    "fp8": {**FP8, "strategy": "channel"},
    "fp8-block": {**FP8, "strategy": "block", "block_structure": [8, 32]},
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
}
ROWS, COLUMNS = 24, 192  # the columns are more than one block of the solver

Qparams = dict[str, torch.Tensor | None]


@st.composite
def problems(
    draw: st.DrawFn, batch: int = 2, *, well_conditioned: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and Hessians of correlated inputs: full rank, deficient, and with silent columns."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    tokens = 400 if well_conditioned else draw(st.sampled_from([400, 40, 3]))
    scale = draw(st.sampled_from([1.0, 1e-4, 1e4]))
    mix = torch.eye(COLUMNS) + torch.randn(COLUMNS, COLUMNS, generator=generator) * 0.1
    inputs = torch.randn(batch, tokens, COLUMNS, generator=generator) @ mix * scale
    silent = 0 if well_conditioned else draw(st.integers(0, 5))
    inputs[..., torch.randperm(COLUMNS, generator=generator)[:silent]] = 0
    weights = torch.randn(batch, ROWS, COLUMNS, generator=generator)
    return weights, inputs.transpose(1, 2) @ inputs


def qparams_of(weights: torch.Tensor, args: QuantizationArgs) -> Qparams:
    found: list[Any] = []
    for weight in weights:
        observer = make_observer("weight", args)
        observer(weight)
        found.append(observer.get_qparams())
    stacked: Qparams = {
        key: torch.stack([q[key] for q in found]) for key in ("scale", "zero_point")
    }
    given_ = found[0].get("global_scale") is not None
    stacked["global_scale"] = (
        torch.stack([q["global_scale"].reshape(-1)[0] for q in found]) if given_ else None
    )
    return stacked


def grid_of(args: QuantizationArgs, qparams: Qparams) -> Grid:
    return Grid.of(args, (ROWS, COLUMNS), **qparams)  # type: ignore[arg-type]


def solved(name: str, weights: torch.Tensor, hessians: torch.Tensor, **options: Any) -> Compensated:
    args = make_args(FORMATS[name])
    options = {"damping": 0.01, **options}
    return compensate(weights, hessians, grid_of(args, qparams_of(weights, args)), **options)


def nearest(weights: torch.Tensor, args: QuantizationArgs, qparams: Qparams) -> torch.Tensor:
    given_ = {key: value for key, value in qparams.items() if value is not None}
    return torch.stack(
        [
            fake_quantize(weight, args=args, **{key: each[number] for key, each in given_.items()})
            for number, weight in enumerate(weights)
        ]
    )


@pytest.mark.parametrize("name", FORMATS)
@given(problem=problems(well_conditioned=True))  # else ties depend on how H is inverted
@examples(4)
def test_integers_are_those_of_llm_compressor(name: str, problem: Any) -> None:
    weights, hessians = problem
    args = make_args(FORMATS[name])
    qparams = qparams_of(weights, args)
    ours = compensate(weights, hessians, grid_of(args, qparams), damping=0.01)
    ordered = args.model_copy(update={"actorder": ActivationOrdering.STATIC})
    theirs, _, _ = quantize_weight(
        weights.clone(), hessians.clone(), **qparams, quant_args=ordered, percdamp=0.01
    )
    # One tie that falls differently changes what follows in its row.
    differ = (ours.weights != theirs).any(-1)
    assert float(differ.float().mean()) < 0.1
    errors = (output_errors(each - weights, hessians).sum(-1) for each in (ours.weights, theirs))
    torch.testing.assert_close(*errors, rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", FORMATS)
@given(problem=problems())
@examples(4)
def test_no_row_is_worse_than_round_to_nearest(name: str, problem: Any) -> None:
    weights, hessians = problem
    args = make_args(FORMATS[name])
    qparams = qparams_of(weights, args)
    found = compensate(weights, hessians, grid_of(args, qparams), damping=0.01)
    plain = nearest(weights, args, qparams)
    before = output_errors(plain - weights, hessians)
    after = output_errors(found.weights - weights, hessians)
    assert bool((after <= before).all())
    assert torch.equal(before, found.before)
    assert torch.equal(after, found.after)


def test_rows_that_gptq_makes_worse_stay_rounded_to_nearest() -> None:
    """With hardly correlated inputs there is little to compensate, and greed loses some rows."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, ROWS, COLUMNS, generator=generator)
    inputs = torch.randn(2, 4000, COLUMNS, generator=generator)
    hessians = inputs.transpose(1, 2) @ inputs
    args = make_args(FORMATS["int8"])
    qparams = qparams_of(weights, args)
    found = compensate(weights, hessians, grid_of(args, qparams), damping=0.01)
    plain = nearest(weights, args, qparams)
    stayed = (found.weights == plain).all(-1)
    assert bool(stayed.any())
    assert bool((~stayed).any())
    assert bool((found.after <= found.before).all())
    errors = output_errors(found.weights - weights, hessians)
    assert bool((errors <= output_errors(plain - weights, hessians)).all())


@pytest.mark.parametrize("name", FORMATS)
@given(problem=problems())
@examples(3)
def test_results_lie_on_the_grid(name: str, problem: Any) -> None:
    weights, hessians = problem
    args = make_args(FORMATS[name])
    qparams = qparams_of(weights, args)
    found = compensate(weights, hessians, grid_of(args, qparams), damping=0.01)
    assert torch.equal(nearest(found.weights, args, qparams), found.weights)


@pytest.mark.parametrize("name", FORMATS)
def test_a_diagonal_hessian_gives_round_to_nearest(name: str) -> None:
    weights = torch.randn(2, ROWS, COLUMNS)
    args = make_args(FORMATS[name])
    qparams = qparams_of(weights, args)
    hessians = torch.diag_embed(torch.rand(2, COLUMNS) + 0.1)
    found = compensate(weights, hessians, grid_of(args, qparams), damping=0.01)
    assert torch.equal(found.weights, nearest(weights, args, qparams))
    assert torch.equal(found.before, found.after)


@given(problem=problems(batch=3))
@examples(5)
def test_a_batch_is_solved_as_its_layers_one_by_one(problem: Any) -> None:
    weights, hessians = problem
    together = solved("int4", weights, hessians)
    for number in range(3):
        one = slice(number, number + 1)
        alone = solved("int4", weights[one], hessians[one])
        # Products of other sizes may round differently, which flips ties at most.
        differ = (alone.weights[0] != together.weights[number]).any(-1)
        assert float(differ.float().mean()) < 0.1
        torch.testing.assert_close(
            alone.after[0].sum(), together.after[number].sum(), rtol=0.02, atol=0
        )


def test_compensation_gains_on_correlated_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, ROWS, COLUMNS, generator=generator)
    inputs = torch.randn(2, 500, 20, generator=generator) @ torch.randn(2, 20, COLUMNS)
    inputs += 0.1 * torch.randn(2, 500, COLUMNS, generator=generator)
    found = solved("int4", weights, inputs.transpose(1, 2) @ inputs)
    assert bool((found.after.sum(-1) < 0.3 * found.before.sum(-1)).all())


@given(problem=problems())
@examples(10)
def test_the_factor_inverts_the_damped_hessian(problem: Any) -> None:
    _, hessians = problem
    found = factorize(hessians.double(), 0.05)
    diagonal = torch.diagonal(hessians.double(), dim1=-2, dim2=-1)
    damped = hessians.double() + torch.diag_embed(
        (found.damping * diagonal.mean(-1)).unsqueeze(-1).expand_as(diagonal)
    )
    identity = found.lower.transpose(1, 2) @ found.lower @ damped
    assert not bool(found.failed.any())
    torch.testing.assert_close(
        identity, torch.eye(COLUMNS).double().expand_as(identity), rtol=0, atol=1e-6
    )


def test_a_hessian_that_is_not_positive_definite_gets_more_damping() -> None:
    hessians = torch.eye(COLUMNS).repeat(2, 1, 1)
    hessians[1, 0, 0] = -0.05  # rounding leaves small negative eigenvalues
    found = factorize(hessians, 0.01)
    assert not bool(found.failed.any())
    assert float(found.damping[0]) == pytest.approx(0.01)
    assert float(found.damping[1]) == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_hessian_that_cannot_be_factorized_is_reported(bad: float) -> None:
    weights = torch.randn(2, ROWS, COLUMNS)
    hessians = torch.eye(COLUMNS).repeat(2, 1, 1)
    hessians[0, 3, 3] = bad
    args = make_args(FORMATS["int4"])
    qparams = qparams_of(weights, args)
    found = compensate(weights, hessians, grid_of(args, qparams), damping=0.01)
    assert found.failed.tolist() == [True, False]
    assert torch.equal(found.weights[0], nearest(weights, args, qparams)[0])


def test_auto_takes_the_damping_with_the_smallest_held_out_error() -> None:
    """With few tokens, a Hessian fits these too well, and more damping helps."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.eye(COLUMNS) + torch.randn(COLUMNS, COLUMNS, generator=generator) * 0.1
    weights = torch.randn(3, ROWS, COLUMNS, generator=generator)
    tokens = torch.tensor([[60], [300], [3000]]) > torch.arange(3000)
    inputs = (torch.randn(3, 3000, COLUMNS, generator=generator) @ mix) * tokens.unsqueeze(-1)
    others = torch.randn(3, 500, COLUMNS, generator=generator) @ mix
    known, held_out = (x.transpose(1, 2) @ x for x in (inputs, others))
    args = make_args(FORMATS["int4"])
    grid = grid_of(args, qparams_of(weights, args))
    chosen = choose_damping(weights, known + held_out, held_out, grid)

    def error(damping: float) -> torch.Tensor:
        found = compensate(weights, known, grid, damping=damping).weights
        outputs = (found - weights).double() @ others.transpose(1, 2).double()
        return outputs.square().sum((1, 2))

    tried = {damping: error(damping) for damping in (0.01, 0.02, 0.05, 0.1, 0.2)}
    for number, damping in enumerate(chosen.tolist()):
        least = min(float(each[number]) for each in tried.values())
        own = next(each for known, each in tried.items() if known == pytest.approx(damping))
        assert float(own[number]) <= 1.001 * least
    assert len(set(chosen.tolist())) > 1
    without = choose_damping(weights, known, torch.zeros_like(known), grid)
    torch.testing.assert_close(without, torch.full((3,), 0.05))
