"""Predictions of a model that a server runs, by the completions API of vLLM."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch

from inlay.comparison.predictions import TopTokens
from inlay.errors import ConfigurationError

__all__ = ["Server"]

_TIMEOUT = 600  # seconds for one row
_KEY = "VLLM_API_KEY"  # the variable that `vllm serve` itself reads
_RULED_OUT = -9000.0  # vLLM sends -9999 for a probability of 0, since JSON has no infinity


@dataclass(frozen=True)
class Server:
    """A server that speaks the API of OpenAI, with vLLM's `prompt_logprobs`.

    :param url: without the `/v1` of its paths
    """

    url: str

    @classmethod
    def of(cls, via: tuple[str, str]) -> "Server":
        """Return the server of a kind and a URL, such as ("vllm", "http://localhost:8000")."""
        kind, url = via
        if kind != "vllm":
            raise ConfigurationError(f'there is no way to compare via {kind!r}; use "vllm"')
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigurationError(f"{url!r} is no URL of a server; use http://HOST:PORT")
        return cls(url.rstrip("/").removesuffix("/v1"))

    def model_name(self, place: str, wanted: str | None = None) -> str:
        """Return the name under which the server has a model.

        :param place: the folder or the name of the model
        :param wanted: the name on the server, if the user gave one
        """
        cards = self._ask("/v1/models").get("data")
        if not isinstance(cards, list):
            raise ConfigurationError(
                f"{self.url}/v1/models lists no models: it is no server with the API of OpenAI"
            )
        names = [str(card.get("id")) for card in cards]
        if wanted is not None:
            if wanted not in names:
                raise ConfigurationError(
                    f"{self.url} has no model {wanted!r}; it has {', '.join(names)}"
                )
            return wanted
        for card in cards:
            if any(_is_same(place, str(card.get(key))) for key in ("id", "root")):
                return str(card["id"])
        raise ConfigurationError(
            f"{self.url} serves {', '.join(names)}, and B is {place}. Start the server with B, or "
            "name the model on the server that B is: served_name (--served-name)"
        )

    def predictions(self, model: str, ids: Sequence[int], count: int) -> TopTokens:
        """Return the most probable tokens after each token of a row but the last.

        :param count: how many tokens to ask for at each position
        """
        answer = self._ask(
            "/v1/completions",
            {
                "model": model,
                "prompt": list(ids),
                "max_tokens": 1,
                "temperature": 0,
                "prompt_logprobs": count,
            },
        )
        try:
            (choice,) = answer["choices"]
            known = choice.get("prompt_logprobs")
        except (KeyError, ValueError, AttributeError):
            known = None
        if not isinstance(known, list):
            raise ConfigurationError(
                f"{self.url} answers without prompt_logprobs, which vLLM gives and others do "
                "not; serve B with vLLM"
            )
        if len(known) != len(ids):
            raise ConfigurationError(
                f"{self.url} gives log-probabilities of {len(known)} tokens for a row of "
                f"{len(ids)}; it must not add or cut tokens"
            )
        try:
            return _top_tokens(ids[1:], known[1:])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"{self.url} gives prompt_logprobs in a form that is not vLLM's: {error!r}"
            ) from error

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        if _KEY in os.environ:
            request.add_header("Authorization", f"Bearer {os.environ[_KEY]}")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise ConfigurationError(self._refusal(path, error)) from error
        except (OSError, urllib.error.URLError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigurationError(
                f"no server answers at {self.url}: {reason}. Start one, such as `vllm serve B`, "
                "and give its URL"
            ) from error
        except ValueError as error:
            raise ConfigurationError(
                f"{self.url}{path} does not answer in JSON: it is no server with the API of OpenAI"
            ) from error

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> str:
        said = _message(error.read())
        text = f"{self.url}{path} refuses with {error.code}: {said or error.reason}"
        if error.code in (401, 403):
            return f"{text}. Set {_KEY} to the key of the server"
        if "greater than max allowed" in said:
            return f"{text}. Pass top_logprobs (--top-logprobs), or serve with --max-logprobs"
        if "context length" in said or "max_model_len" in said:
            return f"{text}. Pass a smaller max_length (--max-length)"
        return text


def _message(body: bytes) -> str:
    """Return what an error says, in the form of vLLM or of OpenAI."""
    try:
        found = json.loads(body)
        inner = found.get("error", found)
        return str(inner.get("message", "") if isinstance(inner, dict) else inner)
    except (ValueError, AttributeError):
        return body[:200].decode(errors="replace").strip()


def _is_same(place: str, served: str) -> bool:
    """Return whether two names are of one model: equal paths, or folders of one name."""
    if os.path.abspath(place) == os.path.abspath(served) or place == served:
        return True
    ends = [os.path.basename(os.path.normpath(each)) for each in (place, served)]
    return os.path.isdir(place) and ends[0] == ends[1]


def _top_tokens(
    expected: Sequence[int], known: Sequence[Mapping[str, Mapping[str, Any]]]
) -> TopTokens:
    """Read log-probabilities by token; vLLM adds the token of the data to the most probable ones.

    :param expected: the tokens of the data
    """
    widest = max(map(len, known), default=0)
    tokens = torch.zeros(len(known), widest, dtype=torch.long)
    values = torch.full((len(known), widest), -torch.inf, dtype=torch.float64)
    choices = torch.zeros(len(known), dtype=torch.long)
    for place, (token, entries) in enumerate(zip(expected, known, strict=True)):
        if str(token) not in entries:
            raise ValueError(f"token {token} of the data is not in {sorted(entries)[:3]}…")
        numbers = {int(each): float(entry["logprob"]) for each, entry in entries.items()}
        tokens[place, : len(numbers)] = torch.tensor(list(numbers))
        given = torch.tensor(list(numbers.values()), dtype=torch.float64)
        values[place, : len(numbers)] = given.masked_fill(given < _RULED_OUT, -torch.inf)
        ranked = {int(each): entry["rank"] for each, entry in entries.items() if entry.get("rank")}
        choices[place] = min(
            ranked or numbers, key=lambda each: (ranked.get(each, 0), -numbers[each])
        )
    return TopTokens(tokens=tokens, log_probabilities=values, choices=choices)
