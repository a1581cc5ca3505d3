"""Calibrations from start to end, on the eager compilers: fast, and bit for bit comparable."""

import gc
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from families import batch, bert, llama
from plain_llama import plain_llama
from specification import Inputs, assert_same_qparams, expected_qparams
from torch import nn

from inlay import Calibration, ConfigurationError, GraphError, Recipe, StatisticsError
from inlay.calibration.phase import Phase
from inlay.nodes.fast_linear import fast_linear
from inlay.nodes.kernel_support import missing_kernels
from inlay.nodes.kernels import integer_linear
from inlay.nodes.quantize import QuantizeDequantize
from inlay.observers import Observer
from inlay.passes import PREPARE, ShareObservers
from inlay.products import onednn_is_faster
from inlay.recipe import make_observer

STATIC = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs={"observer": "static_minmax"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "observer", "dtype"),
    [
        ("eager", "static_minmax", torch.float32),
        ("eager", "minmax", torch.bfloat16),
        ("eager", "mse", torch.bfloat16),
        ("aot_eager", "static_minmax", torch.bfloat16),
        ("aot_eager", "minmax", torch.float32),
        ("aot_eager", "mse", torch.float32),
    ],
)
def test_same_numbers_as_eager_observers(compiler: str, observer: str, dtype: torch.dtype) -> None:
    recipe = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs={"observer": observer})
    model = plain_llama(num_hidden_layers=1).to(dtype)
    batches = [batch(model, index) for index in range(3)]
    calibration = Calibration(model, recipe, compiler=compiler)
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        for one in batches:
            assert torch.equal(compiled(**one).logits, model(**one).logits)
    assert_same_qparams(calibration.finalize(), expected_qparams(model, recipe, batches))


def test_observe_gives_the_same_statistics() -> None:
    model = plain_llama(num_hidden_layers=1)
    batches = [batch(model, index) for index in range(3)]
    calibration = Calibration(model, STATIC, compiler="aot_eager")
    for one in batches:
        assert calibration.observe(**one) is None
    assert_same_qparams(calibration.finalize(), expected_qparams(model, STATIC, batches))
    with pytest.raises(ConfigurationError, match="is finalized"):
        calibration.observe(**batches[0])


@pytest.mark.slow
def test_changing_lengths_feed_the_same_statistics() -> None:
    model = plain_llama(num_hidden_layers=1)
    batches = [
        batch(model, i, rows, tokens)
        for i, (rows, tokens) in enumerate([(2, 6), (2, 9), (1, 5), (3, 12), (1, 1), (4, 7)])
    ]
    calibration = Calibration(model, STATIC, compiler="eager")
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        for one in batches:
            compiled(**one)
    assert_same_qparams(calibration.finalize(), expected_qparams(model, STATIC, batches))


@pytest.mark.slow
def test_at_most_two_compilations_for_changing_lengths() -> None:
    model = llama(num_hidden_layers=4)
    calibration = Calibration(model, STATIC, compiler="eager")
    for index, tokens in enumerate([6, 9, 5, 12, 7]):
        calibration.observe(**batch(model, index, tokens=tokens))
    assert calibration.graphs.compiler_calls <= 2 * 3


def test_graph_breaks_feed_the_same_statistics() -> None:
    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x).relu()

    model = Breaking()
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
    batches = [{"x": torch.randn(3, 4)} for _ in range(3)]
    expected = expected_qparams(model, recipe, batches)
    for way in ("compiled", "observe"):
        torch._dynamo.reset()
        calibration = Calibration(model, recipe, compiler="aot_eager")
        compiled = torch.compile(model, backend=calibration.backend)
        with torch.no_grad():
            for one in batches:
                run = compiled if way == "compiled" else calibration.observe
                run(**one)
        assert_same_qparams(calibration.finalize(), expected)
        with torch.no_grad():
            assert not torch.equal(compiled(**one), model(**one))


@pytest.mark.slow
def test_blocks_compiled_one_by_one_are_told_apart_by_their_weights() -> None:
    model = plain_llama(num_hidden_layers=3)
    ignore = ["lm_head", "re:.*layers.1.*"]
    recipe = Recipe.from_preset("W8A8_STATIC", ignore=ignore, inputs={"observer": "static_minmax"})
    batches = [batch(model, index) for index in range(2)]
    calibration = Calibration(model, recipe, compiler="aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=calibration.backend)
    with torch.no_grad():
        for one in batches:
            model(**one)
    found = calibration.finalize()
    assert not any("layers.1." in name for name in found)
    plain = plain_llama(num_hidden_layers=3)
    expected = expected_qparams(plain, STATIC, batches)
    kept = {name: q for name, q in expected.items() if "layers.1." not in name}
    assert_same_qparams(found, kept)
    with torch.no_grad():
        quantized = model(**batches[0]).logits
    assert not torch.equal(quantized, plain(**batches[0]).logits)


@pytest.mark.slow
def test_train_and_eval_and_gradients() -> None:
    model = llama(num_hidden_layers=1, attention_dropout=0.0)
    calibration = Calibration(model, STATIC, compiler="aot_eager")
    compiled = torch.compile(model, backend=calibration.backend)
    one = batch(model)
    compiled.train()
    compiled(**one).logits.sum().backward()
    gradient = model.model.layers[0].mlp.up_proj.weight.grad
    plain = llama(num_hidden_layers=1, attention_dropout=0.0)
    plain(**one).logits.sum().backward()
    torch.testing.assert_close(gradient, plain.model.layers[0].mlp.up_proj.weight.grad)
    compiled.eval()
    with torch.no_grad():
        compiled(**one)
    slot = calibration.statistics.plan.slots["model.layers.0.mlp.up_proj.input"]
    assert calibration.statistics.seen(slot) == 2


def test_inference_mode() -> None:
    model = plain_llama(num_hidden_layers=1)
    calibration = Calibration(model, STATIC, compiler="aot_eager")
    compiled = torch.compile(model, backend=calibration.backend)
    batches = [batch(model, index) for index in range(2)]
    with torch.inference_mode():
        for one in batches:
            compiled(**one)
    assert_same_qparams(calibration.finalize(), expected_qparams(model, STATIC, batches))


def test_autocast() -> None:
    model = plain_llama(num_hidden_layers=1)
    one = batch(model)
    calibration = Calibration(model, STATIC, compiler="aot_eager")
    compiled = torch.compile(model, backend=calibration.backend)
    inputs = Inputs(model, STATIC)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(**one).logits
        inputs.remove()
        assert torch.equal(compiled(**one).logits, expected)
    found = calibration.finalize()
    assert_same_qparams(found, {n: o.get_qparams() for n, o in inputs.observers.items()})


@pytest.mark.parametrize("count_padding", [False, True])
def test_padding_counts_only_if_asked_to(count_padding: bool) -> None:
    model = bert()
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
    one = batch(model)
    one["attention_mask"][0, 2:] = 0
    both = [expected_qparams(model, recipe, [one], count_padding=c) for c in (False, True)]
    differing = [n for n in both[0] if not torch.equal(both[0][n]["scale"], both[1][n]["scale"])]
    assert len(differing) > len(both[0]) / 2
    calibration = Calibration(model, recipe, compiler="aot_eager", count_padding=count_padding)
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        assert torch.equal(compiled(**one)[0], model(**one)[0])
    assert_same_qparams(calibration.finalize(), both[count_padding])


def test_nothing_matches() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    calibration = Calibration(model, Recipe.from_preset("FP8", ignore=["Linear"]), compiler="eager")
    compiled = torch.compile(model, backend=calibration.backend)
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
        calibration.observe(x)
        assert calibration.finalize() == {}
        assert torch.equal(compiled(x), model(x))


@pytest.mark.slow
def test_attention_and_the_cache() -> None:
    model = llama()
    recipe = Recipe.from_preset(
        "W8A8",
        ignore=["lm_head"],
        kv_cache={"num_bits": 8, "strategy": "attn_head", "observer": "static_minmax"},
    )
    calibration = Calibration(model, recipe, compiler="aot_eager")
    one = batch(model)
    calibration.observe(**one)
    seen = {}

    def hook(module, args, kwargs, output):
        seen["k"] = kwargs["past_key_values"].layers[0].keys

    handle = model.model.layers[0].self_attn.register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(**one)
    handle.remove()
    found = calibration.finalize()["model.layers.0.self_attn.k"]["scale"]
    expected = make_observer("k", recipe.config.kv_cache_scheme)(seen["k"]).get_qparams()["scale"]
    assert found.shape == (2, 1, 1)  # as many heads as are cached, not as many as ask
    assert torch.equal(found, expected)
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        assert not torch.equal(compiled(**one).logits, model(**one).logits)


@pytest.mark.slow
def test_importance_is_gathered_in_the_graph() -> None:
    model = plain_llama()
    recipe = Recipe.from_preset(
        "W4A16",
        ignore=["lm_head"],
        weights={"group_size": 16, "observer": "imatrix_mse", "observer_kwargs": {"strict": True}},
    )
    batches = [batch(model, index) for index in range(3)]
    calibration = Calibration(model, recipe, compiler="aot_eager")
    for one in batches:
        calibration.observe(**one)
    found = calibration.finalize()
    (scheme,) = recipe.config.config_groups.values()
    layer = model.model.layers[1].mlp.down_proj
    observer = make_observer("weight", scheme.weights)
    observer.attach(layer)
    with torch.no_grad():
        for one in batches:
            model(**one)
    observer.detach(layer)
    expected = observer(layer.weight.detach()).get_qparams()
    assert torch.equal(found["model.layers.1.mlp.down_proj.weight"]["scale"], expected["scale"])


def test_slots_without_data_are_named() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Router()
    calibration = Calibration(model, Recipe.from_preset("FP8"), compiler="aot_eager")
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        compiled(torch.randn(2, 4))
    with pytest.raises(StatisticsError, match=r"1 of 2 slots saw no data: unused\.input.*accept="):
        calibration.finalize()
    found = calibration.finalize(accept={"unobserved"})
    assert set(found) == {"used.input", "used.weight", "unused.weight"}


def test_statistics_that_are_not_finite_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    calibration = Calibration(model, Recipe.from_preset("FP8"), compiler="aot_eager")
    calibration.observe(torch.randn(2, 4))
    with pytest.raises(StatisticsError, match=r"2 slots.*0\.weight: .*1\.input: .*not_finite"):
        calibration.finalize()
    assert set(calibration.finalize(accept={"not_finite"})) == {"0.input", "1.weight"}


def test_unknown_problem_cannot_be_accepted() -> None:
    calibration = Calibration(plain_llama(), STATIC, compiler="eager")
    with pytest.raises(ConfigurationError, match=r"cannot accept everything; .*unobserved: "):
        calibration.finalize(accept={"everything"})


def test_fused_layers_share_a_global_scale() -> None:
    model = plain_llama()
    calibration = Calibration(model, Recipe.from_preset("NVFP4A16", ignore=["lm_head"]))
    found = calibration.finalize()
    for group in (("self_attn", "qkv"), ("mlp", None)):
        names = ["q_proj", "k_proj", "v_proj"] if group[1] else ["gate_proj", "up_proj"]
        scales = {
            float(found[f"model.layers.0.{group[0]}.{name}.weight"]["global_scale"])
            for name in names
        }
        assert len(scales) == 1


def test_mixed_fused_layers_are_named() -> None:
    model = plain_llama()
    recipe = Recipe.from_preset("NVFP4A16", ignore=["lm_head", "re:.*layers.0.*k_proj"])
    calibration = Calibration(model, recipe)
    with pytest.raises(
        StatisticsError, match=r"layers\.0\.self_attn\.\{q_proj: .*k_proj: not.*unfused"
    ):
        calibration.finalize()
    assert calibration.finalize(accept={"unfused"})


@pytest.mark.slow
def test_two_calibrations_do_not_meet() -> None:
    model = plain_llama()
    other = plain_llama(num_hidden_layers=1)
    first = Calibration(model, STATIC, compiler="eager")
    second = Calibration(model, Recipe.from_preset("FP8"), compiler="eager")
    third = Calibration(other, STATIC, compiler="eager")
    one = batch(model)
    a = torch.compile(model, backend=first.backend)
    b = torch.compile(model, backend=second.backend)
    with torch.no_grad():
        a(**one)
        b(**one)
        third.observe(**one)
    down = first.statistics.plan.slots["model.layers.0.mlp.down_proj.input"]
    assert [c.statistics.seen(down) for c in (first, second, third)] == [1, 1, 1]
    first.finalize()
    with torch.no_grad():
        assert not torch.equal(a(**one).logits, model(**one).logits)
        assert torch.equal(b(**one).logits, model(**one).logits)
    assert second.qparams is None


def test_a_dropped_calibration_frees_its_memory() -> None:
    model = plain_llama()
    calibration = Calibration(model, STATIC, compiler="aot_eager")
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        compiled(**batch(model))
    kept = [
        weakref.ref(calibration),
        weakref.ref(calibration.statistics),
        *map(weakref.ref, calibration.statistics._own.values()),
        *(
            weakref.ref(tensor)
            for state in calibration.statistics._own.values()
            for tensor in state.inputs().values()
        ),
    ]
    assert len(kept) > 4
    del calibration
    gc.collect()
    assert [ref for ref in kept if ref() is not None] == []
    with torch.no_grad(), pytest.raises(GraphError, match=r"calibration .* is gone; keep it"):
        compiled(**batch(model))


@pytest.mark.slow
def test_two_threads_with_two_calibrations() -> None:
    results = {}

    models = [plain_llama(), plain_llama()]  # seeded here: the generator is the process's

    def run(name: str, seed: int) -> None:
        model = models[int(name)]
        batches = [batch(model, seed + index) for index in range(2)]
        calibration = Calibration(model, STATIC, compiler="aot_eager")
        compiled = torch.compile(model, backend=calibration.backend)
        with torch.no_grad():
            for one in batches:
                compiled(**one)
        results[name] = (calibration.finalize(), batches)

    threads = [threading.Thread(target=run, args=(str(i), 10 * i)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found, batches in results.values():
        assert_same_qparams(found, expected_qparams(plain_llama(), STATIC, batches))
    assert len(results) == 2


@Observer.register("test_untraceable")
class Untraceable(Observer):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        limit = observed.abs().max().item()
        self.min_vals = torch.full((1,), -limit)
        self.max_vals = torch.full((1,), limit)


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_an_observer_that_cannot_be_traced_works_and_says_so_once(compiler: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "test_untraceable"})
    calibration = Calibration(model, recipe, compiler=compiler)
    batches = [{"input": torch.randn(2, 4)} for _ in range(2)]
    compiled = torch.compile(model, backend=calibration.backend)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("default")
        for one in batches:
            torch.testing.assert_close(compiled(**one), model(**one))
    said = [str(w.message) for w in caught if "cannot be traced" in str(w.message)]
    assert len(said) == 1
    assert "observer test_untraceable cannot be traced" in said[0]
    assert "DataDependent" in said[0]
    assert "test_untraceable runs outside the compiled graph" in calibration.explain()
    slots = calibration.statistics.plan.activation_slots()
    assert [calibration.statistics.seen(slot) for slot in slots] == [2, 2]
    found = calibration.finalize()
    assert torch.equal(
        found["0.input"]["scale"], expected_qparams(model, recipe, batches)["0.input"]["scale"]
    )


def test_without_sharing_there_is_an_observer_for_every_slot() -> None:
    model = plain_llama()
    passes = [p for p in PREPARE if p is not ShareObservers]
    calibration = Calibration(model, STATIC, compiler="eager", passes=passes)
    one = batch(model)
    calibration.observe(**one)
    q = calibration.statistics.plan.slots["model.layers.0.self_attn.q_proj.input"]
    assert calibration.statistics.shared_with(q) == (q,)
    assert_same_qparams(calibration.finalize(), expected_qparams(model, STATIC, [one]))


def test_passes_of_the_user_stand_in_every_phase() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) + self.k(x)

    model, x, counts = Two(), torch.randn(2, 4), []
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
    for passes in (PREPARE, [p for p in PREPARE if p is not ShareObservers]):
        calibration = Calibration(model, recipe, compiler="eager", passes=passes)
        calibration.observe(x)
        calibration.finalize()
        nodes = calibration.quantized_module(x).graph.nodes
        counts.append(sum(isinstance(node.target, QuantizeDequantize) for node in nodes))
    assert counts == [1, 2]


def test_public_members_are_what_a_user_needs() -> None:
    """Engine, evaluation and reports use `graphs`; a new member has to be wanted by users."""
    calibration = Calibration(nn.Linear(4, 4), Recipe.from_preset("W8A8_STATIC"))
    public = {name for name in dir(calibration) if not name.startswith("_")}
    assert public == {
        *("model", "recipe", "plan", "statistics", "equalization", "graphs", "show_progress"),
        *("from_statistics", "stored", "save", "explain"),
        *("backend", "observe", "needs_second_run", "equalize"),
        *("finalize", "qparams", "quantized_module"),
    }


def test_graphs_are_prepared_for_a_phase() -> None:
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
    calibration = Calibration(nn.Sequential(nn.Linear(4, 4)), recipe, compiler="eager")
    graphs, x = calibration.graphs, torch.randn(2, 4)

    def prepared() -> set[Phase]:
        return {key[0] for graph in graphs for key in graph.variants}

    calibration.observe(x)
    assert (graphs.phase, prepared()) == (Phase.OBSERVE, {Phase.OBSERVE})
    calibration.finalize()
    assert graphs.phase is Phase.QUANTIZE
    outputs = []
    with graphs.rerun() as rerun:
        for phase in (Phase.PLAIN, Phase.COMPARE, Phase.QUANTIZE):
            with rerun.running(phase):
                assert graphs.phase is phase
            outputs.append(rerun.outputs((x,), phase))
        assert prepared() == set(Phase) - {Phase.OBSERVE_EQUALIZED}
    plain, compared, quantized = outputs
    assert torch.equal(plain, compared)
    assert not torch.equal(plain, quantized)
    assert (graphs.phase, prepared()) == (Phase.QUANTIZE, {Phase.OBSERVE})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.fc = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.plain(x)).tanh()


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_rerun_computes_the_same_by_faster_products(blocks: int) -> None:
    """By oneDNN and on integer kernels, where the machine has them; two blocks share a graph."""
    model = nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(128, 128, bias=False))
    inputs = {"observer": "static_minmax"}
    recipe = Recipe.from_preset("W8A8_STATIC", targets=[r"re:.*fc"], inputs=inputs)
    calibration = Calibration(model, recipe, compiler="eager")
    graphs, x = calibration.graphs, torch.randn(8, 128)
    calibration.observe(x)
    calibration.finalize()
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        expected = {Phase.PLAIN: model(x), Phase.QUANTIZE: compiled(x)}
    used = {}
    with graphs.rerun() as rerun:
        for phase, output in expected.items():
            torch.testing.assert_close(rerun.outputs((x,), phase), output)
            used[phase] = {
                node.target
                for graph in graphs
                for key, variant in graph.variants.items()
                for node in variant.graph_module.graph.nodes
                if key[0] is phase and graph.backend is not graphs.backend
            }
    assert (fast_linear in used[Phase.PLAIN]) == onednn_is_faster()
    assert (integer_linear in used[Phase.QUANTIZE]) == (missing_kernels("cpu") is None)


def test_explain() -> None:
    model = plain_llama()
    calibration = Calibration(model, STATIC, compiler="eager")
    assert "no graph yet" in calibration.explain()
    calibration.observe(**batch(model))
    text = calibration.explain()
    assert "28 slots, phase: observe" in text
    row = next(
        line for line in text.splitlines() if line.startswith("model.layers.0.mlp.up_proj.input")
    )
    assert "static_minmax" in row
    assert "model.layers.0.mlp.gate_proj.input" in row
    assert "by InsertObservers" in text
    calibration.finalize()
    assert "28 slots, phase: quantize" in calibration.explain()


def test_autocast_inside_the_model() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.third(self.second(x))  # one reads float32, the other bfloat16
            return x.float()

    model = Inside()
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
    batches = [{"x": torch.randn(3, 8)} for _ in range(2)]
    calibration = Calibration(model, recipe, compiler="aot_eager")
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        for one in batches:
            assert torch.equal(compiled(**one), model(**one))
    found, expected = calibration.finalize(), expected_qparams(model, recipe, batches)
    assert expected["third.input"]["scale"].dtype == torch.bfloat16
    assert_same_qparams(found, expected)
    with torch.no_grad():
        assert not torch.equal(compiled(**one), model(**one))


def test_mixed_dtypes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    calibration = Calibration(model, Recipe.from_preset("FP8"), compiler="eager")
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        compiled(torch.randn(2, 4))
        model.to(torch.bfloat16)
        with pytest.raises(Exception, match="calibrate in one dtype"):
            compiled(torch.randn(2, 4, dtype=torch.bfloat16))


@Observer.register("test_mean_of_largest")
class MeanOfLargest(Observer):
    """Keeps the largest magnitude of every value in a list that it changes in place."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.largest: list[torch.Tensor] = []

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.largest.append(observed.abs().amax())
        self.max_vals = torch.stack(self.largest).mean().reshape(1)
        self.min_vals = -self.max_vals


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_state_in_a_list_is_not_lost(compiler: str, tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "test_mean_of_largest"})
    generator = torch.Generator().manual_seed(0)
    batches = [{"input": torch.randn(2, 4, generator=generator) * 4**i} for i in range(3)]
    calibration = Calibration(model, recipe, compiler=compiler)
    with pytest.warns(UserWarning, match=r"test_mean_of_largest cannot be traced.* in largest"):
        calibration.observe(**batches[0])
    for one in batches[1:]:
        calibration.observe(**one)
    expected = expected_qparams(model, recipe, batches)
    stored = calibration.stored()
    assert_same_qparams(calibration.finalize(), expected)
    with pytest.raises(StatisticsError, match="outside of tensors, and so not on disk"):
        Calibration.from_statistics(model, recipe, stored)


def test_a_calibration_keeps_its_model_and_lets_go_of_it() -> None:
    recipe = Recipe.from_preset("FP8")
    calibration = Calibration(nn.Sequential(nn.Linear(4, 4)), recipe, compiler="eager")
    gc.collect()
    calibration.observe(torch.randn(2, 4))
    assert set(calibration.finalize()) == {"0.input", "0.weight"}
    model = weakref.ref(calibration.model)
    weight = weakref.ref(calibration.model[0].weight)
    del calibration
    gc.collect()
    assert model() is None
    assert weight() is None


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.up(x))[None]
        p = 0.1 if self.training else 0.0
        return self.down(F.scaled_dot_product_attention(x, x, x, dropout_p=p))


def test_dropout_that_is_active_while_values_are_observed_is_told_once() -> None:
    model = Dropping()
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
    calibration = Calibration(model, recipe, compiler="eager")
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"^drop, .*dropout is active"):
            compiled(torch.randn(4, 8))
        compiled(torch.randn(5, 8))  # a warning would be an error
        calibration.observe(torch.randn(4, 8))  # runs in evaluation mode, so it need not warn
        compiled(torch.randn(4, 8))
