"""Observers that learn where a graph does not look: they run outside of it, or are refused."""

import array
import functools
import itertools
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from inlay import Calibration, Recipe
from inlay.observers import Observer
from inlay.testing import ObserverSubject
from inlay.testing.graph_laws import reason_opaque

pytestmark = pytest.mark.filterwarnings("ignore:observer .* cannot be traced")

X = [torch.linspace(-1, 1 + i, 24).reshape(3, 8) * (1 + i % 3) for i in range(4)]


class Largest(Observer):
    """What the others are made of: a symmetric range."""

    def take_in(self, largest: torch.Tensor) -> None:
        self.min_vals, self.max_vals = -largest, largest


def largest_of(observed: torch.Tensor) -> torch.Tensor:
    return observed.abs().amax((0, -1))


class Counts(Largest):
    """Multiplies a value by how many there were, counted somewhere."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.take_in(largest_of(observed) * self.count())

    def count(self) -> int:
        raise NotImplementedError


class InAnArrayOfNumpy(Counts):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.seen = np.zeros(1, dtype=int)

    def count(self) -> int:
        self.seen[0] += 1
        return int(self.seen[0])


class InSeveralNumbersOfNumpy(InAnArrayOfNumpy):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.seen = np.zeros(3, dtype=int)


class InAnArray(Counts):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.seen = array.array("i", [0])

    def count(self) -> int:
        self.seen[0] += 1
        return self.seen[0]


class InAnIterator(Counts):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.numbers: Iterator[int] = itertools.count(1)

    def count(self) -> int:
        return next(self.numbers)


class Slotted:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


class InSlots(Counts):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.seen = Slotted()

    def count(self) -> int:
        self.seen.number += 1
        return self.seen.number


class Called:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> int:
        self.times += 1
        return self.times


class InSomethingCalled(Counts):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.times = Called()

    def count(self) -> int:
        return self.times()


class InAPartial(Counts):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.times = functools.partial(Called())

    def count(self) -> int:
        return self.times()


class InAClosure(Counts):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        seen = 0

        def count() -> int:
            nonlocal seen
            seen += 1
            return seen

        self.times = count

    def count(self) -> int:
        return self.times()


class OnTheClass(Counts):
    seen: ClassVar[int] = 0

    def count(self) -> int:
        type(self).seen += 1
        return self.seen


class InATensorOfTheClass(Largest):
    seen: ClassVar[torch.Tensor] = torch.zeros(())

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.seen.add_(1)
        self.take_in(largest_of(observed) * self.seen)


SEEN: list[int] = []
NUMBER = 0


class InAListOfTheModule(Counts):
    def count(self) -> int:
        SEEN.append(1)
        return len(SEEN)


class InANumberOfTheModule(Counts):
    def count(self) -> int:
        global NUMBER
        NUMBER += 1
        return NUMBER


class OnAFunction(Counts):
    def count(self) -> int:
        largest_of.times = getattr(largest_of, "times", 0) + 1
        return largest_of.times


class OneTensorTwice(Largest):
    """Changes a tensor by one of its two names."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        largest = largest_of(observed)
        if self.has_statistics:
            self.kept.copy_(torch.maximum(self.kept, largest))
        else:
            self.best = self.kept = largest
        self.take_in(self.best.clone())


class ViewsOfOneTensor(Observer):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        largest = largest_of(observed)
        if not self.has_statistics:
            self.both = torch.stack([-largest, largest])
            self.min_vals, self.max_vals = self.both
        self.both[0] = torch.minimum(self.both[0], -largest)
        self.both[1] = torch.maximum(self.both[1], largest)


class DrawsASample(Largest):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randint(0, observed.numel(), (4,), generator=generator)
        sampled = observed.reshape(-1)[chosen].abs().amax().reshape(1)
        self.take_in(torch.maximum(sampled, self.max_vals) if self.has_statistics else sampled)


class ReadsANumber(Largest):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        number = observed.abs().max().item()
        if self.has_statistics:
            number = max(number, self.max_vals.item())
        self.take_in(torch.full((1,), number))


class Branches(Largest):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        largest = largest_of(observed)
        if not self.has_statistics or largest.max() > self.max_vals.max():
            self.take_in(largest)


class DropsATensor(Largest):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.prior: torch.Tensor | None = torch.full((1,), 9.0)

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        largest = largest_of(observed)
        self.take_in(largest if self.prior is None else torch.maximum(self.prior, largest))
        self.prior = None


class InsideNumpy(Largest):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.take_in(torch.from_numpy(np.abs(observed.numpy()).max(axis=(0, -1)).reshape(-1)))


UNFRIENDLY = {
    InAnArrayOfNumpy: "keeps what it learns in seen",
    InSeveralNumbersOfNumpy: "keeps what it learns in seen",
    InAnArray: "keeps what it learns in seen",
    InAnIterator: "keeps a count in numbers, of which nobody can tell",
    InSlots: "keeps what it learns in seen",
    InSomethingCalled: "keeps what it learns in times",
    InAPartial: "keeps what it learns in times",
    InAClosure: "keeps a function in times, of which nobody can tell",
    OnTheClass: "keeps what it learns in seen",
    InATensorOfTheClass: "writes to a tensor that is not an attribute of its own",
    InAListOfTheModule: "keeps what it learns in SEEN",
    InANumberOfTheModule: "keeps what it learns in NUMBER",
    OnAFunction: "keeps what it learns in largest_of",
    OneTensorTwice: "share their memory",
    ViewsOfOneTensor: "share their memory",
    DrawsASample: "draws random numbers",
    ReadsANumber: "",
    Branches: "",
    DropsATensor: "prior is no tensor any more",
    InsideNumpy: "",
}
NAMES = {cls: f"unfriendly_{cls.__name__}" for cls in UNFRIENDLY}
for registered, name in NAMES.items():
    Observer.register(name)(registered)


@pytest.fixture(autouse=True)
def nothing_was_seen() -> Iterator[None]:
    yield
    forget()


def forget() -> None:
    global NUMBER
    NUMBER = OnTheClass.seen = 0
    InATensorOfTheClass.seen.zero_()
    SEEN.clear()
    vars(largest_of).clear()


@pytest.mark.parametrize("cls", UNFRIENDLY, ids=lambda cls: cls.__name__)
def test_a_graph_has_the_statistics_of_the_observer(cls: type[Observer]) -> None:
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": NAMES[cls]})
    (scheme,) = recipe.config.config_groups.values()
    alone = Observer.load_from_registry(
        NAMES[cls], base_name="input", args=scheme.input_activations
    )
    for value in X:
        alone(value)
    expected = alone.min_vals.clone(), alone.max_vals.clone()
    for compiler in ("eager", "aot_eager"):
        forget()
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
        calibration = Calibration(model, recipe, compiler=compiler)
        for value in X:
            calibration.observe(value)
        (statistics,) = calibration.statistics.snapshot().values()
        found = statistics.observer()
        assert torch.equal(found.min_vals, expected[0]), compiler
        assert torch.equal(found.max_vals, expected[1]), compiler


@pytest.mark.parametrize(
    ("cls", "reason"), UNFRIENDLY.items(), ids=[cls.__name__ for cls in UNFRIENDLY]
)
def test_it_says_why_it_is_not_traced(cls: type[Observer], reason: str) -> None:
    found = reason_opaque(ObserverSubject.of(cls))
    assert found is not None
    assert reason in found
