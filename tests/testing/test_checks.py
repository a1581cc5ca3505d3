"""The kit itself: what it says, what it leaves out, and how long it tries."""

import subprocess
import sys
import textwrap

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from torch.fx import GraphModule

from inlay.errors import ConfigurationError, GraphError
from inlay.graph import Pass, PassResult, copy
from inlay.observers import Observer, flatten_for_calibration
from inlay.recipe import Plan
from inlay.statistics.functional import tensors_of
from inlay.testing import (
    Bounds,
    BrokenLawError,
    GraphCase,
    ObserverSubject,
    check_observer,
    check_pass,
    checks_of,
    graphs,
    modules,
    parametrize_with_checks,
    quantization_args,
    recipes,
    values,
)
from inlay.testing.law import law, require, require_holds
from inlay.testing.observer_cases import ObserverCase, tensor_code
from inlay.testing.strategies import tensors


@Observer.register("test_unregistered_later")
class Registered(Observer):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.min_vals, self.max_vals = observed.amin((0, -1)), observed.amax((0, -1))


class Unregistered(Registered):
    pass


def test_an_observer_may_be_given_by_its_class() -> None:
    assert ObserverSubject.of(Registered).name == "test_unregistered_later"
    with pytest.raises(ConfigurationError, match=r"decorate it with @Observer\.register"):
        check_observer(Unregistered)
    with pytest.raises(ConfigurationError, match="no observer 'minmaxx'"):
        check_observer("minmaxx")


def test_settings_that_are_wrong_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"refuses every format.*averaging_constant"):
        check_observer("minmax", observer_kwargs={"averaging_constant": 7})


def test_laws_that_do_not_apply_say_why() -> None:
    reasons = {check.law.name: check.reason_not for check in checks_of("memoryless_minmax")}
    assert reasons["ranks_merge_to_one_process"] is not None
    assert "those of the last value" in reasons["ranks_merge_to_one_process"]
    assert reasons["padding_is_left_out"] is None
    reasons = {check.law.name: check.text for check in checks_of(Registered)}
    assert "update_statistics_from_valid" in reasons["padding_is_left_out"]


def test_only_formats_that_the_observer_takes_are_tried() -> None:
    strategies = {args.strategy for _, args in ObserverSubject.of("histogram").accepted}
    assert strategies == {"tensor", "attn_head"}


def test_one_test_for_each_law() -> None:
    mark = parametrize_with_checks(["static_minmax", Registered]).args  # type: ignore[attr-defined]
    ids = [str(check) for check in mark[1]]
    assert "static_minmax-ranks_merge_to_one_process" in ids
    assert "test_unregistered_later-get_qparams_changes_nothing" in ids
    assert "test_unregistered_later-ranks_merge_to_one_process" not in ids
    assert len(set(ids)) == len(ids)


def counted(subject: list[int], bounds: Bounds, fails_at: int | None = None) -> None:
    @law(lambda _: st.integers(0, 1000))
    def counts(subject: list[int], case: int) -> None:
        """Numbers are small."""
        subject.append(case)
        require(fails_at is None or case < fails_at, f"{case} is too large")

    require_holds(counts, subject, bounds)


def test_a_call_bounds_examples_and_time() -> None:
    seen: list[int] = []
    counted(seen, Bounds(examples=7))
    assert len(seen) == 7
    seen.clear()
    counted(seen, Bounds(examples=50, seconds=-1))  # over before it starts
    assert len(seen) == 1


def test_the_simplest_case_is_shown() -> None:
    with pytest.raises(BrokenLawError) as error:
        counted([], Bounds(examples=200), fails_at=10)
    assert "breaks counts: 10 is too large" in str(error.value)
    assert "The law: Numbers are small." in str(error.value)
    assert str(error.value).endswith("To reproduce:\n10")


@given(tensors(), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_a_tensor_is_shown_as_code_that_makes_it(value: torch.Tensor, dtype: torch.dtype) -> None:
    value = (value.clamp(-1e6, 1e6) if dtype == torch.int64 else value).to(dtype)
    again = eval(tensor_code(value))
    assert again.dtype == dtype
    assert torch.equal(again, value)


def run(shown: str) -> dict:
    """The variables of code that a message shows."""
    scope: dict = {}
    exec(textwrap.dedent(shown), scope)
    return scope


@examples(20)
@given(st.data())
def test_a_case_is_shown_as_code_that_observes_it(data) -> None:
    name = data.draw(st.sampled_from(["static_minmax", "minmax", "imatrix_mse"]))
    subject = ObserverSubject.of(name, {"averaging_constant": 0.5} if name == "minmax" else {})
    case = data.draw(subject.several())
    found, expected = run(str(case))["observer"], case.observer(case.values)
    assert found.args.model_copy(update={"observer": name}) == expected.args
    tensors = tensors_of(expected)
    assert tensors_of(found).keys() == tensors.keys()
    for key, tensor in tensors_of(found).items():
        assert torch.equal(tensor, tensors[key]), key


def test_numbers_that_are_none_are_shown_too() -> None:
    args = QuantizationArgs(strategy="group", group_size=2, observer="static_minmax")
    value = torch.tensor([[0.1, torch.nan, -torch.inf, 4.0]])
    observer = run(str(ObserverCase("input", args, (value,))))["observer"]
    assert observer.max_vals.isnan().tolist() == [True, False]


@examples(6)
@given(graphs())
def test_a_graph_is_shown_as_code_that_traces_it(case: GraphCase) -> None:
    assert run(str(case))["graph_module"].code == case.graph_module.code


@Observer.register("test_shifts")
class Shifts(Registered):
    """Wrong if a value has more than one group."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        low, high = observed.amin((0, -1)), observed.amax((0, -1))
        self.min_vals, self.max_vals = low, high.roll(1)


def test_what_the_author_of_an_observer_reads() -> None:
    """The simplest case, as lines to paste, and nothing of how it was found."""
    with pytest.raises(BrokenLawError) as error:
        check_observer(Shifts, examples=60)
    message = str(error.value)
    assert message.startswith("test_shifts breaks ")
    assert len(message.splitlines()) < 12
    assert not getattr(error.value, "__notes__", [])
    observer = run(message.partition("To reproduce:\n")[2])["observer"]
    assert isinstance(observer, Shifts)
    assert observer.min_vals.numel() <= 4


class Forgetful(Pass):
    """Says that it has changed nothing."""

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        found = [node for node in gm.graph.nodes if node.name.startswith("relu")]
        for node in found:
            node.meta["seen"] = True
        return PassResult(gm, False)


def test_what_the_author_of_a_pass_reads() -> None:
    with pytest.raises(BrokenLawError) as error:
        check_pass(Forgetful(), examples=100)
    message = str(error.value)
    assert message.startswith("Forgetful breaks modified_is_honest: it says that it modified")
    assert not getattr(error.value, "__notes__", [])
    scope = run(message.partition("To reproduce:\n")[2])
    assert len(scope["model"].steps) == 1


class Choosy(Forgetful):
    """Takes no graph that anybody makes up."""

    def requires(self, gm: GraphModule) -> None:
        raise GraphError("it has no convolution of three dimensions")


def test_a_pass_that_refuses_all_graphs_is_told_to_be_given_some() -> None:
    with pytest.raises(ConfigurationError, match=r"Choosy refuses every case .* given `graphs`"):
        check_pass(Choosy(), examples=8)


@given(st.data())
def test_values_fit_the_arguments_they_are_drawn_for(data) -> None:
    base_name = data.draw(st.sampled_from(["weight", "input", "output", "q", "k", "v"]))
    args = data.draw(quantization_args(base_name))
    flatten_for_calibration(data.draw(values(args, base_name)), base_name, args)


@examples(10)
@given(st.data())
def test_recipes_fit_the_modules_they_are_drawn_for(data) -> None:
    module = data.draw(modules())
    plan = Plan(module, data.draw(recipes(module)))
    assert plan.slots


def test_without_hypothesis_it_says_what_to_install() -> None:
    code = (
        "import sys, inlay; assert 'hypothesis' not in sys.modules\n"
        "sys.modules['hypothesis'] = None\n"
        "import inlay.testing"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'inlay[testing]'" in done.stderr
