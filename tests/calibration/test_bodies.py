"""Blocks that are traced and prepared once: the same numbers as traced one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import batch, bert, gemma3, llama, mixtral, qwen3, vit
from torch import nn

from inlay import Calibration, Recipe
from inlay.calibration.tracing import running
from inlay.evaluation.compare import compare
from inlay.nodes.call_body import CallBody

pytestmark = pytest.mark.slow

STATIC = {"inputs": {"observer": "static_minmax"}}
RECIPES = {
    "static": lambda **more: Recipe.from_preset("W8A8_STATIC", **STATIC, **more),
    "average": lambda **more: Recipe.from_preset("W8A8_STATIC", **more),
    "importance": lambda **more: Recipe.from_preset(
        "W4A16", weights={"observer": "imatrix_mse", "group_size": 16}, **more
    ),
    "cache": lambda **more: Recipe.from_preset(
        "FP8", kv_cache={"num_bits": 8, "type": "float", "strategy": "tensor"}, **more
    ),
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have blocks traced one by one, as if torch had no nested_compile_region."""

    def switch() -> None:
        torch._dynamo.reset()
        monkeypatch.setattr(running, "_with_blocks_apart", lambda model, observing: [])

    return switch


def padded(model: nn.Module, index: int) -> dict[str, Any]:
    one = batch(model, index)
    if "attention_mask" in one:
        one["attention_mask"][0, 4:] = 0
    return one


def calibrated(model: nn.Module, recipe: Recipe, batches: int = 2) -> Calibration:
    calibration = Calibration(model, recipe, compiler="eager")
    for index in range(batches):
        calibration.observe(**padded(model, index))
    return calibration


def called_bodies(calibration: Calibration) -> list[CallBody]:
    return [
        node.target
        for graph in calibration.graphs
        for variant in graph.variants.values()
        for node in variant.graph_module.graph.nodes
        if isinstance(node.target, CallBody)
    ]


def assert_equal_qparams(one: Calibration, other: Calibration) -> None:
    # Of modules that share a weight, one stands for all.
    left, right = (each.finalize(accept=["unobserved"]) for each in (one, other))
    assert any("input" in name or ".k" in name for name in left) or not list(
        one.plan.activation_slots()
    )
    assert left.keys() == right.keys()
    for name, qparams in left.items():
        for key, value in qparams.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, right[name][key]), (name, key)


def head_of(model: nn.Module) -> list[str]:
    return ["lm_head"] if hasattr(model, "lm_head") else []


# Every recipe with several families, and every family with one recipe at least.
PAIRS = [
    *((llama, kind) for kind in RECIPES),
    (qwen3, "cache"),
    (gemma3, "cache"),
    (mixtral, "importance"),
    (bert, "importance"),
    (vit, "static"),
]


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_same_numbers_as_traced_one_by_one(family: Any, kind: str, one_by_one: Any) -> None:
    model = family(num_hidden_layers=3)
    recipe = RECIPES[kind](ignore=head_of(model))
    together = calibrated(model, recipe)
    if family in (llama, qwen3, mixtral):
        assert len(together.graphs) == 1  # a block; what is around it runs as it is
    if family is vit:
        assert len(called_bodies(together)) == 3
    one_by_one()
    apart = calibrated(model, recipe)
    assert called_bodies(apart) == []
    assert_equal_qparams(together, apart)


@pytest.mark.parametrize("kind", ["static", "cache"])
def test_blocks_that_are_quantized_unlike(kind: str, one_by_one: Any) -> None:
    """The body was traced in a block that the recipe leaves alone, or treats in another way."""
    model = llama(num_hidden_layers=4)
    recipe = RECIPES[kind](ignore=["lm_head", "re:.*layers\\.0\\..*", "re:.*layers\\.2\\.mlp.*"])
    together = calibrated(model, recipe)
    assert all(graph.is_body for graph in together.graphs)
    one_by_one()
    assert_equal_qparams(together, calibrated(model, recipe))


def test_blocks_after_the_last_that_is_observed_do_not_run() -> None:
    model = llama(num_hidden_layers=4)
    recipe = RECIPES["static"](ignore=["lm_head", "re:.*layers\\.[23]\\..*"])
    assert len(called_bodies(calibrated(model, recipe))) == 2


def test_compared_and_quantized_alike(one_by_one: Any) -> None:
    model = llama(num_hidden_layers=3)
    calibration = calibrated(model, RECIPES["static"](ignore=["lm_head"]))
    calibration.finalize()
    held_out = [padded(model, 5), padded(model, 6)]
    together = compare(model, calibration, held_out)
    one_by_one()
    apart = compare(model, calibration, held_out)
    for one, other in zip(together.changes, apart.changes, strict=True):
        for number in ("value", "before", "after"):
            left, right = getattr(one, number), getattr(other, number)
            assert left == right or left == pytest.approx(right, rel=1e-5)
    assert [layer.module for layer in together.layers] == [layer.module for layer in apart.layers]
    for one, other in zip(together.layers, apart.layers, strict=True):
        assert one.sqnr_db == pytest.approx(other.sqnr_db, rel=1e-5)


def test_nothing_stays_on_the_class() -> None:
    model = llama(num_hidden_layers=3)
    cls = type(model.model.layers[0])
    forward, names = cls.forward, set(vars(cls.forward))
    calibrated(model, RECIPES["static"](ignore=["lm_head"]))
    with pytest.raises(Exception, match=r"shape|size|str"):
        Calibration(model, RECIPES["static"]()).observe(input_ids="no tensor")
    assert cls.forward is forward
    assert set(vars(forward)) == names
    assert all("forward" not in vars(layer) for layer in model.model.layers)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc(x).relu()


class InPlace(Block):
    """Writes to what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(self.fc(x).relu())


class Broken(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Derived(Block):
    """Has no `forward` of its own."""


class Indexed(Block):
    """Computes something else at each place in the row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (self.index + 1))


class Keeping(Block):
    """Keeps something of what it runs on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x.sum()
        return super().forward(x)


class Growing(Block):
    """Returns another shape at its last place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.index < 2 else torch.cat([x, x]))


class Late(Block):
    """Breaks the graph at its last place, when others have observed already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.index == 2:
            torch._dynamo.graph_break()
        return super().forward(x)


class Stack(nn.Module):
    def __init__(self, block: type[Block], *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        for index, one in enumerate(self.blocks):
            one.index = index
        if tied:
            self.blocks[2].fc.weight = self.blocks[0].fc.weight
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "block", [Block, Derived, InPlace, Broken, Indexed, Keeping, Growing, Late]
)
def test_blocks_of_all_sorts(block: type[Block], tied: bool, one_by_one: Any) -> None:
    model = Stack(block, tied=tied)
    x = [torch.randn(2, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    def run() -> Calibration:
        calibration = Calibration(model, RECIPES["static"](), compiler="eager")
        for value in x:
            calibration.observe(value.clone())
        return calibration

    together = run()
    assert len(called_bodies(together)) == (3 if block in (Block, Derived, Indexed) else 0)
    kept = [set(vars(one)) - set(vars(block())) for one in model.blocks]
    one_by_one()
    apart = run()
    assert_equal_qparams(together, apart)
    for index in range(3):
        assert together.statistics.seen(together.plan.slots[f"blocks.{index}.fc.input"]) == 3
    # Nothing but what the block itself keeps, when it is no node of a graph: of the last batch.
    assert kept == [{"index"} | ({"kept"} if block is Keeping else set())] * 3
    if block is Keeping:
        assert torch.equal(model.blocks[0].kept, x[-1].sum())


class LateForSome(Block):
    """Breaks the graph at its last place, for long batches only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.index == 2 and x.shape[0] > 3:
            torch._dynamo.graph_break()
        return super().forward(x)


def test_a_batch_is_not_counted_twice_by_blocks_before_one_that_breaks() -> None:
    """What was observed of it is forgotten, if the model was traced anew for it."""
    model = Stack(LateForSome)
    calibration = Calibration(model, RECIPES["static"](), compiler="eager")
    slot = calibration.plan.slots["blocks.0.fc.input"]
    for tokens in (2, 5, 6):
        calibration.observe(torch.randn(tokens, 4))
    assert calibration.statistics.seen(slot) == 3
    assert calibration.statistics.snapshot()[slot.name].tokens == 2 + 5 + 6


def test_a_batch_that_a_block_cannot_trace_is_observed_anew() -> None:
    """Other blocks have observed it by then, and the graph around the blocks has run before."""
    model = Stack(LateForSome)
    calibration = Calibration(model, RECIPES["static"](), compiler="eager")
    for tokens in (2, 3, 5):
        calibration.observe(torch.randn(tokens, 4))
    for name, found in calibration.statistics.snapshot().items():
        if name.startswith("blocks"):
            assert (found.seen, found.tokens) == (3, 2 + 3 + 5), name
    lines = calibration.graphs.tracing
    assert (
        lines[0] == "tracing strategy: several graphs of the model, with graph breaks between them"
    )
    assert [line.split(":")[0] for line in lines[1:]] == [
        "gave up one graph for all blocks, one graph around them",
        "gave up one graph of the whole model",
    ]


@pytest.mark.parametrize("lengths", [[3, 3, 3], [3, 5, 4, 7]])
def test_one_trace_of_a_block_for_all_lengths(lengths: list[int]) -> None:
    model = Stack(Block)
    calibration = Calibration(model, RECIPES["static"](), compiler="eager")
    for length in lengths:
        x = torch.randn(length, 4)
        if len(set(lengths)) > 1:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        calibration.observe(x)
    assert len(calibration.graphs) == 2  # the model around its blocks, and the block


class Called(nn.Module):
    """Calls its blocks with all that a graph can pass on, and takes more than one result."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(
            self, x: torch.Tensor, pair: Any, *, scale: float = 1.0, mask: Any = None, flag: bool
        ) -> tuple[torch.Tensor, None, list[torch.Tensor]]:
            x = self.fc(x * pair[0] + pair[1]["shift"]) * scale
            return (x if flag or mask is None else x * mask), None, [x.mean()]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, means = x * 1, []
        for block in self.blocks:
            x, _, (mean,) = block(x, (x + 1, {"shift": x - 1}), scale=0.5, flag=len(means) > 0)
            means.append(mean)
        return torch.stack(means) + x.sum()


@pytest.mark.parametrize("around", ["eager", "traced"])
def test_blocks_called_with_all_sorts(around: str, one_by_one: Any, monkeypatch: Any) -> None:
    model, x = Called(), torch.randn(2, 4)
    if around == "traced":
        monkeypatch.setattr(running, "_observes_around", lambda model, plan: True)

    def run() -> Calibration:
        calibration = Calibration(model, RECIPES["static"](), compiler="eager")
        calibration.observe(x)
        return calibration

    together = run()
    assert len(called_bodies(together)) == (3 if around == "traced" else 0)
    assert "gave up" not in together.explain()
    one_by_one()
    assert_equal_qparams(together, run())


def test_another_model_of_the_class_meanwhile(one_by_one: Any) -> None:
    """Blocks of the class that are not those of the model run as they are."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Stack(Block), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(self.other(x))

    model, x = Two(), torch.randn(2, 4)
    together = Calibration(model, RECIPES["static"](), compiler="eager")
    together.observe(x)
    one_by_one()
    apart = Calibration(model, RECIPES["static"](), compiler="eager")
    apart.observe(x)
    assert_equal_qparams(together, apart)


def test_a_nested_compile_region_of_the_users_own() -> None:
    """A model that marks its block itself, compiled by the backend."""
    model = Stack(Block)
    marked = torch.compiler.nested_compile_region(lambda block, x: x + block.fc(x).relu())

    def forward(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = marked(block, x)
        return model.last(x)

    calibration = Calibration(model, RECIPES["static"](), compiler="aot_eager")
    compiled = torch.compile(forward, backend=calibration.backend, fullgraph=True)
    x = torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), forward(x))
        plain = Calibration(model, RECIPES["static"](), compiler="eager")
        plain.observe(x * 1)
        calibration.finalize()
        quantized = compiled(x)
    assert not torch.equal(quantized, forward(x))
    for name, qparams in plain.finalize().items():
        torch.testing.assert_close(qparams["scale"], calibration.qparams[name]["scale"])


class CallsTwice(nn.Module):
    """A block whose call is more than its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x) + 3 * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).tanh()


@pytest.mark.parametrize("what", ["call", "hook", "hook before"])
def test_what_a_call_of_a_block_does_besides_counts(what: str) -> None:
    """Dynamo is shown the call as a whole only where it runs `forward` and nothing else."""

    class Plain(CallsTwice):
        __call__ = nn.Module.__call__

    torch.manual_seed(0)
    cls = CallsTwice if what == "call" else Plain
    model = nn.Sequential(*(cls() for _ in range(3))).eval()
    if what == "hook":
        model[1].register_forward_hook(lambda module, args, out: out * 5)
    elif what == "hook before":
        model[1].register_forward_pre_hook(lambda module, args: (args[0] * 5,))
    x, seen = torch.randn(4, 8), []
    calibration = Calibration(model, RECIPES["static"](), compiler="eager")
    calibration.observe(x)
    for block in model:
        block.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(x)
    for index, value in enumerate(seen):
        found = calibration.statistics.snapshot()[f"{index}.fc.input"].tensors
        assert torch.equal(found["max_vals"].reshape(()), value.max())
        assert torch.equal(found["min_vals"].reshape(()), value.min())
