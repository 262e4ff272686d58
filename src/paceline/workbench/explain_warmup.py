"""What is slow when a program does it for the first time, done before anything is measured.

An unrelated text is continued with drafts and then without. Nobody learns from it: planner and cost
model have stand-ins meanwhile, and proposers are told to forget the request before it ends. Knows
no text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from paceline.engine.engine import Engine
from paceline.engine.planners import PLANNERS, new_correction
from paceline.policy.cost import CostModel
from paceline.request import Request
from paceline.sampling_params import SamplingParams
from paceline.workbench.explain import RecordingPlanner

NUM_TOKENS = 32
"""Tokens that each part of the warm-up generates at least, if there is time."""
MOST_SECONDS = 0.5
"""Of each part: where steps take long, what is slow about the first one is little beside them."""
PROMPT_LENGTH, PERIOD = 24, 8
"""Tokens of the text, and after how many it repeats itself: there must be something to draft."""
SALT = "paceline warm-up"
"""Prompts of other salts see nothing of what is cached here."""


def warm_up(engine: Engine, params: SamplingParams) -> None:
    """Run an idle engine a little, with its proposers and without. Call it where the engine lives.

    Nothing of it is in drafts, plans or statistics after it; the latter begin anew. Does nothing
    where the context is too short.

    Args:
        params: how tokens are chosen later; their length, ends and structure do not count.
    """
    context, proposers = engine.config.max_model_len, engine.drafting.proposers
    longest = max((each.config.num_speculative_tokens for each in proposers), default=0)
    length = 2 * (NUM_TOKENS + longest + 1)  # a part ends with the step that has enough
    if context is None or context < PROMPT_LENGTH + length:
        return
    unended = replace(params, n=1, max_tokens=length, min_tokens=0, structured_outputs=None)
    unended = replace(unended, ignore_eos=True, stop=(), stop_token_ids=())
    for name in ("fixed", engine.config.planner):  # the first of them drafts whatever it costs
        with _stand_ins(engine, name):
            try:
                engine.set_speculation(proposers)
                _run(engine, unended)
            finally:
                engine.set_speculation(proposers)
    engine.reset_stats()


@contextmanager
def _stand_ins(engine: Engine, planner: str) -> Iterator[None]:
    """Let a planner of this name and a cost model of their own plan and learn meanwhile."""
    drafting, real = engine.drafting, (engine.drafting.planner, engine.cost)
    engine.cost = CostModel(engine.cost.table, correct=new_correction)
    stand_in = PLANNERS[planner](engine.cost, None, engine.config.objective)
    drafting.planner = RecordingPlanner(stand_in)
    try:
        yield
    finally:
        drafting.planner, engine.cost = real


def _run(engine: Engine, params: SamplingParams) -> None:
    """One request, with drafts until its proposers forget it, and then without."""
    tokens = [1 + 7 * (i % PERIOD) % (engine.vocab_size - 1) for i in range(PROMPT_LENGTH)]
    (request_id,) = engine.add_request(tokens, params, cache_salt=SALT)
    request = engine.requests[request_id]
    _advance(engine, request)
    engine.drafting.finish(request)
    engine.set_speculation([])
    _advance(engine, request)
    engine.abort(request_id)
    engine.step()


def _advance(engine: Engine, request: Request) -> None:
    """One part: steps until there are :data:`NUM_TOKENS` more, or the time is over."""
    until = request.num_output_tokens + NUM_TOKENS
    deadline = time.perf_counter() + MOST_SECONDS
    while request.finish_reason is None and request.num_output_tokens < until:
        engine.step()
        if time.perf_counter() > deadline:
            break
