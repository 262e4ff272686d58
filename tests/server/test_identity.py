"""Plain equals speculative through HTTP: the bodies, byte for byte apart from ids and times.

One server answers every feature without drafts, with those of each proposer, and with all of them
merged. Requests say themselves who may draft, so all of that shares batches.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.server.bodies import (
    FEATURES,
    REGEX,
    Body,
    ask_all,
    comparable,
    is_structured,
    mixed_bodies,
)
from tests.server.served import KEY, served

pytest.importorskip("llguidance")

OFF = {"enabled": False}
SPECULATION: dict[str, Any] = {
    "prompt_lookup": {"method": ["prompt_lookup"]},
    "suffix": {"method": ["suffix"]},
    "draft_model": {"method": ["draft_model"]},
    "grammar": {"method": ["grammar"]},
    "merged": {},
}
_METRICS = re.compile(r',"metrics":\{.*?\}\}\}')
_CACHED = re.compile(r'"cached_tokens":\d+')


def asked(feature: str, speculation: str, adds_grammar: bool) -> Body:
    """A feature as one column of the comparison asks for it; nobody shares cached prefixes."""
    body = FEATURES[feature]
    if adds_grammar:
        body = {**body, "structured_outputs": {"regex": REGEX}}
    salt = f"{feature} {speculation} {adds_grammar}"
    wish = SPECULATION.get(speculation, OFF)
    return {**body, "speculative": wish, "cache_salt": salt, "include_metrics": True}


def adds_grammar(feature: str, speculation: str) -> bool:
    """A grammar drafts where there is one, so that column adds it to what has none."""
    return speculation == "grammar" and not is_structured(FEATURES[feature])


@pytest.fixture(scope="session")
def told(served_url: str) -> dict[tuple[str, str, bool], str]:
    """Answers by feature, who drafted, and whether a grammar was added.

    They are asked for once in the life of their server: a second time it would have cached some
    of the prompts, and dropped others, as requests of other tests had it. A worker that takes this
    module's tests in parts would ask again.
    """
    crowd = [(f, s, adds_grammar(f, s)) for s in SPECULATION for f in FEATURES]
    alone = list(dict.fromkeys((feature, "off", added) for feature, _, added in crowd))
    answers = ask_all(served_url, [asked(*each) for each in alone], 1, KEY)
    answers += ask_all(served_url, [asked(*each) for each in crowd], 16, KEY)
    assert {*_CACHED.findall("".join(answers))} == {'"cached_tokens":0'}
    return dict(zip(alone + crowd, answers, strict=True))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("speculation", SPECULATION)
def test_a_feature(speculation: str, feature: str, told: Any) -> None:
    added = adds_grammar(feature, speculation)
    plain, drafted = told[feature, "off", added], told[feature, speculation, added]
    assert comparable(_METRICS.sub("", drafted)) == comparable(_METRICS.sub("", plain))


def test_everybody_drafts_when_asked_and_nobody_else(told: Any) -> None:
    accepted: dict[str, Counter[str]] = {}
    for (_, speculation, _), answer in told.items():
        for found in _METRICS.findall(answer):
            counters = json.loads(f"{{{found[1:]}}}")["metrics"]["speculative_decoding"]
            own = accepted.setdefault(speculation, Counter())
            own["steps"] += counters["num_steps"]
            own.update(counters["num_accepted_by_origin"])
            assert speculation != "off" or counters["num_drafts"] == 0
    for speculation, own in accepted.items():
        drafters = {name for name in own if name != "steps"}
        if speculation == "merged":  # what both look up is mostly the surer one's
            drafters.discard("prompt_lookup")
        everybody = {"suffix", "draft_model", "grammar"}
        assert drafters == {"off": set(), "merged": everybody}.get(speculation, {speculation})
        assert all(own[name] > 0 for name in drafters), own


def test_mixed_requests(served_url: str) -> None:
    """One at a time with drafts, and many at once without."""
    bodies = mixed_bodies(16, seed=2)
    drafted = ask_all(served_url, bodies, 1, KEY)
    plain = ask_all(served_url, [body | {"speculative": OFF} for body in bodies], 16, KEY)
    assert_same(bodies, plain, drafted)


def assert_same(bodies: list[Body], plain: list[str], drafted: list[str]) -> None:
    """What came out of a cache is a matter of who came before, as times are."""
    for body, one, other in zip(bodies, plain, drafted, strict=True):
        assert comparable(_CACHED.sub("", one)) == comparable(_CACHED.sub("", other)), body


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("planner", ["fixed", "auto"])
def test_two_hundred_mixed_requests(served_model: Path, planner: str) -> None:
    """Against a server that was started without speculation, too; each body for itself, too."""
    bodies = mixed_bodies(200, seed=3)
    off = [body | {"speculative": OFF} for body in bodies]
    with served(served_model, speculation=("--no-speculation",)) as url:
        plain = ask_all(url, _apart(bodies, "plain"), 1, KEY)
        assert_same(bodies, plain, ask_all(url, bodies, 16, KEY))
    with served(served_model, planner=planner) as url:
        for concurrency in (1, 16):
            assert_same(bodies, plain, ask_all(url, bodies, concurrency, KEY))
            assert_same(bodies, plain, ask_all(url, off, concurrency, KEY))
        drafted = ask_all(url, _apart(bodies, "drafted"), 1, KEY)
        assert [comparable(each) for each in drafted] == [comparable(each) for each in plain]


def _apart(bodies: list[Body], arm: str) -> list[Body]:
    """So that none finds a cached prefix."""
    return [body | {"cache_salt": f"{arm} {i}"} for i, body in enumerate(bodies)]
