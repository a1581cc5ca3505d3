"""The predictions of a server, which a small one on this machine gives in the form of vLLM."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from compared import TEXTS, changed_tensors, decisive, in_folder, quantized
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import inlay
from inlay.cli import app
from inlay.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:continuing without a tokenizer")

Answer = Callable[[Any], Any]  # from the body of a request to that of the response


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_folder(decisive(), tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="module")
def eight(plain: Path) -> Path:
    return quantized(decisive(), plain.with_name("eight"))


@contextmanager
def serving(folder: Path, complete: Answer) -> Iterator[str]:
    """Serve a model on loopback; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            card = {"id": "served", "root": str(folder)}
            self._send(200, {"data": [card]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions"
            assert body["model"] == "served"
            status, answer = 200, complete(body)
            if isinstance(answer, int):
                status, answer = answer, {"error": {"message": "no entry"}}
            self._send(status, answer)

        def _send(self, status: int, answer: Any) -> None:
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def vllm(folder: Path) -> Answer:
    """Answer as vLLM does: the token of the data, and the most probable ones with their ranks."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def complete(body: Any) -> Any:
        ids = torch.tensor([body["prompt"]])
        with torch.no_grad():
            logs = model(ids).logits[0].double().log_softmax(-1)
        known: list[Any] = [None]
        for place, token in enumerate(ids[0, 1:].tolist()):
            order = logs[place].argsort(descending=True).tolist()
            tokens = dict.fromkeys([token, *order[: body["prompt_logprobs"]]])
            known.append(
                {
                    str(each): {
                        "logprob": float(logs[place, each]),
                        "rank": order.index(each) + 1,
                    }
                    for each in tokens
                }
            )
        return {"choices": [{"text": "", "prompt_logprobs": known}]}

    return complete


def test_a_server_gives_what_its_folder_gives(plain: Path, eight: Path) -> None:
    """Except for positions after the last token of a row, which a server does not report."""
    local = inlay.compare(plain, eight, TEXTS, progress=False).estimates
    with serving(eight, vllm(eight)) as url:
        few, every = (
            inlay.compare(plain, eight, TEXTS, via=("vllm", url), top_logprobs=n, progress=False)
            for n in (5, 96)
        )
    assert few.positions == every.positions == 66
    for name in ("perplexity_a", "perplexity_b", "perplexity_ratio"):
        for found in (few, every):
            assert found.estimates[name].value == pytest.approx(local[name].value, rel=1e-4)
    assert few.estimates["agreement"] == every.estimates["agreement"]
    exact, bound = every.estimates["kl"].value, few.estimates["kl"].value
    assert few.estimates["kl"].is_bound
    assert 0 < bound < exact
    assert exact == pytest.approx(local["kl"].value, rel=0.3)  # of other positions


def test_a_server_that_swaps_scales(plain: Path, eight: Path, tmp_path: Path) -> None:
    """The folder is right, and what is served is not."""
    first, second = (f"model.layers.{index}.mlp.down_proj.weight_scale" for index in (0, 1))

    def swap(tensors: dict[str, Any]) -> None:
        tensors[first], tensors[second] = 3 * tensors[second], tensors[first] / 3

    wrong = changed_tensors(eight, tmp_path / "wrong", swap)
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(TEXTS[:3]))
    command = ["compare", str(plain), str(eight), "--data", str(data), "--max-kl", "0.01"]
    codes = []
    for served in (eight, wrong):
        with serving(eight, vllm(served)) as url:
            done = CliRunner().invoke(app, [*command, "--via", "vllm", url, "--quiet"])
        codes.append(done.exit_code)
    assert codes == [0, 3]
    assert "failed: the KL divergence is " in done.stderr


def test_answers_that_are_none(plain: Path, eight: Path) -> None:
    def refused(complete: Answer, text: str, **options: Any) -> None:
        with serving(eight, complete) as url, pytest.raises(ConfigurationError, match=text):
            inlay.compare(plain, eight, TEXTS[:1], via=("vllm", url), progress=False, **options)

    refused(lambda _: {"choices": [{"text": ""}]}, "answers without prompt_logprobs")
    refused(lambda _: {"choices": [{"prompt_logprobs": [None]}]}, "1 tokens for a row of 12")
    refused(lambda _: 401, r"refuses with 401: no entry\. Set VLLM_API_KEY")
    refused(lambda _: {}, "has no model 'other'; it has served", served_name="other")
    with (
        serving(plain, lambda _: {}) as url,
        pytest.raises(ConfigurationError, match="--served-name"),
    ):
        inlay.compare(plain, eight, TEXTS[:1], via=("vllm", url), progress=False)
    with pytest.raises(ConfigurationError, match="no server answers at http://127"):
        inlay.compare(plain, eight, TEXTS[:1], via=("vllm", "http://127.0.0.1:9"), progress=False)
