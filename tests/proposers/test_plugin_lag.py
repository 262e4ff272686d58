"""What plugins say of their reading and their forwards: taken as plain numbers, or as failures."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from paceline.engine.guard import MAX_FAILURES
from paceline.planner.cost import CostModel
from paceline.planner.planner import CostAwarePlanner
from paceline.proposers.plugin import PluginProposer
from paceline.request.request import Request
from paceline.request.sampling_params import SpeculativeParams
from tests.proposers.drive import make_request, propose
from tests.proposers.plugins import Repeats, repeating_plugin
from tests.proposers.test_plugins import GREEDY, JOBS
from tests.toy import Job, run_jobs, toy_engine


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
