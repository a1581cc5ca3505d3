"""From attached observers to a recipe of Inlay."""

import re
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given
from hypothesis import strategies as st
from llmcompressor.observers import Observer as PeerObserver
from torch import nn

from inlay.llmcompressor.recipe import attached_observers, recipe_of, targets_of
from inlay.recipe import Plan

WORDS = ["model", "layers", "0", "1", "23", "q_proj", "w1", "w.2"]
NAMES = st.sets(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(".".join), min_size=1)


@given(st.data())
def test_targets_match_what_is_wanted_and_nothing_else(data: Any) -> None:
    everything = data.draw(NAMES)
    wanted = data.draw(st.sets(st.sampled_from(sorted(everything))))
    targets = targets_of(wanted, everything)
    patterns = [re.compile(target.removeprefix("re:")) for target in targets]
    matched = {n for n in everything if any(pattern.match(n) for pattern in patterns)}
    assert matched == wanted
    assert len(targets) <= len(wanted)


def test_a_target_stands_for_all_experts_of_all_layers() -> None:
    names = [
        f"layers.{i}.experts.{j}.{n}" for i in range(9) for j in range(12) for n in ("w1", "w2")
    ]
    first = [name for name in names if name.endswith("w1")]
    assert targets_of(first, names) == ["re:^layers[.][0-9]+[.]experts[.][0-9]+[.]w1$"]
    assert len(targets_of(first[1:], names)) == len(first) - 1


def observed(**fields: Any) -> PeerObserver:
    args = QuantizationArgs(**{"num_bits": 8, **fields})
    return PeerObserver.load_from_registry(args.observer, base_name="input", args=args)


def test_modules_with_equal_observers_are_one_group() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    kinds = ["minmax", "minmax", "mse", None]
    for module, kind in zip(model, kinds, strict=True):
        if kind is not None:
            module.input_observer = observed(strategy="tensor", observer=kind)
    recipe = recipe_of(model, attached_observers(model))
    assert len(recipe.config.config_groups) == 2
    slots = Plan(model, recipe).slots
    assert {name: slot.observer for name, slot in slots.items()} == {
        "0.input": "minmax",
        "1.input": "minmax",
        "2.input": "mse",
    }


def test_settings_are_those_of_the_observer_and_not_of_the_recipe() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    args = QuantizationArgs(num_bits=8, strategy="tensor", observer="minmax")
    model[0].input_observer = PeerObserver.load_from_registry(
        "minmax", base_name="input", args=args, averaging_constant=0.5
    )
    (slot,) = Plan(model, recipe_of(model, attached_observers(model))).slots.values()
    assert slot.make_observer().avg_constant == 0.5


def test_weights_that_need_no_data_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    args = QuantizationArgs(num_bits=8, strategy="channel", observer="memoryless_mse")
    weight = PeerObserver.load_from_registry("memoryless_mse", base_name="weight", args=args)
    model[0].weight_observer = weight
    (one,) = attached_observers(model)
    assert one.gathers_from is None
    imatrix = PeerObserver.load_from_registry("imatrix_mse", base_name="weight", args=args)
    model[0].weight_observer = imatrix
    imatrix.attach(model[0])
    (one,) = attached_observers(model)
    assert one.gathers_from == "0.input:importance"
    assert torch.is_tensor(model[0].weight)
