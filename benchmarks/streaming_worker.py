"""Worker: Paceline with layers that are read from disk; see ``streaming.py``."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from peers_paceline import Paceline
from peers_worker import generated, serve

from paceline import SamplingParams


class Streamed(Paceline):
    """One packed model within a memory for weights."""

    def answer(self, token_ids: list[int], max_tokens: int, temperature: float) -> dict[str, Any]:
        """An answer, and what was read for it: clock and counters begin behind the prompt."""
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=0, ignore_eos=True
        )
        found: list[int] = []
        stamps: list[float] = []
        counted: dict[str, float] = {}
        for output in self.llm.stream(token_ids, params):
            stamps.append(time.perf_counter())
            found += output.token_ids
            counted = counted or self._counters()
        after = self._counters()
        return {
            **generated(stamps[0], stamps, found),
            "steps": len(stamps),
            **{name: after[name] - counted[name] for name in after},
        }

    def _counters(self) -> dict[str, float]:
        stats = self.llm.stats()
        return {
            "bytes_read": stats.num_weight_bytes_read,
            "seconds_waited": stats.weight_wait_seconds,
            "experts_read": stats.num_experts_read,
            "experts_fetched": stats.num_experts_fetched,
        }


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(Streamed)
