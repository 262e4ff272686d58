"""A constraint written without any grammar library: a finite automaton over token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.request.span import DraftTree
from tests.toy import EOS, VOCAB


class Automaton:
    """Random states; some allow one token, some few, some many, and some allow the end.

    The states are the seed's; where a request is in them is this object's.
    """

    def __init__(self, seed: int, states: int = 14, fails_at: int | None = None) -> None:
        rng = random.Random(seed)
        self.edges: list[dict[int, int]] = []
        for _ in range(states):
            width = rng.choice((1, 1, 2, 3, 12, 40))
            tokens = rng.sample(range(1, VOCAB), width)
            self.edges.append({token: rng.randrange(states) for token in tokens})
        self.accepting = {s for s in range(states) if rng.random() < 0.2}
        self.last = {s for s in range(1, states) if rng.random() < 0.07}
        for state in self.last:
            self.edges[state] = {}
        self.accepting |= self.last
        self.fails_at = fails_at
        self.output: list[int] = []

    def state(self, path: Sequence[int]) -> int | None:
        """None where the path leaves the automaton."""
        state: int | None = 0
        for token in [*self.output, *path]:
            state = None if state is None else self.edges[state].get(token)
        return state

    def allowed(self, path: Sequence[int]) -> set[int]:
        if EOS in path:
            return {EOS}
        state = self.state(path)
        assert state is not None, "asked about a path that cannot follow"
        return set(self.edges[state]) | ({EOS} if state in self.accepting else set())

    @property
    def is_complete(self) -> bool:
        return self.state(()) in self.last

    def advance(self, token_id: int) -> None:
        assert token_id != EOS
        assert token_id in self.allowed(())
        self.output.append(token_id)

    def mask(self, path: Sequence[int]) -> bytes:
        if self.fails_at is not None and len(self.output) + len(path) >= self.fails_at:
            raise RuntimeError("out of fuel")
        return sum(1 << token for token in self.allowed(path)).to_bytes(VOCAB // 8, "little")

    def takes(self, path: Sequence[int]) -> bool:
        return EOS not in path and self.state(path) is not None

    def legal(self, tree: DraftTree) -> DraftTree:
        paths: dict[int, list[int]] = {-1: []}
        for node, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
            above = paths.get(parent)
            if above is not None and EOS not in above and token in self.allowed(above):
                paths[node] = [*above, token]
        return tree.select(sorted(node for node in paths if node >= 0))

    def certain(self, path: Sequence[int]) -> int | None:
        tokens = self._within(path)
        return tokens.pop() if len(tokens) == 1 else None

    def usual(self, path: Sequence[int]) -> int | None:
        return None

    def alternatives(self, path: Sequence[int], most: int) -> list[int]:
        tokens = self._within(path)
        return sorted(tokens) if len(tokens) <= most else []

    def _within(self, path: Sequence[int]) -> set[int]:
        if self.state(path) in self.last or EOS in path:
            return set()
        return self.allowed(path)
