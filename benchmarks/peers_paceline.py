"""Worker: Paceline, through its Python API.

Single forwards are the engine's own ``ModelRunner``, packing included; everything else is the
engine or :class:`~paceline.api.llm.LLM` as its users have it. Runs under Paceline's environment.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers_worker import UnsupportedError, generated, serve, timed

from paceline import LLM, SamplingParams
from paceline.build.default_drafts import default_speculative_config
from paceline.config import DTYPES
from paceline.config.speculative import without_memory
from paceline.engine.engine import Engine
from paceline.profiling.machine import Work
from paceline.request.request import StepOutput
from paceline.request.span import Span

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 16
CHUNK = 512
REQUEST = -1
"""The sequence on which single forwards run; the engine's own ids are not negative."""


class Paceline:
    """One model in one arithmetic on ``threads`` threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        if options["dtype"] not in DTYPES:
            raise UnsupportedError(f"this build of Paceline has no dtype {options['dtype']!r}")
        self.options = options
        self.llm = LLM(
            options["model"],
            speculative_config=[],
            dtype=options["dtype"],
            num_threads=options["threads"],
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=options.get("context", MAX_MODEL_LEN),
            enable_prefix_caching=False,
            strict=True,
        )

    def describe(self) -> dict[str, Any]:
        """Sizes as well: bytes of the target model's weights and of one token's keys and values.

        Neither has padding or second copies; blocks count with their scales. Of a GGUF file
        they are the file's bytes.
        """
        config = self.llm.call(lambda engine: engine.runner.decoder.config)
        kv_dtype = self.llm.config.kv_cache_dtype
        path = Path(self.options["model"])
        layers = range(config.num_layers)
        stored = path.stat().st_size if path.is_file() else None
        file_bytes = stored or self.llm.checkpoint.num_bytes
        work = Work.of(config, self.llm.config.dtype, kv_dtype, file_bytes)
        return {
            "engine": "paceline",
            "dtype": self.llm.config.dtype,
            "kv_cache_dtype": kv_dtype,
            "promises_identity": self.llm.promises_identity,
            "weight_bytes": stored or work.weight_bytes,
            "kv_bytes_per_token": work.kv_bytes * sum(map(config.has_attention, layers)),
        }

    # --- forwards ----------------------------------------------------------------------------

    def forward(self, width: int, context: int, repeats: int, tokens: list[int]) -> list[float]:
        """Seconds of forwards over ``width`` tokens after ``context`` ones, without the first."""
        rows = range(width)
        span = Span(REQUEST, context, tokens[context : context + width], range(-1, width - 1), rows)

        def run(engine: Engine) -> list[float]:
            read(engine, tokens[:context])
            assert engine.kv.reserve(REQUEST, width)
            times = timed(lambda: one_forward(engine, span), repeats + 1)
            engine.kv.free(REQUEST)
            return times[1:]

        return self.llm.call(run)

    def long(self, context: int, repeats: int, tokens: list[int]) -> list[float]:
        """Seconds of plain steps after a context longer than all others have."""
        return self.forward(1, context, repeats, tokens)

    def prefill(self, tokens: list[int], repeats: int) -> list[float]:
        def run(engine: Engine) -> list[float]:
            times = timed(
                lambda: read(engine, tokens), repeats, before=lambda: engine.kv.free(REQUEST)
            )
            engine.kv.free(REQUEST)
            return times

        return self.llm.call(run)

    def parallel(self, sequences: int, tokens: list[int], steps: int) -> dict[str, Any]:
        """Greedy steps of several requests at once, from the moment when all of them decode."""
        self.llm.set_speculation([])
        params = SamplingParams(max_tokens=steps + 8, temperature=0, ignore_eos=True)

        def run(engine: Engine) -> dict[str, Any]:
            ids = [engine.add_request(tokens, params)[0] for _ in range(sequences)]
            waiting = set(ids)
            while waiting:
                waiting -= {out.request_id for out in stepped(engine) if out.token_ids}
            began, count = time.perf_counter(), 0
            while count < sequences * steps:
                outputs = stepped(engine)
                count += sum(len(out.token_ids) for out in outputs)
                if any(out.finish_reason for out in outputs):
                    break
            seconds = time.perf_counter() - began
            for id_ in ids:
                engine.abort(id_)
            engine.step()
            return {"seconds": seconds, "tokens": count}

        return self.llm.call(run)

    # --- generating --------------------------------------------------------------------------

    def generate(self, mode: str, prompt: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """Greedy text: ``plain``, or as the command line drafts by ``default``."""
        # Both modes run the same prompts, so none may draft from what the other answered.
        default = without_memory(default_speculative_config(self.llm.model))
        self.llm.set_speculation({"plain": [], "default": default}[mode])
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        found: list[int] = []
        stamps: list[float] = []
        began = time.perf_counter()
        for output in self.llm.stream(prompt["token_ids"], params):
            stamps.append(time.perf_counter())
            found += output.token_ids
        return {**generated(began, stamps, found), "steps": len(stamps)}


def stepped(engine: Engine) -> list[StepOutput]:
    """One step; a request that failed in it ends the task, and all requests with it."""
    outputs = engine.step()
    error = next((out.error for out in outputs if out.error is not None), None)
    if error is not None:
        for request_id in list(engine.requests):
            engine.abort(request_id)
        engine.step()
        raise error
    return outputs


def read(engine: Engine, tokens: Sequence[int]) -> None:
    """Give the sequence of single forwards a committed context."""
    kv = engine.kv
    kv.open(REQUEST)
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        last = start + len(chunk) == len(tokens)
        assert kv.reserve(REQUEST, len(chunk), certain=len(chunk))
        one_forward(engine, Span.chunk(REQUEST, start, chunk, sample=last))
        kv.commit(REQUEST, range(len(chunk)))


def one_forward(engine: Engine, span: Span) -> None:
    engine.runner.forward(engine.runner.pack([span]))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(Paceline)
