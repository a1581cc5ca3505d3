"""Comparing the traced graphs of a model with the model itself, run eagerly."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from inlay.calibration import Calibration
from inlay.calibration.phase import Phase
from inlay.calibration.tracing.running import evaluating
from inlay.calibration.tracing.strategies import Enclosed
from inlay.evaluation.compare import Batch, counted_positions, run_eagerly
from inlay.graph import module_path
from inlay.run_record import Agreement
from inlay.torch_private import observing_dynamo

__all__ = ["compare_traced", "differ_by", "tensors_in"]


@torch.no_grad()
def compare_traced(
    model: nn.Module, calibration: Calibration, batch: Batch, what: str
) -> Agreement:
    """Run one batch through the eager model and through the traced graphs, and compare outputs.

    Random numbers are the same in both runs, and the user's generators are left alone.

    :param batch: a batch as `prepared` returns it
    :param what: description of the batch
    """
    tolerance = _tolerance(model)
    with evaluating(model), calibration.graphs.rerun() as rerun:
        expected = _outputs(model, batch, seed=0)
        with _seeded(0):
            found = _counted(model, batch, rerun.outputs(batch, Phase.PLAIN))
        difference = _difference(found, expected)
        if difference <= tolerance:
            return Agreement(batch=what, difference=difference, tolerance=tolerance)
        again = _difference(_outputs(model, batch, seed=1), expected)
        if not again <= tolerance:
            return Agreement(
                unknown=f"the eager model differs from itself by {again:.2g} when it runs twice"
            )
        first = _first_parting(model, batch, tolerance)
    return Agreement(batch=what, difference=difference, tolerance=tolerance, first=first)


def _tolerance(model: nn.Module) -> float:
    """Return the relative difference that rounding may explain: half of the digits of the dtype.

    Over the families of `tests/support/families.py`, SmolLM2 and five MoE models, in
    float32 and bfloat16, with and without padding, traced and eager outputs are equal bit for bit.
    The exception is Mamba in float32, at 0.3 eps. sqrt(eps) leaves room for models that choose
    other kernels while they are traced: 2,900 eps in float32, 11 eps in bfloat16. Tracing faults
    are larger: 0.5 of the norm for Doge in transformers 5.17.
    """
    dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    return math.sqrt(max((torch.finfo(dtype).eps for dtype in dtypes), default=1e-7))


def _outputs(model: nn.Module, batch: Batch, *, seed: int) -> list[torch.Tensor]:
    with _seeded(seed):
        return _counted(model, batch, run_eagerly(model, batch))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _counted(model: nn.Module, batch: Batch, outputs: Any) -> list[torch.Tensor]:
    """Return the tensors of an output without padding tokens, whose values mean nothing."""
    mask = counted_positions(model, batch)
    tensors = tensors_in(outputs)
    if mask is None:
        return tensors
    return [t[mask] if t.dim() > 2 and t.shape[:2] == mask.shape else t for t in tensors]


def tensors_in(outputs: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of a model's output, without caches."""
    if isinstance(outputs, torch.Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if isinstance(outputs, Mapping):
        outputs = [value for key, value in outputs.items() if key != "past_key_values"]
    if isinstance(outputs, (tuple, list)):
        return [tensor for value in outputs for tensor in tensors_in(value)]
    return []


def _difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative difference of two lists of outputs; Inf for other shapes."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return float("inf")
    pairs = zip(found, expected, strict=True)
    return max((differ_by(one, other) for one, other in pairs), default=0.0)


def differ_by(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference of two tensors, relative to that of the second.

    NaN and Inf equal themselves. Elsewhere they make the difference Inf.
    """
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    error = (one - other).masked_fill(same, 0).norm()
    if bool(error == 0):
        return 0.0
    ratio = float(error / other.masked_fill(~other.isfinite(), 0).norm())
    return ratio if ratio == ratio else float("inf")


def _first_parting(model: nn.Module, batch: Batch, tolerance: float) -> str | None:
    """Name the first innermost module whose traced output differs, if a new trace shows it.

    This traces the whole model anew, so it is for models that are known to differ.
    """
    eager: dict[str, torch.Tensor] = {}
    traced: dict[str, torch.Tensor] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            eager[name] = output.detach().clone()

    def recording(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        return _Recorder(gm, traced).record

    leaves = [(n, m) for n, m in model.named_modules() if n and not any(m.children())]
    handles = [module.register_forward_hook(partial(keep, name)) for name, module in leaves]
    try:
        _outputs(model, batch, seed=0)
    finally:
        for handle in handles:
            handle.remove()
    with observing_dynamo(), _seeded(0):
        run = torch.compile(Enclosed(model), backend=recording)
        _ = run(**batch) if isinstance(batch, Mapping) else run(*batch)
    for name, expected in eager.items():
        found = traced.get(name)
        if found is not None and _difference([found], [expected]) > tolerance:
            return name
    return None


class _Recorder(Interpreter):
    """Runs a graph and keeps the last tensor that each module computed."""

    def __init__(self, gm: GraphModule, kept: dict[str, torch.Tensor]) -> None:
        super().__init__(gm)
        self._kept = kept

    def record(self, *args: Any) -> Any:
        return self.run(*args, enable_io_processing=False)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        path = module_path(n)
        if path is not None and n.op != "placeholder" and isinstance(result, torch.Tensor):
            self._kept[path.removeprefix("model.")] = result.detach().clone()
        return result
