"""From the text of a GBNF grammar to its rules. Owns the syntax, its limits and what rules are.

Rules are read and refused as llama.cpp b11549 (``src/llama-grammar.cpp``) does. It refuses rules
that lead back to themselves from the left. What may match nothing is there only what has an empty
alternative of its own, not what consists of such rules; so it is here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from paceline.core.errors import RequestError
from paceline.text.token_pieces import TokenNames

NEWLINE = re.compile(r"\r\n|\r|\n")
DIGITS = re.compile(r"[0-9]+")
_HEX = {kind: re.compile(f"[0-9a-fA-F]{{{n}}}") for kind, n in {"x": 2, "u": 4, "U": 8}.items()}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{each: each for each in '\\"[]-'}}


class Scanner:
    """The text of a grammar, and the place up to which it has been read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, text: str) -> bool:
        """Whether this text is next; then it is passed."""
        is_next = self.text.startswith(text, self.at)
        self.at += len(text) * is_next
        return is_next

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise self.refusal(f"Expected {text!r}")

    def found(self, pattern: re.Pattern[str], what: str) -> str:
        """What the pattern finds at this place, which is passed."""
        match = pattern.match(self.text, self.at)
        if match is None:
            raise self.refusal(f"Expected {what}")
        self.at = match.end()
        return match[0]

    def number(self, what: str, largest: int) -> int:
        at = self.at
        digits = self.found(DIGITS, what).lstrip("0") or "0"
        if len(digits) > len(str(largest)) or int(digits) > largest:
            raise self.refusal(f"Larger than {largest}: {what}", at)
        return int(digits)

    def character(self) -> int:
        """The code point of a character that may be escaped."""
        at = self.at
        if at >= len(self.text):
            raise self.refusal("Expected a character")
        self.at += 1
        if self.text[at] != "\\":
            return ord(self.text[at])
        kind = self.text[at + 1 : at + 2]
        self.at += 1
        if kind in _HEX:
            return int(self.found(_HEX[kind], f"the hexadecimal digits of \\{kind}"), 16)
        if kind not in _ESCAPES:
            raise self.refusal(
                f'\\{kind} is not an escape; allowed: \\n \\r \\t \\\\ \\" \\[ \\] \\- \\x41 '
                "\\u0041 \\U00000041",
                at,
            )
        return ord(_ESCAPES[kind])

    def refusal(self, problem: str, at: int | None = None) -> RequestError:
        """What is wrong at a place, by default at this one."""
        at = self.at if at is None else at
        lines = NEWLINE.split(self.text[:at])
        ahead = self.text[at : at + 20]
        place = f"where {ahead!r} is" if ahead else "where it ends"
        return RequestError(
            f"{problem} at line {len(lines)}, column {len(lines[-1]) + 1} of the GBNF, {place}"
        )


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
    """The rules of a grammar; ``RequestError`` where llama.cpp would refuse it."""
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
        alternatives = [self._sequence(is_nested)]
        while self.take("|"):
            self.skip(_BLANK_LINES)
            alternatives.append(self._sequence(is_nested))
        self._rules.bodies[number] = alternatives

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
        characters: list[Element] = []
        while not self.take('"'):
            code = self.character()
            characters.append(Characters.among([(code, code)]))
        return characters

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
        count = self.number("a number", MAX_COUNT)
        self.skip(blanks)
        return count

    def _weight(self, weight: int, counts: tuple[int, int | None], at: int) -> int:
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


LAST_CODE_POINT = 0x10FFFF
_NO_CHARACTERS = (0, 0), (0xD800, 0xDFFF)
"""NUL, at which llama.cpp's texts end, and surrogates."""

Ranges = tuple[tuple[int, int], ...]
"""First and last of each."""


@dataclass(frozen=True)
class Characters:
    """One character of these code points."""

    ranges: Ranges

    @classmethod
    def among(cls, ranges: Sequence[tuple[int, int]], *, inverted: bool = False) -> Characters:
        """Those of the ranges, or all others, as far as they are characters of a text."""
        excluded = list(ranges) if inverted else list(_others(ranges, LAST_CODE_POINT))
        return cls(tuple(_others([*excluded, *_NO_CHARACTERS], LAST_CODE_POINT)))


@dataclass(frozen=True)
class CharacterRun(Characters):
    """As many of these characters as there are, but at least and at most so many."""

    least: int = 1
    most: int | None = None


@dataclass(frozen=True)
class Token:
    """One token of these ids, whatever its text is."""

    ranges: Ranges

    @classmethod
    def of(cls, token_id: int, names: TokenNames, *, inverted: bool = False) -> Token:
        """This one, or any other. As in llama.cpp none that ends a text is among them."""
        if inverted:
            excluded = [(each, each) for each in {token_id, *names.ends}]
            return cls(tuple(_others(excluded, names.size - 1)))
        is_known = token_id < names.size and token_id not in names.ends
        return cls(((token_id, token_id),) if is_known else ())


@dataclass(frozen=True)
class Reference:
    """What the rule or the repetition of this number matches."""

    number: int


Element = Characters | Token | Reference


@dataclass(frozen=True)
class Repetition:
    """A sequence at least, and unless ``most`` is None at most, so many times."""

    items: Sequence[Element]
    least: int
    most: int | None


Body = Sequence[Sequence[Element]] | Repetition
"""The alternatives of a rule or of a group, or a repetition."""


@dataclass
class Rules:
    """The bodies of a grammar by number, a repetition's above those of the repetitions in it, and
    the number of the rule that matches the whole text.
    """

    bodies: dict[int, Body] = field(default_factory=dict)
    root: int = 0


def sequences(body: Body) -> Sequence[Sequence[Element]]:
    """What a body may begin with, each as a whole."""
    return [body.items] if isinstance(body, Repetition) else body


def without_dead_ends(bodies: Mapping[int, Body]) -> dict[int, Body]:
    """The same without sequences that need a character or a token that never comes."""
    alive = {number: dict(enumerate(sequences(body))) for number, body in bodies.items()}
    users: dict[int, list[tuple[int, int]]] = {}
    dead: list[tuple[int, int]] = []
    for number, rows in alive.items():
        for index, sequence in rows.items():
            for item in sequence:
                if isinstance(item, Reference):
                    users.setdefault(item.number, []).append((number, index))
                elif not item.ranges:
                    dead.append((number, index))
    while dead:
        number, index = dead.pop()
        was_alive = alive[number].pop(index, None) is not None
        if was_alive and not alive[number] and not _is_optional(bodies[number]):
            dead += users.get(number, [])
    kept = {number: _left_of(bodies[number], list(rows.values())) for number, rows in alive.items()}
    return {number: body for number, body in kept.items() if body is not None}


def _left_of(body: Body, alive: Sequence[Sequence[Element]]) -> Body | None:
    if len(alive) == len(sequences(body)):
        return body
    return alive or ([[]] if _is_optional(body) else None)


def _is_optional(body: Body) -> bool:
    return isinstance(body, Repetition) and body.least == 0


def _others(ranges: Sequence[tuple[int, int]], last: int) -> Iterator[tuple[int, int]]:
    begin = 0
    for first, end in sorted(ranges):
        if first > end:
            continue
        if begin < first:
            yield begin, min(first - 1, last)
        begin = max(begin, end + 1)
        if begin > last:
            return
    yield begin, last


def left_recursive(bodies: Mapping[int, Body]) -> int | None:
    """The number of what leads back to itself before it has matched anything, if there is one."""
    empty = _may_be_empty(bodies)
    edges = {number: _leftmost(body, empty) for number, body in bodies.items()}
    for number, body in bodies.items():
        if isinstance(body, Repetition) and body.most is None and _are_all(body.items, empty):
            edges[number].append(number)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        circle: list[int] = error.args[1]
        return min(circle)
    return None


def _may_be_empty(bodies: Mapping[int, Body]) -> set[int]:
    empty = {n for n, body in bodies.items() if not isinstance(body, Repetition) and not all(body)}
    for number, body in sorted(bodies.items(), key=lambda entry: entry[0]):
        if isinstance(body, Repetition) and (body.least == 0 or _are_all(body.items, empty)):
            empty.add(number)
    return empty


def _are_all(items: Sequence[Element], numbers: set[int]) -> bool:
    return all(isinstance(item, Reference) and item.number in numbers for item in items)


def _leftmost(body: Body, empty: set[int]) -> list[int]:
    references = []
    for sequence in sequences(body):
        for item in sequence:
            if not isinstance(item, Reference):
                break
            references.append(item.number)
            if item.number not in empty:
                break
    return references
