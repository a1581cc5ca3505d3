"""Each expert has the statistics of the tokens that it is given, as a loop over experts has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import WITH_EXPERTS, batch, mixtral, qwen3_moe
from routed import assert_observed, everywhere_rows, routed_rows

from inlay import Calibration, ConfigurationError, Observer, Recipe, StatisticsError
from inlay.nodes.every_token import EveryToken
from inlay.observers import StaticMinMaxObserver
from inlay.observers.measuring import Tensors
from inlay.statistics.coverage import Coverage, coverage
from inlay.statistics.on_disk import StoredStatistics

pytestmark = pytest.mark.filterwarnings("ignore")  # what Dynamo warns of is its own

FP8 = {"ignore": ["lm_head", "re:.*[.]gate$"]}


def padded(model: Any, index: int, tokens: int) -> dict[str, Any]:
    one = batch(model, index, rows=3, tokens=tokens)
    one["attention_mask"][0, 2:] = 0
    one["attention_mask"][1, :1] = 0
    return one


def observed(model: Any, recipe: Recipe, batches: Any, **options: Any) -> Calibration:
    calibration = Calibration(model, recipe, progress=False, **{"compiler": "eager", **options})
    for one in batches:
        calibration.observe(**one)
    return calibration


def assert_each_saw_its_own(calibration: Calibration, rows: Any) -> None:
    plan = calibration.plan
    slots = [*plan.activation_slots(), *plan.watching_slots()]
    of_experts = [slot for slot in slots if plan.is_routed(slot.module)]
    assert of_experts
    for slot in of_experts:
        known = calibration.statistics.of(slot)
        assert known is not None
        assert_observed(known, slot, rows.get(slot.module, []))


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_each_saw_what_a_loop_over_experts_gives_it(family: str) -> None:
    model = WITH_EXPERTS[family]()
    batches = [padded(model, 0, 6), padded(model, 1, 9)]
    calibration = observed(model, Recipe.from_preset("FP8", **FP8), batches)
    assert_each_saw_its_own(calibration, routed_rows(model, batches))


WIDE = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("NVFP4", {}),
        ("FP8", {"inputs": {"observer": "minmax", "observer_kwargs": {"averaging_constant": 0.3}}}),
        ("FP8", {"inputs": {"observer": "histogram"}}),
        ("FP8", {"inputs": {"observer": "mse"}}),
        ("W4A16", {"weights": {"observer": "imatrix_mse", "group_size": 32}}),
    ],
)
def test_every_observer_sees_each_expert(name: str, fields: dict[str, Any]) -> None:
    model = mixtral(**WIDE)
    batches = [padded(model, index, 6) for index in range(2)]
    calibration = observed(model, Recipe.from_preset(name, **FP8, **fields), batches)
    assert_each_saw_its_own(calibration, routed_rows(model, batches))


def test_in_bfloat16() -> None:
    model = qwen3_moe(**WIDE).to(torch.bfloat16)
    batches = [padded(model, 0, 6)]
    calibration = observed(model, Recipe.from_preset("FP8", **FP8), batches)
    assert_each_saw_its_own(calibration, routed_rows(model, batches))


@pytest.mark.slow
def test_compiled_as_op_by_op() -> None:
    model = mixtral(**WIDE)
    batches = [padded(model, 0, 6), padded(model, 1, 6)]
    recipe = Recipe.from_preset("FP8", **FP8)
    plain, compiled = (
        observed(model, recipe, batches, compiler=compiler) for compiler in ("eager", "inductor")
    )
    for name, expected in plain.statistics.snapshot().items():
        found = compiled.statistics.snapshot()[name]
        assert (int(found.seen), int(found.tokens)) == (int(expected.seen), int(expected.tokens))
        for key, tensor in expected.tensors.items():
            torch.testing.assert_close(found.tensors[key], tensor)


@Observer.register("third_largest")
class ThirdLargest(Observer):
    """An observer that a user might write, with statistics in tensors of its own."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        top = observed.abs().flatten().topk(3).values[-1].reshape(1)
        known = getattr(self, "max_vals", None)
        self.max_vals = top if known is None else torch.maximum(top, known)
        self.min_vals = -self.max_vals


@Observer.register("reader")
class Reader(Observer):
    """An observer that cannot be traced: it looks at values."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        largest = float(observed.max())
        self.max_vals = torch.tensor([max(largest, float(getattr(self, "max_vals", -1e9)))])
        self.min_vals = -self.max_vals


@pytest.mark.parametrize("observer", ["third_largest", "reader"])
def test_observers_of_users_see_one_expert_after_another(observer: str) -> None:
    model = mixtral(**WIDE)
    batches = [batch(model, index, rows=3, tokens=9) for index in range(2)]
    recipe = Recipe.from_preset("FP8", inputs={"observer": observer}, **FP8)
    calibration = observed(model, recipe, batches)
    rows = routed_rows(model, batches)
    for slot in calibration.plan.activation_slots():
        if not calibration.plan.is_routed(slot.module):
            continue
        expected = slot.make_observer()
        for value in rows[slot.module]:
            expected(value)
        found = calibration.statistics.observer(slot)
        assert torch.equal(found.max_vals, expected.max_vals)
        assert calibration.statistics.tokens(slot) == sum(map(len, rows[slot.module]))


class MeasuresOtherwise(StaticMinMaxObserver):
    def measure(self, observed: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        return {name: 2 * value for name, value in super().measure(observed, valid).items()}


def test_who_measures_otherwise_does_not_inherit_how_parts_are_measured() -> None:
    assert StaticMinMaxObserver.measures_row_groups()
    assert not MeasuresOtherwise.measures_row_groups()


def test_blocks_share_what_is_compiled() -> None:
    model = mixtral(num_hidden_layers=4, **{k: v for k, v in WIDE.items() if "layers" not in k})
    calibration = observed(model, Recipe.from_preset("FP8", **FP8), [batch(model)])
    blocks = [graph for graph in calibration.graphs if graph.variants]
    assert len(blocks) <= 3


def never_chosen(number: int, **changes: Any) -> Any:
    """A model whose routers never choose one of the experts."""
    model = mixtral(**WIDE | changes)
    for name, router in model.named_modules():
        if name.endswith("mlp.gate"):
            # The first channel of its input is 1, and counts against that expert alone.
            router.register_forward_pre_hook(lambda _, args: (_with_first(args[0], 1.0),))
            router.weight.data[:, 0] = 0.0
            router.weight.data[number, 0] = -100.0
    return model


def _with_first(value: torch.Tensor, number: float) -> torch.Tensor:
    return torch.cat([torch.full_like(value[..., :1], number), value[..., 1:]], -1)


def test_an_expert_without_tokens_is_refused_by_name() -> None:
    model = never_chosen(2)
    calibration = observed(model, Recipe.from_preset("FP8", **FP8), [batch(model)])
    words = r"experts \(2: 0; an even share of its 24 would be 6\).*experts=\"fill\""
    for accept in ((), {"unobserved"}, {"few_tokens"}):
        with pytest.raises(StatisticsError, match=words):
            calibration.finalize(accept=accept)


@pytest.mark.parametrize("name", ["FP8", "W4A16"])
def test_experts_without_tokens_may_have_the_statistics_of_their_layer(name: str) -> None:
    fields = {"weights": {"observer": "imatrix_mse", "group_size": 32}} if name == "W4A16" else {}
    model = never_chosen(2)
    of_layer: dict[str, Any] = {}
    for how in ("fill", "layer"):
        recipe = Recipe.from_preset(name, experts=how, **FP8, **fields)
        calibration = observed(model, recipe, [batch(model)])
        known = calibration.statistics
        calibration.finalize()
        assert [each.tokens[2] for each in coverage(known)] == [0]
        plan = calibration.plan
        slots = [*plan.activation_slots(), *plan.watching_slots()]
        own = {s.name: known.gathered(s) for s in slots if plan.is_routed(s.module)}
        for slot in slots:
            if ".experts." not in slot.name:
                continue
            found = known.of(slot)
            if how == "fill" and ".2." not in slot.name:
                assert found is own[slot.name]
                continue
            assert int(found.tokens) == 24
            of_layer.setdefault(slot.name.partition("experts.")[2][1:], found)
            for key, tensor in of_layer[slot.name.partition("experts.")[2][1:]].tensors.items():
                assert torch.equal(found.tensors[key], tensor)
    for tail, layer in of_layer.items():
        if "min_vals" in layer.tensors:
            lows = [each.tensors["min_vals"] for name, each in own.items() if name.endswith(tail)]
            assert torch.equal(layer.tensors["min_vals"], torch.stack(lows).amin(0))


def test_few_tokens_are_refused_unless_accepted() -> None:
    share = Coverage("experts", (100, 100, 4, 0))
    assert (share.few, share.none, share.starved) == ([], [3], [3])
    assert str(Coverage("e", (100, 100, 1))) == "e (2: 1; an even share of its 201 would be 67)"
    assert Coverage("e", (100, 100, 1)).few == [2]
    model = mixtral(**WIDE)
    calibration = observed(model, Recipe.from_preset("FP8", **FP8), [batch(model, rows=16)])
    slot = calibration.plan.slots["model.layers.0.mlp.experts.1.gate_proj.input"]
    calibration.statistics.of(slot).tokens.fill_(1)
    with pytest.raises(StatisticsError, match=r"1: 1; .*few_tokens"):
        calibration.finalize()
    calibration.finalize(accept={"few_tokens"})


def test_statistics_go_on_from_stored_ones(tmp_path: Path) -> None:
    model, recipe = mixtral(**WIDE), Recipe.from_preset("FP8", **FP8)
    batches = [padded(model, index, 6) for index in range(2)]
    whole = observed(model, recipe, batches).statistics.snapshot()
    observed(model, recipe, batches[:1]).stored().save(tmp_path / "s")
    again = Calibration.from_statistics(
        model, recipe, StoredStatistics.load(tmp_path / "s"), compiler="eager", progress=False
    )
    again.observe(**batches[1])
    apart = [observed(model, recipe, [one]).stored() for one in batches]
    for found in (again.statistics.snapshot(), apart[0].merge(apart[1]).slots):
        assert found.keys() == whole.keys()
        for name, expected in whole.items():
            assert int(found[name].tokens) == int(expected.tokens)
            for key, tensor in expected.tensors.items():
                assert torch.equal(found[name].tensors[key], tensor)


def test_rewinding_forgets_what_experts_saw_since() -> None:
    model, recipe = never_chosen(2), Recipe.from_preset("FP8", **FP8)
    calibration = observed(model, recipe, [batch(model)])
    known = calibration.statistics
    before = known.snapshot()
    bound = known.of(calibration.plan.slots["model.layers.0.mlp.experts.0.gate_proj.input"])
    router = model.get_submodule("model.layers.0.mlp.gate")
    router.weight.data[2, 0] = 100.0
    calibration.observe(**batch(model, 1))
    assert known.snapshot().keys() > before.keys()
    known.rewind(before)
    assert known.snapshot().keys() == before.keys()
    assert known.of(bound.slot) is bound
    for name, now in known.snapshot().items():
        assert int(now.tokens) == int(before[name].tokens)
        assert all(torch.equal(now.tensors[key], t) for key, t in before[name].tensors.items())


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("FP8", {}),
        ("FP8", {"observer": "memoryless_mse"}),
        ("FP8_DYNAMIC", {"observer": "memoryless_mse", "observer_kwargs": {"patience": 1}}),
        ("FP8", {"strategy": "block", "block_structure": [48, 32]}),
        ("W4A16_ASYM", {"group_size": 32, "observer": "memoryless_mse"}),
        ("W4A16", {"group_size": 32, "observer": "imatrix_mse"}),
        ("NVFP4A16", {"observer": "memoryless_mse"}),
    ],
)
def test_weights_together_have_the_scales_of_one_by_one(
    name: str, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixtral(**WIDE)
    recipe = Recipe.from_preset(name, weights=weights, **FP8)
    monkeypatch.setattr("inlay.steps.observe_weights._TOGETHER", 3 * 64 * 64)
    found = observed(model, recipe, [batch(model)]).finalize()
    monkeypatch.setattr("inlay.steps.observe_weights._measures_many", lambda _: False)
    expected = observed(model, recipe, [batch(model)]).finalize()
    assert found.keys() == expected.keys()
    for slot, qparams in expected.items():
        for key in ("scale", "zero_point", "global_scale"):
            own, theirs = found[slot].get(key), qparams.get(key)
            assert own is theirs is None or torch.equal(own.float(), theirs.float()), (slot, key)


@pytest.mark.parametrize("name", ["W4A16", "NVFP4A16"])
def test_gate_and_up_share_a_global_scale(name: str) -> None:
    model = mixtral(**WIDE)
    recipe = Recipe.from_preset(name, weights={"group_size": 16}, **FP8)
    found = Calibration(model, recipe, compiler="eager", progress=False).finalize()
    for number in range(4):
        gate, up, down = (
            found[f"model.layers.0.mlp.experts.{number}.{part}_proj.weight"]["global_scale"]
            for part in ("gate", "up", "down")
        )
        assert (gate is None) == (name == "W4A16")
        assert gate is None or (torch.equal(gate, up) and not torch.equal(gate, down))


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_every_expert_may_be_given_every_token(family: str) -> None:
    """Also one that the model never chooses; what the model computes stays."""
    model = WITH_EXPERTS[family](num_hidden_layers=2)
    batches = [padded(model, 0, 6), padded(model, 1, 9)]
    recipe = Recipe.from_preset("FP8", experts="all", **FP8)
    calibration = observed(model, recipe, batches)
    rows = everywhere_rows(model, batches)
    for slot in calibration.plan.activation_slots():
        known = calibration.statistics.of(slot)
        if not calibration.plan.is_routed(slot.module):
            continue
        assert int(known.tokens) == sum(int(one["attention_mask"].sum()) for one in batches)
        low = torch.stack([value.amin() for value in rows[slot.module]]).amin()
        high = torch.stack([value.amax() for value in rows[slot.module]]).amax()
        torch.testing.assert_close(known.tensors["min_vals"], low.reshape(1))
        torch.testing.assert_close(known.tensors["max_vals"], high.reshape(1))
    calibration.finalize()
    with torch.no_grad():
        quantized = torch.compile(model, backend=calibration.backend)(**batches[0])[0]
        torch.testing.assert_close(quantized, model(**batches[0])[0], atol=0.1, rtol=0.1)


def test_every_token_goes_through_a_few_experts_at_a_time() -> None:
    """As many as a token is sent to, so that memory holds no more rows than without it."""
    model = mixtral(num_local_experts=7, **WIDE)
    recipe = Recipe.from_preset("FP8", experts="all", **FP8)
    calibration = observed(model, recipe, [batch(model)])
    (block,) = (graph for graph in calibration.graphs if graph.variants and _sends(graph))
    assert [each.experts for each in _sends(block)] == 2 * [2, 2, 2, 1]  # for both products
    for slot in calibration.plan.activation_slots():
        if calibration.plan.is_routed(slot.module):
            assert calibration.statistics.tokens(slot) == 12


def _sends(graph: Any) -> list[EveryToken]:
    (variant,) = graph.variants.values()
    targets = (node.target for node in variant.graph_module.graph.nodes)
    return [target for target in targets if isinstance(target, EveryToken)]


def test_observers_of_users_see_every_token_of_a_few_experts_at_a_time() -> None:
    model = mixtral(**WIDE)
    recipe = Recipe.from_preset("FP8", experts="all", inputs={"observer": "reader"}, **FP8)
    batches = [batch(model)]
    calibration = observed(model, recipe, batches)
    rows = everywhere_rows(model, batches)
    for slot in calibration.plan.activation_slots():
        if calibration.plan.is_routed(slot.module):
            largest = max(float(value.max()) for value in rows[slot.module])
            assert float(calibration.statistics.observer(slot).max_vals) == pytest.approx(largest)


def test_statistics_of_all_tokens_are_not_taken_for_those_of_routed_ones() -> None:
    model = mixtral(**WIDE)
    stored = observed(model, Recipe.from_preset("FP8", **FP8), [batch(model)]).stored()
    with pytest.raises(ConfigurationError, match='experts="routed", and the recipe asks for'):
        Calibration.from_statistics(model, Recipe.from_preset("FP8", experts="all", **FP8), stored)
