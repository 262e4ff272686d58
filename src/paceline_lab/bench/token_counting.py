"""How long a text is: by a tokenizer on disk, by the server's ``/tokenize``, or in words.

Owns the making of random texts of a wanted length. Needs no torch. Lengths here only shape the
prompts: what a report says of tokens is the server's own count.
"""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.core.errors import BenchmarkError

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer


ATTEMPTS = 12
TIMEOUT_S = 30.0
_PROBE = "How long is this?"
# vLLM's form of the request, and llama.cpp's.
_FORMS: tuple[dict[str, Any], ...] = (
    {"text": "prompt", "add_special_tokens": True},
    {"text": "content", "add_special": True},
)
_ONSETS, _VOWELS, _CODAS = "bdfgklmnprstvz", "aeiou", ("", "l", "n", "r", "s", "t")


class TokenCounter:
    """Counts tokens, and draws random ones; words, for a server that does not say how it counts."""

    name = "words"

    def count(self, text: str) -> int:
        """Tokens of a prompt, those that every prompt begins with included."""
        return len(text.split())

    def draw(self, rng: random.Random, length: int) -> str:
        """A random text of about so many tokens; reproducible by the generator's state."""
        return "".join(f" {_word(rng)}" for _ in range(length))


def _word(rng: random.Random) -> str:
    syllables = (rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3)))
    return "".join(syllables) + rng.choice(_CODAS)


class LocalTokenCounter(TokenCounter):
    """Counts with a tokenizer of this machine, and draws from its whole vocabulary."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._usable: dict[int, bool] = {}

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def draw(self, rng: random.Random, length: int) -> str:
        size, ids = self._tokenizer.vocab_size, list[int]()
        while len(ids) < length:
            token_id = rng.randrange(size)
            if self._is_usable(token_id):
                ids.append(token_id)
        return self._tokenizer.decode(ids)

    def _is_usable(self, token_id: int) -> bool:
        """Whether the token stands for whole characters, so that it survives as text."""
        if token_id not in self._usable:
            text = self._tokenizer.decode([token_id])
            self._usable[token_id] = bool(text.strip()) and "\ufffd" not in text
        return self._usable[token_id]


class ServerTokenCounter(TokenCounter):
    """Counts with the server's ``/tokenize``; draws words, since the vocabulary is not known."""

    name = "server"

    def __init__(self, url: str, model: str, headers: Mapping[str, str], form: int = 0) -> None:
        self._url, self._model, self._headers = f"{url}/tokenize", model, dict(headers)
        self._form = _FORMS[form]

    def count(self, text: str) -> int:
        """Tokens of the text; ``BenchmarkError`` where the server does not answer with them."""
        body = {key: value for key, value in self._form.items() if key != "text"}
        body |= {"model": self._model, self._form["text"]: text}
        request = urllib.request.Request(
            self._url,
            data=json.dumps(body).encode(),
            headers={**self._headers, "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return len(json.load(response)["tokens"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(f"{self._url} counted no tokens: {error}") from error


def server_counter(url: str, model: str, headers: Mapping[str, str]) -> TokenCounter:
    """The server's own count in the form that it understands, or words where it has none."""
    for form in range(len(_FORMS)):
        counter = ServerTokenCounter(url, model, headers, form)
        try:
            if counter.count(_PROBE):
                return counter
        except BenchmarkError:
            continue
    return TokenCounter()


def open_counter(folder: str) -> TokenCounter:
    """The counter of a tokenizer's folder; ``ModelLoadError`` where there is none in it."""
    from paceline.text.tokenizer import Tokenizer

    return LocalTokenCounter(Tokenizer.from_folder(folder), folder)


def text_of_length(
    counter: TokenCounter, rng: random.Random, length: int, prefix: str = ""
) -> tuple[str, int]:
    """A random text of ``length`` tokens that begins with ``prefix``.

    Tokens that were drawn one by one can join when they are read again, so the text is extended and
    cut until it fits.

    Returns:
        the text and its length, which differs from the wanted one where no cut fits exactly.
    """
    missing = length - (counter.count(prefix) if prefix else 0)
    text = prefix + counter.draw(rng, max(1, missing))
    best, best_count = text, counter.count(text)
    count = best_count
    for _ in range(ATTEMPTS):
        if best_count == length:
            break
        if count < length:
            text += counter.draw(rng, length - count)
        else:
            own = len(text) - len(prefix)
            cut = -(-own * (count - length) // count)
            text = text[: max(len(prefix) + 1, len(text) - cut)]
        count = counter.count(text)
        if abs(count - length) < abs(best_count - length):
            best, best_count = text, count
    return best, best_count
