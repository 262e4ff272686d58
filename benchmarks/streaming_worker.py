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
        """An answer, and what was read for it. The clock begins behind the prompt's step."""
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=0, ignore_eos=True
        )
        found: list[int] = []
        stamps: list[float] = []
        counted = self._counters()
        for output in self.llm.stream(token_ids, params):
            stamps.append(time.perf_counter())
            found += output.token_ids
        after = self._counters()
        return {
            **generated(stamps[0], stamps, found),
            "steps": len(stamps),
            "bytes_read": after[0] - counted[0],
            "seconds_waited": after[1] - counted[1],
        }

    def _counters(self) -> tuple[int, float]:
        stats = self.llm.stats()
        return stats.num_weight_bytes_read, stats.weight_wait_seconds


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(Streamed)
