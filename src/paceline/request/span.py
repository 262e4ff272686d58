"""Spans and draft trees: the flat arrays that every step is made of. Owns their rules only.

A *draft tree* hangs below the last committed token of a request. A *span* is what one request puts
into one forward of the target model: a prefill chunk (a chain), a single token, or a root with its
draft tree. Nothing here knows models, tensors or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.errors import ProposerError

ROOT = -1
"""Parent index of a draft node that follows the last committed token directly."""
Claims = list[tuple[str, float]]
"""Per proposer that named a node, in the order of their trees: its name and its estimate."""


@dataclass(slots=True)
class DraftTree:
    """Candidate continuations of one request, as flat arrays of equal length.

    Attributes:
        token_ids: the token that each node proposes.
        parents: index of each node's parent, lower than its own; :data:`ROOT` below the last token.
        accept_probs: estimated probability that the node is accepted, given that its parent is.
            An estimate for the planner; the verifier never reads it.
        origins: name of the proposer that drafted each node.
        claims: of a merged tree, what each proposer that named the node said of it; else empty.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    accept_probs: list[float] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    claims: list[Claims] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def chain(
        cls, token_ids: Sequence[int], accept_probs: Sequence[float], origin: str = ""
    ) -> DraftTree:
        """A tree without branches: each token follows the one before it."""
        count = len(token_ids)
        return cls(
            list(token_ids), list(range(-1, count - 1)), list(accept_probs), [origin] * count
        )

    @property
    def is_chain(self) -> bool:
        """True when no node has more than one child and all follow one another."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    def depths(self) -> list[int]:
        """Depth of each node; a child of the last committed token has depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def path_probs(self) -> list[float]:
        """Estimated probability that each node is accepted: the product along its path."""
        probs: list[float] = []
        for parent, prob in zip(self.parents, self.accept_probs, strict=True):
            probs.append(prob if parent < 0 else probs[parent] * prob)
        return probs

    def child(self, parent: int, token_id: int) -> int | None:
        """The node below ``parent`` (or :data:`ROOT`) that carries a token. No two siblings do."""
        tokens, parents = self.token_ids, self.parents
        for node in range(parent + 1, len(tokens)):  # a child comes after its parent
            if tokens[node] == token_id and parents[node] == parent:
                return node
        return None

    def follow(self, token_ids: Sequence[int], start: int = 0) -> list[int]:
        """The nodes that carry the tokens of a text from ``start`` on, one below the other."""
        nodes: list[int] = []
        last = ROOT
        for token_id in token_ids[start : start + len(self)]:
            node = self.child(last, token_id)
            if node is None:
                break
            nodes.append(node)
            last = node
        return nodes

    def outcomes(self, token_ids: Sequence[int]) -> list[tuple[int, bool]]:
        """The nodes of which the tokens that a target emitted tell whether it accepts them.

        These are all below the nodes that it accepted, whether they were verified or not.

        Returns:
            Node and outcome, by node.
        """
        # By node: the token that followed it. The last token's own node has no successor.
        targets = dict(zip([ROOT, *self.follow(token_ids)], token_ids, strict=False))
        pairs = enumerate(zip(self.parents, self.token_ids, strict=True))
        return [
            (node, token_id == targets[parent])
            for node, (parent, token_id) in pairs
            if parent in targets
        ]

    def claims_of(self, node: int) -> Claims:
        """Each proposer that named a node, and what it said of it."""
        return self.claims[node] if self.claims else [(self.origins[node], self.accept_probs[node])]

    def select(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of the given nodes, in that order. Every node's parent must come before it."""
        position = {node: i for i, node in enumerate(nodes)}
        position[ROOT] = ROOT
        return DraftTree(
            [self.token_ids[i] for i in nodes],
            [position[self.parents[i]] for i in nodes],
            [self.accept_probs[i] for i in nodes],
            [self.origins[i] for i in nodes],
            [self.claims[i] for i in nodes] if self.claims else [],
        )

    def within(self, max_nodes: int, max_depth: int) -> DraftTree:
        """The tree without what is deeper, and without what goes beyond so many nodes."""
        if len(self) <= min(max_nodes, max_depth):
            return self
        nodes = [i for i, depth in enumerate(self.depths()) if depth <= max_depth][:max_nodes]
        return self if len(nodes) == len(self) else self.select(nodes)

    def validate(self, vocab_size: int) -> None:
        """Check that this is a tree over the vocabulary in which no two siblings carry one token.

        Raises:
            ProposerError: naming the first node that breaks a rule.
        """
        count = len(self.token_ids)
        if not (len(self.parents) == len(self.accept_probs) == len(self.origins) == count):
            raise ProposerError("a draft tree's arrays differ in length")
        if self._is_plain_chain(vocab_size):
            return
        seen: set[tuple[int, int]] = set()
        for i in range(count):
            token, parent = self.token_ids[i], self.parents[i]
            if type(token) is not int or not 0 <= token < vocab_size:
                raise ProposerError(
                    f"draft node {i}: token {token!r} is not in 0..{vocab_size - 1}"
                )
            if type(parent) is not int or not ROOT <= parent < i:
                raise ProposerError(f"draft node {i}: parent {parent!r} is not in -1..{i - 1}")
            if (parent, token) in seen:
                raise ProposerError(f"draft node {i}: a sibling carries token {token} already")
            seen.add((parent, token))

    def _is_plain_chain(self, vocab_size: int) -> bool:
        """The common case, told by a few calls for the whole tree; False means: look closer."""
        tokens = self.token_ids
        return (
            self.is_chain
            and set(map(type, tokens)) == {int}
            and min(tokens) >= 0
            and max(tokens) < vocab_size
        )

    def clamp_probs(self) -> int:
        """Bring estimates into 0..1, numbers that are none to 0; returns how many were not."""
        probs = self.accept_probs
        # A sum is not a number if one of its terms is not; min and max overlook that.
        if not probs or (min(probs) >= 0.0 and max(probs) <= 1.0 and sum(probs) >= 0.0):
            return 0
        self.accept_probs = [min(prob, 1.0) if prob >= 0.0 else 0.0 for prob in probs]
        return sum(not 0.0 <= prob <= 1.0 for prob in probs)


class Span(NamedTuple):  # one per request and step: a frozen dataclass takes thrice as long
    """One request's share of one forward: a tree of nodes in flat arrays.

    Attributes:
        request_id: whose tokens these are.
        start: committed KV length before this span, in tokens. Node ``i`` writes its KV at the
            logical slot ``start + i``; its position is ``start`` plus its depth.
        token_ids: node 0 is the root.
        parents: -1 for node 0; a parent's index is lower than its child's.
        sample_rows: nodes whose logits are needed.
        num_cached: how many leading nodes have their KV already and are attended to, not computed.
    """

    request_id: int
    start: int
    token_ids: Sequence[int]
    parents: Sequence[int]
    sample_rows: Sequence[int]
    num_cached: int = 0

    @property
    def is_chain(self) -> bool:
        straight = range(-1, len(self.parents) - 1)
        return self.parents == straight or list(self.parents) == list(straight)

    @classmethod
    def chunk(cls, request_id: int, start: int, token_ids: Sequence[int], sample: bool) -> Span:
        """A prefill chunk; ``sample`` asks for the logits of its last row."""
        count = len(token_ids)
        rows = (count - 1,) if sample else ()
        return cls(request_id, start, token_ids, range(-1, count - 1), rows)

    @classmethod
    def tree(cls, request_id: int, start: int, root: int, draft: DraftTree) -> Span:
        """The last committed token with its draft tree; the logits of every node are needed."""
        count = 1 + len(draft.token_ids)
        if count == 1:
            return cls(request_id, start, (root,), (ROOT,), (0,))
        parents = [ROOT, *[parent + 1 for parent in draft.parents]]
        tokens = [root, *draft.token_ids]
        return cls(request_id, start, tokens, parents, range(count))
