"""Twenty of the models that `make sweep` checks: their statistics are what hooks see."""

import pytest
import torch
from outcomes import outcome_of
from shrinking import batches_for, names, shrunk

from inlay import Calibration, Recipe

# With and without experts, convolutions, biases and products of transposed weights.
SAMPLE = (
    "apertus", "bitnet", "bloom", "codegen", "cohere2", "deepseek_v3", "electra", "ernie4_5",
    "exaone4", "falcon", "gemma2", "glm4", "gpt_neox", "granite", "helium", "lfm2", "olmo2", "opt",
    "phi3", "stablelm",
)  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_statistics_are_what_hooks_see(name: str) -> None:
    model = shrunk(name)
    batch = batches_for(model)[0]
    seen: dict[str, tuple[float, float]] = {}

    def note(own: str, value: torch.Tensor) -> None:
        low, high = seen.get(own, (torch.inf, -torch.inf))
        seen[own] = min(low, float(value.min())), max(high, float(value.max()))

    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, own=own: note(own, args[0]))
        for own, module in linears.items()
    ]
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    recipe = Recipe.from_preset("W8A8_STATIC", targets=list(seen), inputs=STATIC)
    calibration = Calibration(model, recipe, compiler="eager", progress=False, count_padding=True)
    calibration.observe(**batch)
    found = calibration.statistics.snapshot()
    assert len(seen) >= 4
    for own, (low, high) in seen.items():
        observer = found[f"{own}.input"].observer()
        assert float(observer.min_vals) == pytest.approx(low, rel=1e-5), own
        assert float(observer.max_vals) == pytest.approx(high, rel=1e-5), own


STATIC = {"observer": "static_minmax"}


def test_all_types_are_known_to_the_sweep() -> None:
    assert set(SAMPLE) < set(names())
    outcome, words = outcome_of("gpt2")
    assert outcome == "refused"
    assert "are Conv1D, and transformers loads quantized weights of Linear" in words


def test_weights_that_saving_would_merge_stay_apart() -> None:
    """HRM runs its blocks several times, and is saved with one tensor for query, key and value."""
    assert outcome_of("hrm_text", count=1) == ("right", "")
