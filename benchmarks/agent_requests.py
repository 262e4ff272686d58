"""Requests as agents make them, and what routing them over replicas does to caches and drafts.

Times and lengths are a recorded service's, texts are edits of code. Each agent goes on with its
conversation, all of which is in every prompt, until that fills the context; then it begins another.
Replicas are engines of this process that answer one request after another, so that everything which
is counted depends on neither the machine nor the load: how busy a replica is, is reckoned from the
times of the trace.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from harness import note
from prompt_sets import data_folder, load_prompts

from paceline import LLM, SamplingParams
from paceline.ray.prompts import parts_of
from paceline.ray.routing import Affinity, Choice
from paceline.request.metrics import EngineStats
from paceline.workbench.serving.arrivals import read_trace

AFFINITY, LOADS, TURNS = "affinity", "by load alone", "round robin"
OWN, ONE = "by agent", "one engine"
ARMS = (TURNS, LOADS, AFFINITY, OWN, ONE)
TRACE = "traces/azure_llm_inference_code.csv"
RULES = "# Edit the files of a project. Write the changed lines alone, and nothing else.\n" * 8
MAX_MODEL_LEN = 2048
KV_BYTES = 8 << 20
ANSWER_TOKENS = (8, 48)
CHARACTERS_PER_TOKEN = 0.2
"""Of an edit, for each token of the trace's prompt: those have thousands, contexts here two."""
TOKEN_SECONDS = 0.05
SEED = 0
Choose = Callable[[bytes, dict[str, int]], Choice]


@dataclass(frozen=True, slots=True)
class Turn:
    """What an agent asks next.

    Attributes:
        seconds: when, after the first of all.
        text: goes on from what was said.
    """

    seconds: float
    agent: int
    text: str
    max_tokens: int


def turns(count: int, num_agents: int) -> list[Turn]:
    """The first requests of the trace, each by one of the agents.

    Raises:
        RequestError: the trace is not here.
    """
    edits, rng = load_prompts("auto").kind("edit"), random.Random(SEED)
    share = len(edits) // num_agents
    of_agent = [cycle(edits[i * share : (i + 1) * share]) for i in range(num_agents)]
    made = []
    for row in read_trace(data_folder() / TRACE, count):
        agent = rng.randrange(num_agents)
        text = next(of_agent[agent])[: int(row.prompt_len * CHARACTERS_PER_TOKEN)]
        low, high = ANSWER_TOKENS
        made.append(Turn(row.time, agent, text, min(max(row.output_len, low), high)))
    return made


def routed(arm: str, asked: Sequence[Turn], num_replicas: int) -> tuple[dict[str, Any], list[str]]:
    """A row of the table, and the answers, which are the same in every arm."""
    names = [str(i) for i in range(1 if arm == ONE else num_replicas)]
    kv_bytes = KV_BYTES * num_replicas // len(names)
    engines = {name: _engine(kv_bytes) for name in names}
    try:
        answers = list(_answers(asked, engines, _chooser(arm, names)))
        stats = [engine.stats() for engine in engines.values()]
    finally:
        for engine in engines.values():
            engine.close()
    note(f"{arm}: {len(answers)} requests")
    return _row(arm, stats), answers


def _engine(kv_bytes: int) -> LLM:
    return LLM(
        "embedded",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory=kv_bytes,
        max_num_seqs=1,
        planner="fixed",
        speculative_config={"method": "suffix"},
    )


def _row(arm: str, stats: Sequence[EngineStats]) -> dict[str, Any]:
    steps = sum(each.speculation.num_steps for each in stats)
    accepted = sum(each.speculation.num_accepted_tokens for each in stats)
    queried = sum(each.num_queried_tokens for each in stats)
    return {
        "arm": arm,
        "hit_rate": sum(each.num_cached_tokens for each in stats) / queried,
        "accepted_per_step": accepted / steps,
        "busiest": max(each.num_requests for each in stats),
        "routed": sum(each.num_requests for each in stats),
    }


def _chooser(arm: str, names: Sequence[str]) -> Choose:
    if arm in (TURNS, ONE):
        order = cycle(names)
        return lambda body, work: Choice(next(order), 0)
    if arm == OWN:
        return lambda body, work: Choice(names[int(json.loads(body)["user"]) % len(names)], 0)
    policy = Affinity(is_on=arm == AFFINITY)
    return lambda body, work: policy.choose(parts_of(body, []), work)


def _answers(asked: Sequence[Turn], engines: dict[str, LLM], choose: Choose) -> Iterator[str]:
    said: dict[int, str] = {}
    given: dict[str, list[tuple[float, int]]] = {name: [] for name in engines}
    encode = next(iter(engines.values())).encode
    for turn in asked:
        prompt = said.get(turn.agent, RULES) + turn.text
        if len(encode(prompt)) + turn.max_tokens > MAX_MODEL_LEN:
            prompt = RULES + turn.text
        body = json.dumps({"prompt": prompt, "user": str(turn.agent)}).encode()
        unfinished = {
            name: sum(work for end, work in theirs if end > turn.seconds)
            for name, theirs in given.items()
        }
        name, work = choose(body, unfinished)
        given[name].append((turn.seconds + turn.max_tokens * TOKEN_SECONDS, work))
        params = SamplingParams(max_tokens=turn.max_tokens, temperature=0, ignore_eos=True)
        answer = engines[name].generate(prompt, params).text
        said[turn.agent] = prompt + answer + "\n"
        yield answer
