"""Data at a path: files, folders of files, and saved datasets hold the same rows."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import bert, llama
from tokens import CHAT, text_of, word_tokenizer

from inlay.data.sources import batches_of
from inlay.engine.batches import read_batches
from inlay.errors import ConfigurationError
from inlay.options import DataOptions

ROWS = [[index, index + 1] for index in range(40)]
TOKENIZER = word_tokenizer()


def rows_in(data: Any, **options: Any) -> list[list[int]]:
    found = batches_of(data, tokenizer=TOKENIZER, held_out=0, **options)
    assert found.samples == len(found)
    return [batch["input_ids"][0].tolist() for batch in found]  # type: ignore[call-overload]


def write(path: Path, rows: list[list[int]]) -> None:
    """Write rows of text in the format that the name of a file tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [text_of(row) for row in rows]
    if path.suffix == ".txt":
        path.write_text("\n".join(texts))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"id": range(len(rows)), "text": texts})
        parquet.write_table(table, path, row_group_size=7)


def test_a_parquet_file(tmp_path: Path) -> None:
    file = tmp_path / "some.parquet"
    write(file, ROWS)
    assert rows_in(file) == ROWS
    assert batches_of(file, tokenizer=TOKENIZER, samples=3).source == "some.parquet, 3 of 40 texts"
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    chats = [[{"role": "w1", "content": text_of(row)}] for row in ROWS]
    parquet.write_table(pyarrow.table({"messages": chats}), file)
    chatting = word_tokenizer(chat_template=CHAT)
    found = batches_of(file, tokenizer=chatting, held_out=0)
    assert [batch["input_ids"][0].tolist() for batch in found] == [[1, *row] for row in ROWS]  # type: ignore[call-overload]
    parquet.write_table(pyarrow.table({"input_ids": ROWS}), file)
    assert rows_in(file) == ROWS
    parquet.write_table(pyarrow.table({"prompt": ["w1"]}), file)
    with pytest.raises(ConfigurationError, match=r"some.parquet, row 1 has prompt; expected text"):
        rows_in(file)
    file.write_bytes(b"PAR")
    with pytest.raises(ConfigurationError, match=r"cannot read .*some.parquet"):
        rows_in(file)


def test_a_folder_holds_the_rows_of_its_files_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder / "train-00000-of-00002.parquet", ROWS[:5])
    write(folder / "train-00001-of-00002.jsonl", ROWS[5:9])
    write(folder / "deep" / "test.txt", ROWS[9:20])
    (folder / "README.md").write_text("not data")
    assert rows_in(folder) == [*ROWS[9:20], *ROWS[:9]]
    assert rows_in(folder, split="train") == ROWS[:9]
    found = batches_of(folder, tokenizer=TOKENIZER, samples=4, held_out=0)
    assert found.source == "data, 4 of 20 texts"
    (folder / "deep" / "test.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match=r"deep/test.txt, line 1 is not UTF-8"):
        rows_in(folder)
    with pytest.raises(ConfigurationError, match=r"no file of the split 'dev', only test.txt"):
        rows_in(folder, split="dev")


def test_a_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    some = datasets.Dataset.from_dict({"text": list(map(text_of, ROWS)), "id": range(40)})
    some.save_to_disk(tmp_path / "one")
    assert rows_in(tmp_path / "one") == ROWS
    both = datasets.DatasetDict({"train": some.select(range(9)), "test": some.select([3, 1])})
    both.save_to_disk(tmp_path / "two")
    assert rows_in(tmp_path / "two", split="test") == [ROWS[3], ROWS[1]]
    found = batches_of(tmp_path / "two", split="train", tokenizer=TOKENIZER, held_out=0)
    assert found.source == "two, split train, 9 texts"
    for split, problem in ((None, "the splits train, test; choose"), ("dev", "no split 'dev'")):
        with pytest.raises(ConfigurationError, match=problem):
            rows_in(tmp_path / "two", split=split)
    with pytest.raises(ConfigurationError, match="one dataset without splits"):
        rows_in(tmp_path / "one", split="train")


def test_an_optional_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "some.parquet").touch()
    with pytest.raises(ConfigurationError, match="pip install pyarrow"):
        rows_in(tmp_path / "some.parquet")
    (tmp_path / "dataset_info.json").touch()
    with pytest.raises(ConfigurationError, match="pip install datasets"):
        rows_in(tmp_path)


def advice(model: torch.nn.Module, rows: list[Any], **template: Any) -> tuple[str, ...]:
    tokenizer = word_tokenizer(**template)
    return read_batches(model, rows, tokenizer, DataOptions(max_length=64, held_out=0)).advice


def test_advice_on_short_texts() -> None:
    model = llama(max_position_embeddings=4096)
    rows = ["w1 w2", "w1 w2 w3", "w1 w2 w3 w4 w5"]
    (short,) = advice(model, rows)
    assert "at most 3 tokens, 4.7% of the 64 that one may have" in short
    assert "up to 4,096" in short
    assert advice(model, [" ".join(["w1"] * 5)] * 3) == ()
    assert advice(llama(max_position_embeddings=32), rows) == ()
    assert advice(bert(), rows) == ()  # sentences are short


def test_advice_on_texts_without_the_chat_template() -> None:
    template = "<s>{% for m in messages %}<end> {{ m.role }} {{ m.content }}{% endfor %}"
    fields = {"chat_template": template, "bos_token": "<s>"}
    (found,) = advice(bert(vocab_size=200), ["<s> w1", "w2"], **fields)
    assert "None of 2 texts has <end> of the tokenizer's chat template" in found
    assert advice(bert(vocab_size=200), ["w1", "<end> user w2"], **fields) == ()
    assert advice(bert(vocab_size=200), [{"input_ids": [1]}], **fields) == ()
    assert advice(bert(vocab_size=200), ["w1"], chat_template=CHAT) == ()  # it has no marks
