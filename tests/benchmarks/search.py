"""Mixed precision: choices of `inlay.search` beside those by simpler rules, on the same rows.

The model is SmolLM2 with weights that lie on no grid. Each choice is a mixture of 4 and 8 bits
whose KL divergence from float32 is measured on held-out windows.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

CALIBRATING, HELD_OUT, ALONE = 16, 8, 1
FORMATS = {
    "gptq": "W4A16:group_size=64,W8A16:group_size=64",
    "nearest": "W4A16:group_size=64,observer=imatrix_mse,W8A16:group_size=64",
}
BITS = (4.25, 4.5, 5.0, 6.0)
RULES = ("relative output error", "weight error", "outer blocks first", "down projections first")


def rows() -> Iterator[Any]:
    from harness import Row, cold, single

    for method in FORMATS:
        found: dict[str, Any] = cold(__file__, method)
        losses = found["losses"]
        for bits in map(str, BITS):
            for rule in RULES:
                quotient = losses[bits]["search"] / losses[bits][rule]
                group = "KL divergence of the search's choice / of another"
                yield Row(group, f"{bits} bits, {method}, {rule}", single(quotient))
        closed = (losses["4"] - losses["4.5"]["search"]) / losses["4"]
        yield Row("loss of 4 bits that 4.5 bits close", method, single(closed))
        yield Row("rank correlation of predicted and measured KL", method, single(found["ranks"]))
        yield Row("search / calibration, processor time", method, single(found["time"]))


def child(method: str) -> None:
    import torch
    from rotated import rotated_smollm2, windows
    from transformers import AutoModelForCausalLM

    import inlay

    folder = rotated_smollm2()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    data = [{"input_ids": w[None]} for part in windows(folder, CALIBRATING, HELD_OUT) for w in part]
    run = {"samples": CALIBRATING, "held_out": HELD_OUT, "progress": False}
    scoring, seconds = _scored(model, data, method, run)
    scores = scoring.scores
    start = time.process_time()
    recipe = inlay.Recipe.from_preset(
        "W4A16",
        weights={"group_size": 64, "observer": "imatrix_mse"},
        gptq=method == "gptq",
    )
    with tempfile.TemporaryDirectory() as place:
        inlay.calibrate(model, recipe, data, **run).save(f"{place}/model")
    calibrating = time.process_time() - start
    hessians = _hessians(model, data[:CALIBRATING], list(scoring.by_format[0].weights))
    losses: dict[str, Any] = {"4": scoring.measure(_lowest(scores))}
    for bits in BITS:
        choices = {"search": _best(scores, bits)}
        choices |= {rule: make(scoring, hessians, bits) for rule, make in _MAKE.items()}
        losses[str(bits)] = {name: scoring.measure(choice) for name, choice in choices.items()}
    predicted, measured = _alone(model, scoring, data[CALIBRATING : CALIBRATING + ALONE])
    result = {
        "losses": losses,
        "ranks": _rank_correlation(predicted, measured),
        "time": seconds / calibrating,
        "seconds": [seconds, calibrating],
        "alone": [predicted, measured],
    }
    print(json.dumps(result))


def _scored(model: Any, data: Any, method: str, run: Mapping[str, Any]) -> tuple[Any, float]:
    """Search for 4.5 bits; return the scores with the weights, and the processor time."""
    from inlay.options import SearchOptions
    from inlay.searching.formats import parse_formats
    from inlay.searching.scoring import Scoring

    options = SearchOptions(bits=4.5, **run)
    formats, gptq = parse_formats(FORMATS[method], "best" if method == "gptq" else "plain")
    start = time.process_time()
    scoring = Scoring(
        model,
        data,
        None,
        formats=formats,
        gptq=gptq,
        ignore=None,
        forward_only=False,
        settings={},
        options=options,
    )
    scoring.measure(_best(scoring.scores, 4.5))
    return scoring, time.process_time() - start


def _hessians(model: Any, data: Any, names: list[str]) -> dict[str, Any]:
    """Return XᵀX of the inputs of layers, for a rule that is no part of what is measured."""
    import torch

    found: dict[str, Any] = {}
    hooks = []

    def gather(name: str, given: Any) -> None:
        rows = given.flatten(0, -2)
        found[name] = found.get(name, 0) + rows.T @ rows

    for name in names:
        hook = lambda _, args, name=name: gather(name, args[0])  # noqa: E731
        hooks.append(model.get_submodule(name).register_forward_pre_hook(hook))
    with torch.no_grad():
        for batch in data:
            model(**batch, use_cache=False)
    for each in hooks:
        each.remove()
    return found


def _lowest(scores: Any) -> tuple[int, ...]:
    return (0,) * len(scores.units)


def _best(scores: Any, bits: float) -> tuple[int, ...]:
    from inlay.searching.targets import Target, choose

    return choose(scores, Target("bits", bits))


def _with_costs(scoring: Any, cost: Callable[[str, int], float]) -> Any:
    """Return scores with other costs of layers in each format."""
    from dataclasses import replace

    scores = scoring.scores
    units = tuple(
        replace(
            unit,
            costs=tuple(sum(cost(name, place) for name in unit.layers) for place in unit.places),
        )
        for unit in scores.units
    )
    return replace(scores, units=units)


def _by_output_error(scoring: Any, hessians: Any, bits: float) -> tuple[int, ...]:
    def error(name: str, place: int) -> float:
        plain, quantized = _weights(scoring, name, place)
        hessian = hessians[name]
        wrong, signal = (((each @ hessian) * each).sum() for each in (quantized - plain, plain))
        return float(wrong / signal)

    return _best(_with_costs(scoring, error), bits)


def _by_weight_error(scoring: Any, hessians: Any, bits: float) -> tuple[int, ...]:
    def error(name: str, place: int) -> float:
        plain, quantized = _weights(scoring, name, place)
        return float((quantized - plain).square().sum() / plain.square().sum())

    return _best(_with_costs(scoring, error), bits)


def _weights(scoring: Any, name: str, place: int) -> tuple[Any, Any]:
    plain = scoring.model.get_submodule(name).weight.detach()
    return plain, scoring.by_format[place].weights[name]


def _outer_first(scoring: Any, _: Any, bits: float) -> tuple[int, ...]:
    units = scoring.scores.units
    blocks = [int(unit.layers[0].split(".")[2]) for unit in units]
    order = sorted(range(len(units)), key=lambda n: min(blocks[n], max(blocks) - blocks[n]))
    return _filled(scoring.scores, order, bits)


def _down_first(scoring: Any, _: Any, bits: float) -> tuple[int, ...]:
    units = scoring.scores.units
    order = sorted(range(len(units)), key=lambda n: "down_proj" not in units[n].layers[0])
    return _filled(scoring.scores, order, bits)


def _filled(scores: Any, order: list[int], bits: float) -> tuple[int, ...]:
    """Give units 8 bits in an order, as far as the budget goes."""
    choice = [0] * len(scores.units)
    for number in order:
        choice[number] = 1
        if scores.bits_of(tuple(choice)) > bits:
            choice[number] = 0
    return tuple(choice)


_MAKE = dict(
    zip(RULES, (_by_output_error, _by_weight_error, _outer_first, _down_first), strict=True)
)


def _alone(model: Any, scoring: Any, windows: Any) -> tuple[list[float], list[float]]:
    """Return the predicted and the measured KL divergence of each layer alone in 4 bits."""
    import torch

    predicted, measured = [], []
    with torch.no_grad():
        plain = [model(**window, use_cache=False).logits.log_softmax(-1) for window in windows]
        for name, weight in scoring.by_format[0].weights.items():
            parameters = {f"{name}.weight": weight}
            total = 0.0
            for window, before in zip(windows, plain, strict=True):
                given = {**window, "use_cache": False}
                after = torch.func.functional_call(model, parameters, (), given).logits
                apart = before.exp() * (before - after.log_softmax(-1))
                total += float(apart.sum(-1).mean()) / len(windows)
            predicted.append(scoring.by_format[0].costs[name])
            measured.append(total)
    return predicted, measured


def _rank_correlation(one: list[float], other: list[float]) -> float:
    import torch

    ranks = [torch.tensor(each).argsort().argsort().double() for each in (one, other)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


if __name__ == "__main__":
    child(*sys.argv[1:])
