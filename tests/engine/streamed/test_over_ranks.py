"""Streaming on several processes: the folder that one writes, or the error of the one that failed.

The processes are real, and joined by gloo.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import llama, qwen3_moe
from folders import assert_same_files, assert_same_folder, tensors_in
from ranks import Ranks
from streaming_ranks import Job, run, run_in_memory

from inlay import Recipe
from inlay.errors import ConfigurationError, RankError

pytestmark = pytest.mark.slow

STATIC = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs={"observer": "static_minmax"})
HISTOGRAM = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs={"observer": "histogram"})
WITH_HEAD = Recipe.from_preset("W8A8_STATIC", ignore=(), inputs={"observer": "histogram"})
EQUALIZED = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"}, equalize="auto")
SEEN_SCALED = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "histogram"}, equalize=0.7)
EQUALIZED_EXPERTS = Recipe.from_preset(
    "FP8", ignore=["lm_head", "re:.*gate$"], inputs={"observer": "minmax"}, equalize="auto"
)
EXPERTS = Recipe.from_preset(
    "FP8", ignore=["lm_head", "re:.*gate$"], inputs={"observer": "static_minmax"}, experts="fill"
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started, threads = Ranks(2), torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have: products of matrices round as threads divide them
    yield started
    torch.set_num_threads(threads)
    started.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    llama(num_hidden_layers=3).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rows(count: int) -> list[dict[str, list[int]]]:
    """Rows of token ids, of two lengths."""
    return [
        {"input_ids": [(3 * row + 5 * place) % 32 for place in range(5 + row % 2)]}
        for row in range(count)
    ]


def on_all(ranks: Ranks, job: Job, run: Any = run) -> list[Any]:
    found = ranks.run(run, [job] * ranks.size)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def alone(job: Job) -> Path:
    """The folder of one process; it is written once."""
    out = job.out.with_name("alone")
    if not out.exists():
        run(replace(job, out=out, stop=None))
    return out


def test_they_write_what_one_process_does(ranks: Ranks, model: Path) -> None:
    """And compare; and all of them share what one has read of a block."""
    job = Job(
        model=model,
        out=model.parent / "out",
        recipe=HISTOGRAM,
        data=rows(7),
        options={"samples": 5, "held_out": 2},
    )
    found = on_all(ranks, job)
    assert_same_folder(job.out, alone(job), but=["data"])
    assert_same_files(job.out, alone(job))
    expected = "7 rows of token ids, divided over 2 processes (3, 2 of 5 batches)"
    assert [result["data"] for result in found] == [expected] * 2
    assert [result["copied"] for result in found] == [[]] * 2
    assert sorted(path.name for path in model.parent.iterdir()) == ["alone", "model", "out"]


@pytest.mark.parametrize(("recipe", "offload"), [(EQUALIZED, False), (SEEN_SCALED, True)])
def test_one_of_them_may_have_no_rows(
    ranks: Ranks, model: Path, recipe: Recipe, offload: bool
) -> None:
    job = Job(
        model=model,
        out=model.parent / "out",
        recipe=recipe,
        data=rows(1),
        options={"offload_activations": offload},
    )
    on_all(ranks, job)
    assert_same_folder(job.out, alone(job), but=["data"])


def test_batches_that_are_given_are_their_own(ranks: Ranks, model: Path) -> None:
    """Also if the first has none, and writes; and together they have to have some."""
    given = [{"input_ids": torch.tensor([row["input_ids"]])} for row in rows(3)]
    job = Job(model=model, out=model.parent / "out", recipe=SEEN_SCALED, own=([], given))
    on_all(ranks, job)
    assert_same_folder(job.out, alone(replace(job, own=(), data=given)), but=["data"])
    found = ranks.run(run, [replace(job, out=model.parent / "other", own=([], []))] * 2)
    assert all("no data to observe" in str(error) for error in found)
    assert any(isinstance(error, ConfigurationError) for error in found)


def test_experts_that_some_never_ran(ranks: Ranks, tmp_path: Path) -> None:
    qwen3_moe(num_experts=8).save_pretrained(tmp_path / "model")
    job = Job(model=tmp_path / "model", out=tmp_path / "out", recipe=EXPERTS, data=rows(3))
    on_all(ranks, job)
    assert_same_folder(job.out, alone(job), but=["data"])


def test_equalized_experts_are_those_of_as_many_in_memory(ranks: Ranks, tmp_path: Path) -> None:
    """Sums of sizes, by which "auto" chooses, are rounded as the data is divided."""
    qwen3_moe().save_pretrained(tmp_path / "model")
    options = {"samples": 5, "held_out": 2}
    recipe, data = EQUALIZED_EXPERTS, rows(7)
    job = Job(
        model=tmp_path / "model", out=tmp_path / "out", recipe=recipe, data=data, options=options
    )
    on_all(ranks, job)
    expected = replace(job, out=tmp_path / "in-memory")
    on_all(ranks, expected, run_in_memory)
    assert_same_folder(job.out, expected.out)


def test_without_data_they_search_a_part_of_the_weights_each(ranks: Ranks, model: Path) -> None:
    recipe = Recipe.from_preset(
        "NVFP4A16", ignore=["lm_head"], weights={"observer": "memoryless_mse"}
    )
    job = Job(model=model, out=model.parent / "out", recipe=recipe)
    on_all(ranks, job)
    assert_same_folder(job.out, alone(job))


@pytest.mark.parametrize("preset", ["FP8_BLOCK", "W4A16_ASYM"])
def test_each_writes_a_part_of_the_files_that_one_process_writes(
    ranks: Ranks, model: Path, preset: str
) -> None:
    """Also where a block takes several files, some of which hold tensors of one rank alone."""
    groups = {"group_size": 32}
    fields = {
        "FP8_BLOCK": {"weights": {"block_structure": [24, 32]}, "inputs": groups},
        "W4A16_ASYM": {"weights": groups},
    }[preset]
    recipe = Recipe.from_preset(preset, ignore=["lm_head"], **fields)
    options = {"max_shard_size": "3KB"}
    job = Job(model=model, out=model.parent / "out", recipe=recipe, options=options)
    found = on_all(ranks, job)
    assert_same_files(job.out, alone(job))
    written = [set(result["written"]) for result in found]
    assert not written[0] & written[1]
    assert written[0] | written[1] == tensors_in(job.out).keys()
    assert len(list(job.out.glob("*.safetensors"))) > 10
    for layer in range(3):
        mlp = f"model.layers.{layer}.mlp"
        assert all(any(name.startswith(mlp) for name in own) for own in written)


def test_a_block_takes_few_collectives(ranks: Ranks, tmp_path: Path) -> None:
    counts = []
    for depth in (2, 3):
        llama(num_hidden_layers=depth).save_pretrained(tmp_path / f"{depth}")
        job = Job(
            model=tmp_path / f"{depth}", out=tmp_path / f"out{depth}", recipe=STATIC, data=rows(2)
        )
        found = on_all(ranks, job)
        assert found[0]["collectives"] == found[1]["collectives"]
        counts.append(sum(found[0]["collectives"].values()))
    assert 0 < counts[1] - counts[0] <= 8


@pytest.mark.parametrize(("again", "recipe"), [(2, WITH_HEAD), (1, SEEN_SCALED)])
def test_an_interrupted_run_goes_on_with_as_many_or_one(
    ranks: Ranks, model: Path, again: int, recipe: Recipe
) -> None:
    """The last part has to be written, and batches have been observed in front of it."""
    job = Job(model=model, out=model.parent / "out", recipe=recipe, data=rows(5))
    for error in ranks.run(run, [replace(job, stop=(1, 4, "memory is full"))] * 2):
        assert "memory is full" in str(error)
    assert not job.out.exists()
    assert all("holds the work" in str(error) for error in ranks.run(run, [job] * 2))
    resumed = replace(job, options={"resume": True})
    if again == 1:
        run(resumed)
    else:
        on_all(ranks, resumed)
    whole = replace(job, out=model.parent / "whole")
    on_all(ranks, whole)
    assert_same_folder(job.out, whole.out, but=["data"])


@pytest.mark.parametrize("stop", [(1, 2, "kill, written")])
def test_a_killed_one_is_named_and_another_number_goes_on(
    model: Path, stop: tuple[int, int, str]
) -> None:
    pair, threads = Ranks(2), torch.get_num_threads()
    job = Job(model=model, out=model.parent / "out", recipe=STATIC, data=rows(3))
    (found,) = pair.run(run, [replace(job, stop=stop)] * 2, but=1)
    pair.close()
    assert isinstance(found, RankError)
    assert "rank 1 ended without an error of its own: it was killed" in str(found)
    assert not job.out.exists()
    torch.set_num_threads(1)
    run(replace(job, options={"resume": True}))
    assert_same_folder(job.out, alone(job), but=["data"])
    assert_same_files(job.out, alone(job))
    torch.set_num_threads(threads)


def test_the_first_is_killed_before_it_noted_a_block_and_both_go_on(
    ranks: Ranks, model: Path
) -> None:
    """The block is written again; and what one of them finds changed, both refuse."""
    pair = Ranks(2)
    job = Job(model=model, out=model.parent / "out", recipe=STATIC, data=rows(3))
    (found,) = pair.run(run, [replace(job, stop=(0, 2, "kill, complete"))] * 2, but=0)
    pair.close()
    assert isinstance(found, RankError)
    written = model.parent / "out.streaming" / "checkpoint"
    assert (written / "region-00002-000.safetensors").exists()
    # A part of a file that a killed process was writing.
    (written / ".region-00003-000.safetensors.0-0.partial").write_bytes(b"half")
    first, second = (written / f"region-0000{number}-000.safetensors" for number in (0, 1))
    resumed = replace(job, options={"resume": True})
    for file in (first, second):
        content = file.read_bytes()
        for changed in (content[:-1] + bytes([content[-1] ^ 1]), b"\xff" * len(content)):
            file.write_bytes(changed)
            for error in ranks.run(run, [resumed] * 2):
                assert f"{file.name}, which an interrupted run had written" in str(error)
        file.write_bytes(content)
    on_all(ranks, resumed)
    assert_same_folder(job.out, alone(job), but=["data"])
    assert_same_files(job.out, alone(job))
