"""GBNF, the grammars of llama.cpp, in Lark for the compiler: they match the same texts.

The compiler cuts a text into *lexemes*, the longest that can be, before rules see it: a rule such
as ``[a-z]+`` would take all letters, also those that a later rule needs. So a lexeme here is one
character or one token, and which rule takes it is left to the rules, as in llama.cpp. Two things
are longer.

A grammar in which no rule leads back to itself is one regular expression, since each place of the
rules at which a text may stand costs time for each token of the vocabulary, and an automaton is in
one state.

A *run* of repeated characters is one lexeme where neither what may stand in its place nor what is
behind it goes on with one of these characters. So a JSON string is few lexemes, whose masks the
compiler knows beforehand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from paceline.core.errors import RequestError
from paceline.structured.gbnf_parser import (
    Body,
    CharacterRun,
    Characters,
    Element,
    Ranges,
    Reference,
    Repetition,
    Token,
    parsed,
    sequences,
    without_dead_ends,
)
from paceline.text.token_pieces import TokenNames


def from_gbnf(text: str, tokens: TokenNames, *, is_whole: bool = True) -> str:
    """A grammar in Lark for one in GBNF; nothing is behind what it matches if it ``is_whole``.

    Raises:
        RequestError: it is malformed, leads back to itself from the left, or matches no text.
    """
    rules = parsed(text, tokens)
    alive = without_dead_ends(rules.bodies)
    if rules.root not in alive:
        raise RequestError(
            "No text matches the GBNF: each needs a character or a token that cannot come"
        )
    expression = whole_expression(alive, rules.root) if is_whole else None
    if expression is not None:
        return f"%llguidance {{}}\nstart: rule_{rules.root}\nrule_{rules.root}: /{expression}/\n"
    bodies = with_runs(alive, rules.root, is_whole=is_whole)
    lines = [f"rule_{number}: {_body(body)}" for number, body in bodies.items()]
    return "\n".join(["%llguidance {}", f"start: rule_{rules.root}", *lines]) + "\n"


def _body(body: Body) -> str:
    if isinstance(body, Repetition):
        return f"({_sequence(body.items)}){counts(body.least, body.most)}"
    return " | ".join(dict.fromkeys(map(_sequence, body)))


def _sequence(items: Sequence[Element]) -> str:
    return " ".join(map(_element, items)) or '""'


def _element(item: Element) -> str:
    match item:
        case Reference():
            return f"rule_{item.number}"
        case Token():
            spans = (f"{first}-{last}" for first, last in item.ranges)
            return f"<[{','.join(spans)}]>"
        case CharacterRun():
            return f"/{run_of(item)}/"
        case Characters():
            return f"/{class_of(item.ranges)}/"


MAX_EXPRESSION_SIZE = 1000
"""Characters and references in an expression, those of a rule wherever it is referred to."""
MAX_EXPRESSION_DEPTH = 50


def whole_expression(bodies: Mapping[int, Body], root: int) -> str | None:
    """All of a grammar; None where it is recursive, names tokens, or is too large."""
    try:
        return _Expression(bodies).of(root, frozenset())
    except _NotRegularError:
        return None


def class_of(ranges: Ranges) -> str:
    """One character of these."""
    spans = (
        _escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}"
        for first, last in ranges
    )
    return f"[{''.join(spans)}]"


def run_of(run: CharacterRun) -> str:
    return class_of(run.ranges) + counts(run.least, run.most)


def counts(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _escaped(code: int) -> str:
    return f"\\x{{{code:x}}}"


class _NotRegularError(Exception):
    """The grammar is no expression."""


class _Expression:
    def __init__(self, bodies: Mapping[int, Body]) -> None:
        self._bodies = bodies
        self._size = 0

    def of(self, number: int, within: frozenset[int]) -> str:
        """``within`` has the numbers of the bodies in which this one is."""
        if number in within or len(within) == MAX_EXPRESSION_DEPTH:
            raise _NotRegularError
        body, within = self._bodies[number], within | {number}
        alternatives = [
            "".join(self._item(item, within) for item in line) for line in sequences(body)
        ]
        whole = f"({'|'.join(dict.fromkeys(alternatives))})"
        return whole + counts(body.least, body.most) if isinstance(body, Repetition) else whole

    def _item(self, item: Element, within: frozenset[int]) -> str:
        self._size += 1
        if self._size > MAX_EXPRESSION_SIZE:
            raise _NotRegularError
        match item:
            case Reference():
                return self.of(item.number, within)
            case Characters():
                return class_of(item.ranges)
        raise _NotRegularError


MAX_RULES_WITH_RUNS = 1000
"""Rules, and what they consist of, in a grammar in which runs are looked for."""
MAX_UNROLLED = 8
_ROUNDS = 4
"""Rules that are one character are looked through so deep."""


def with_runs(bodies: Mapping[int, Body], root: int, *, is_whole: bool) -> Mapping[int, Body]:
    """The same grammar, with runs where these are safe; see :func:`from_gbnf` for ``is_whole``."""
    lines = [each for body in bodies.values() for each in sequences(body)]
    names_tokens = any(isinstance(item, Token) for line in lines for item in line)
    if names_tokens or sum(len(line) + 1 for line in lines) > MAX_RULES_WITH_RUNS:
        return bodies
    plain = _without_names_of_characters(bodies)
    with_all, loops = _with_all_runs(plain)
    follow = Follow(with_all, root, loops)
    return {
        number: _without_runs(number, body, plain)
        if _begins_with_run(body) and not follow.is_certain(number, may_be_last=is_whole)
        else body
        for number, body in with_all.items()
    }


def _begins_with_run(body: Body) -> bool:
    return any(isinstance(item, CharacterRun) for item in sequences(body)[0])


def _without_names_of_characters(bodies: Mapping[int, Body]) -> Mapping[int, Body]:
    for _ in range(_ROUNDS):
        single = {number: _one_character(body) for number, body in bodies.items()}
        bodies = {number: _with_characters(body, single) for number, body in bodies.items()}
    return bodies


def _one_character(body: Body) -> Characters | None:
    if isinstance(body, Repetition):
        return None
    character, others = _parted(body)
    return None if others else character


def _parted(
    alternatives: Sequence[Sequence[Element]],
) -> tuple[Characters | None, list[Sequence[Element]]]:
    """All alternatives that are one character as one, and the others."""
    ranges: list[tuple[int, int]] = []
    others: list[Sequence[Element]] = []
    for sequence in alternatives:
        if len(sequence) == 1 and isinstance(sequence[0], Characters):
            ranges += sequence[0].ranges
        else:
            others.append(sequence)
    return Characters.among(ranges) if ranges else None, others


def _with_characters(body: Body, single: Mapping[int, Characters | None]) -> Body:
    def put(items: Sequence[Element]) -> list[Element]:
        return [(isinstance(item, Reference) and single[item.number]) or item for item in items]

    if not isinstance(body, Repetition):
        return [put(sequence) for sequence in body]
    if body.least == body.most and body.least <= MAX_UNROLLED:
        return [put(body.items) * body.least]  # so that its last character is known from the others
    return Repetition(put(body.items), body.least, body.most)


def _with_all_runs(bodies: Mapping[int, Body]) -> tuple[dict[int, Body], frozenset[int]]:
    """With a run wherever characters are repeated; and the numbers of the repetitions that begin
    again behind a run only with another thing.
    """
    changed = dict(bodies)
    loops = set()
    for number, body in bodies.items():
        if not isinstance(body, Repetition) or body.most == 1 or len(body.items) != 1:
            continue
        item = body.items[0]
        if isinstance(item, Characters):
            nothing: list[list[Element]] = [] if body.least else [[]]
            changed[number] = [[CharacterRun(item.ranges, body.least or 1, body.most)], *nothing]
        elif isinstance(item, Reference) and body.least <= 1 and body.most is None:
            inner = bodies[item.number]
            character, others = (None, []) if isinstance(inner, Repetition) else _parted(inner)
            if character is not None:
                own = max(changed) + 1  # since others may refer to the rule, too
                changed[own] = [[CharacterRun(character.ranges)], *others]
                changed[number] = Repetition([Reference(own)], body.least, None)
                loops.add(number)
    return changed, frozenset(loops)


def _without_runs(number: int, body: Body, bodies: Mapping[int, Body]) -> Body:
    if number in bodies:
        return bodies[number]
    return [
        [Characters(item.ranges) if isinstance(item, CharacterRun) else item for item in sequence]
        for sequence in sequences(body)
    ]


LAST_ASCII = 0x7F
MAX_FOLLOW_STEPS = 20_000
"""After so many any place is said to stand in any other's stead."""


class Follow:
    """What may stand in one place of a text, and what behind it, by the rules of a grammar.

    Each character of the rules is a *place*. Which rule called which is forgotten, as in a finite
    automaton; so more is said to be possible than is. Sets of places are bits of a number. No rule
    may name tokens, each of which stands for any number of characters.

    Args:
        bodies: by number; a run is the first thing of its body.
        root: the number with which texts begin.
        loops: numbers of the repetitions that do not repeat a run directly behind itself.
    """

    def __init__(self, bodies: Mapping[int, Body], root: int, loops: Collection[int]) -> None:
        self._bodies, self._loops, self._root = bodies, loops, root
        self._items: list[Characters] = []
        self._places: dict[tuple[int, int, int], int] = {}
        for number, body in bodies.items():
            for row, sequence in enumerate(sequences(body)):
                for column, item in enumerate(sequence):
                    if isinstance(item, Characters):
                        self._places[number, row, column] = len(self._items)
                        self._items.append(item)
        self._empty: set[int] = set()
        self._first, self._last = dict.fromkeys(bodies, 0), dict.fromkeys(bodies, 0)
        while self._find_ends():
            pass
        self._behind = [0] * len(self._items)
        for number, body in bodies.items():
            self._find_behind(number, body)
        self._together = self._find_together(self._first[root])

    def is_certain(self, number: int, *, may_be_last: bool) -> bool:
        """Whether a text cannot go on with a character of this body's run but in the run."""
        place = self._places[number, 0, 0]
        if self._last[self._root] >> place & 1 and not may_be_last:
            return False
        behind = self._behind[place]
        for other in _bits(self._together[place] & ~(1 << place)):
            if self._share(place, other):
                behind |= self._ahead(other)
        return all(_are_apart(self._items[place], self._items[each]) for each in _bits(behind))

    def _find_ends(self) -> bool:
        """One round of finding what bodies begin and end with; whether it changed anything."""
        is_new = False
        for number, body in self._bodies.items():
            first = last = 0
            is_empty = isinstance(body, Repetition) and body.least == 0
            for row, sequence in enumerate(sequences(body)):
                begin, end, may_be_empty = self._ends_of(number, row, sequence)
                first, last, is_empty = first | begin, last | end, is_empty or may_be_empty
            is_new |= (first, last) != (self._first[number], self._last[number])
            is_new |= is_empty and number not in self._empty
            self._first[number], self._last[number] = first, last
            if is_empty:
                self._empty.add(number)
        return is_new

    def _ends_of(self, number: int, row: int, sequence: Sequence[Element]) -> tuple[int, int, bool]:
        first = last = 0
        is_empty = True
        for column, item in enumerate(sequence):
            begin, end, may_be_empty = self._of(number, row, column, item)
            first |= begin if is_empty else 0
            last = end | (last if may_be_empty else 0)
            is_empty = is_empty and may_be_empty
        return first, last, is_empty

    def _of(self, number: int, row: int, column: int, item: Element) -> tuple[int, int, bool]:
        """What an element begins and ends with, and whether it may be nothing."""
        if isinstance(item, Reference):
            return self._first[item.number], self._last[item.number], item.number in self._empty
        bit = 1 << self._places[number, row, column]
        return bit, bit, False

    def _find_behind(self, number: int, body: Body) -> None:
        for row, sequence in enumerate(sequences(body)):
            ends = 0
            for column, item in enumerate(sequence):
                begin, end, may_be_empty = self._of(number, row, column, item)
                self._add_behind(ends, begin)
                ends = end | (ends if may_be_empty else 0)
            if isinstance(body, Repetition) and body.most != 1:
                begin, _, _ = self._ends_of(number, row, sequence)
                self._add_behind(ends, begin, self._run_of(number, body))

    def _add_behind(self, places: int, begin: int, run: int = 0) -> None:
        for place in _bits(places):
            self._behind[place] |= begin & ~(run & 1 << place)

    def _run_of(self, number: int, body: Repetition) -> int:
        item = body.items[0] if body.items else None
        if number not in self._loops or not isinstance(item, Reference):
            return 0
        return 1 << self._places[item.number, 0, 0]

    def _find_together(self, first: int) -> list[int]:
        """For each place those that may stand in its stead, behind the same text."""
        together = [first * (first >> place & 1) for place in range(len(self._items))]
        todo = dict.fromkeys(_bits(first), first)
        steps = 0
        while todo:
            place, others = todo.popitem()
            ahead = 0
            for other in _bits(others):
                if self._share(place, other):
                    ahead |= self._ahead(other)
            for each in _bits(self._ahead(place)):
                new = ahead & ~together[each]
                if new:
                    together[each] |= new
                    todo[each] = todo.get(each, 0) | new
            steps += others.bit_count()
            if steps > MAX_FOLLOW_STEPS:
                return [(1 << len(self._items)) - 1] * len(self._items)
        return together

    def _ahead(self, place: int) -> int:
        """What may be next once a character was taken at this place: also more of a run."""
        return self._behind[place] | isinstance(self._items[place], CharacterRun) << place

    def _share(self, place: int, other: int) -> bool:
        """Whether one text may stand in both places."""
        return _overlap(self._items[place], self._items[other])


def _are_apart(run: Characters, item: Characters) -> bool:
    """Whether not even a first byte is the same, by which an item could go on where a run might."""
    is_ascii = any(each.ranges[-1][1] <= LAST_ASCII for each in (run, item))
    return is_ascii and not _overlap(run, item)


def _overlap(a: Characters, b: Characters) -> bool:
    return any(
        first <= end and begin <= last for first, last in a.ranges for begin, end in b.ranges
    )


def _bits(number: int) -> Iterator[int]:
    while number:
        yield (number & -number).bit_length() - 1
        number &= number - 1
