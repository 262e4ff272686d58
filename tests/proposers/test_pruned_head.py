"""A draft whose head has some of the tokens ranks those as the target would: by their own ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.models.decoder import Decoder
from paceline.models.weights import HEAD_TOKENS, PrunedHead
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.sampling import sampler
from paceline.sampling.logit_edits import SamplingRow
from paceline.sampling.sampler import rank_candidates
from tests.arrays import arrays, same
from tests.proposers.drive import Target, make_request
from tests.toy import TOY, VOCAB, draft_config, toy_ops, toy_runner, toy_tensors

HEAD = PrunedHead(np.array([t for t in range(VOCAB) if t % 3]), VOCAB)
PROMPT = [5, 9, 2, 7, 7, 30, 11]
SAMPLING: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.0},
    {"temperature": 0.9, "presence_penalty": 0.7, "logit_bias": {4: 3.0, 10: -2.0, 6: 1.0}},
    {"temperature": 1.0, "banned_token_ids": [1, 2, 3, 5], "min_tokens": 8},
    {"temperature": 1.0, "allowed_token_ids": list(range(10, 30))},
]


def pruned_self_draft(dtype: str = "float32", **options: Any) -> DraftModelProposer:
    """The toy target as its own draft, without a third of its head."""
    count = len(HEAD.token_ids)
    config = dataclasses.replace(TOY, tie_embeddings=False, draft_vocab_size=count)
    tensors = toy_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][HEAD.token_ids]
    tensors[HEAD_TOKENS] = torch.from_numpy(HEAD.offsets)
    ops = toy_ops(dtype)
    decoder = Decoder(config, arrays(tensors), ops, TOY.max_position)
    memory = ops.kv_memory(config, 100, ops.default_kv_dtype)
    runner = ModelRunner(decoder, KVCache(memory, prefix_caching=False))
    return DraftModelProposer(draft_config(**options), runner)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_self_draft_is_accepted_wherever_its_head_has_the_token(
    sampling: dict[str, Any], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(sampler, "kernels", None)
    model, proposer = Target(toy_runner()), pruned_self_draft()
    request, kept = make_request(1, PROMPT, **sampling), set(HEAD.token_ids.tolist())
    known = missing = 0
    for _ in range(8):
        draft, result = model.step(proposer, request)
        assert len(draft) == 4
        assert kept.issuperset(draft.token_ids)
        *accepted, bonus = result.token_ids
        assert len(accepted) == 4 or bonus not in kept
        known, missing = known + len(accepted), missing + (bonus not in kept)
    assert known
    assert missing or "allowed_token_ids" in sampling


@pytest.mark.parametrize("dtype", ["native-int8", "native-int4"])
def test_native_drafts_read_every_token_and_rank_those_of_the_head(dtype: str) -> None:
    if sampler.kernels is None:
        pytest.skip("the native kernels are not built")
    model, proposer = Target(toy_runner(dtype)), pruned_self_draft(dtype)
    request, kept = make_request(1, [0, 3, *PROMPT], temperature=1.0), set(HEAD.token_ids.tolist())
    for _ in range(10):
        _, result = model.step(proposer, request)
        assert len(result.token_ids) == 5 or result.token_ids[-1] not in kept


@pytest.mark.parametrize("kernels", [True, False])
def test_ranks_and_scores_are_those_of_the_whole_rows(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(sampler, "kernels", None)
    logits = np.random.default_rng(0).standard_normal((3, len(HEAD.token_ids)), np.float32)
    logits[:, 7] = logits[:, 3] = logits.max() + 1  # a tie: the lower id first
    whole = HEAD.by_token(logits)
    assert same(whole[:, HEAD.token_ids], logits)
    assert np.isfinite(whole).sum() == logits.size
    for temperature in (0.0, 1.0):
        rows = [SamplingRow(make_request(i, PROMPT, temperature=temperature)) for i in range(3)]
        found, wanted = rank_candidates(logits, rows, 8, HEAD), rank_candidates(whole, rows, 8)
        assert found[0].tolist() == wanted[0].tolist()
        assert found[1].tolist() == wanted[1].tolist()
    mask = bytes([0b10]) + bytes(5)  # token 1 alone
    row = SamplingRow(make_request(1, PROMPT), mask=mask)
    tokens, scores = rank_candidates(logits[:1], [row], 2, HEAD)
    assert tokens[0, 0] == 1
    assert scores[0, 1] == -float("inf")


@pytest.mark.skipif(sampler.kernels is None, reason="the native kernels are not built")
@pytest.mark.parametrize("token_ids", [[0, VOCAB], [-1, 2], [1], [1, 2, 3]])
def test_kernels_refuse_columns_that_do_not_fit(token_ids: list[int]) -> None:
    head = PrunedHead(np.array(token_ids), VOCAB)
    with pytest.raises(ValueError, match="do not fit"):
        rank_candidates(torch.zeros(1, 2), [SamplingRow(make_request(1, PROMPT))], 1, head)
