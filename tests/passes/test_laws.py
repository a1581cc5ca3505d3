"""Laws of passes over generated graphs, friendly and unfriendly ones."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from graphs import Functional, linear, observed
from hypothesis import example, given
from profiles import count, examples
from specification import assert_eager_statistics, quantized_copy
from torch import nn
from torch.fx import GraphModule

from inlay import Calibration, Recipe
from inlay.graph import MAIN, PaddingMask, observes
from inlay.nodes import kernel_support
from inlay.padding.layouts import Layouts
from inlay.passes import (
    Annotate,
    CompareLayers,
    FindEqualizable,
    FoldQParams,
    InlineCalls,
    InsertObservers,
    LeaveOutPadding,
    LowerToKernels,
    OutlineObservers,
    OutlineRepeats,
    Pass,
    Pipeline,
    PruneUnobserved,
    RemoveObservers,
    ShareObservers,
    SpeedUpProducts,
    UseEqualized,
)
from inlay.recipe import Plan
from inlay.testing import Check, PassSubject, checks_of, parametrize_with_checks
from inlay.testing.graphs import STATIC, GraphCase, graphs, qparams_of, trace
from inlay.testing.modules import GeneratedModule, example_inputs, modules

pytestmark = pytest.mark.slow

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
(SCHEME,) = STATIC.config.config_groups.values()
INPUTS = Recipe(
    QuantizationConfig(
        config_groups={
            "group_0": QuantizationScheme(
                targets=["Linear"], input_activations=SCHEME.input_activations
            )
        }
    )
)
EQUALIZED = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"}, equalize=0.5)
MINMAX = OutlineObservers(observers=frozenset({"static_minmax"}))
laws = examples(15)


def one_layer() -> nn.Module:
    return Functional(lambda self, x: self.fc(x), fc=linear())


def two_layers() -> nn.Module:
    return Functional(lambda self, x: self.o(self.q(x)), q=linear(), o=linear(seed=1))


def two_readers() -> nn.Module:
    return Functional(lambda self, x: (self.q(x), self.k(x)), q=linear(), k=linear(seed=1))


def blocks() -> nn.Module:
    stack = nn.Sequential(*(nn.Sequential(linear(seed=i), nn.ReLU()) for i in range(2)))
    return Functional(lambda self, x: self.layers(x), layers=stack)


KEPT: list[nn.Module] = []  # graphs know the weights of their model by weak references


def shown(model: nn.Module, recipe: Recipe, *steps: type[Pass]) -> GraphModule:
    """The graph of a model, after these passes."""
    KEPT.append(model)
    traced = trace("dynamo", model, X)
    return Pipeline.of(steps, plan=Plan(model, recipe))(traced).graph_module


ONE = one_layer()
PLAN = Plan(ONE, STATIC)
QPARAMS = qparams_of(PLAN, ONE)
LAYOUTS = Layouts({"fc.input": PaddingMask(MAIN, ("rows",))}, frozenset({MAIN}))
INSERTED = (InlineCalls, Annotate, InsertObservers)
SHARED = (*INSERTED, ShareObservers)

# Every pass on generated graphs, and those whose fields are known on the graph in their docstring.
ON_GENERATED = [
    PassSubject(InlineCalls()),
    PassSubject(Annotate),
    PassSubject(InsertObservers(), after=(InlineCalls, Annotate)),
    PassSubject(ShareObservers(), after=INSERTED),
    PassSubject(LeaveOutPadding, after=SHARED),
    PassSubject(PruneUnobserved(), after=SHARED),
    PassSubject(OutlineRepeats(), after=SHARED),
    PassSubject(MINMAX, after=SHARED),
    PassSubject(FoldQParams, after=SHARED),
    PassSubject(RemoveObservers(), after=SHARED),
    PassSubject(LowerToKernels, after=(*SHARED, FoldQParams, RemoveObservers)),
    PassSubject(CompareLayers, after=(InlineCalls, Annotate)),
    PassSubject(FindEqualizable, after=(InlineCalls, Annotate), recipe=EQUALIZED),
    PassSubject(UseEqualized, after=SHARED),
    # It rounds otherwise, which moves what is quantized: it runs on graphs that observe alone.
    PassSubject(SpeedUpProducts(smallest=1), after=(*SHARED, PruneUnobserved), tolerance=1e-5),
]


def documented() -> list[PassSubject]:
    return [
        PassSubject(Annotate(plan=PLAN), example=shown(ONE, STATIC)),
        PassSubject(InsertObservers(), example=shown(ONE, STATIC, Annotate)),
        PassSubject(
            ShareObservers(), example=shown(two_readers(), INPUTS, Annotate, InsertObservers)
        ),
        PassSubject(
            LeaveOutPadding(layouts=LAYOUTS),
            example=shown(one_layer(), INPUTS, Annotate, InsertObservers),
        ),
        PassSubject(
            PruneUnobserved(), example=shown(one_layer(), INPUTS, Annotate, InsertObservers)
        ),
        PassSubject(OutlineRepeats(), example=shown(blocks(), STATIC)),
        PassSubject(MINMAX, example=shown(two_layers(), INPUTS, Annotate, InsertObservers)),
        PassSubject(
            FoldQParams(qparams=QPARAMS), example=shown(ONE, STATIC, Annotate, InsertObservers)
        ),
        PassSubject(RemoveObservers(), example=shown(ONE, STATIC, Annotate, InsertObservers)),
        PassSubject(
            LowerToKernels(qparams=QPARAMS),
            example=Pipeline((FoldQParams(qparams=QPARAMS), RemoveObservers()))(
                shown(ONE, STATIC, Annotate, InsertObservers)
            ).graph_module,
        ),
        PassSubject(
            CompareLayers(plan=Plan(ONE, STATIC), qparams=QPARAMS),
            example=shown(ONE, STATIC, Annotate),
        ),
        PassSubject(SpeedUpProducts(smallest=1), example=shown(ONE, STATIC)),
    ]


@pytest.fixture(autouse=True)
def with_small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compute small layers too; they pay for large ones only."""
    monkeypatch.setattr(kernel_support, "SMALLEST", {})


@pytest.mark.hypothesis
@parametrize_with_checks(ON_GENERATED, examples=count(12))
def test_passes_keep_every_law(check: Check) -> None:
    check()


def test_docstrings_are_what_passes_do() -> None:
    for subject in documented():
        (check,) = (
            check
            for check in checks_of(subject)
            if check.law.name == "the_docstring_is_what_it_does"
        )
        assert check.reason_not is None, subject
        check()


@laws
@given(modules())
def test_observers_never_change_outputs_and_count_what_eager_ones_count(model: nn.Module) -> None:
    torch._dynamo.reset()
    calibration = Calibration(model, STATIC, compiler="aot_eager")
    compiled = torch.compile(model, backend=calibration.backend)
    batches = [example_inputs(seed) for seed in range(2)]
    with torch.no_grad():
        for one in batches:
            assert torch.equal(compiled(*one), model(*one))
    assert_eager_statistics(calibration, model, batches)


@laws
@given(graphs())
def test_insert_and_remove_give_back_the_graph(case: GraphCase) -> None:
    removed = RemoveObservers()(observed(case.graph_module, case.plan)).graph_module
    assert removed.code == case.graph_module.code


@laws
@example(GeneratedModule([("dropout", 0)], training=["", "dropout"]))
@given(modules(training=True))
def test_a_finalized_model_is_the_quantized_one(model: nn.Module) -> None:
    """In whatever mode its modules are: it is observed in evaluation mode, which changes none."""
    torch._dynamo.reset()
    modes = [module.training for module in model.modules()]
    calibration = Calibration(model, STATIC, compiler="eager")
    with torch.no_grad():
        calibration.observe(*example_inputs())
        qparams = calibration.finalize(accept=["unobserved"])
        assert [module.training for module in model.modules()] == modes
        model.eval()
        assert_eager_statistics(calibration, model, [example_inputs()])
        found = torch.compile(model, backend=calibration.backend)(*example_inputs())
        assert torch.equal(found, quantized_copy(model, qparams, STATIC)(*example_inputs()))


@laws
@given(modules())
def test_sharing_loses_no_slot(model: nn.Module) -> None:
    gm = trace("export", model, *example_inputs())
    inserted = Pipeline((Annotate(plan=Plan(model, STATIC)), InsertObservers()))(gm).graph_module
    shared = ShareObservers()(inserted).graph_module

    def slots(graph_module) -> set[str]:
        return {s.name for node in graph_module.graph.nodes for s in observes(node)}

    assert slots(shared) == slots(inserted)
