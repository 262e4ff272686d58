"""The walk of greedy requests, against a walk that looks every node's children up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.cache.model_runner import NO_LOGITS, ForwardResult
from paceline.core.errors import RequestFailedError
from paceline.engine.step import Scheduled
from paceline.engine.verifier import verify
from paceline.request.request import NO_DRAFT, TARGET_ORIGIN, Request, VerifyResult
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import ROOT, DraftTree

PROMPT = [1, 2]


def scheduled(draft: DraftTree = NO_DRAFT, num_computed: int = 1, num_tokens: int = 1) -> Scheduled:
    request = Request(0, list(PROMPT), 2, SamplingParams(temperature=0), seed=0, max_len=9)
    request.num_computed = num_computed
    return Scheduled(request, num_tokens, draft)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Trees over three tokens, so that the target often agrees."""
    tree, edges = DraftTree(), set()
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(ROOT, len(tree) - 1))
        token = draw(st.integers(0, 2))
        if (parent, token) not in edges:
            edges.add((parent, token))
            tree.token_ids.append(token)
            tree.parents.append(parent)
            tree.accept_probs.append(0.5)
            tree.origins.append(f"p{len(tree) % 2}")
    return tree


def walked(tree: DraftTree, argmax: list[int]) -> VerifyResult | None:
    children = {edge: i for i, edge in enumerate(zip(tree.parents, tree.token_ids, strict=True))}
    path, tokens, node = [0], [argmax[0]], ROOT
    if tokens[0] < 0:
        return None
    while (node := children.get((node, tokens[-1]), ROOT)) != ROOT and argmax[node + 1] >= 0:
        path.append(node + 1)
        tokens.append(argmax[node + 1])
    origins = [tree.origins[i - 1] for i in path[1:]]
    return VerifyResult(path, tokens, [*origins, TARGET_ORIGIN], tree)


@given(trees(), st.data())
def test_greedy_tokens_are_those_of_a_walk_down_the_tree(tree: DraftTree, data: st.DataObject):
    rows = 1 + len(tree)
    argmax = data.draw(st.lists(st.integers(-1, 2), min_size=rows, max_size=rows))
    item = scheduled(tree)
    # Behind another request's row.
    result = ForwardResult(NO_LOGITS, [0, 1, 1 + rows], [7, *argmax])
    first, second = verify(result, [scheduled(), item])
    assert isinstance(first, VerifyResult)
    assert first.token_ids == [7]
    expected = walked(tree, argmax)
    if expected is None:
        assert isinstance(second, RequestFailedError)
        return
    assert isinstance(second, VerifyResult)
    assert list(second.path) == expected.path
    assert second.token_ids == expected.token_ids
    assert second.origins == expected.origins
    assert second.draft is tree


def test_a_chunk_before_the_last_token_has_no_verdict():
    item = scheduled(num_computed=0)
    assert verify(ForwardResult(NO_LOGITS, [0, 0], []), [item]) == [None]
