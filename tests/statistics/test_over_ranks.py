"""A calibration over ranks: what is saved and shown is that of all of them."""

from collections.abc import Iterator

import numpy as np
import pytest
import rank_functions as on_rank
from ranks import Ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


def batches(count: int, seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.normal(size=(3, 4)).astype(np.float32) for _ in range(count)]


def without(result: object) -> object:
    if isinstance(result, Exception):
        raise result
    return result


@pytest.mark.parametrize(
    ("observer", "equalize"),
    [("static_minmax", None), ("histogram", None), ("static_minmax", 0.7), ("histogram", 0.7)],
)
@pytest.mark.parametrize("counts", [(1, 2), (0, 3)], ids=["both have data", "one has none"])
def test_saved_statistics_are_those_of_one_process(ranks, observer: str, equalize, counts) -> None:
    parts = [batches(count, seed) for seed, count in enumerate(counts)]
    results = ranks.run(on_rank.calibrate, [(observer, part, equalize) for part in parts])
    alone = on_rank.calibrate((observer, [batch for part in parts for batch in part], equalize))
    assert len(alone["equalized"]) == (equalize is not None)
    for found in map(without, results):
        assert found["equalized"] == alone["equalized"]
        assert found["scales"].keys() == alone["scales"].keys()
        for name, scale in alone["scales"].items():
            np.testing.assert_array_equal(found["scales"][name], scale)
        assert found["stored"].keys() == alone["stored"].keys()
        for name, known in alone["stored"].items():
            for key, value in known.items():
                np.testing.assert_allclose(found["stored"][name][key], value, rtol=1e-6)
        assert found["shown"] == alone["shown"]
        assert set(found["shown"].values()) == {9}
        assert found["data"] == (3, 6, 14)


def test_an_average_weighs_ranks_by_what_they_saw(ranks) -> None:
    parts = [batches(1, 0), batches(2, 1)]
    one, other = map(
        without, ranks.run(on_rank.calibrate, [("minmax", part, None) for part in parts])
    )
    apart = [
        on_rank.calibrate(("minmax", part, None))["stored"]["0.input"]["max_vals"] for part in parts
    ]
    for found in (one, other):
        expected = (apart[0] + 2 * apart[1]) / 3
        np.testing.assert_allclose(found["stored"]["0.input"]["max_vals"], expected, rtol=1e-6)


def test_a_refused_attempt_counts_nothing_twice(ranks) -> None:
    for result in ranks.run(on_rank.finalize_twice, [batches(1, 0), batches(1, 1)]):
        message, counted = without(result)
        assert "unused.input" in message
        assert counted == 2 * 3 * 4
