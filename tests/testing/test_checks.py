"""The kit itself: what it says, what it leaves out, and how long it tries."""

import subprocess
import sys

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from inlay.errors import ConfigurationError
from inlay.observers import Observer, flatten_for_calibration
from inlay.recipe import Plan
from inlay.testing import (
    Bounds,
    BrokenLawError,
    ObserverSubject,
    check_observer,
    checks_of,
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


def test_a_case_is_shown_as_code_that_observes_it() -> None:
    args = QuantizationArgs(strategy="group", group_size=2, observer="static_minmax")
    value = torch.tensor([[0.1, torch.nan, -torch.inf, 4.0]])
    scope: dict = {"torch": torch, "Observer": Observer, "QuantizationArgs": QuantizationArgs}
    exec("\n".join(map(str.strip, str(ObserverCase("input", args, (value,))).splitlines())), scope)
    assert scope["observer"].args.group_size == 2
    assert scope["observer"].max_vals.isnan().tolist() == [True, False]


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
