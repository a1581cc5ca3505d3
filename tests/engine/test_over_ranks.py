"""Calibrating on several processes: the result of one, or the error of the one that failed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating_ranks import Job, files_in, rows, run, save_llama, save_with_full_disk
from ranks import Ranks

from inlay.errors import CheckpointError, ConfigurationError, RankError

pytestmark = pytest.mark.slow

HISTOGRAM = {"observer": "histogram", "observer_kwargs": {"mantissa_bits": 2}}
STATIC = {"observer": "static_minmax"}
SEARCHED = {"observer": "memoryless_mse"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started, threads = Ranks(4), torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have: products of matrices round as threads divide them
    yield started
    torch.set_num_threads(threads)
    started.close()


def on_all(ranks: Ranks, job: Job) -> list[dict[str, Any]]:
    found = ranks.run(run, [job] * ranks.size)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


@pytest.mark.parametrize(
    "job",
    [
        Job(data=rows(11), inputs=HISTOGRAM, options={"held_out": 1}),
        # Three batches of two: a rank has none, and one layer is reached by one rank only.
        Job(data=rows(6), inputs=STATIC, equalize="auto", options={"batch_size": 2, "held_out": 0}),
        # What is kept of the last batch only is that of the last batch of all.
        Job(data=rows(5), inputs={"observer": "memoryless_minmax"}, options={"held_out": 0}),
        # Eight experts, of which a row of five words reaches a few.
        Job(data=rows(3), experts="mixtral", scheme="FP8", inputs=STATIC, options={"held_out": 0}),
    ],
    ids=["histogram", "equalized, a rank without rows", "the last batch", "experts"],
)
def test_all_ranks_have_the_result_of_one_process(ranks: Ranks, job: Job) -> None:
    if job.inputs == {"observer": "memoryless_minmax"}:
        job = replace(job, options={**job.options, "accept": {"unobserved"}})
    alone, found = run(job), on_all(ranks, job)
    for result in found:
        assert result["same"] == alone["same"]
    assert [result["held out"] for result in found] == [alone["held out"], 0, 0, 0]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("strength", [0.6, "auto"])
def test_equalized_experts_have_the_scales_of_one_process(
    ranks: Ranks, family: str, strength: Any
) -> None:
    """Bit for bit by ranges alone; mean sizes, which "auto" weighs, are summed in another order."""
    job = Job(
        data=rows(6, length=14),
        experts=family,
        scheme="FP8",
        inputs=STATIC,
        equalize=strength,
        options={"held_out": 0, "accept": {"few_tokens", "unobserved"}},
    )
    alone, found = run(job)["same"], [result["same"] for result in on_all(ranks, job)]
    assert all(result == found[0] for result in found)
    assert sum(".experts." in name for name in alone["scales"]) == 8
    summed = strength == "auto"
    _assert_equal(found[0], alone, lambda path: summed or path[-1] == "magnitudes")


def _assert_equal(
    found: Any, expected: Any, is_rounded: Callable[[tuple[str, ...]], bool], *path: str
) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            _assert_equal(found[key], value, is_rounded, *path, key)
    elif path[:1] == ("statistics",) and isinstance(expected, tuple):
        assert found[1] == expected[1], path
        _assert_equal(found[0], expected[0], is_rounded, *path)
    elif path[0] != "equalized" and is_rounded(path):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), msg=str(path))
    else:
        assert found == expected, path


def test_auto_compilers_agree_with_ranks_that_traced_nothing(ranks: Ranks) -> None:
    """Which do not know that q, k and v see the same values."""
    job = Job(data=rows(2), llama=1, inputs=STATIC, options={"compiler": "auto", "held_out": 0})
    found = on_all(ranks, job)
    assert all(result["same"] == found[0]["same"] for result in found)
    assert len(found[0]["same"]["statistics"]) == 7


def test_a_moving_average_weighs_ranks_by_what_they_saw(ranks: Ranks) -> None:
    """Five batches: two on the first rank, one on each other."""
    slot = "first.input"
    job = Job(data=rows(5), inputs={"observer": "minmax"}, options={"held_out": 0})
    (merged, *others) = (r["same"]["statistics"][slot][0]["max_vals"] for r in on_all(ranks, job))
    assert others == [merged] * 3
    accept = {"held_out": 0, "accept": {"unobserved"}}
    parts = [run(replace(job, data=rows(5)[rank::4], options=accept)) for rank in range(4)]
    of_ranks = [part["same"]["statistics"][slot][0]["max_vals"] for part in parts]
    expected = sum(n * torch.tensor(v) for n, v in zip((2, 1, 1, 1), of_ranks, strict=True)) / 5
    torch.testing.assert_close(torch.tensor(merged), expected)


@pytest.mark.parametrize(("scheme", "size"), [("NVFP4A16", "5GB"), ("W8A8", "20KB")])
def test_all_ranks_write_the_files_that_one_process_writes(
    ranks: Ranks, tmp_path: Path, scheme: str, size: str
) -> None:
    found = ranks.run(save_llama, [(str(tmp_path / "ranks"), scheme, size)] * 4)
    alone = save_llama((str(tmp_path / "alone"), scheme, size))
    assert found == [alone] * 4
    assert (len(alone) > 3) == (size == "20KB")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "ranks"]


def test_where_the_first_cannot_write_all_say_so(ranks: Ranks) -> None:
    for error in ranks.run(save_llama, [("/proc/nowhere", "W8A8", "5GB")] * 4):
        assert "cannot write the folder /proc/nowhere" in str(error)


def test_where_another_cannot_write_nothing_is_left(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks.run(save_with_full_disk, [str(tmp_path / "out")] * 4)
    assert [type(error) for error in errors] == [RankError, RankError, CheckpointError, RankError]
    assert all("No space left on device" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


def test_weights_are_searched_by_one_rank_each(ranks: Ranks) -> None:
    """Fused ones together, which share a global scale; and a tied weight is one."""
    job = Job(scheme="NVFP4A16", llama=2, weights=SEARCHED)
    alone, found = run(job), on_all(ranks, job)
    assert all(result["same"] == alone["same"] for result in found)
    searched = [result["weights"] for result in found]
    assert sorted(name for own in searched for name in own) == sorted(alone["weights"])
    assert all(searched)
    for group in ("q_proj", "k_proj", "v_proj"):
        (owner,) = [own for own in searched if f"model.layers.0.self_attn.{group}.weight" in own]
        assert "model.layers.0.self_attn.q_proj.weight" in owner


def test_the_number_of_collectives_does_not_grow_with_the_model(ranks: Ranks) -> None:
    counts = []
    for depth in (1, 3):
        job = Job(data=rows(4), llama=depth, inputs=HISTOGRAM, options={"held_out": 0})
        counts += [result["collectives"] for result in on_all(ranks, job)]
    assert all(count == counts[0] for count in counts)
    assert counts[0]["all_reduce"] <= 6
    assert counts[0]["all_gather_object"] <= 6


def test_batches_that_are_given_are_the_ranks_own(ranks: Ranks) -> None:
    given = [
        {"input_ids": torch.tensor([row["input_ids"]]), "attention_mask": torch.ones(1, 5 + long)}
        for long, row in zip((0, 0, 1, 0), rows(4), strict=True)
    ]
    parts = ([given[0]], [], [given[1], given[2]], [given[3]])
    job = Job(own=parts, inputs=HISTOGRAM, options={"held_out": 0})
    alone = run(replace(job, own=(), data=given))
    found = on_all(ranks, job)
    assert all(result["same"] == alone["same"] for result in found)
    assert found[0]["data"] == (
        "1 batches, and those of all 4 processes (1, 0, 2, 1 of 4 batches), fewer than samples=512"
    )


def test_the_record_says_how_data_was_divided(ranks: Ranks) -> None:
    job = Job(data=rows(5), inputs=STATIC, options={"held_out": 0})
    expected = "5 rows of token ids, divided over 4 processes (2, 1, 1, 1 of 5 batches), "
    expected += "fewer than samples=512"
    assert [result["data"] for result in on_all(ranks, job)] == [expected] * 4


def test_a_row_that_cannot_be_used_fails_on_all_ranks_by_name(ranks: Ranks) -> None:
    data = rows(8)
    data[6] = {"input_ids": [1, 2, 999]}
    found = ranks.run(run, [Job(data=data, options={"held_out": 0})] * 4)
    assert [type(error) for error in found] == [RankError, RankError, ConfigurationError, RankError]
    for error in found:
        assert "token id 999 is beyond" in str(error)
    assert str(found[0]).startswith("rank 2 failed: ")


def test_without_any_data_all_say_so(ranks: Ranks) -> None:
    found = ranks.run(run, [Job(own=((), (), (), ()))] * 4)
    assert all("no data to observe" in str(error) for error in found)
    assert any(isinstance(error, ConfigurationError) for error in found)


JOB = Job(data=rows(11), inputs=HISTOGRAM, options={"held_out": 0})
STOPPED = {1: (5, "memory is full")}


def kept_in(folder: Path, job: Job = JOB, *, resume: bool = False) -> Job:
    return replace(job, options={**job.options, "statistics": folder, "resume": resume})


@pytest.mark.parametrize("again", [4, 1])
def test_an_interrupted_run_goes_on_with_as_many_ranks_or_one(
    ranks: Ranks, tmp_path: Path, again: int
) -> None:
    job = kept_in(tmp_path)
    for error in ranks.run(run, [replace(job, stop=STOPPED)] * 4):
        assert "memory is full" in str(error)
    assert "rank-1-of-4.safetensors" in files_in(tmp_path)
    refused = ranks.run(run, [job] * 4)
    assert all("continue it (resume=True" in str(error) for error in refused)
    resumed = kept_in(tmp_path, resume=True)
    found = on_all(ranks, resumed) if again == 4 else [run(resumed)]
    assert all(result["same"] == run(JOB)["same"] for result in found)
    assert files_in(tmp_path) == ["statistics.safetensors"]


def test_a_run_of_one_process_goes_on_with_four(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        run(replace(kept_in(tmp_path), stop={0: (6, "")}))
    assert files_in(tmp_path) == ["statistics.safetensors"]
    # Interrupted again, so that there are files of four; and other data is refused.
    resumed = kept_in(tmp_path, resume=True)
    ranks.run(run, [replace(resumed, stop={3: (7, "")})] * 4)
    other = replace(resumed, data=rows(11, length=4))
    assert any("is not that of the interrupted run" in str(e) for e in ranks.run(run, [other] * 4))
    alone = run(JOB)
    assert all(result["same"] == alone["same"] for result in on_all(ranks, resumed))


def test_a_slow_rank_is_waited_for_and_a_killed_one_is_named() -> None:
    pair = Ranks(2)
    slow = on_all(pair, replace(JOB, stop={1: (9, "be slow")}))
    assert all(result["same"] == run(JOB)["same"] for result in slow)
    job = replace(JOB, stop={1: (3, "kill")})
    (found,) = pair.run(run, [job] * 2, but=1)
    pair.close()
    assert isinstance(found, RankError)
    assert found.rank == 1
    assert "rank 1 ended without an error of its own: it was killed" in str(found)


def test_ranks_compensate_weights_as_one_process(ranks: Ranks) -> None:
    """Sums of ranks round differently, so ties may fall differently."""
    job = Job(data=rows(8), llama=1, scheme="W4A16", weights={"group_size": 16}, gptq=True)
    job = replace(job, options={"held_out": 0})
    (alone, (first, *others)) = run(job), on_all(ranks, job)
    assert all(other["same"] == first["same"] for other in others)
    one, all_of_them = (each["same"]["compensated"] for each in (alone, first))
    assert one.keys() == all_of_them.keys()
    for name, weight in one.items():
        differ = (torch.tensor(weight) != torch.tensor(all_of_them[name])).any(-1)
        assert float(differ.float().mean()) < 0.1
