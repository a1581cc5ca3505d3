"""What processes tell each other, tried with threads in their place."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import distributed as dist

from inlay.errors import ConfigurationError, RankError
from inlay.ranks import together
from inlay.ranks.together import Channel, EndedError


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Channel]]:
    monkeypatch.setattr(together, "_LINGER", 2.0)
    store = dist.HashStore()
    found = [Channel(store, rank, 3) for rank in range(3)]
    for channel in found:
        channel.begin()
    yield found
    for channel in found:
        channel.close()


def in_turn(channels: list[Channel], *steps: Callable[[Channel], Any]) -> list[Any]:
    """Let each channel take its own step, all at the same time; errors come back as values."""

    def step(pair: tuple[Channel, Callable[[Channel], Any]]) -> Any:
        try:
            return pair[1](pair[0])
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(channels)) as pool:
        return list(pool.map(step, zip(channels, steps, strict=True)))


def meeting(channel: Channel) -> None:
    try:
        channel.meet()
    except RankError as error:
        channel.fail(error)
        raise


def failing(text: str) -> Callable[[Channel], None]:
    return lambda channel: channel.fail(ConfigurationError(text))


def test_they_wait_for_the_last(channels: list[Channel]) -> None:
    arrived = []

    def late(channel: Channel) -> None:
        time.sleep(0.3)
        arrived.append(channel.rank)
        channel.meet()

    def punctual(channel: Channel) -> list[int]:
        channel.meet()
        return list(arrived)

    for _ in range(2):
        arrived.clear()
        assert in_turn(channels, punctual, late, punctual) == [[1], None, [1]]


def test_all_hear_of_an_error_and_the_first_says_it(channels: list[Channel]) -> None:
    found = in_turn(channels, meeting, failing("a bad row"), meeting)
    assert [str(error) for error in found] == [
        "rank 1 failed: a bad row",
        "None",
        "rank 1 failed: a bad row",
    ]
    assert [channel.speaks for channel in channels] == [True, False, False]


def test_if_the_first_fails_the_next_says_it(channels: list[Channel]) -> None:
    in_turn(channels, failing("a full disk"), meeting, meeting)
    assert [channel.speaks for channel in channels] == [False, True, False]


def test_what_all_find_is_said_once(channels: list[Channel]) -> None:
    in_turn(channels, *[failing("no such scheme")] * 3)
    assert [channel.speaks for channel in channels] == [True, False, False]


def test_after_an_error_they_may_try_again(channels: list[Channel]) -> None:
    in_turn(channels, meeting, failing("refused"), meeting)
    for channel in channels:
        channel.begin()
    assert in_turn(channels, *[meeting] * 3) == [None] * 3


def test_one_that_gives_no_sign_of_life_is_lost(channels, monkeypatch) -> None:
    monkeypatch.setattr(together, "_LOST", 4.0)
    first = channels[0]
    for channel in channels[:2]:  # one that was never heard of is waited for much longer
        while len(channel._heard) < 2:
            channel.silence()
            time.sleep(0.01)
    channels[2].close()
    found = in_turn(channels[:2], meeting, meeting)
    assert all(isinstance(error, RankError) and error.rank == 2 for error in found)
    lost = first.find_lost(seconds=3, silence=0.8)
    assert lost is not None
    assert lost.rank == 2


def test_time_in_which_this_process_slept_counts_little(channels: list[Channel]) -> None:
    first = channels[0]
    first.silence()
    channels[1].close()
    first._listened -= 3600  # suspended, with all the others
    assert max(first.silence().values()) < 5


def test_a_signal_ends_it_at_the_next_look(channels: list[Channel]) -> None:
    first = channels[0]
    first.ended = RankError(2, "rank 2 was killed")
    with pytest.raises(RankError, match="rank 2 was killed"):
        first.look_now_and_then()
    first.fail(EndedError(first.ended))
    assert first.speaks
    assert not isinstance(EndedError(first.ended), Exception)


def test_a_warning_is_news_once(channels: list[Channel]) -> None:
    assert [channel.is_news("few tokens") for channel in channels] == [True, False, False]


def test_alone_nothing_is_asked() -> None:
    with together.together(), together.collective():
        together.look_around()
