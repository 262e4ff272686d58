"""What may stand in one place of a text, and what behind it, by the rules of a GBNF grammar.

Each character of the rules is a *place*. Which rule called which is forgotten, as in a
finite automaton; so more is said to be possible than is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from paceline.structured.gbnf.rules import (
    Body,
    Characters,
    Element,
    Reference,
    Repetition,
    Run,
    sequences,
)

LAST_ASCII = 0x7F
MAX_STEPS = 20_000
"""After so many any place is said to stand in any other's stead."""


class Follow:
    """Sets of places are bits of a number.

    No rule may name tokens: one stands for any number of characters, so that counting them does not
    tell what may stand in the stead of what is behind it.

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
        """Go on finding what bodies begin and end with; whether that told something new."""
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
            if steps > MAX_STEPS:
                return [(1 << len(self._items)) - 1] * len(self._items)
        return together

    def _ahead(self, place: int) -> int:
        """What may be next once a character was taken at this place: also more of a run."""
        return self._behind[place] | isinstance(self._items[place], Run) << place

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
