"""Models that read images, from files on disk to a loaded checkpoint."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from multimodal import MODELS, whisper, write_images, write_recordings
from PIL import Image
from tokens import word_tokenizer
from typer.testing import CliRunner

import inlay
from inlay.checkpoint.loading import load_tokenizer
from inlay.cli import app
from inlay.data.audio import waveform
from inlay.data.sources import batches_of
from inlay.errors import ConfigurationError


def chat(image: Any, text: str = "w2 w3 w4") -> dict[str, Any]:
    content = [{"type": "image", "path": image}, {"type": "text", "text": text}]
    return {"messages": [{"role": "w1", "content": content}]}


# Images of Qwen2.5-VL lie one behind the other in a tensor, which a batch with padding cannot have.
@pytest.mark.parametrize(("kind", "rows"), [("gemma3", 2), ("qwen2_5_vl", 1)])
def test_from_images_to_a_checkpoint(kind: str, rows: int, tmp_path: Path) -> None:
    model, processor = MODELS[kind]()
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(chat(name)) for name in write_images(tmp_path)))
    recipe = inlay.Recipe.from_preset("W8A8_STATIC")
    run = inlay.calibrate(
        model,
        recipe,
        data,
        processor=processor,
        held_out=0,
        batch_size=rows,
        compiler="eager",
        progress=False,
    )
    assert len(run.graphs) <= 2, run.graphs.tracing  # images have four sizes
    assert all("language_model" in slot for slot in run.statistics.snapshot())
    run.save(tmp_path / "out", report=False)
    loaded, found = type(model).from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values()), found
    messages = chat(str(tmp_path / "24x24.png"))["messages"]
    batch = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        before, after = (each.eval()(**batch).logits for each in (model, loaded))
    assert not torch.equal(before, after)
    assert float(torch.cosine_similarity(before.flatten(), after.flatten(), dim=0)) > 0.99
    assert (tmp_path / "out" / "chat_template.jinja").is_file()


def test_the_command_reads_images_beside_the_data(tmp_path: Path) -> None:
    model, processor = MODELS["llava"]()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    messages = [{"role": "w1", "content": "w2 <image> w3"}]
    rows = [{"messages": messages, "images": [name]} for name in write_images(tmp_path)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = {"--data": "rows.jsonl", "--out": "out"}
    places = [word for name, file in given.items() for word in (name, str(tmp_path / file))]
    options = ["--scheme", "W8A8_STATIC", "--method", "plain", "--compiler", "eager"]
    arguments = ["calibrate", str(tmp_path / "model"), *places, *options, "--no-report"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "rows.jsonl, 4 rows with images" in result.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert any("vision_tower" in name for name in config["ignore"])
    assert load_tokenizer(tmp_path / "out").image_processor.size == {"shortest_edge": 16}


def test_from_recordings_to_a_checkpoint(tmp_path: Path) -> None:
    model, processor = whisper()
    rows = [{"audio": name, "text": "w1 w2 w3"} for name in write_recordings(tmp_path)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = inlay.calibrate(
        model,
        inlay.Recipe.from_preset("W8A8_STATIC"),
        tmp_path / "rows.jsonl",
        processor=processor,
        held_out=0,
        compiler="eager",
        progress=False,
    )
    assert run.record.data.startswith("rows.jsonl, 3 recordings")
    assert run.recipe.config.ignore == ["proj_out"]
    names = {slot.rpartition(".")[0] for slot in run.statistics.snapshot()}
    assert {"model.encoder.layers.0.fc1", "model.decoder.layers.1.encoder_attn.k_proj"} <= names
    run.save(tmp_path / "out", report=False)
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    (batch, *_) = batches_of(tmp_path / "rows.jsonl", tokenizer=processor, held_out=0)
    with torch.no_grad():
        before, after = (each(**batch).logits for each in (model, loaded))
    assert not torch.equal(before, after)
    assert float(torch.cosine_similarity(before.flatten(), after.flatten(), dim=0)) > 0.99


def test_recordings_of_all_forms_are_heard_alike(tmp_path: Path) -> None:
    """Whatever their width and channels; and those of another rate are refused."""
    tones = [waveform(name, tmp_path, "row 1", 16000) for name in write_recordings(tmp_path)]
    time = torch.arange(16000) / 16000
    for tone, loudness in zip(tones, (30000 / 32768, 120 / 128, 30000 / 32768), strict=True):
        expected = loudness * torch.sin(2 * torch.pi * 440 * time[: len(tone)])
        assert float((tone - expected).abs().max()) < 0.01
    with pytest.raises(ConfigurationError, match=r"has 16,000 samples per second.*-ar 8000"):
        waveform("0.5s.wav", tmp_path, "row 1", 8000)
    with pytest.raises(ConfigurationError, match=r"row 1: cannot read .*missing.wav"):
        waveform("missing.wav", tmp_path, "row 1", 8000)
    decoded = {"array": tones[0].numpy(), "sampling_rate": 16000}
    assert torch.equal(waveform(decoded, None, "row 1", 16000), tones[0])


def rows_of(record: dict[str, Any], folder: Path) -> Any:
    (folder / "some.jsonl").write_text(json.dumps(record))
    return batches_of(folder / "some.jsonl", tokenizer=MODELS["llava"]()[1], held_out=0)


def test_images_in_all_places_are_the_same(tmp_path: Path) -> None:
    name = write_images(tmp_path)[0]
    text = {"type": "text", "text": "w2"}
    parts = [{"path": name}, {"image": name}, {"type": "image_url", "image_url": {"url": name}}]
    chats = [
        *({"messages": [{"role": "w1", "content": [{"type": "image", **p}, text]}]} for p in parts),
        {"messages": [{"role": "w1", "content": "<image> w2"}], "images": [name]},
        {"messages": [{"role": "w1", "content": "w2"}], "image": name},
        {"text": "w1 <image> w2", "images": [name]},
    ]
    first, *others = [next(iter(rows_of(record, tmp_path))) for record in chats]
    pixels = Image.open(tmp_path / name)
    encoded = io.BytesIO()
    pixels.save(encoded, "png")
    for raw in (pixels, {"bytes": encoded.getvalue()}, encoded.getvalue()):
        record = {"messages": [{"role": "w1", "content": "w2"}], "images": [raw]}
        others += batches_of([record], tokenizer=MODELS["llava"]()[1])
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[key], first[key]) for key in first)


def test_rows_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write_images(tmp_path)
    for record, problem in (
        (chat("missing.png"), "cannot read the image 'missing.png'"),
        (chat("https://somewhere/a.png"), "is not downloaded; save the image"),
        ({"text": "w1", "images": [3]}, "an image is a int"),
        ({"messages": [{"role": "w1", "content": "<image> <image>"}], "image": "a"}, "2 times <im"),
    ):
        with pytest.raises(ConfigurationError, match=f"some.jsonl, line 1.*{problem}"):
            rows_of(record, tmp_path)
    with pytest.raises(ConfigurationError, match="images, which need a processor; pass"):
        batches_of([chat("24x24.png")], tokenizer=word_tokenizer())


def test_a_tower_can_be_targeted() -> None:
    model, _ = MODELS["llava"]()
    recipe = inlay.Recipe.from_preset("W8A8", targets=["Linear", "re:.*vision_tower.*fc1$"])
    ignored = recipe.for_model(model).config.ignore
    assert ignored == ["lm_head", r"re:model\.multi_modal_projector($|[.].*)"]
    names = {slot.module for slot in inlay.Calibration(model, recipe).plan.slots.values()}
    assert any("vision_tower" in name for name in names)
