"""Adapters in the engine: the answers that a request would get alone, and nothing shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from paceline.backends.native.native import why_not_native
from paceline.core.errors import ConfigError, UnknownAdapterError
from paceline.engine.engine import Engine
from paceline.loading.adapter import load_adapter
from paceline.models.backend import AdaptedLayers
from paceline.proposers.suffix import SuffixProposer
from paceline.request.sampling_params import SamplingParams
from tests.adapters import adapter_folder, adapter_tensors
from tests.contracts.test_identity import Factory, dflash, draft, head, lookup
from tests.proposers.mtp import toy_mtp
from tests.proposers.parallel_heads import toy_dflash2, toy_dspark, toy_peagle
from tests.proposers.self_drafts import self_drafter
from tests.toy import (
    TOY,
    USUAL,
    VOCAB,
    Job,
    assert_no_leak,
    run_jobs,
    suffix_config,
    toy_engine,
)
from tests.toy import toy_tensors as tensors

ALL = SamplingParams(temperature=0.0, max_tokens=20, logprobs=VOCAB, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=20, logprobs=VOCAB, ignore_eos=True)
PROMPT = [7, 8, 9, 11] * 10
PROPOSERS: dict[str, Sequence[Factory]] = {
    "plain": [],
    "texts": [lookup(max_branching=2), lambda: SuffixProposer(suffix_config())],
    "draft_model": [draft(0.3, max_branching=2, max_tree_nodes=10)],
    "head": [head(max_branching=2, max_tree_nodes=8)],
    "self": [lambda: lambda runner: self_drafter(runner, 1, max_branching=2, max_tree_nodes=8)],
    "mtp": [lambda: lambda runner: toy_mtp(runner, max_branching=2, max_tree_nodes=8)],
    "dflash": [dflash(max_branching=2, max_tree_nodes=8)],
    "peagle": [lambda: lambda runner: toy_peagle(runner, max_branching=2, max_tree_nodes=8)],
    "dspark": [lambda: lambda runner: toy_dspark(runner, max_branching=2, max_tree_nodes=8)],
    "dflash2": [lambda: lambda runner: toy_dflash2(runner, max_branching=2, max_tree_nodes=8)],
}
DTYPES = [
    USUAL,
    pytest.param("native-int8", marks=pytest.mark.skipif(why_not_native() is not None, reason="")),
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, AdaptedLayers]:
    found = {}
    for seed, name in enumerate(("one", "two", "other")):
        folder = tmp_path_factory.mktemp(name)
        adapter_folder(folder, adapter_tensors(tensors(), seed))
        found[name] = load_adapter(folder, TOY, {})
    return found


def engine(adapters: Mapping[str, AdaptedLayers], **options: Any) -> Engine:
    made = toy_engine(**options)
    for name in ("one", "two"):
        made.load_adapter(name, adapters[name])
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROPOSERS)
def test_answers_in_mixed_batches_are_those_that_each_gets_alone(
    name: str, dtype: str, adapters: Mapping[str, AdaptedLayers]
) -> None:
    chosen = (None, "one", "two", "one", "two", None)
    jobs = [
        Job(PROMPT[: 20 + 3 * i], (ALL, SAMPLED)[i % 2], at=i % 3, adapter=adapter)
        for i, adapter in enumerate(chosen)
    ]
    together = engine(adapters, proposers=[make() for make in PROPOSERS[name]], dtype=dtype)
    got = run_jobs(together, jobs)
    for (result,), job in zip(got, jobs, strict=True):
        fresh = engine(adapters, dtype=dtype)
        ((alone,),) = run_jobs(fresh, [Job(job.prompt, job.params, 0, 0, job.adapter)])
        assert result.answer == alone.answer, job.adapter
        ((plain,),) = run_jobs(fresh, [Job(job.prompt, job.params)])
        assert (result.token_ids == plain.token_ids) == (job.adapter is None)
    assert_no_leak(together)
    if PROPOSERS[name]:
        assert together.stats().speculation.num_accepted_tokens


def test_prefixes_are_shared_by_requests_of_one_adapter_alone(
    adapters: Mapping[str, AdaptedLayers],
) -> None:
    model, cached = engine(adapters), []
    for adapter in (None, "one", "two", "one", None, "two"):
        ((result,),) = run_jobs(model, [Job(PROMPT, ALL, adapter=adapter)])
        assert result.request is not None
        cached.append(result.request.num_cached_tokens > 0)
    assert cached == [False, False, False, True, True, True]


def test_observers_of_cached_blocks_are_told_with_which_adapter_they_were_read(
    adapters: Mapping[str, AdaptedLayers],
) -> None:
    told = []

    class Observer:
        def stored(self, key: bytes, parent: Any, token_ids: Any, adapter: str | None) -> None:
            told.append(adapter)

        def removed(self, key: bytes) -> None: ...
        def cleared(self) -> None: ...

    model = engine(adapters)
    model.kv.pool.observer = Observer()
    for adapter in (None, "one"):
        run_jobs(model, [Job(PROMPT, SamplingParams(n=2, max_tokens=1), adapter=adapter)])
    assert told == [None] * 2 + ["one"] * 2


def test_a_name_that_is_given_again_shares_nothing_with_what_had_it(
    adapters: Mapping[str, AdaptedLayers],
) -> None:
    model = engine(adapters, proposers=[SuffixProposer(suffix_config())])
    job = Job(PROMPT, ALL, adapter="one")
    ((before,),) = run_jobs(model, [job])
    model.load_adapter("one", adapters["other"], replaces=True)
    ((after,),) = run_jobs(model, [job])
    fresh = toy_engine()
    fresh.load_adapter("one", adapters["other"])
    ((want,),) = run_jobs(fresh, [job])
    assert after.answer == want.answer != before.answer
    assert before.request is not None
    assert after.request is not None
    assert after.request.num_cached_tokens == 0
    assert after.request.cache_salt != before.request.cache_salt


def test_requests_keep_an_adapter_that_is_unloaded(
    adapters: Mapping[str, AdaptedLayers],
) -> None:
    job, model = Job(PROMPT, ALL, adapter="one"), engine(adapters)
    ((want,),) = run_jobs(engine(adapters), [job])
    unload = {4: lambda model, ids: model.unload_adapter("one")}
    ((got,), (other,)) = run_jobs(model, [job, Job(PROMPT, ALL, at=2, adapter="two")], unload)
    assert got.answer == want.answer
    assert other.error is None
    assert list(model.adapters) == ["two"]
    with pytest.raises(UnknownAdapterError, match="'one' is loaded; loaded: two"):
        model.add_request(PROMPT, ALL, adapter="one")
    with pytest.raises(UnknownAdapterError):
        model.unload_adapter("one")
    assert not model.has_work


def test_a_name_is_given_once(adapters: Mapping[str, AdaptedLayers]) -> None:
    with pytest.raises(ConfigError, match="'one' is loaded already"):
        engine(adapters).load_adapter("one", adapters["two"])
