"""Statistics over ranks, with real processes."""

from collections.abc import Iterator

import numpy as np
import pytest
import rank_functions as on_rank
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from ranks import Ranks

from inlay.errors import ConfigurationError, StatisticsError
from inlay.observers import sync_observers
from inlay.testing.strategies import activations

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(request.param)
    yield started
    started.close()


def batch(*values: float) -> np.ndarray:
    return np.array([[values]], dtype=np.float32)


def assert_same_on_all(results: list[dict]) -> None:
    for result in results[1:]:
        assert result.keys() == results[0].keys()
        for name, value in result.items():
            np.testing.assert_array_equal(value, results[0][name])


def without(result: object) -> object:
    if isinstance(result, Exception):
        raise result
    return result


@examples(25)
@given(data=st.data())
def test_merged_shards_equal_one_process_that_saw_everything(ranks: Ranks, data) -> None:
    shards = data.draw(
        st.lists(
            st.lists(activations(4).map(torch.Tensor.numpy), max_size=3),
            min_size=ranks.size,
            max_size=ranks.size,
        )
    )
    names = ["static_minmax", "static_minmax@k", "histogram", "histogram@k", "counting"]
    results = ranks.run(on_rank.observe_and_sync, [(names, shard) for shard in shards])
    everything = on_rank.feed(names, [b for shard in shards for b in shard])
    for result in results:
        for own, alone in zip(without(result), everything, strict=True):
            for name, value in on_rank.statistics(alone).items():
                np.testing.assert_array_equal(own[name], value)


@examples(25)
@given(data=st.data())
def test_each_and_together_are_the_same(ranks: Ranks, data) -> None:
    names = ["minmax", "static_minmax", "mse", "memoryless_minmax", "histogram"]
    shards = [
        data.draw(st.lists(activations(4).map(torch.Tensor.numpy), max_size=2))
        for _ in range(ranks.size)
    ]
    arguments = [(names, shard) for shard in shards]
    together = ranks.run(on_rank.observe_and_sync, arguments)
    each = ranks.run(on_rank.observe_and_sync_each, arguments)
    for one, other in zip(together, each, strict=True):
        for own, theirs in zip(without(one), without(other), strict=True):
            assert_same_on_all([own, theirs])


def test_averages_weigh_ranks_by_what_they_saw(ranks: Ranks) -> None:
    shards = [[batch(0, 4)] * 3, [batch(0, 8)]] + [[]] * (ranks.size - 2)
    results = ranks.run(on_rank.observe_and_sync, [(["minmax"], shard) for shard in shards])
    for (result,) in results:
        assert result["max_vals"] == [(3 * 4 + 8) / 4]


def test_synchronizing_between_batches_counts_nothing_twice(ranks: Ranks) -> None:
    rounds = [[batch(1, 2)], [batch(3, 3)], []]
    for name in ("counting", "static_minmax"):
        arguments = [
            (name, rounds if rank == 0 else [[], [batch(-1, 0)], []]) for rank in range(ranks.size)
        ]
        results = ranks.run(on_rank.observe_in_rounds, arguments)
        seen = [b for _, own in arguments for batches in own for b in batches]
        (alone,) = on_rank.feed([name], seen)
        for result in results:
            assert_same_on_all([without(result), on_rank.statistics(alone)])


def test_an_average_follows_the_ranks_that_saw_something_new(ranks: Ranks) -> None:
    rounds = [[[batch(0, 4)], [batch(0, 104)]]] + [[[batch(0, 4)], []]] * (ranks.size - 1)
    results = ranks.run(on_rank.observe_in_rounds, [("minmax", own) for own in rounds])
    for result in results:
        assert result["max_vals"] == [np.float32(4 * 0.99) + np.float32(1.04)]


def test_importance_is_summed_once(ranks: Ranks) -> None:
    shards = [[batch(1, 2, 3, 4)], [batch(1, 1, 1, 1)] * 2] + [[]] * (ranks.size - 2)
    for result in ranks.run(on_rank.gather_importance, shards):
        np.testing.assert_array_equal(without(result)["_imatrix_sum"], [3, 6, 11, 18])
        assert result["_imatrix_count"] == 3


def test_no_rank_saw_anything(ranks: Ranks) -> None:
    results = ranks.run(on_rank.observe_and_sync, [(["minmax", "counting"], [])] * ranks.size)
    for minmax, counting in results:
        assert minmax == {"min_vals": None, "max_vals": None}
        assert counting == {"bins": None, "smallest": None}


def test_not_a_number_is_not_lost(ranks: Ranks) -> None:
    shards = [[batch(1, float("nan"))]] + [[batch(1, 2)]] * (ranks.size - 1)
    arguments = [(["static_minmax", "minmax"], shard) for shard in shards]
    for results in ranks.run(on_rank.observe_and_sync, arguments):
        for result in results:
            assert not np.isfinite(result["min_vals"]).any()
            assert not np.isfinite(result["max_vals"]).any()


def test_half_precision(ranks: Ranks) -> None:
    shards = [[batch(-1.5, 2)], [batch(-0.5, 4)]] + [[]] * (ranks.size - 2)
    for result in ranks.run(on_rank.half_precision, shards):
        assert without(result) == [-1.5, 4.0, -1.0, 3.0]


def test_many_observers_need_few_collectives(ranks: Ranks) -> None:
    names = ["static_minmax", "minmax", "mse", "counting"] * 25
    counts = ranks.run(on_rank.count_collectives, [(names, [batch(1, 2)])] * ranks.size)
    # Two to agree on what is there, then the largest and the sums, of floats and of integers.
    assert [without(count) for count in counts] == [6] * ranks.size


def test_other_shapes_on_other_ranks_are_refused_on_all(ranks: Ranks) -> None:
    names = [["static_minmax"]] + [["static_minmax@k"]] * (ranks.size - 1)
    for result in ranks.run(on_rank.observe_and_sync, [(n, [batch(1, 2)]) for n in names]):
        assert isinstance(result, StatisticsError)
        assert ".min_vals" in str(result)
        assert "same model in the same dtype" in str(result)


def test_other_observers_on_other_ranks_are_refused_on_all(ranks: Ranks) -> None:
    names = [["minmax"]] + [["minmax", "minmax"]] * (ranks.size - 1)
    for result in ranks.run(on_rank.observe_and_sync, [(n, [batch(1, 2)]) for n in names]):
        assert isinstance(result, StatisticsError)
        assert "same observers in the same order" in str(result)


def test_unknown_operation(ranks: Ranks) -> None:
    for result in ranks.run(on_rank.unknown_operation, [None] * ranks.size):
        assert isinstance(result, ConfigurationError)
        assert "MIN, MAX, SUM, AVG" in str(result)


def test_without_a_process_group_there_is_nothing_to_do() -> None:
    observer = on_rank.feed(["minmax"], [batch(1, 2)])[0]
    sync_observers([observer])
    assert observer.sync_activation_stats() == []
    assert float(observer.max_vals) == 2
