"""Records what llama.cpp says of texts in GBNF grammars.

Run ``python -m tests.runtime.record_gbnf FOLDER`` in an environment with ``xllamacpp`` (whose
library exports llama.cpp's functions) and ``tokenizers``; the folder is ``grammars`` of llama.cpp's
source. It is no test.
"""

from __future__ import annotations

import ctypes
import json
import lzma
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.runtime.gbnf.parser import parsed
from paceline.runtime.gbnf.rules import Characters, Element, Reference, Repetition, Rules, Token
from paceline.runtime.token_names import TokenNames
from tests.runtime.gbnf_cases import FILE, OWN, REFUSED, RESTATED, TAKEN, token_texts

NUM_TEXTS = 200
MAX_CHARACTERS = 120
NUM_MASKED_TEXTS = 2
NUM_MASKS = 6


class Llama:
    """llama.cpp's grammars, by the names that its compiler gave to the functions."""

    def __init__(self) -> None:
        spec = find_spec("xllamacpp")
        assert spec is not None
        assert spec.submodule_search_locations
        (library,) = Path(spec.submodule_search_locations[0]).glob("*.so")
        self._llama = llama = ctypes.CDLL(str(library))
        self._make = llama._Z23llama_grammar_init_implPK11llama_vocabPKcS3_bPS3_mPKim
        self._free = llama._Z23llama_grammar_free_implP13llama_grammar
        self._accept = llama._Z20llama_grammar_acceptP13llama_grammarj
        self._stacks = llama._Z24llama_grammar_get_stacksP13llama_grammar
        self._make.restype = self._stacks.restype = ctypes.c_void_p
        self._free.argtypes = self._stacks.argtypes = [ctypes.c_void_p]
        self._accept.argtypes = [ctypes.c_void_p, ctypes.c_uint32]

    @contextmanager
    def _grammar(self, source: str) -> Iterator[int | None]:
        nothing, zero = ctypes.c_void_p(), ctypes.c_size_t()
        made = self._make(
            nothing, source.encode(), b"root", ctypes.c_bool(), nothing, zero, nothing, zero
        )
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
        begin, end = (ctypes.c_size_t * 2).from_address(self._stacks(grammar))
        places = (ctypes.c_size_t * ((end - begin) // 8)).from_address(begin) if begin < end else ()
        return [b - a for a, b, _ in zip(places[::3], places[1::3], places[2::3], strict=True)]


class Writer:
    """Texts of a grammar, drawn at random."""

    def __init__(self, rules: Rules, chance: random.Random) -> None:
        self._rules, self._chance = rules, chance

    def text(self) -> str:
        while True:
            try:
                return "".join(self._of(Reference(self._rules.root), 0))[:MAX_CHARACTERS]
            except RecursionError:
                continue

    def _of(self, item: Element, depth: int) -> Iterator[str]:
        assert not isinstance(item, Token)
        if isinstance(item, Characters):
            yield self._character(item)
            return
        body = self._rules.bodies[item.number]
        if isinstance(body, Repetition):
            most = body.least + 6 if body.most is None else body.most
            often = min(most, body.least + int(self._chance.expovariate(0.5 + depth / 8)))
            sequences = [body.items] * often
        else:
            few = sorted(body, key=len)[:2] if depth > 12 else body
            sequences = [self._chance.choice(few)]
        for sequence in sequences:
            for each in sequence:
                yield from self._of(each, depth + 1)

    def _character(self, characters: Characters) -> str:
        plain = [each for each in characters.ranges if each[0] < 127]
        ranges = plain if plain and self._chance.random() < 0.9 else characters.ranges
        first, last = self._chance.choice(ranges)
        return chr(self._chance.randint(first, min(last, first + 200)))

    def spoilt(self, text: str, others: str) -> str:
        """The text with one to three characters out of place."""
        letters = list(text)
        for _ in range(self._chance.randint(1, 3)):
            place = self._chance.randrange(len(letters) + 1)
            match self._chance.randrange(4):
                case 0:
                    del letters[place:]
                case 1:
                    letters[place : place + 1] = []
                case 2:
                    letters[place : place + 1] = [self._chance.choice(others)]
                case _:
                    letters[place:place] = [self._chance.choice(others)]
        return "".join(letters)


def texts_of(source: str, chance: random.Random) -> list[str]:
    writer = Writer(parsed(source, TokenNames()), chance)
    good = sorted({writer.text() for _ in range(4 * NUM_TEXTS)})
    good = chance.sample(good, min(len(good), NUM_TEXTS // 2))
    others = "".join(good) + 'aZ0 \n\t"\\([{,:-é😀一'
    found = dict.fromkeys(good)
    while len(found) < NUM_TEXTS:
        found[writer.spoilt(chance.choice(good), others)] = None
    return list(found)


def masks_of(llama: Llama, source: str, texts: list[str]) -> list[tuple[str, str]]:
    """Beginnings of texts, and the tokens that may follow each: bits of a hexadecimal number."""
    found = {}
    for text in texts[:NUM_MASKED_TEXTS]:
        for place in range(0, len(text) + 1, len(text) // NUM_MASKS + 1):
            begun = text[:place]
            mask = sum(
                1 << token
                for token, piece in token_texts().items()
                if abs(llama.verdict(source, begun + piece)) >= len(begun + piece)
            )
            found[begun] = f"{mask:x}"
    return list(found.items())


def main(folder: Path) -> None:
    llama, chance = Llama(), random.Random(11549)
    grammars = {name: (folder / f"{name}.gbnf").read_text() for name in RESTATED} | OWN
    texts: dict[str, Any] = {}
    masks: dict[str, Any] = {}
    for name, source in grammars.items():
        drawn = texts_of(source, chance)
        texts[name] = [(text, llama.verdict(source, text)) for text in drawn]
        masks[name] = masks_of(llama, source, drawn)
        print(name, sum(v == len(t) for t, v in texts[name]), "of", len(drawn), "match")
    taken = {source: llama.takes(source) for source in (*REFUSED, *TAKEN)}
    record = {"version": version("xllamacpp"), "taken": taken, "texts": texts, "masks": masks}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_bytes(lzma.compress(json.dumps(record, ensure_ascii=False).encode(), preset=9))
    print(FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
