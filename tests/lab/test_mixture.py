"""The requests of a long identity run: repeatable, servable, and of every kind."""

from __future__ import annotations

from itertools import islice

from paceline.config import SpeculativeConfig
from paceline.request.sampling_params import SamplingParams
from paceline_lab.verify.verification import RECIPES, drafting_variants, mixed_requests

PROMPTS = [list(range(5)), list(range(100, 190)), [7]]
METHODS = ("draft_model", "prompt_lookup")


def requests(count: int, seed: int = 1) -> list[tuple[list[int], SamplingParams]]:
    found = mixed_requests(
        PROMPTS, seed=seed, max_tokens=64, context=80, vocab_size=200, methods=METHODS
    )
    return list(islice(found, count))


def test_the_seed_decides() -> None:
    assert requests(50) == requests(50)
    assert requests(50) != requests(50, seed=2)


def test_every_request_fits_and_every_kind_comes() -> None:
    found = requests(300)
    for prompt, params in found:
        assert prompt
        assert params.max_tokens is not None
        assert len(prompt) + params.max_tokens <= 80
        assert params.seed is not None
        params.check_vocabulary(200)
    wishes = [params for _, params in found]
    for recipe in RECIPES:
        same = [p for p in wishes if all(getattr(p, k) == v for k, v in recipe.items())]
        assert len(same) >= 300 // len(RECIPES)
    assert {p.speculative.methods for p in wishes} == {None, *((name,) for name in METHODS)}
    assert {p.speculative.enabled for p in wishes} == {True, False}
    assert {p.ignore_eos for p in wishes} == {True, False}
    assert any(p.logit_bias for p in wishes)
    assert any(p.min_tokens for p in wishes)
    assert len({p.seed for p in wishes}) == len(wishes)


def test_variants_keep_the_proposers_and_change_their_shape() -> None:
    configs = (SpeculativeConfig(), SpeculativeConfig("draft_model", model="x"))
    own, chains, trees = drafting_variants(configs)
    assert own == configs
    for variant in (chains, trees):
        assert [(c.method, c.model) for c in variant] == [(c.method, c.model) for c in configs]
    assert all(c.max_branching == 1 and c.num_speculative_tokens == 8 for c in chains)
    assert all(c.max_branching > 1 and c.max_tree_nodes > c.num_speculative_tokens for c in trees)
