"""The object that the page draws: its fields, and an engine that is down."""

from __future__ import annotations

import asyncio
import json

from paceline.core.errors import EngineDeadError
from paceline.request.engine_stats import EngineStats
from paceline.server.admin.health import snapshot
from paceline.server.engine_process.life import MAX_BEATS, OutputHistory
from paceline.text.chat_templates import BUILT_IN
from tests.server.chats import chat_tokenizer
from tests.server.fakes import FakeEngine
from tests.server.metrics.test_server_metrics import busy


def test_a_snapshot_has_what_the_page_draws() -> None:
    engine = FakeEngine(tokenizer=None, state="ready", stats_to_tell=busy())
    found = json.loads(json.dumps(asyncio.run(snapshot(engine))))
    assert (found["model"], found["state"], found["restarts"]) == ("fake", "ready", 0)
    assert found["uptime_s"] > 0
    assert found["has_chat_template"] is False
    assert "identical" in found["promise"]
    assert found["kv"] == {"used": 5, "total": 100, "block_size": 16}
    assert found["tokens"] == {"prompt": 10, "output": 4, "cached": 4}
    assert found["widths"] == {"1": 1, "4": 1}
    assert found["cost_curve"] == [[1, 1.0], [8, 1.5], [16, 2.6]]
    assert found["phases"] == {"forward": 0.25, "plan": 0.5}
    speculation = found["speculation"]
    assert (speculation["steps"], speculation["emitted"], speculation["expected"]) == (2, 4, 3.5)
    assert (speculation["drafts_per_pos"], speculation["accepted_per_pos"]) == ([1, 1], [1, 1])
    assert speculation["by_proposer"]["b"] == {
        "drafts": 1,
        "draft_tokens": 1,
        "accepted": 1,
        "accepted_per_pos": [0, 1],
    }


def test_the_output_of_the_last_minutes_is_kept_and_no_more() -> None:
    """A beat a second, each after seven tokens, for longer than is kept."""
    seconds = iter(range(1000))
    history = OutputHistory(lambda: next(seconds))
    for beat in range(400):
        history.note(EngineStats(num_output_tokens=7 * beat))
    told = history.told()
    assert len(told) == MAX_BEATS
    assert told[0] == (300, 7 * 100)
    assert told[-1] == (1, 7 * 399)
    history.clear()
    assert history.told() == []


def test_a_dead_engine_is_a_state_and_no_error() -> None:
    class Dead(FakeEngine):
        async def stats(self):
            raise EngineDeadError("gone")

    found = asyncio.run(snapshot(Dead(tokenizer=None, state="failed", stats_to_tell=busy())))
    assert (found["state"], found["tokens"]["prompt"]) == ("failed", 0)


def test_a_fallback_is_no_chat_template_of_the_model() -> None:
    tokenizer = chat_tokenizer.__wrapped__(None)  # not the one that other tests share
    engine = FakeEngine(tokenizer=tokenizer, state="ready")
    tokenizer.set_chat_template(BUILT_IN["plain"], is_fallback=True)
    assert asyncio.run(snapshot(engine))["has_chat_template"] is False
    tokenizer.set_chat_template(BUILT_IN["plain"])
    assert asyncio.run(snapshot(engine))["has_chat_template"] is True
