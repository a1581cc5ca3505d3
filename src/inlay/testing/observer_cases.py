"""An observer under test, and the cases that its laws are tried on."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import strategies as st

from inlay.errors import ConfigurationError, ObservationError
from inlay.nodes.observe import Observe
from inlay.observers import Observer
from inlay.recipe import Gathers, Slot
from inlay.reductions import Reduction, reduction_of
from inlay.statistics.functional import tensors_of
from inlay.statistics.rule import Rule
from inlay.statistics.value import Statistics
from inlay.testing.strategies import CASES, SHAPES, padded_batches, values
from inlay.torch_private import FakeTensorMode

__all__ = ["ObserverCase", "ObserverSubject", "gathered", "short", "tensor_code", "tensors_after"]

_DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
_REFUSALS = (ConfigurationError, ObservationError)


@dataclass(frozen=True)
class ObserverCase:
    """How an observer is made, and what it observes.

    :param base_name: a port, or `importance`, where the values are inputs of the module
    :param values: batches, or weights, in this order
    :param also: what else was drawn for a law, by name: a mask, an order, a place to cut
    """

    base_name: str
    args: QuantizationArgs
    values: tuple[torch.Tensor, ...]
    also: Mapping[str, Any] = field(default_factory=dict)

    @property
    def slot(self) -> Slot:
        if self.base_name == Gathers.IMPORTANCE.value:
            return Slot("module", "input", self.args, Gathers.IMPORTANCE)
        return Slot("module", self.base_name, self.args)

    def observer(self, values: Sequence[torch.Tensor] = ()) -> Observer:
        """A new observer that has seen these values."""
        observer = self.slot.make_observer()
        for value in values:
            self.show(observer, value)
        return observer

    def with_bad(self, bad: str) -> "ObserverCase":
        """The same case with NaN or infinity as the first element of the first value."""
        first = self.values[0].clone()
        first.view(-1)[0] = float(bad)
        return replace(self, values=(first, *self.values[1:]))

    def show(self, observer: Observer, value: torch.Tensor) -> None:
        """Let an observer see a value, or an input of the module whose weight it observes."""
        if self.slot.is_importance:
            observer.observe_input(value)
        else:
            observer(value)

    def __str__(self) -> str:
        """Lines of Python that observe the same."""
        base_name = "weight" if self.slot.is_importance else self.base_name
        call = "observer.observe_input" if self.slot.is_importance else "observer"
        lines = [
            "import torch",
            "from compressed_tensors.quantization import QuantizationArgs",
            "from inlay.observers import Observer",
            f"observer = Observer.load_from_registry({self.args.observer!r}, "
            f"base_name={base_name!r}, args={_args_code(self.args)})",
            *(f"{call}({tensor_code(value)})" for value in self.values),
        ]
        for name, drawn in self.also.items():
            lines.append(f"{name} = {_code(drawn)}")
        return "\n".join(f"    {line}" for line in lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("…")  # Hypothesis repeats it after the message, which has it already


@dataclass(frozen=True, eq=False)
class ObserverSubject:
    """An observer under test: a registered class with its settings.

    :param compilers: backends of `torch.compile` that it has to work with, inside a graph
    """

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    compilers: tuple[str, ...] = ("eager", "aot_eager")

    @classmethod
    def of(
        cls,
        observer: str | type[Observer],
        kwargs: Mapping[str, Any] | None = None,
        compilers: Sequence[str] = ("eager", "aot_eager"),
    ) -> "ObserverSubject":
        """Find the observer by name or class; a class must be registered."""
        name = observer if isinstance(observer, str) else _registered_name(observer)
        Observer.get_value_from_registry(name)
        return cls(name, dict(kwargs or {}), tuple(compilers))

    def __str__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self.kwargs.items())
        return f"{self.name}({settings})" if settings else self.name

    @cached_property
    def observer_class(self) -> type[Observer]:
        found: type[Observer] = Observer.get_value_from_registry(self.name)
        return found

    @cached_property
    def accepted(self) -> tuple[tuple[str, QuantizationArgs], ...]:
        """Base names and arguments that the observer does not refuse.

        :raises ConfigurationError: if it refuses all of them
        """
        found, refusal = [], None
        for base_name, fields in CASES.values():
            args = QuantizationArgs(**fields, observer=self.name, observer_kwargs={**self.kwargs})
            try:
                Slot("module", base_name, args).make_observer()(torch.ones(SHAPES[base_name]))
            except _REFUSALS as error:
                refusal = error
                continue
            except Exception:
                pass  # the laws will tell
            found.append((base_name, args))
        if not found:
            raise ConfigurationError(f"{self} refuses every format: {refusal}") from refusal
        return tuple(found)

    @cached_property
    def gathering(self) -> tuple[tuple[str, QuantizationArgs], ...]:
        """Base names and arguments with statistics from data."""
        if self.observer_class.observes_input:
            weights = [args for base_name, args in self.accepted if base_name == "weight"]
            return tuple(("importance", args) for args in weights)
        return tuple(
            (base_name, args)
            for base_name, args in self.accepted
            if base_name != "weight" and args.dynamic is not True
        )

    @cached_property
    def operations(self) -> dict[str, Reduction]:
        """How the statistics merge, as the class declares it in `_act_sync_dict`."""
        declared = self.observer_class._act_sync_dict
        return {name: reduction_of(of, f"{self.name}: {name}") for name, of in declared.items()}

    @property
    def leaves_out_padding(self) -> bool:
        return any(
            Rule(Slot("module", base_name, args)).leaves_out_padding
            for base_name, args in self.gathering
        )

    def single(
        self, *, scaled: bool = True, dynamic: bool = True
    ) -> st.SearchStrategy[ObserverCase]:
        """Cases of one value, of any kind that the observer accepts.

        :param dynamic: whether to draw arguments whose scales are computed while the model runs
        """
        kinds = [kind for kind in self.accepted if dynamic or kind[1].dynamic is not True]
        return self._cases(kinds, 1, scaled=scaled)

    def several(
        self,
        count: int = 4,
        *,
        scaled: bool = False,
        least: int = 1,
        of: Collection[str] | None = None,
    ) -> st.SearchStrategy[ObserverCase]:
        """Cases of several batches with statistics from data.

        :param of: the base names to draw; None for all of them
        """
        kinds = [kind for kind in self.gathering if of is None or kind[0] in of]
        return self._cases(kinds, count, scaled=scaled, least=least)

    def bad(
        self, cases: st.SearchStrategy[ObserverCase], numbers: Sequence[str]
    ) -> st.SearchStrategy[ObserverCase]:
        """Cases with NaN or infinity in the first value."""
        return st.builds(ObserverCase.with_bad, cases, st.sampled_from(numbers))

    def padded(self) -> st.SearchStrategy[ObserverCase]:
        """Cases of one batch with padding."""

        @st.composite
        def cases(draw: st.DrawFn) -> ObserverCase:
            base_name, args = draw(st.sampled_from(self.gathering))
            kind = base_name if base_name == "k" else "input"
            padded = padded_batches(args.group_size or 4, kind, draw(_DTYPES), scaled=False)
            value, mask = draw(padded)
            return ObserverCase(base_name, args, (value,), {"mask": mask})

        return cases()

    def _cases(
        self,
        kinds: Sequence[tuple[str, QuantizationArgs]],
        count: int,
        *,
        scaled: bool,
        least: int = 1,
    ) -> st.SearchStrategy[ObserverCase]:
        @st.composite
        def cases(draw: st.DrawFn) -> ObserverCase:
            base_name, args = draw(st.sampled_from(kinds))
            columns = (args.group_size or 1) * draw(st.integers(1, 3))
            dtype = draw(_DTYPES)
            kind = "input" if base_name == "importance" else base_name
            value = values(args, kind, dtype, scaled, columns)
            drawn = draw(st.lists(value, min_size=least, max_size=count))
            return ObserverCase(base_name, args, tuple(drawn))

        return cases()


def _registered_name(cls: type[Observer]) -> str:
    for name in Observer.registered_names():
        if Observer.get_value_from_registry(name) is cls:
            return str(name).replace("-", "_")
    raise ConfigurationError(
        f"{cls.__name__} is not registered, so no recipe can name it; decorate it with "
        "@Observer.register(name)"
    )


@torch.no_grad()
def gathered(case: ObserverCase, values: Sequence[torch.Tensor]) -> Statistics:
    """What a graph gathers from these values, op by op; nothing, if there are none."""
    rule = Rule(case.slot)
    with FakeTensorMode() as mode:
        target = Observe.traced(rule, mode.from_tensor(case.values[0]))
    specs = None if target.is_opaque else target.specs
    statistics = Statistics.start(rule, specs, case.values[0].device)
    for value in values:
        target(value, *statistics.inputs().values())
    return statistics.current()


def tensors_after(case: ObserverCase, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The statistics of a new observer that has seen these values."""
    found = tensors_of(case.observer(values))
    return {name: tensor.clone() for name, tensor in found.items()}


def _code(drawn: Any) -> str:
    return tensor_code(drawn) if isinstance(drawn, torch.Tensor) else repr(drawn)


def tensor_code(value: torch.Tensor) -> str:
    """A tensor as Python that makes the same one, in as few digits as that takes."""
    dtype = "" if value.dtype in (torch.float32, torch.int64) else f", dtype={value.dtype}"
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        number = _number(value.flatten()[0].item())
        return f"torch.full({tuple(value.shape)}, {number}{dtype})"
    if not value.is_floating_point():
        return f"torch.tensor({value.tolist()}{dtype})"
    numbers = value.flatten().tolist()
    for digits in range(1, 18):
        rounded = [float(f"{number:.{digits}g}") for number in numbers]
        again = torch.tensor(rounded, dtype=torch.float64).to(value.dtype).reshape(value.shape)
        if torch.equal(again.nan_to_num(), value.nan_to_num()):
            nested = torch.tensor(rounded, dtype=torch.float64).reshape(value.shape).tolist()
            return f"torch.tensor({_nested(nested)}{dtype})"
    raise AssertionError("17 digits tell all numbers apart")


def short(tensor: torch.Tensor | None) -> str:
    """The first numbers of a tensor, for messages."""
    if tensor is None:
        return "missing"
    numbers = [f"{number:.6g}" for number in tensor.double().flatten()[:4].tolist()]
    more = ", …" if tensor.numel() > 4 else ""
    return f"[{', '.join(numbers)}{more}]"


def _nested(numbers: Any) -> str:
    if isinstance(numbers, list):
        return f"[{', '.join(map(_nested, numbers))}]"
    return _number(numbers)


def _number(number: float) -> str:
    text = repr(number)
    return f"torch.{text}" if text in ("nan", "inf") else text.replace("-inf", "-torch.inf")


def _args_code(args: QuantizationArgs) -> str:
    usual = QuantizationArgs()
    fields = []
    for name in type(args).model_fields:
        value = getattr(args, name)
        if value != getattr(usual, name) and name not in ("observer",) and value != {}:
            fields.append(f"{name}={getattr(value, 'value', value)!r}")
    return f"QuantizationArgs({', '.join(fields)})"
