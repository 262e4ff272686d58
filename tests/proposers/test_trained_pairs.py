"""Heads that were trained to copy a tiny target are accepted by it at every depth.

Wrong positions, stale keys and shifted hidden states show here, as low acceptance; a random head
drafts wrong tokens either way. What is accepted is compared with what plain torch would draft by
the same head, too, which the reference packages agree with.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import numpy as np
import pytest
import torch

from paceline.api.llm import LLM
from paceline.proposers.heads.proposer import Features
from paceline.request.sampling_params import SamplingParams
from tests.proposers.trained_pairs import DEPTH, LENGTH, Pair, forms, texts, write_pair

PROMPT, COUNT = 20, 40
SHAPES = {
    "chain": {"max_tree_nodes": 0, "max_branching": 1},
    "tree": {"max_tree_nodes": 12, "max_branching": 3},
}
SAMPLED = 0.8
FORMS = forms()


def answered(
    pair: Pair, temperature: float, shape: dict[str, int] | None
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Texts with their answers, and by depth the drafts accepted and those that went so deep.

    Prompts are read in chunks, two requests run at once, and each prompt is asked twice, so that
    its first block is found in the prefix cache.
    """
    prompts = [text[:PROMPT] for text in texts(pair.form.language, COUNT, 12345).tolist()]
    options = {**pair.config, **(shape or {}), "min_accept_prob": 0.0}
    options["num_speculative_tokens"] = DEPTH
    params = [
        SamplingParams(
            max_tokens=LENGTH - PROMPT, ignore_eos=True, temperature=temperature, seed=seed
        )
        for seed in range(COUNT)
    ]
    with LLM(
        str(pair.folder),
        dtype="float32",
        planner="fixed",
        max_num_seqs=2,
        max_num_batched_tokens=8,
        speculative_config=[options] if shape else [],
    ) as llm:
        first = llm.generate(prompts, params)
        again = llm.generate(prompts, params)
        stats = llm.stats()
    assert [each.token_ids for each in first] == [each.token_ids for each in again]
    whole = [[*p, *each.token_ids] for p, each in zip(prompts, first, strict=True)]
    counted = stats.speculation
    own = counted.by_proposer.get(pair.form.method)
    accepted = [] if own is None else own.num_accepted_tokens_per_pos
    reached = [
        sum(count for depth, count in counted.drafts_by_depth.items() if depth > level)
        for level in range(DEPTH)
    ]
    return torch.tensor(whole), [*accepted, *[0] * (DEPTH - len(accepted))], reached


@pytest.fixture(scope="module", params=FORMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(FORMS[request.param], tmp_path_factory.mktemp("pair"))


@pytest.mark.slow
@pytest.mark.timeout(900)  # training takes a minute
def test_a_trained_head_is_accepted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for temperature in (0.0, SAMPLED):
        plain, _, _ = answered(pair, temperature, None)
        given = pair.expected(plain, range(PROMPT, LENGTH - DEPTH - 2), temperature)
        for name, shape in SHAPES.items():
            whole, accepted, reached = answered(pair, temperature, shape)
            assert whole.equal(plain)
            assert reached[-1] > COUNT
            shares = [a / r for a, r in zip(accepted, reached, strict=True)]
            said = f"{temperature} {name}: accepted {accepted} of {reached}, plain torch {given}"
            print(said)
            for level, least in enumerate(accumulate(given, mul)):
                assert shares[level] >= least - 0.08, said
            if not temperature or pair.form.language.first == 1:
                assert min(given) >= 0.95, said
                assert all(share >= 0.95**level for level, share in enumerate(shares, 1)), said
    if pair.form.language.lag == 1:  # the last token alone says what comes
        return
    read = Features.read
    monkeypatch.setattr(Features, "read", lambda *args: np.roll(read(*args), 1, axis=0))
    _, accepted, reached = answered(pair, 0.0, SHAPES["chain"])
    assert accepted[0] < 0.5 * reached[0]  # hidden states of other positions show
