"""Two models in folders, with faults that the comparison has to find."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compared import TEXTS, changed_config, changed_tensors, decisive, in_folder, quantized
from families import bert, qwen3_moe
from tokens import END, word_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

import inlay
from inlay.cli import app
from inlay.comparison import ModelComparison
from inlay.comparison.result import failures
from inlay.errors import ConfigurationError
from inlay.options import CompareOptions

pytestmark = pytest.mark.filterwarnings("ignore:continuing without a tokenizer")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_folder(decisive(), tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="module")
def eight(plain: Path) -> Path:
    return quantized(decisive(), plain.with_name("eight"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments), "--quiet"])


def warnings_of(found: ModelComparison) -> str:
    return "\n".join(f"{each.about}: {each.text}" for each in found.warnings)


def test_a_model_does_not_differ_from_itself(plain: Path) -> None:
    found = inlay.compare(plain, plain, TEXTS)
    assert found.estimates["kl"].value == found.estimates["kl_reverse"].value == 0
    assert found.estimates["agreement"].value == found.estimates["perplexity_ratio"].value == 1
    assert (found.rows, found.positions, found.findings, found.worst) == (6, 72, (), ())


@pytest.mark.parametrize("batch_size", [1, 4])
def test_numbers_by_hand(plain: Path, eight: Path, batch_size: int) -> None:
    found = inlay.compare(plain, eight, TEXTS, batch_size=batch_size)
    tokenizer = word_tokenizer()
    kept: dict[str, list[torch.Tensor]] = {"a": [], "b": [], "labels": []}
    models = [AutoModelForCausalLM.from_pretrained(each).eval() for each in (plain, eight)]
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            for name, model in zip("ab", models, strict=True):
                kept[name].append(model(ids).logits[0].double().log_softmax(-1))
        kept["labels"].append(F.pad(ids[0, 1:], (0, 1), value=-100))
    a, b, labels = (torch.cat(kept[name]) for name in ("a", "b", "labels"))
    kl = F.kl_div(b, a, log_target=True, reduction="none").sum(-1)
    expected = {
        "kl": kl.mean(),
        "kl_reverse": F.kl_div(a, b, log_target=True, reduction="batchmean"),
        "agreement": (a.argmax(-1) == b.argmax(-1)).double().mean(),
        "perplexity_a": F.nll_loss(a, labels).exp(),
        "perplexity_b": F.nll_loss(b, labels).exp(),
        "perplexity_ratio": (F.nll_loss(b, labels) - F.nll_loss(a, labels)).exp(),
    }
    assert found.estimates.keys() == expected.keys()
    for name, value in expected.items():
        assert found.estimates[name].value == pytest.approx(float(value), rel=1e-3), name
        assert found.estimates[name].interval is not None
    assert found.estimates["kl"].value > 1e-5

    values, places = kl.topk(5)
    assert [each.kl for each in found.worst] == pytest.approx(values.tolist(), rel=1e-2)
    worst, place = found.worst[0], int(places[0])
    assert (worst.row, worst.token) == (place // 12 + 1, place % 12 + 2)
    assert worst.text == " ".join(TEXTS[place // 12].split()[: place % 12 + 1])
    top = a[place].exp().topk(3)
    words = tokenizer.convert_ids_to_tokens(top.indices)
    known = [w or f"<{i}>" for w, i in zip(words, top.indices.tolist(), strict=True)]
    assert [each.token for each in worst.top_a] == known
    shares = [each.probability for each in worst.top_a]
    assert shares == pytest.approx(top.values.tolist(), rel=1e-4)
    assert worst.top_b[0].probability == pytest.approx(float(b[place].exp().max()), rel=1e-4)


def test_json_keeps_everything(plain: Path, eight: Path) -> None:
    found = inlay.compare(plain, eight, TEXTS, samples=2)
    assert ModelComparison.from_json(found.to_json()) == found
    with pytest.raises(ConfigurationError, match="no comparison of version 1"):
        ModelComparison.from_json("{}")


# Faults


def test_a_swapped_scale_between_two_layers(
    eight: Path, plain: Path, tmp_path: Path, data: Path
) -> None:
    first, second = (f"model.layers.{index}.mlp.down_proj.weight_scale" for index in (0, 1))

    def swap(tensors: dict[str, Any]) -> None:
        tensors[first], tensors[second] = 3 * tensors[second], 3 * tensors[first]

    def swap_alone(tensors: dict[str, Any]) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    swapped = changed_tensors(eight, tmp_path / "swapped", swap_alone)
    found = inlay.compare(eight, swapped, TEXTS)
    for one, other in ((first, second), (second, first)):
        assert f"{one}: What B has here, A has as {other}" in warnings_of(found)
    usual = inlay.compare(plain, eight, TEXTS).estimates["kl"].value
    assert found.estimates["kl"].value > 10 * usual
    # A plain model has no scales, but other weights.
    worse = changed_tensors(eight, tmp_path / "worse", swap)
    found = inlay.compare(plain, worse, TEXTS)
    assert "model.layers.0.mlp.down_proj.weight" in warnings_of(found)
    assert "far more than others of their kind" in warnings_of(found)

    limit = ("--data", data, "--max-kl", 5 * usual)
    assert run(plain, eight, *limit).exit_code == 0
    failed = run(plain, swapped, *limit)
    assert failed.exit_code == 3
    assert "failed: the KL divergence is " in failed.stderr


def test_a_zeroed_expert(tmp_path: Path) -> None:
    model = decisive(qwen3_moe, num_hidden_layers=1)
    plain = in_folder(model, tmp_path / "plain")
    intact = quantized(model, tmp_path / "intact")

    def zero(tensors: dict[str, Any]) -> None:
        for name in [each for each in tensors if ".experts.2." in each and "scale" in each]:
            tensors[name].zero_()

    broken = changed_tensors(intact, tmp_path / "broken", zero)
    usual, found = (inlay.compare(plain, each, TEXTS) for each in (intact, broken))
    assert warnings_of(usual) == ""
    for name in ("down_proj", "gate_up_proj"):
        assert f"model.layers.0.mlp.experts.{name}[2]" in warnings_of(found)
    assert "only zeros in B" in warnings_of(found)
    assert found.estimates["kl"].value > 10 * usual.estimates["kl"].value
    assert failures(found, CompareOptions(strict=True))


def test_a_changed_chat_template(plain: Path, tmp_path: Path) -> None:
    changed = changed_config(plain, tmp_path / "changed", lambda config: None)
    template = "{% for m in messages %}{{ m['role'] }} w9 {{ m['content'] }} {% endfor %}"
    word_tokenizer(chat_template=template).save_pretrained(changed)
    chats = [{"messages": [{"role": "w1", "content": text}]} for text in TEXTS]
    found = inlay.compare(plain, changed, chats)
    text = warnings_of(found)
    assert "chat template: It differs from line 1 on" in text
    assert "w9 {{ m['content'] }}" in text
    assert "6 of 6 rows of the data are other tokens to B" in text
    assert found.estimates["kl"].value == 0  # both were given the tokens of A
    assert len(failures(found, CompareOptions(strict=True))) == 2
    assert failures(found, CompareOptions(max_kl=0.0)) == []


def test_an_end_token_that_became_probable(plain: Path, tmp_path: Path) -> None:
    def talkative(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"][END] *= 3

    other = changed_tensors(plain, tmp_path / "other", talkative)
    texts = [f"{text} <end>" for text in TEXTS]
    found = inlay.compare(plain, other, texts)
    (token,) = (each for each in found.special_tokens if each.id == END)
    sums = {name: [0.0, 0.0] for name in ("expected", "elsewhere")}
    chosen = []
    for side, folder in enumerate((plain, other)):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        chosen.append([])
        for text in texts:
            ids = word_tokenizer()(text, return_tensors="pt").input_ids
            with torch.no_grad():
                probabilities = model(ids).logits[0].softmax(-1)
            sums["expected"][side] += float(probabilities[11, END]) / 6
            sums["elsewhere"][side] += float(probabilities[:11, END].sum()) / 66
            chosen[side] += (probabilities.argmax(-1) == END).tolist()
    assert (token.token, token.expected) == ("<end>", 6)
    assert [token.expected_a, token.expected_b] == pytest.approx(sums["expected"], rel=1e-4)
    assert [token.elsewhere_a, token.elsewhere_b] == pytest.approx(sums["elsewhere"], rel=1e-4)
    assert (token.chosen_a, token.chosen_b) == tuple(map(sum, chosen))
    assert token.chosen_b > token.chosen_a


def test_numbers_that_are_none(plain: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["model.embed_tokens.weight"][7] = math.nan

    broken = changed_tensors(plain, tmp_path / "broken", spoil)
    found = inlay.compare(plain, broken, ["w1 w2 w7 w3", "w4 w5"])
    assert found.estimates["kl"].value == 0
    assert "B: The model gives NaN or Inf at 4 of 6 positions" in warnings_of(found)


def test_a_config_and_tensors_that_differ(plain: Path, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["rms_norm_eps"] = 0.01

    found = inlay.compare(plain, changed_config(plain, tmp_path / "other", change), TEXTS)
    assert "config.json: rms_norm_eps is 1e-06 in A and 0.01 in B." in warnings_of(found)
    deeper = in_folder(decisive(num_hidden_layers=3), tmp_path / "deeper")
    text = warnings_of(inlay.compare(plain, deeper, TEXTS))
    assert "num_hidden_layers is 2 in A and 3 in B" in text
    assert "model.layers.2.input_layernorm.weight" in text


# Other models


def test_encoders(tmp_path: Path) -> None:
    plain = in_folder(bert(), tmp_path / "plain")
    eight = quantized(bert(), tmp_path / "eight")
    found = inlay.compare(plain, eight, TEXTS)
    units = ("tokens", "sequences")
    assert found.estimates.keys() == {
        f"{n}_{u}" for n in ("cosine", "relative_error") for u in units
    }
    assert 0.9 < found.estimates["cosine_tokens"].value < 1
    assert (found.rows, found.positions, found.warnings) == (6, 72, ())
    assert failures(found, CompareOptions(min_cosine=0.9)) == []
    assert len(failures(found, CompareOptions(min_cosine=1.0))) == 2
    with pytest.raises(ConfigurationError, match="max_kl needs the KL divergence, which these"):
        failures(found, CompareOptions(max_kl=1.0))


def test_refusals_say_what_to_do(plain: Path, tmp_path: Path) -> None:
    def unknown(config: dict[str, Any]) -> None:
        config["model_type"] = "perceptron"

    with pytest.raises(ConfigurationError, match=r"B does not load: .*update transformers.*--via"):
        inlay.compare(plain, changed_config(plain, tmp_path / "unknown", unknown), TEXTS)
    larger = in_folder(decisive(vocab_size=128), tmp_path / "larger")
    with pytest.raises(ConfigurationError, match="A has a vocabulary of 96 tokens and B of 128"):
        inlay.compare(plain, larger, TEXTS)
    encoder = in_folder(bert(), tmp_path / "encoder")
    with pytest.raises(ConfigurationError, match="only one of them predicts next tokens"):
        inlay.compare(plain, encoder, TEXTS)
    with pytest.raises(ConfigurationError, match=r"there is no folder"):
        inlay.compare(plain, tmp_path / "nowhere", TEXTS)
    with pytest.raises(ConfigurationError, match="min_agreement must be a number from 0 to 1"):
        inlay.compare(plain, plain, TEXTS, min_agreement=1.5)


# The command


def test_the_command_shows_what_it_found(plain: Path, eight: Path, data: Path) -> None:
    found = CliRunner().invoke(app, ["compare", str(plain), str(eight), "--data", str(data)])
    assert found.exit_code == 0, found.output
    for words in ("top-1 agreement", "KL divergence of B from A", "perplexity of B over A"):
        assert words in found.stdout
    assert "6 rows, 72 positions" in found.stdout
    assert "text before" in found.stdout
    assert "show no fault" in found.stdout


def test_the_command_prints_json_and_fails_beyond_limits(
    plain: Path, eight: Path, data: Path
) -> None:
    arguments = [plain, eight, "--data", data, "--json", "--samples", 4]
    found = run(*arguments, "--min-agreement", "1", "--max-perplexity-ratio", "0.5")
    assert found.exit_code == 3
    assert json.loads(found.stdout)["comparison"]["rows"] == 4
    assert "the perplexity ratio is" in found.stderr
    assert "above max_perplexity_ratio=0.5" in found.stderr
    assert run(*arguments, "--min-agreement", "2").exit_code == 2
