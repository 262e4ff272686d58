"""GBNF grammars drawn at random, and texts in and near their languages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import suppress

from paceline.structured.gbnf_parser import (
    Characters,
    Element,
    Reference,
    Repetition,
    Rules,
    Token,
    parsed,
    without_dead_ends,
)
from paceline.text.token_pieces import TokenNames

MAX_CHARACTERS = 120
MAX_TRIALS = 100
_NAMES = ("a", "A", "a-b", "-", "0", "start", "root-1", "x9", "ab")
_BLANKS = (*[" "] * 12, "  ", "\t")
_BREAKS = ("\n", "\r\n", " # note\n", "\n\t", "#\r")
_ENDS = ("\n", "\n", "\n\n", "\r\n", "\r", "\n# note\n", " # note\n", "\n \n")
_PLAIN = (*"aaabbbccxx", "é", "😀", "一", "-", "^", ".", "(", "#", " ", "'")
_ESCAPED = (
    *(r"\n", r"\t", r"\r", r"\\", r"\"", r"\[", r"\]", r"\-"),
    *(r"\x61", r"\u00e9", r"\U0001F600", r"\x2D", r"\u4e00"),
)
_RANGES = ("a-b", "a-c", "b-x", r"\x61-\x63", "A-Z", "0-9", r"\u00e0-\u00ff", "一-丁", r"\n-a", "[")
_COUNTS = (
    *(*"*+?", *"*+?", "{2}", "{3}", "{1}", "{0,1}", "{0,2}", "{1,}", "{0,}", "{2,3}", "{1,1}"),
    *("{ 1\t, 2 }", "{1 ,}"),
)
_SIGNS = '"[]()|*+?{},-\\<!>.#:=\n\r 0a'
_NAMED_TOKENS = ("<[5]>", "<[1000]>", "<|pad|>", "<|im_start|> !<[5]>* <[5]>", "<|pad|>{2}")


class GrammarDrawer:
    """
    Args:
        with_tokens: rules name tokens of the embedded model, each where no text may stand, and
            their texts have the letters a to c alone.
    """

    def __init__(self, chance: random.Random, *, with_tokens: bool = False) -> None:
        self._chance, self._with_tokens = chance, with_tokens
        self._names: list[str] = []

    def grammar(self) -> str:
        self._names = self._chance.sample(_NAMES, self._chance.choice((1, 2, 2, 3)))
        rules = ["root", *self._names]
        if self._happens(0.05):
            rules.append(self._chance.choice(rules))  # the last definition holds
        if self._happens(0.1):
            self._names.append(self._chance.choice(("root", "nowhere")))
        self._chance.shuffle(rules)
        text = self._chance.choice(("", "", "# note\n", "\n", "  \t\r\n"))
        for name in rules:
            gap = self._chance.choice(("", " ", "\t"))
            text += f"{name}{gap}::={self._gap(0.5, may_break=True)}{self._alternatives(0)}"
            text += self._chance.choice(_ENDS)
        return self._damaged(text) if self._happens(0.1) else text

    def _happens(self, probability: float) -> bool:
        return self._chance.random() < probability

    def _gap(self, probability: float = 1.0, *, may_break: bool) -> str:
        if not self._happens(probability):
            return ""
        return self._chance.choice(_BREAKS if may_break and self._happens(0.2) else _BLANKS)

    def _alternatives(self, depth: int) -> str:
        count = self._chance.choice((1, 1, 2, 2, 3))
        return "|".join(
            self._gap(0.4, may_break=depth > 0 or at > 0) + self._sequence(depth)
            for at in range(count)
        )

    def _sequence(self, depth: int) -> str:
        text = ""
        for at in range(
            self._chance.choice((1, 1, 2, 2, 2, 3, 3)) - (depth and self._happens(0.2))
        ):
            item = self._item(depth, may_be_rule=at > 0 or self._happens(0.1))
            counts = "" if item == '""' and self._happens(0.95) else self._counts()
            text += item + counts + self._gap(0.9, may_break=depth > 0)
        return text

    def _item(self, depth: int, *, may_be_rule: bool) -> str:
        if self._with_tokens and self._happens(0.3):
            return f"({self._chance.choice(_NAMED_TOKENS)})"
        draw = self._chance.random()
        if may_be_rule and draw < 0.15:
            return self._chance.choice(self._names)
        if draw < 0.4 and self._happens(0.9 / (1 + depth)):
            return f"({self._gap(0.4, may_break=True)}{self._alternatives(depth + 1)})"
        if self._with_tokens:
            return self._chance.choice(('"a"', '"ab"', "[a-b]", "[ac]", '"bc"'))
        if draw < 0.7:
            letters = (self._character() for _ in range(self._chance.choice((0, 1, 1, 2, 3))))
            return f'"{"".join(letters)}"'
        return "." if draw < 0.77 else self._class()

    def _class(self) -> str:
        parts = [
            self._chance.choice(_RANGES) if self._happens(0.5) else self._character()
            for _ in range(self._chance.choice((1, 1, 2, 3)))
        ]
        return (
            self._chance.choice(("[", "[", "[^")) + "".join(parts) + "-" * self._happens(0.1) + "]"
        )

    def _character(self) -> str:
        return self._chance.choice(_ESCAPED if self._happens(0.2) else _PLAIN)

    def _counts(self) -> str:
        if self._happens(0.6):
            return ""
        if self._happens(0.04):
            return self._chance.choice(("{0}", "{0,0}"))
        again = self._counts() if self._happens(0.15) else ""
        return self._gap(0.3, may_break=False) + self._chance.choice(_COUNTS) + again

    def _damaged(self, text: str) -> str:
        letters = list(text)
        for _ in range(self._chance.choice((1, 1, 2))):
            place = self._chance.randrange(len(letters) + 1)
            put = [] if self._happens(0.3) else [self._chance.choice(_SIGNS)]
            letters[place : place + self._chance.randrange(2)] = put
        return "".join(letters)


class Writer:
    """Texts of a grammar, drawn at random."""

    def __init__(self, rules: Rules, chance: random.Random) -> None:
        self._rules, self._chance = rules, chance

    def text(self, most: int = MAX_CHARACTERS) -> str:
        for _ in range(MAX_TRIALS):
            with suppress(RecursionError):
                return "".join(itertools.islice(self._of(Reference(self._rules.root), 0), most))
        raise ValueError("the grammar leads to no end")

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


def texts_near(source: str, chance: random.Random, count: int, most: int = 30) -> list[str]:
    """Short texts, in a grammar and spoilt.

    None where the grammar is refused, or has characters that never come: what leads to these is a
    dead end for llama.cpp and left out by Paceline.
    """
    found: dict[str, None] = {}
    with suppress(ValueError):
        rules = parsed(source, TokenNames())
        if without_dead_ends(rules.bodies) != rules.bodies:
            return []
        writer = Writer(rules, chance)
        good = [writer.text(most) for _ in range(count // 3)]
        others = "".join(good) + 'abcx\n-é😀一 "'
        found = dict.fromkeys(good)
        for _ in range(count - count // 3):
            found[writer.spoilt(chance.choice(good), others)] = None
    return list(found)
