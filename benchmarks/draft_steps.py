"""One draft step of several draft models, timed in turns: a forward of one token, and its ranking.

A step is the forward of a request's last token after some context, and the choice of candidates
from its logits, as :class:`~paceline.proposers.draft_model.DraftModelProposer` does both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Sample, take_turns

from paceline import SamplingParams
from paceline.models.checkpoint import load_checkpoint
from paceline.models.decoder import Decoder
from paceline.models.ops.resolve import resolve_dtype, resolve_ops
from paceline.proposers.draft_model.growth import RANKED
from paceline.request import Request
from paceline.runtime.kv_cache import KVCache
from paceline.runtime.logit_edits import SamplingRow
from paceline.runtime.model_runner import ModelRunner
from paceline.runtime.sampler import rank_candidates
from paceline.span import Span
from paceline.workbench.profile_machine import Work

CONTEXT, MAX_LEN = 128, 256
FORWARDS = 50
"""Draft steps of one timed sample."""


class DraftStep:
    """A draft model after some context, which it goes on from again and again."""

    def __init__(self, folder: Path, device: str, temperatures: Sequence[float]) -> None:
        checkpoint = load_checkpoint(folder, with_tokenizer=False)
        dtype = resolve_dtype("auto", device, checkpoint)
        ops = resolve_ops(dtype, device)
        decoder = Decoder(checkpoint.config, checkpoint.tensors, ops, MAX_LEN)
        memory = ops.kv_memory(checkpoint.config, 2 + CONTEXT // 16 + 1, ops.default_kv_dtype)
        self.runner = ModelRunner(decoder, KVCache(memory, prefix_caching=False))
        self.work = Work.of(checkpoint.config, dtype, ops.default_kv_dtype)
        tokens = list(range(1, CONTEXT + 2))
        self._last = Span.chunk(0, CONTEXT, tokens[-1:], sample=True)
        self._rows = {
            t: [SamplingRow(Request(0, tokens, 1, SamplingParams(temperature=t), 1, MAX_LEN))]
            for t in temperatures
        }
        kv = self.runner.kv
        kv.open(0)
        assert kv.reserve(0, CONTEXT)
        self.runner.forward(self.runner.pack([Span.chunk(0, 0, tokens[:-1], sample=False)]))
        kv.commit(0, range(CONTEXT))

    def run(self, temperature: float) -> None:
        runner, rows = self.runner, self._rows[temperature]
        for _ in range(FORWARDS):
            assert runner.kv.reserve(0, 1)
            logits = runner.forward(runner.pack([self._last])).logits
            rank_candidates(logits, rows, RANKED, runner.decoder.pruned_head)
            runner.kv.rollback(0)


def timed(
    steps: Mapping[str, DraftStep], temperatures: Sequence[float], repeats: int
) -> list[Sample]:
    """A sample per draft, temperature and repeat, whose item is the temperature."""
    arms: dict[str, Callable[[Any], Any]] = {name: step.run for name, step in steps.items()}
    take_turns(arms, temperatures, 2, lambda _: {})  # warm caches
    return take_turns(arms, temperatures, repeats, lambda _: {"forwards": FORWARDS})
