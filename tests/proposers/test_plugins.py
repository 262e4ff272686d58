"""Proposers of other packages: how they are found, what they lack, and what they cannot break.

What plugins say of their reading and their forwards: taken as plain numbers, or as failures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import METHODS, parse_speculative_config, speculative
from paceline.core.errors import ConfigError, RequestError
from paceline.engine.contained_proposers import MAX_FAILURES
from paceline.planner.cost import CostModel
from paceline.planner.planner import CostAwarePlanner
from paceline.proposers import build_proposers, find_builder
from paceline.proposers.base import Proposer
from paceline.proposers.plugin import NEEDED, PluginProposer
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams, SpeculativeParams
from paceline.request.span import DraftTree
from tests.proposers.drive import make_request, propose
from tests.proposers.plugins import Install, Repeats, installer, repeating_plugin
from tests.proposers.test_build_proposers import TARGET
from tests.toy import VOCAB, Job, assert_no_leak, run_jobs, toy_engine

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
from tests.proposers.plugins import Repeats

class NoFinish:
    def __init__(self, config, target): ...
    def propose(self, requests, budget): ...
    def observe(self, request, result): ...

class NoCount(NoFinish):
    def finish(self, request): ...
    @property
    def num_forwards(self):
        raise KeyError("count")

def broken(config, target):
    raise KeyError("phrases")
"""
ENTRIES = {
    "repeats": "some_plugin:Repeats",
    "no_finish": "some_plugin:NoFinish",
    "no_count": "some_plugin:NoCount",
    "broken": "some_plugin:broken",
    "absent": "no_such_module:Class",
    "suffix": "some_plugin:broken",  # takes no built-in proposer's place
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return installer(tmp_path, monkeypatch)


def build(method: str, **options: Any) -> Proposer:
    configs = parse_speculative_config({"method": method, **options})
    (proposer,) = build_proposers(configs, TARGET, strict=True)
    return proposer


# --- found ---------------------------------------------------------------------------------------


def test_a_plugin_is_found_configured_and_named_by_its_method(install: Install) -> None:
    with pytest.raises(ConfigError, match=r"'repeats'; allowed: .*suffix.*: none"):
        build("repeats")
    install(SOURCE, ENTRIES)
    proposer = build("repeats", options={"length": 2}, num_speculative_tokens=8)
    assert proposer.name == "repeats"
    assert not proposer.costs_forwards
    (tree,) = propose(proposer, make_request(1, [5, 6, 7, 8, 5]))
    assert (tree.token_ids, tree.origins) == ([6, 7], ["repeats"] * 2)
    with pytest.raises(ConfigError, match=r": absent, broken, no_count, no_finish, repeats$"):
        build("magic")
    assert SpeculativeParams(methods=["repeats", "ngram"]).methods == ("repeats", "prompt_lookup")
    with pytest.raises(RequestError, match=r"speculative.method is 'magic'.*repeats"):
        SpeculativeParams(methods=["magic"])
    assert build("suffix").name == "suffix"


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("no_finish", "no_finish has no finish; a plugin's class needs propose, observe, finish"),
        ("broken", r"broken \(some_plugin:broken\) cannot be built: KeyError\('phrases'\)"),
        ("no_count", r"no_count \(some_plugin:NoCount\) cannot be built: KeyError\('count'\)"),
        ("absent", "no module named 'no_such_module'"),
    ],
)
def test_a_plugin_that_cannot_be_built(
    install: Install, caplog: pytest.LogCaptureFixture, method: str, problem: str
) -> None:
    install(SOURCE, ENTRIES)
    with pytest.raises(ConfigError, match=f"(?i){problem}"):
        build(method)
    configs = parse_speculative_config([{"method": method}, {"method": "suffix"}])
    (left,) = build_proposers(configs, TARGET, strict=False)
    assert left.name == "suffix"
    assert f"no drafts by {method}" in caplog.text


def test_the_built_in_ones_need_no_metadata(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(speculative, "plugins_of", lambda group: EntryPoints())
    monkeypatch.syspath_prepend(str(tmp_path))  # looked at anew, since the path is another
    assert all(callable(find_builder(method)) for method in METHODS)
    assert build("suffix").name == "suffix"


# --- what a plugin may lack, and do --------------------------------------------------------------


class Fixed(Repeats):
    """Drafts what it was made with."""

    def __init__(self, made: Callable[[Request], Any]) -> None:
        self.made = made

    def propose(self, requests: list[Request], budget: object) -> Any:
        return [self.made(request) for request in requests]


def plugin(made: Callable[[Request], Any]) -> PluginProposer:
    return PluginProposer(repeating_plugin().config, Fixed(made))


def test_trees_are_copied_and_cut() -> None:
    kept = DraftTree(np.array([4, 5, 6, 7, 8, 9, 1]), [-1, 0, 1, 2, 3, -1, -1], [0.5] * 7)
    proposer, request = plugin(lambda request: kept), make_request(1, [1])
    (tree,) = propose(proposer, request)
    tree.validate(VOCAB)
    assert tree.token_ids == [4, 5, 6, 7]  # 4 nodes, 4 deep, by its configuration
    (tree,) = propose(proposer, request, nodes=6, depth=1)
    assert (tree.token_ids, tree.parents) == ([4, 9, 1], [-1, -1, -1])
    tree.accept_probs[0] = tree.token_ids[0] = 0
    assert (kept.token_ids[0], kept.accept_probs[0], kept.origins) == (4, 0.5, [])


def test_one_that_counts_forwards_is_asked_only_where_that_may_pay() -> None:
    inner: Any = Fixed(lambda request: DraftTree())
    inner.num_forwards, inner.lag = 7, lambda request: None
    proposer = PluginProposer(repeating_plugin().config, inner)
    assert (proposer.costs_forwards, proposer.num_forwards) == (True, 7)
    assert proposer.lag(make_request(1, [1])) is None


GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
JOBS = [Job([5, 6, 7] * 5, GREEDY), Job([9, 8, 7, 6] * 4, GREEDY, at=1)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [group[0].token_ids for group in run_jobs(toy_engine(), JOBS)]


class Failing(Repeats):
    def __init__(self, name: str) -> None:
        super().__init__(repeating_plugin().config, None)
        self.name = name

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__
        return found("fail") if name in NEEDED and name == found("name") else found(name)

    def fail(self, *arguments: object) -> Any:
        raise RuntimeError("plugin")


NONSENSE: dict[str, Callable[[Request], Any]] = {
    "nothing": lambda r: None,
    "text": lambda r: "tree",
    "fractions": lambda r: DraftTree([1.5], [-1], [0.5]),  # type: ignore[list-item]
    "outside of the vocabulary": lambda r: DraftTree.chain([VOCAB], [0.5]),
    "parents after children": lambda r: DraftTree([1, 2], [1, -1], [0.5, 0.5]),
    "parents below the root": lambda r: DraftTree([1, 2, 3, 4, 5], [-3] * 5, [0.5] * 5),
    "no estimates": lambda r: DraftTree([1], [-1]),
    "twins": lambda r: DraftTree([4, 4], [-1, -1], [0.5, 0.5]),
}


def test_nonsense_costs_a_step_its_draft_and_nothing_else(expected: list[list[int]]) -> None:
    kinds = [kind for made in NONSENSE.values() for kind in (made, lambda r: DraftTree())]

    class Nonsense(Repeats):
        def propose(self, requests: list[Request], budget: object) -> Any:
            made = kinds.pop(0) if kinds else lambda r: DraftTree()
            return [made(request) for request in requests]

    config = repeating_plugin().config
    engine = toy_engine([PluginProposer(config, Nonsense(config, None))])
    results = run_jobs(engine, JOBS)
    assert [group[0].token_ids for group in results] == expected
    assert engine.stats().num_proposer_failures == len(NONSENSE)
    assert not kinds
    assert_no_leak(engine)


@pytest.mark.parametrize("kind", ["propose", "observe"])
def test_a_plugin_that_keeps_raising_is_switched_off(kind: str, expected: list[list[int]]) -> None:
    engine = toy_engine([PluginProposer(repeating_plugin().config, Failing(kind))])
    results = run_jobs(engine, JOBS)
    assert [group[0].token_ids for group in results] == expected
    assert engine.stats().num_proposer_failures == MAX_FAILURES
    assert not engine.drafting.is_on


def test_its_estimates_are_calibrated_and_its_drafts_counted(expected: list[list[int]]) -> None:
    engine = toy_engine([plugin(lambda request: DraftTree.chain([1], [0.9]))])  # never comes
    planner = engine.drafting.planner = CostAwarePlanner(engine.cost)
    before = planner.drafts.estimate(99, "repeats", 1, 0.9)
    forced = SamplingParams(
        temperature=0.0,
        max_tokens=20,
        ignore_eos=True,
        speculative=SpeculativeParams(num_speculative_tokens=1),
    )
    results = run_jobs(engine, [Job(job.prompt, forced, job.at) for job in JOBS])
    assert [group[0].token_ids for group in results] == expected
    assert before == pytest.approx(0.9, abs=0.01)
    assert planner.drafts.estimate(99, "repeats", 1, 0.9) < before - 0.01
    counters = engine.stats().speculation.by_proposer["repeats"]
    assert counters.num_draft_tokens > 10
    assert counters.num_accepted_tokens == 0


def test_forwards_are_read_after_each_draft() -> None:
    inner: Any = Repeats(repeating_plugin().config, None)
    inner.num_forwards = 0
    proposer = PluginProposer(repeating_plugin().config, inner)
    inner.num_forwards = np.int64(9)
    assert proposer.num_forwards == 0
    propose(proposer, make_request(1, [1]))
    assert (proposer.num_forwards, type(proposer.num_forwards)) == (9, int)


@pytest.mark.parametrize("lag", [RuntimeError("plugin"), "soon", float("nan")])
def test_a_lag_that_is_none_costs_nobody_else_a_draft(lag: Any) -> None:
    class Lagging(Repeats):
        def lag(self, request: Request) -> Any:
            if isinstance(lag, Exception):
                raise lag
            return lag

    expected = [group[0].token_ids for group in run_jobs(toy_engine(), JOBS)]
    good = repeating_plugin()
    bad = PluginProposer(good.config, Lagging(good.config, None))
    bad.name = "lagging"
    engine = toy_engine([bad, good])
    frozen = CostModel(learns=False)  # no decision depends on a clock
    engine.drafting.planner = CostAwarePlanner(frozen)
    engine.drafting.replace([bad, good])
    params = dataclasses.replace(GREEDY, speculative=SpeculativeParams(num_speculative_tokens=3))
    results = run_jobs(engine, [Job(job.prompt, params, job.at) for job in JOBS])
    assert [group[0].token_ids for group in results] == expected
    stats = engine.stats()
    assert stats.num_proposer_failures == MAX_FAILURES
    assert engine.drafting.proposers == [good]
    assert stats.speculation.by_proposer["repeats"].num_draft_tokens > 0
