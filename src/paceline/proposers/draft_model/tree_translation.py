"""A tree of the draft's tokens as a tree of the target's. Knows texts and probabilities, no model.

Every path of the draft is a text, and the target's tokens for it a path of the new tree. A token of
the target is reached when the draft's text reaches its end: its probability is that of the draft's
node that gets there, or the sum over the nodes of different paths that do. The last tokens of a
path, which what follows could still change, are left out: of the first of them 5 to 8 in 100 were
right between models with vocabularies of 2048, 512 and 105 tokens, of the settled ones 37 to 73.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.proposers.draft_model.proposer import NAME
from paceline.proposers.draft_model.translation import Translation
from paceline.request.span import ROOT, DraftTree


@dataclass(slots=True)
class _Node:
    """A node of the new tree; ``reached_by`` are the draft's nodes that get to its end."""

    token: int
    parent: int
    depth: int
    reached_by: set[int] = field(default_factory=set)


def translate(
    translation: Translation,
    draft: DraftTree,
    max_nodes: int,
    max_depth: int,
    min_prob: float,
    *,
    is_chain: bool = False,
) -> DraftTree:
    """The target's tree for a draft.

    Args:
        draft: in the draft's vocabulary, below what the translation has it read.
        min_prob: nodes less likely than this to be reached and accepted are left out.
        is_chain: of siblings the likeliest alone is kept.
    """
    if translation.is_direct:
        tokens = [translation.pair.to_target[token] for token in draft.token_ids]
        return replace(draft, token_ids=tokens)
    nodes, probs = _nodes(translation, draft), draft.path_probs()
    tree = DraftTree()
    reached: list[float] = []
    for node in nodes:
        above = 1.0 if node.parent < 0 else reached[node.parent]
        reached.append(min(above, sum(probs[each] for each in sorted(node.reached_by))))
        tree.token_ids.append(node.token)
        tree.parents.append(node.parent)
        tree.accept_probs.append(reached[-1] / above if above > 0.0 else 0.0)
        tree.origins.append(NAME)
    kept: list[int] = []
    for i in sorted(range(len(nodes)), key=lambda i: -reached[i]):
        follows = not is_chain or nodes[i].parent == (kept[-1] if kept else ROOT)
        if follows and reached[i] >= min_prob and nodes[i].depth <= max_depth:
            kept.append(i)
    return tree.select(kept[:max_nodes])


def _nodes(translation: Translation, draft: DraftTree) -> list[_Node]:
    """The target's tokens for all paths, one node for the same token below the same node."""
    nodes: list[_Node] = []
    index: dict[tuple[int, int], int] = {}
    for path in _paths(draft):
        parent = ROOT
        for depth, (token, reaching) in enumerate(_walk(translation, draft, path), 1):
            at = index.get((parent, token))
            if at is None:
                at = index[parent, token] = len(nodes)
                nodes.append(_Node(token, parent, depth))
            nodes[at].reached_by.add(reaching)
            parent = at
    return nodes


def _paths(draft: DraftTree) -> list[list[int]]:
    """The nodes from the root to each leaf."""
    paths = []
    for leaf in sorted(set(range(len(draft))) - set(draft.parents)):
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = draft.parents[node]
        paths.append(path[::-1])
    return paths


def _walk(translation: Translation, draft: DraftTree, path: list[int]) -> list[tuple[int, int]]:
    """Target tokens of one path, and the draft's node that gets to the end of each."""
    pair = translation.pair
    text, reach, special = b"", [], None
    for node in path:
        piece = pair.draft.piece(draft.token_ids[node])
        if piece is None:
            special = pair.to_target.get(draft.token_ids[node]), node
            break
        text += piece
        reach.append((len(text), node))
    skipped = len(translation.pending)
    found = translation.continuation(text[skipped:])
    written = found.ends[-1] if found.ends else 0
    is_ended = special is not None and written == len(text) - skipped
    count = len(found.tokens) if is_ended else found.settled
    steps, at = [], 0
    for token, end in zip(found.tokens[:count], found.ends, strict=False):
        while reach[at][0] < end + skipped:
            at += 1
        steps.append((token, reach[at][1]))
    if is_ended and special is not None and special[0] is not None:
        steps.append((special[0], special[1]))
    return steps
