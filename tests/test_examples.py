"""The examples run, and the custom observers in them keep what they promise."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given
from hypothesis import strategies as st
from profiles import count

from inlay.errors import ConfigurationError
from inlay.testing import Check, parametrize_with_checks
from inlay.testing.strategies import tensors

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

MARGIN = runpy.run_path(str(EXAMPLES / "custom_minmax.py"))
NORMAL = runpy.run_path(str(EXAMPLES / "custom_normal.py"))
PERCENTILE = runpy.run_path(str(EXAMPLES / "custom_percentile.py"))


def run(name: str, *arguments: str | Path) -> dict[str, Any]:
    """Run an example in this process, which has imported already what it needs."""
    before = sys.argv
    sys.argv = [name, *map(str, arguments)]
    try:
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = before


@pytest.mark.parametrize(
    ("example", "line"),
    [
        (MARGIN, "range -1.5 to 6.0\nscale 0.0471"),
        (NORMAL, "range -4."),
        (PERCENTILE, "percentile: scale 0.0"),
    ],
    ids=["margin", "normal", "percentile"],
)
def test_custom_observers_run(example: dict[str, Any], line: str, capsys) -> None:
    example["main"]()
    assert line in capsys.readouterr().out


def test_example_of_a_weight(capsys) -> None:
    run("observe_a_weight.py")
    found = re.fullmatch(
        r"memoryless_minmax: error (0\.1\d+)\nmemoryless_mse: error (0\.1\d+)\n",
        capsys.readouterr().out,
    )
    assert found is not None
    assert float(found[2]) < float(found[1])


@pytest.mark.slow
def test_example_in_the_graph() -> None:
    """As a user starts it: in a process of its own, with the compiler that it names."""
    command = [sys.executable, str(EXAMPLES / "calibrate_in_the_graph.py")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "'scale': tensor([0." in output
    assert "56 slots, phase: quantize" in output


@pytest.mark.slow
def test_observers_on_a_real_model(capsys) -> None:
    run("observers_on_minilm.py", "FP8")
    output = capsys.readouterr().out
    for word in ("37 Linear layers", "FP8", "memoryless_mse", "imatrix_mse"):
        assert word in output


@pytest.mark.slow
def test_demo(tmp_path: Path, capsys) -> None:
    """With less work than the demo does: few sentences, op by op."""
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    demo["main"](tmp_path, sentences=16, compiler="eager")
    output = capsys.readouterr().out
    for scheme in ("W8A8_STATIC", "W4A16"):
        (size, kept) = re.search(rf"{scheme} +│ +([\d.]+) MB │ +\d+ +│ ([\d.]+)", output).groups()
        assert float(size) < 91 * 0.7, "not much smaller than in float32"
        assert float(kept) > 0.9
        assert f"report of {scheme}: {tmp_path / scheme / 'report.html'}" in output
        assert (tmp_path / scheme / "report.html").exists()
        assert re.search(rf"{scheme} .*│ +([\d.]+|no kernel) +│$", output, re.MULTILINE)


@pytest.mark.slow
def test_example_with_a_language_model(tmp_path: Path, capsys) -> None:
    from families import llama
    from tokens import CHAT, text_of, word_tokenizer

    name = "W8A8_STATIC, histogram, down_proj per token"
    llama().save_pretrained(tmp_path / "model")
    word_tokenizer(chat_template=CHAT).save_pretrained(tmp_path / "model")
    texts = [text_of(list(range(start, start + 9))) for start in range(30)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    files = ["--text", tmp_path / "texts.txt", "--out", tmp_path / "out"]
    options = ["--only", name, "--question", "w1 w2", "--compiler", "eager"]
    run("language_model.py", tmp_path / "model", *files, *options)
    output = capsys.readouterr().out
    assert "float32" in output
    assert "down_proj" in output
    recipe = (
        tmp_path / "out" / name.replace(", ", "-").replace(" ", "_") / "recipe.yaml"
    ).read_text()
    assert "histogram" in recipe
    assert "strategy: token" in recipe


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the peer warns of is theirs
def test_example_inside_llm_compressor(tmp_path: Path, capsys) -> None:
    from families import llama
    from peer import EAGER
    from safetensors.torch import load_file
    from tokens import text_of, word_tokenizer

    llama(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    texts = [text_of(list(range(start, start + 9))) for start in range(4)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    options = ["--text", tmp_path / "texts.txt", "--out", tmp_path / "out", "--pipeline", EAGER]
    run("inside_llmcompressor.py", tmp_path / "model", *options)
    assert f"{tmp_path / 'out'} is written" in capsys.readouterr().out
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved["model.layers.0.mlp.down_proj.weight"].dtype == torch.int8
    assert float(saved["model.layers.0.mlp.down_proj.input_scale"]) > 0


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("observe_a_weight.py", "examples/README.md"),
        ("calibrate_in_the_graph.py", "README.md"),
    ],
)
def test_documents_show_examples(name: str, document: str) -> None:
    shown = (ROOT / document).read_text()
    code = (EXAMPLES / name).read_text().split('"""', 2)[2].strip()
    assert code in shown


@pytest.mark.hypothesis
@parametrize_with_checks(["margin_minmax", "normal", "percentile"], examples=count(8))
def test_custom_observers_keep_every_law(check: Check) -> None:
    check()


@given(tensors(), st.floats(0, 1))
def test_quantile_is_that_of_torch(values, q: float) -> None:
    own = PERCENTILE["quantile"](values, q)
    slack = float(values.abs().max()) * 1e-5
    torch.testing.assert_close(own, torch.quantile(values, q, dim=-1), rtol=0, atol=slack)


def test_percentile_takes_more_than_quantile_does() -> None:
    value = torch.zeros(1, 1, 17_000_000)
    value[..., :10] = 5
    of = PERCENTILE["PercentileObserver"]("input", QuantizationArgs(strategy="tensor"))
    of.update_statistics_from_observed(value)
    assert float(of.max_vals) == 0


def test_percentile_out_of_range() -> None:
    of = PERCENTILE["PercentileObserver"]("input", QuantizationArgs(strategy="tensor"))
    of.args.observer_kwargs["percentile"] = 20
    with pytest.raises(ConfigurationError, match="from 50 to 100"):
        of(torch.ones(2, 2))


@given(st.lists(tensors((2, 3), scaled=False), min_size=1, max_size=4))
def test_normal_observer_sees_all_batches_as_one(batches) -> None:
    args = QuantizationArgs(strategy="tensor")
    parts = NORMAL["NormalObserver"]("input", args, k=2.0)
    for batch in batches:
        parts(batch)
    whole = NORMAL["NormalObserver"]("input", args, k=2.0)(torch.cat(batches))
    for own, expected in zip(parts.range(), whole.range(), strict=True):
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)
    everything = torch.cat(batches)
    torch.testing.assert_close(
        whole.range()[1],
        (everything.mean() + 2 * everything.std(correction=0)).reshape(1),
        atol=1e-4,
        rtol=1e-4,
    )
