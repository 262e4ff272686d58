"""Rules of GBNF that lead back to themselves from the left, which llama.cpp refuses.

What may match nothing is there only what has an empty alternative of its own, not what consists of
such rules; so it is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from paceline.structured.gbnf.rules import Body, Element, Reference, Repetition, sequences


def left_recursive(bodies: Mapping[int, Body]) -> int | None:
    """The number of what leads back to itself before it has matched anything, if there is one."""
    empty = _may_be_empty(bodies)
    edges = {number: _leftmost(body, empty) for number, body in bodies.items()}
    for number, body in bodies.items():
        if isinstance(body, Repetition) and body.most is None and _are_all(body.items, empty):
            edges[number].append(number)
    return _in_a_circle(edges)


def _may_be_empty(bodies: Mapping[int, Body]) -> set[int]:
    empty = {n for n, body in bodies.items() if not isinstance(body, Repetition) and not all(body)}
    for number, body in sorted(bodies.items(), key=lambda entry: entry[0]):
        if isinstance(body, Repetition) and (body.least == 0 or _are_all(body.items, empty)):
            empty.add(number)
    return empty


def _are_all(items: Sequence[Element], numbers: set[int]) -> bool:
    return all(isinstance(item, Reference) and item.number in numbers for item in items)


def _leftmost(body: Body, empty: set[int]) -> list[int]:
    """What a body may begin with."""
    found = []
    for sequence in sequences(body):
        for item in sequence:
            if not isinstance(item, Reference):
                break
            found.append(item.number)
            if item.number not in empty:
                break
    return found


def _in_a_circle(edges: Mapping[int, Sequence[int]]) -> int | None:
    """A node that can be reached from itself."""
    done: set[int] = set()
    for first in edges:
        path: dict[int, Iterator[int]] = {} if first in done else {first: iter(edges[first])}
        while path:
            node, ahead = next(reversed(path.items()))
            following = next(ahead, None)
            if following is None:
                done.add(node)
                del path[node]
            elif following in path:
                return following
            elif following not in done:
                path[following] = iter(edges[following])
    return None
