"""Data from whatever holds it: every row once and in order."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokens import CHAT, END, PADDING, WORDS, text_of, word_tokenizer
from torch.utils.data import DataLoader, TensorDataset

from inlay.data.batch import Batch, count_tokens, digest, on_device_of, varying_sizes
from inlay.data.sources import Batches, batches_of
from inlay.errors import ConfigurationError
from inlay.ranks.division import Part

TOKENIZER = word_tokenizer()
rows_of_ids = st.lists(
    st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=6), min_size=1, max_size=40
)


def rows_in(batches: Any) -> list[list[int]]:
    """The ids of all rows, without padding."""
    return [
        ids[mask.bool()].tolist()
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def expected_split(rows: int, samples: int | None, held_out: int) -> tuple[int, int]:
    if samples is None or rows < samples:
        kept = min(held_out, rows // 8)
        return rows - kept, kept
    return samples, min(held_out, rows - samples)


@given(
    rows=rows_of_ids,
    samples=st.none() | st.integers(1, 45),
    batch_size=st.integers(1, 5),
    size=st.integers(1, 5),
    is_finite=st.booleans(),
)
def test_processes_divide_the_batches_of_one(
    rows: list[list[int]], samples: int | None, batch_size: int, size: int, is_finite: bool
) -> None:
    texts = list(map(text_of, rows))
    common = {"tokenizer": TOKENIZER, "samples": samples, "batch_size": batch_size, "held_out": 3}

    def batches(part: Part) -> Batches:
        return batches_of(texts if is_finite else iter(texts), part=part, **common)

    whole = batches(Part())
    expected = [batch["input_ids"].tolist() for batch in whole]
    parts = [batches(Part(rank, size)) for rank in range(size)]
    numbered = [(number, b["input_ids"].tolist()) for part in parts for number, b in part.numbered]
    assert sorted(numbered) == list(enumerate(expected))
    assert [len(part.held_out) for part in parts] == [len(whole.held_out)] + [0] * (size - 1)
    assert {part.samples for part in parts} == {whole.samples}


@given(
    rows=rows_of_ids,
    samples=st.none() | st.integers(1, 45),
    batch_size=st.integers(1, 5),
    held_out=st.integers(0, 20),
    side=st.sampled_from(["left", "right"]),  # of generation; here it does not matter
)
def test_every_row_once_and_in_order(
    rows: list[list[int]], samples: int | None, batch_size: int, held_out: int, side: str
) -> None:
    TOKENIZER.padding_side = side
    found = batches_of(
        list(map(text_of, rows)),
        tokenizer=TOKENIZER,
        samples=samples,
        batch_size=batch_size,
        held_out=held_out,
    )
    used, kept = expected_split(len(rows), samples, held_out)
    assert rows_in(found) == rows[:used]
    assert rows_in(found.held_out) == rows[used : used + kept]
    assert found.samples == used
    assert len(found) == len(list(found)) == -(-used // batch_size)
    for part, count in ((list(found), used), (found.held_out, kept)):
        sizes = [len(batch["input_ids"]) for batch in part]  # type: ignore[call-overload]
        assert sum(sizes) == count
        assert all(size == batch_size for size in sizes[:-1])
    for batch in [*found, *found.held_out]:
        require_padding(batch)


def require_padding(batch: Batch) -> None:
    assert isinstance(batch, dict)
    mask = batch["attention_mask"]
    lengths = mask.sum(1)
    assert int(lengths.max()) == mask.shape[1], "padded further than the longest row"
    for row, ids, length in zip(mask.tolist(), batch["input_ids"].tolist(), lengths, strict=True):
        padding = [0] * (len(row) - int(length))
        counted = [1] * int(length)
        assert row == counted + padding
        assert ids[int(length) :] == [PADDING] * len(padding)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=20),
    samples=st.none() | st.integers(1, 50),
    held_out=st.integers(0, 20),
)
def test_ready_batches_stay_whole(sizes: list[int], samples: int | None, held_out: int) -> None:
    batches = [torch.full((size, 3), index) for index, size in enumerate(sizes)]
    found = batches_of(batches, samples=samples, held_out=held_out)
    used, kept = list(found), found.held_out
    order = [int(batch[0][0, 0]) for batch in [*used, *kept]]  # type: ignore[index]
    assert order == list(range(len(order)))
    assert found.samples == sum(sizes[: len(used)])
    total = sum(sizes)
    if samples is None or total < samples:
        assert len(order) == len(sizes)
        assert sum(sizes[len(used) :]) <= min(held_out, total // 8)
    else:
        assert sum(sizes[: len(used) - 1]) < samples <= sum(sizes[: len(used)])
        if kept:
            assert sum(sizes[len(used) : len(order) - 1]) < held_out


@given(rows=st.integers(1, 30), samples=st.integers(1, 40), held_out=st.integers(0, 10))
def test_no_more_is_read_than_needed(rows: int, samples: int, held_out: int) -> None:
    taken = 0

    def stream() -> Iterator[str]:
        nonlocal taken
        for index in range(rows):
            taken += 1
            yield text_of([index])

    batches_of(stream(), tokenizer=TOKENIZER, samples=samples, held_out=held_out)
    assert taken == min(rows, samples + held_out)


def test_a_stream_without_end_is_read_as_it_is_asked_for() -> None:
    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(2, 3, dtype=torch.int64)

    found = batches_of(endless(), samples=None)
    assert found.samples is None
    assert found.held_out == []
    assert found.source == "a generator"
    with pytest.raises(TypeError, match="known only after reading"):
        len(found)
    iterator = iter(found)
    assert next(iterator)[0].shape == (2, 3)  # type: ignore[index]
    with pytest.raises(ConfigurationError, match="a generator can be read only once"):
        iter(found)
    bounded = batches_of(endless(), samples=4, held_out=2)
    assert (len(bounded), len(bounded.held_out)) == (2, 1)
    assert len(list(bounded)) == len(list(bounded)) == 2


@given(seed=st.integers(0, 9), samples=st.integers(1, 9), held_out=st.integers(0, 3))
def test_a_seed_shuffles_rows_before_they_are_chosen(
    seed: int, samples: int, held_out: int
) -> None:
    texts = [f"w{number}" for number in range(12)]
    found = batches_of(
        texts, tokenizer=word_tokenizer(), seed=seed, samples=samples, held_out=held_out
    )
    order = [f"w{number}" for number in range(12)]
    random.Random(seed).shuffle(order)
    chosen = [word_tokenizer().decode(batch["input_ids"][0]) for batch in found]
    kept = [word_tokenizer().decode(batch["input_ids"][0]) for batch in found.held_out]
    assert (chosen, kept) == (order[:samples], order[samples : samples + held_out])
    assert found.source.endswith(f"shuffled by seed {seed}")


def test_a_stream_without_end_cannot_be_shuffled() -> None:
    endless = ({"input_ids": torch.ones(1, 2)} for _ in itertools.count())
    with pytest.raises(ConfigurationError, match="cannot be shuffled; leave out seed"):
        batches_of(endless, seed=0)


def test_the_column_of_texts_has_any_name(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "w1 w2", "text": 5}\n')
    rows = [{"prompt": "w1 w2"}]
    for data in (path, rows):
        (batch,) = batches_of(data, tokenizer=word_tokenizer(), text_column="prompt", held_out=0)
        assert batch["input_ids"].shape == (1, 2)
    with pytest.raises(ConfigurationError, match=r"line 1: text must be a text, got 5"):
        batches_of(path, tokenizer=word_tokenizer())
    with pytest.raises(ConfigurationError, match=r"has prompt; .*\(--text-column\)"):
        batches_of(rows, tokenizer=word_tokenizer())


def test_a_source_that_begins_anew_is_read_again() -> None:
    class Source:
        def __iter__(self) -> Iterator[str]:
            return iter(["w1 w2", "w3"])

    found = batches_of(Source(), tokenizer=TOKENIZER)
    assert rows_in(found) == rows_in(found) == [[1, 2], [3]]


def test_a_shuffling_loader_keeps_the_held_out_rows_out() -> None:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.arange(64)[:, None]), batch_size=2, shuffle=True)
    found = batches_of(loader, held_out=6)
    assert found.source == "a DataLoader"
    assert found.samples == 58
    for _ in range(2):
        used = torch.cat([batch[0] for batch in found])  # type: ignore[index]
        kept = torch.cat([batch[0] for batch in found.held_out])  # type: ignore[index]
        assert sorted(torch.cat([used, kept]).flatten().tolist()) == list(range(64))


def test_forms_of_batches() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    assert list(batches_of([{"input_ids": ids}])) == [{"input_ids": ids}]
    for item in (ids, (ids,), [ids]):
        (batch,) = batches_of([item])
        assert isinstance(batch, tuple)
        assert batch[0] is ids
    encoding = TOKENIZER(["w1 w2"], return_tensors="pt")
    (batch,) = batches_of([encoding])
    assert type(batch) is dict
    assert rows_in([batch]) == [[1, 2]]


def test_texts_are_cut_and_batches_of_one_are_not_padded() -> None:
    found = batches_of(["w1 w2 w3 w4", "w5"], tokenizer=word_tokenizer(), max_length=3)
    assert [batch["input_ids"].tolist() for batch in found] == [[[1, 2, 3]], [[5]]]  # type: ignore[call-overload]
    short = word_tokenizer(model_max_length=2)
    assert rows_in(batches_of(["w1 w2 w3"], tokenizer=short)) == [[1, 2]]


def test_without_a_padding_token_the_end_token_pads_and_the_tokenizer_stays_as_it_is() -> None:
    tokenizer = word_tokenizer(pad_token=None)
    (batch,) = batches_of(["w1 w2", "w3"], tokenizer=tokenizer, batch_size=2)
    assert batch["input_ids"].tolist() == [[1, 2], [3, END]]  # type: ignore[call-overload]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]  # type: ignore[call-overload]
    assert tokenizer.pad_token is None


def test_a_file_of_texts(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(b"\xef\xbb\xbfw1 w2\r\n\n   \nw3\nw4 w5")
    found = batches_of(path, tokenizer=TOKENIZER)
    assert rows_in(found) == rows_in(found) == [[1, 2], [3], [4, 5]]
    assert found.source == "some.txt, 3 texts"
    assert rows_in(batches_of(str(path), tokenizer=TOKENIZER, samples=1, held_out=1)) == [[1, 2]]


def test_a_file_of_chats_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    chat = {"messages": [{"role": "w7", "content": "w8 w9"}, {"role": "w1", "content": "w2"}]}
    path.write_text(f"{json.dumps(chat)}\n\n{json.dumps({'text': 'w3', 'more': 1})}\n")
    found = batches_of(path, tokenizer=word_tokenizer(chat_template=CHAT))
    assert rows_in(found) == [[7, 8, 9, 1, 2], [3]]
    assert found.source == "some.jsonl, 2 chats"
    with pytest.raises(ConfigurationError, match=r"some.jsonl, line 1 has messages.*no chat templ"):
        batches_of(path, tokenizer=TOKENIZER)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": ', "is not JSON"),
        ('"just a text"', None),
        ("[1]", "is a list; expected a text"),
        ('{"prompt": "w1", "answer": "w2"}', "has prompt, answer; expected text, messages or"),
        ('{"messages": [{"role": "w1"}]}', "does not fit the tokenizer's chat template"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, problem: str | None) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(f'{{"text": "w1"}}\n\n{line}\n')
    tokenizer = word_tokenizer(
        chat_template="{% for m in messages %}{{ m.content.upper() }}{% endfor %}"
    )
    if problem is None:
        assert batches_of(path, tokenizer=tokenizer).samples == 2
        return
    with pytest.raises(ConfigurationError, match="some.jsonl, line 3 .*" + problem):
        batches_of(path, tokenizer=tokenizer)


def test_lines_beyond_those_needed_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "w1"}\n{"text": "w2"}\nbroken\n')
    found = batches_of(path, tokenizer=TOKENIZER, samples=1, held_out=1)
    assert rows_in([*found, *found.held_out]) == [[1], [2]]


def refused(data: Any, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        list(batches_of(data, **options))
    return str(caught.value)


def test_files_that_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "missing.txt")
    assert "neither .txt" in refused(tmp_path / "some.csv")
    assert "has no split 'test'" in refused(tmp_path / "some.txt", split="test")
    assert "has no split 'test'" in refused(["w1"], split="test")
    assert "pass it in a list" in refused("Once upon a time")
    (tmp_path / "folder.txt").mkdir()
    assert "has no .txt, .jsonl or .parquet file" in refused(tmp_path / "folder.txt")
    (tmp_path / "empty.txt").write_text("\n \n")
    assert "empty.txt is empty" in refused(tmp_path / "empty.txt", tokenizer=TOKENIZER)
    (tmp_path / "latin.txt").write_bytes("w1\nschön\n".encode("latin-1"))
    found = refused(tmp_path / "latin.txt", tokenizer=TOKENIZER)
    assert "latin.txt, line 2 is not UTF-8: byte 4 is 0xf6" in found


def test_data_that_is_refused() -> None:
    ids = torch.ones(1, 2, dtype=torch.int64)
    assert "a list is empty" in refused([])
    assert "a generator is empty" in refused(x for x in ())  # type: ignore[var-annotated]
    assert "row 1 of a list is text, which needs a tokenizer" in refused(["w1"])
    assert "single tensor" in refused(ids)
    assert "single mapping with input_ids" in refused({"input_ids": ids})
    assert "cannot calibrate on a int" in refused(3)
    assert "batch 2 of a list: labels is a ndarray, neither a tensor nor a plain value" in refused(
        [{"input_ids": ids}, {"input_ids": ids, "labels": [ids.numpy()]}]
    )
    assert "batch 1 of a list is a tuple without tensors" in refused([(None, 3)])
    assert "batch 1 of a list is a tuple without tensors" in refused([()])
    assert "batch 1 of a list is a float without tensors" in refused([1.0])
    assert "batch 1 of a list is empty" in refused([ids[:0]])
    assert "samples must be a whole number from 1, got 0" in refused([ids], samples=0)
    assert "batch_size must be a whole number from 1" in refused([ids], batch_size=True)
    assert "held_out must be a whole number from 0, got -1" in refused([ids], held_out=-1)


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    ids = torch.tensor([[1, 2]])
    assert len(batches_of([ids], vocabulary=3)) == 1
    assert "token id 2 is beyond the model's vocabulary of 2" in refused([ids], vocabulary=2)
    assert "beyond" in refused([{"input_ids": ids}], vocabulary=2)
    assert "beyond" in refused(["w1 w2"], tokenizer=TOKENIZER, vocabulary=2)
    assert "token id -100 is below 0" in refused([{"input_ids": torch.tensor([[1, -100]])}])
    # A tensor by position need not be ids.
    assert len(batches_of([torch.tensor([[-1]])])) == 1
    assert len(batches_of([torch.tensor([[9.0]])], vocabulary=2)) == 1


def test_datasets_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = datasets.Dataset.from_dict({"text": ["w1 w2", "", "w3"], "id": [1, 2, 3]})
    found = batches_of(texts, tokenizer=TOKENIZER)
    assert rows_in(found) == [[1, 2], [3]]
    assert found.source == "a Dataset, 2 texts"
    ids = {"input_ids": [[1, 2, 3], [4]], "attention_mask": [[1, 1, 0], [1]]}
    for tokenized in (
        datasets.Dataset.from_dict(ids),
        datasets.Dataset.from_dict(ids).with_format("torch"),
    ):
        (batch,) = batches_of(tokenized, batch_size=2)
        assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
        assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert rows_in(batches_of(datasets.Dataset.from_dict(ids), max_length=2)) == [[1, 2], [4]]
    chats = datasets.Dataset.from_dict({"messages": [[{"role": "w1", "content": "w2"}]]})
    tokenizer = word_tokenizer(chat_template=CHAT)
    assert rows_in(batches_of(chats, tokenizer=tokenizer)) == [[1, 2]]
    other = datasets.Dataset.from_dict({"question": ["w1"], "answer": ["w2"]})
    assert "row 1 of a Dataset has question, answer" in refused(other, tokenizer=TOKENIZER)
    splits = datasets.DatasetDict({"train": texts, "test": texts})
    assert "has the splits train, test; choose one" in refused(splits, tokenizer=TOKENIZER)
    assert rows_in(batches_of(splits, split="test", tokenizer=TOKENIZER)) == [[1, 2], [3]]
    short = datasets.Dataset.from_dict({"input_ids": [[1, 2]], "attention_mask": [[1]]})
    assert "has 2 input_ids but 1 in attention_mask" in refused(short)


def test_a_streamed_dataset_is_not_exhausted() -> None:
    datasets = pytest.importorskip("datasets")
    taken = 0

    def rows() -> Iterator[dict[str, str]]:
        nonlocal taken
        for index in range(50):
            taken += 1
            yield {"text": f"w{index}"}

    stream = datasets.IterableDataset.from_generator(rows)
    found = batches_of(stream, tokenizer=TOKENIZER, samples=3, held_out=2)
    assert rows_in(found) == [[0], [1], [2]]
    assert rows_in(found.held_out) == [[3], [4]]
    assert taken <= 6
    whole = batches_of(stream, tokenizer=TOKENIZER, samples=None)
    assert (whole.samples, whole.held_out) == (None, [])
    assert len(rows_in(whole)) == len(rows_in(whole)) == 50


def test_rows_need_not_come_from_a_dataset() -> None:
    found = batches_of([{"input_ids": [1, 2]}, {"input_ids": [3]}], batch_size=2)
    assert rows_in(found) == [[1, 2], [3]]
    assert found.source == "2 rows of token ids"
    assert "row 1 of a list: input_ids must be a list of whole numbers" in refused(
        [{"input_ids": "w1"}]
    )
    assert "row 1 of a list has no tokens" in refused([{"input_ids": []}])


def test_sources_in_words() -> None:
    ids = torch.ones(1, 2, dtype=torch.int64)
    assert batches_of([ids, ids]).source == "2 batches"
    assert batches_of(["w1", "w2", "w3"], tokenizer=TOKENIZER).source == "3 texts"


def test_data_that_is_not_used_is_told(tmp_path: Path) -> None:
    texts = ["w1"] * 10_000
    words = {"tokenizer": TOKENIZER, "batch_size": 64}
    assert batches_of(texts, **words).source == "512 of 10,000 texts"
    assert batches_of(texts, samples=None, **words).source == "10,000 texts"
    assert batches_of(texts[:528], **words).source == "528 texts"  # the last 16 are held out
    assert batches_of(texts[:528], held_out=0, **words).source == "512 of 528 texts"
    file = tmp_path / "some.txt"
    file.write_text("w1\n\n" * 600)
    assert batches_of(file, **words).source == "some.txt, 512 of 600 texts"
    assert batches_of(iter(texts), **words).source == "a list_iterator, the first 512 texts"
    assert batches_of(iter(texts[:9]), **words).source == "a list_iterator, 9 texts"
    ids = torch.tensor([[1, 2]])
    assert batches_of([ids] * 600).source == "512 of 600 batches"
    assert (
        batches_of(DataLoader(ids.expand(9, 2)), samples=4, held_out=0).source
        == "a DataLoader, 4 of 9 batches"
    )
    assert batches_of(iter([ids] * 600)).source == "a list_iterator"


@given(rows=rows_of_ids, batch_size=st.integers(1, 5))
def test_tokens_are_counted_without_padding(rows: list[list[int]], batch_size: int) -> None:
    found = batches_of(
        list(map(text_of, rows)), tokenizer=TOKENIZER, batch_size=batch_size, held_out=0
    )
    counts = [count_tokens(torch.nn.Identity(), batch) for batch in found]
    assert sum(tokens for tokens, _ in counts) == sum(map(len, rows))
    assert sum(map(sum, counts)) == sum(batch["input_ids"].numel() for batch in found)  # type: ignore[call-overload]


class Model(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return input_ids


def test_tokens_without_a_mask() -> None:
    model = Model()
    assert count_tokens(model, (torch.ones(2, 3, dtype=torch.int64),)) == (6, 0)
    assert count_tokens(model, {"inputs_embeds": torch.ones(2, 3, 8)}) == (6, 0)
    assert count_tokens(model, (torch.ones(5, 8),)) == (5, 0)
    assert count_tokens(model, {"pixel_values": torch.ones(2, 3, 4, 4)}) == (2, 0)


def test_tokens_of_masks() -> None:
    """By name or by position, of tokens or of pairs of them."""
    ids, mask = torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert count_tokens(Model(), {"input_ids": ids, "attention_mask": mask}) == (5, 1)
    assert count_tokens(Model(), (ids, mask)) == (5, 1)
    pairs = (torch.ones(3, 3).tril().bool() & mask[:, None, :].bool())[:, None]
    assert count_tokens(Model(), (ids, pairs)) == (5, 1)


tensors = st.builds(
    lambda values, dtype: torch.tensor(values).to(dtype),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.sampled_from([torch.int64, torch.bool, torch.float32, torch.bfloat16]),
)
plain = st.none() | st.booleans() | st.integers(0, 1) | st.sampled_from(["", "a", 1.0, 0.0])
arguments = st.one_of(tensors, plain, st.lists(tensors, max_size=2), st.tuples(plain, tensors))
batches = st.one_of(
    st.dictionaries(st.sampled_from("ab"), arguments, min_size=1),
    st.lists(arguments, min_size=1, max_size=2).map(tuple),
)


def same(one: Batch, other: Batch) -> bool:
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return all(map(equal, one, other))  # type: ignore[arg-type]


def equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@given(one=batches, other=batches)
def test_equal_digests_mean_equal_batches(one: Batch, other: Batch) -> None:
    assert (digest(one) == digest(other)) == same(one, other)


@given(batch=st.dictionaries(st.sampled_from("ab"), tensors, min_size=2))
def test_order_and_layout_do_not_change_the_digest(batch: dict[str, torch.Tensor]) -> None:
    turned = {name: batch[name].clone() for name in reversed(batch)}
    assert digest(turned) == digest(batch)
    spread = {name: tensor.repeat_interleave(2)[::2] for name, tensor in batch.items()}
    assert digest(spread) == digest(batch)


def test_shape_changes_the_digest() -> None:
    assert digest((torch.zeros(2, 3),)) != digest((torch.zeros(3, 2),))


def of_lengths(*lengths: int) -> list[Batch]:
    return [{"input_ids": torch.zeros(2, length, dtype=torch.long)} for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "dims"),
    [((3,), []), ((3, 3), []), ((3, 4), [1]), ((3, 3, 4), []), ((3, 3, 4, 5), [1]), ((), None)],
)
def test_sizes_vary_where_no_half_agrees(lengths: tuple[int, ...], dims: list[int] | None) -> None:
    expected = {} if dims is None else {"input_ids": dims}
    assert varying_sizes(of_lengths(*lengths)) == expected


def test_tensors_that_change_their_rank_do_not_count() -> None:
    assert varying_sizes(
        [(torch.zeros(3), torch.zeros(1)), (torch.zeros(2, 4), torch.zeros(2))]
    ) == {1: [0]}


def test_marks_do_not_stay_on_the_tensors_of_the_caller() -> None:
    (batch,) = of_lengths(5)
    moved = on_device_of(torch.nn.Linear(1, 1), batch, {"input_ids": [1]})
    assert torch.equal(moved["input_ids"], batch["input_ids"])
    assert hasattr(moved["input_ids"], "_dynamo_weak_dynamic_indices")
    assert not hasattr(batch["input_ids"], "_dynamo_weak_dynamic_indices")
