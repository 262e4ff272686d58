"""From the text of a GBNF grammar to its rules. Owns the syntax and its limits."""

from __future__ import annotations

import re

from paceline.core.errors import RequestError
from paceline.structured.gbnf.recursion import left_recursive
from paceline.structured.gbnf.rules import (
    Characters,
    Element,
    Reference,
    Repetition,
    Rules,
    Token,
)
from paceline.structured.gbnf.scanner import DIGITS, NEWLINE, Scanner
from paceline.text.token_pieces import TokenNames

MAX_REPETITIONS = 2000
"""As in llama.cpp: of a count, and of all counts that apply to one item, multiplied."""
MAX_DEPTH = 200
"""How deep groups nest."""
MAX_TOKEN_ID = 2**32 - 1
MAX_COUNT = 2**64 - 1

_BLANKS = re.compile(r"(?:[ \t]+|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")  # llama.cpp's have no underscore, those of vLLM's EBNF do
_TOKEN_TEXT = re.compile(r"<[^>]*>")
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parsed(text: str, tokens: TokenNames) -> Rules:
    """The rules of a grammar.

    Raises:
        RequestError: llama.cpp would refuse it.
    """
    return _Parser(text, tokens).whole()


class _Parser(Scanner):
    """llama.cpp limits how often a group is repeated by the number of rules that it makes of the
    group; so these are counted, as *symbols*.
    """

    def __init__(self, text: str, tokens: TokenNames) -> None:
        super().__init__(text)
        self._tokens = tokens
        self._rules = Rules()
        self._numbers: dict[str, int] = {}  # of the rules that have names
        self._met: list[tuple[str, int]] = []  # by number: of which rule, and where it came up
        self._name = ""  # of the rule in which the place is
        self._num_symbols = 0
        self._depth = 0

    def whole(self) -> Rules:
        self.skip(_BLANK_LINES)
        while self.at < len(self.text):
            self._rule()
        for name, number in self._numbers.items():
            if number not in self._rules.bodies:
                raise self.refusal(f"Rule {name!r} not found", self._met[number][1])
        if "root" not in self._numbers:
            raise RequestError("The GBNF has no 'root' rule, with which every text begins")
        self._rules.root = self._numbers["root"]
        circular = left_recursive(self._rules.bodies)
        if circular is not None:
            name, at = self._met[circular]
            raise self.refusal(
                f"Left recursion: rule {name!r} leads back to itself before it has matched "
                "anything (write it as a repetition)",
                at,
            )
        return self._rules

    def _rule(self) -> None:
        at = self.at
        self._name = self.found(_NAME, "the name of a rule")
        number = self._number_of(self._name, at)
        self.skip(_BLANKS)
        self.expect("::=")
        self.skip(_BLANK_LINES)
        self._alternatives(number, is_nested=False)
        if self.at < len(self.text):
            self.found(NEWLINE, "a new line, '|', or what a rule is made of")
        self.skip(_BLANK_LINES)

    def _number_of(self, name: str, at: int) -> int:
        if name not in self._numbers:
            self._num_symbols += 1
            self._numbers[name] = self._new_number(name, at)
        return self._numbers[name]

    def _new_number(self, name: str, at: int) -> int:
        self._met.append((name, at))
        return len(self._met) - 1

    def _alternatives(self, number: int, *, is_nested: bool) -> None:
        found = [self._sequence(is_nested)]
        while self.take("|"):
            self.skip(_BLANK_LINES)
            found.append(self._sequence(is_nested))
        self._rules.bodies[number] = found

    def _sequence(self, is_nested: bool) -> list[Element]:
        items: list[Element] = []
        last, weight = 0, 1  # where the last item begins, and how many symbols it stands for
        blanks = _BLANK_LINES if is_nested else _BLANKS
        while True:
            at = self.at
            counts = self._counts(blanks)
            if counts is not None:
                if last == len(items):
                    raise self.refusal("Expected an item before a repetition", at)
                weight = self._weight(weight, counts, at)
                items[last:] = self._repeated(items[last:], counts, at)
            else:
                before, is_group = self._num_symbols, self.text.startswith("(", at)
                item = self._item()
                if item is None:
                    return items
                last, weight = len(items), self._num_symbols - before if is_group else 1
                items += item
            self.skip(blanks)

    def _item(self) -> list[Element] | None:
        """What is next: as many elements as it has characters. None where there is no item."""
        at = self.at
        match self.text[at : at + 1]:
            case '"':
                return self._literal()
            case "[":
                return self._class()
            case ".":
                self.at += 1
                return [Characters.among((), inverted=True)]
            case "<" | "!":
                return [self._token()]
            case "(":
                return [self._group()]
        if _NAME.match(self.text, at) is None:
            return None
        return [Reference(self._number_of(self.found(_NAME, "a name"), at))]

    def _literal(self) -> list[Element]:
        self.at += 1
        found: list[Element] = []
        while not self.take('"'):
            code = self.character()
            found.append(Characters.among([(code, code)]))
        return found

    def _class(self) -> list[Element]:
        self.at += 1
        inverted = self.take("^")
        ranges = []
        while not self.take("]"):
            first = last = self.character()
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                last = self.character()
            ranges.append((first, last))
        return [Characters.among(ranges, inverted=inverted)] if ranges else []

    def _token(self) -> Token:
        inverted = self.take("!")
        at = self.at
        if self.take("<["):
            token: int | None = self.number("the id of a token", MAX_TOKEN_ID)
            self.expect("]>")
        else:
            text = self.found(_TOKEN_TEXT, "<token> or <[id]>")
            token = self._tokens.find(text)
        if token is None:
            raise self.refusal("No single token of the model", at)
        return Token.of(token, self._tokens, inverted=inverted)

    def _group(self) -> Reference:
        number = self._new_number(self._name, self.at)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self.refusal(f"Groups nested deeper than {MAX_DEPTH} levels")
        self._num_symbols += 1
        self.expect("(")
        self.skip(_BLANK_LINES)
        self._alternatives(number, is_nested=True)
        self.expect(")")
        self._depth -= 1
        return Reference(number)

    def _counts(self, blanks: re.Pattern[str]) -> tuple[int, int | None] | None:
        """How often the last item may come, where that is next; None for without end."""
        at = self.at
        sign = self.text[at : at + 1]
        if sign in _COUNTS:
            self.at += 1
            return _COUNTS[sign]
        if not self.take("{"):
            return None
        self.skip(blanks)
        least = most = self._count(blanks)
        if self.take(","):
            self.skip(blanks)
            is_open = DIGITS.match(self.text, self.at) is None
            most = MAX_COUNT if is_open else self._count(blanks)
        self.expect("}")
        if least > MAX_REPETITIONS:
            raise self.refusal(f"More than {MAX_REPETITIONS} repetitions", at)
        if most < least:
            raise self.refusal(f"At least {least} and at most {most} repetitions", at)
        return least, most if most <= MAX_REPETITIONS else None

    def _count(self, blanks: re.Pattern[str]) -> int:
        found = self.number("a number", MAX_COUNT)
        self.skip(blanks)
        return found

    def _weight(self, weight: int, counts: tuple[int, int | None], at: int) -> int:
        """For how many symbols an item of this weight stands when it is repeated."""
        least, most = counts
        weight *= most or least or 1
        if weight > MAX_REPETITIONS:
            raise self.refusal(
                f"Too much to repeat (counts, times the rules in a group, make {weight}; at most "
                f"{MAX_REPETITIONS} are allowed)",
                at,
            )
        return weight

    def _repeated(
        self, items: list[Element], counts: tuple[int, int | None], at: int
    ) -> list[Element]:
        least, most = counts
        self._num_symbols += 1 if most is None else most - least
        if most == 0:
            return []
        if counts == (1, 1):
            return items
        number = self._new_number(self._name, at)
        self._rules.bodies[number] = Repetition(items, least, most)
        return [Reference(number)]
