"""Runs in an interpreter that has llama.cpp: what its grammars say of texts and of tokens.

    python -m tests.structured.llama_grammars [VOCABULARY.gguf]

Tasks are lines of JSON on standard input, answers lines on standard output. A grammar on which
llama.cpp fails, or thinks for too long, ends the process. It is no test.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_bool, c_char_p, c_float, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

from paceline_lab.quality.llama_peer_child import LOG, declare, libraries, opened

SECONDS = 5
"""Of processor time for one task."""
MAX_BYTES = 4 * 2**30
INNER: dict[str, tuple[Any, list[Any]]] = {
    "_Z23llama_grammar_init_implPK11llama_vocabPKcS3_bPS3_mPKim": (
        c_void_p,
        [c_void_p, c_char_p, c_char_p, c_bool, c_void_p, c_size_t, c_void_p, c_size_t],
    ),
    "_Z23llama_grammar_free_implP13llama_grammar": (None, [c_void_p]),
    "_Z20llama_grammar_acceptP13llama_grammarj": (None, [c_void_p, c_uint32]),
    "_Z24llama_grammar_get_stacksP13llama_grammar": (c_void_p, [c_void_p]),
}
"""By the names that its compiler gave to them."""


class ModelParams(ctypes.Structure):
    """``llama_model_params`` of b11549."""

    _fields_ = (
        *(("devices", c_void_p), ("overrides", c_void_p)),
        *((name, c_int32) for name in ("layers", "split", "load", "lazy", "main")),
        *((name, c_void_p) for name in ("tensor_split", "callback", "data", "kv")),
        *((name, c_bool) for name in ("vocab_only", "check", "extra", "host", "alloc", "mtp")),
    )


class Candidate(ctypes.Structure):
    """``llama_token_data``."""

    _fields_ = (("id", c_int32), ("logit", c_float), ("p", c_float))


class Candidates(ctypes.Structure):
    """``llama_token_data_array``."""

    _fields_ = (
        ("data", ctypes.POINTER(Candidate)),
        ("size", c_size_t),
        ("selected", c_int64),
        ("sorted", c_int8),
    )


VOCABULARY: dict[str, tuple[Any, list[Any]]] = {
    "llama_model_default_params": (ModelParams, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
}
SAMPLER: dict[str, tuple[Any, list[Any]]] = {
    "llama_sampler_init_grammar": (c_void_p, [c_void_p, c_char_p, c_char_p]),
    "llama_sampler_apply": (None, [c_void_p, ctypes.POINTER(Candidates)]),
    "llama_sampler_accept": (None, [c_void_p, c_int32]),
    "llama_sampler_free": (None, [c_void_p]),
}


class Llama:
    """llama.cpp's grammars.

    Args:
        vocabulary: a GGUF file, whose tokens grammars may name.
    """

    def __init__(self, vocabulary: str | None = None) -> None:
        self._llama = llama = opened(list(libraries()))
        declare(llama, INNER | SAMPLER)
        self._make, self._free, self._accept, self._stacks = (getattr(llama, n) for n in INNER)
        self._keep_log = LOG(lambda *_: None)
        llama.llama_log_set(self._keep_log, None)
        self._vocabulary, self._size = None, 0
        if vocabulary is not None:
            declare(llama, VOCABULARY)
            llama.llama_backend_init()
            params = llama.llama_model_default_params()
            params.vocab_only = True
            model = llama.llama_model_load_from_file(vocabulary.encode(), params)
            assert model, vocabulary
            self._vocabulary = llama.llama_model_get_vocab(model)
            self._size = llama.llama_vocab_n_tokens(self._vocabulary)

    @contextmanager
    def _grammar(self, source: str) -> Iterator[int | None]:
        made = self._make(self._vocabulary, source.encode(), b"root", False, None, 0, None, 0)
        try:
            yield made
        finally:
            if made:
                self._free(made)

    def takes(self, source: str) -> bool:
        with self._grammar(source) as grammar:
            return bool(grammar)

    def verdict(self, source: str, text: str) -> int:
        """How many characters are taken, negative where all are and more must follow."""
        with self._grammar(source) as grammar:
            assert grammar, source
            for place, character in enumerate(text):
                self._accept(grammar, ord(character))
                if not self._lengths(grammar):
                    return place
            return len(text) if 0 in self._lengths(grammar) else -len(text) - 1

    def _lengths(self, grammar: int) -> list[int]:
        """Of the stacks at which the grammar stands: vectors in a vector."""
        begin, end = (c_size_t * 2).from_address(self._stacks(grammar))
        places = (c_size_t * ((end - begin) // 8)).from_address(begin) if begin < end else ()
        return [b - a for a, b, _ in zip(places[::3], places[1::3], places[2::3], strict=True)]

    def masks(self, source: str, tokens: Sequence[int]) -> list[str]:
        """What may follow the first none, one, ... of these tokens: bits of hexadecimal numbers."""
        sampler = self._llama.llama_sampler_init_grammar(self._vocabulary, source.encode(), b"root")
        assert sampler, source
        found = []
        for token in (*tokens, None):
            mask = self._mask(sampler)
            found.append(f"{mask:x}")
            if token is None or not mask >> token & 1:
                break
            self._llama.llama_sampler_accept(sampler, token)
        self._llama.llama_sampler_free(sampler)
        return found

    def _mask(self, sampler: int) -> int:
        data = (Candidate * self._size)(*((i, 0.0, 0.0) for i in range(self._size)))
        self._llama.llama_sampler_apply(sampler, Candidates(data, self._size, -1, 0))
        return sum(1 << each.id for each in data if each.logit > -math.inf)


def answer(llama: Llama, task: dict[str, Any]) -> dict[str, Any]:
    """Whether ``grammar`` is one, what it says of ``texts``, and masks along ``paths``."""
    source = task["grammar"]
    if not llama.takes(source):
        return {"taken": False}
    return {
        "taken": True,
        "texts": [llama.verdict(source, text) for text in task.get("texts", ())],
        "masks": [llama.masks(source, path) for path in task.get("paths", ())],
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it writes refused grammars there
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    llama = Llama(*sys.argv[1:])
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        answers.write(json.dumps(answer(llama, json.loads(line))) + "\n")
        answers.flush()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


if __name__ == "__main__":
    main()
