"""Worker: llama.cpp, compiled for this processor, by its C API. Runs under ``.peers/llama``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as api
import numpy as np
from peers_worker import UnsupportedError, generated, serve, timed

CONTEXT = 1024
BATCH = 512


class Llama:
    """One GGUF file on ``threads`` threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.threads = options["threads"]
        api.llama_backend_init()
        params = api.llama_model_default_params()
        self.model = api.llama_model_load_from_file(options["model"].encode(), params)
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.context = self._context(CONTEXT, 1)
        self.batch = api.llama_batch_init(max(CONTEXT, BATCH), 0, 1)
        self._many: tuple[int, Any] | None = None

    def _context(self, tokens: int, sequences: int) -> Any:
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = tokens, max(CONTEXT, BATCH), BATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.threads
        params.no_perf = True
        context = api.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError(f"llama.cpp makes no context of {tokens} tokens")
        return context

    def describe(self) -> dict[str, Any]:
        info = api.llama_print_system_info().decode()
        return {"engine": "llama.cpp", "python_package": api.__version__, "system_info": info}

    # --- forwards ----------------------------------------------------------------------------

    def _decode(self, rows: list[tuple[int, int, int]], context: Any, sample: bool = True) -> None:
        """One forward over (token, position, sequence) rows; all have logits, or the last one."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = sample or i == len(rows) - 1
        if api.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        api.llama_synchronize(context)

    def _choose(self, row: int, context: Any) -> int:
        logits = api.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def _keep(self, length: int, context: Any) -> bool:
        """Go back to so many tokens; False where recurrent layers cannot."""
        return bool(api.llama_memory_seq_rm(api.llama_get_memory(context), 0, length, -1))

    def forward(self, width: int, context: int, repeats: int, tokens: list[int]) -> list[float]:
        """Seconds of forwards over ``width`` tokens after ``context`` ones, without the first.

        Each follows on the one before where recurrent layers cannot go back.
        """
        self._keep(0, self.context)
        self._decode([(tokens[i], i, 0) for i in range(context)], self.context, sample=False)
        times, at = list[float](), context
        for _ in range(repeats + 1):
            rows = [(tokens[context + i], at + i, 0) for i in range(width)]
            times += timed(lambda: self._decode(rows, self.context), 1)  # noqa: B023
            at = context if self._keep(context, self.context) else at + width
        return times[1:]

    def long(self, context: int, repeats: int, tokens: list[int]) -> list[float]:
        """Seconds of plain steps after a context longer than all others have."""
        wide = self._context(context + repeats + 1, 1)
        for start in range(0, context, BATCH):
            end = min(start + BATCH, context)
            rows = [(tokens[i], i, 0) for i in range(start, end)]
            self._decode(rows, wide, sample=False)
        seconds = []
        for step in range(repeats + 1):
            row = [(tokens[0], context + step, 0)]
            seconds += timed(lambda: self._decode(row, wide), 1)  # noqa: B023
        api.llama_free(wide)
        return seconds[1:]

    def prefill(self, tokens: list[int], repeats: int) -> list[float]:
        rows = [(token, i, 0) for i, token in enumerate(tokens)]
        return timed(
            lambda: self._decode(rows, self.context, sample=False),
            repeats,
            before=lambda: self._keep(0, self.context),
        )

    def parallel(self, sequences: int, tokens: list[int], steps: int) -> dict[str, Any]:
        """Greedy steps of several sequences at once, after their prompts."""
        if self._many is None or self._many[0] != sequences:
            if self._many is not None:
                api.llama_free(self._many[1])
            self._many = sequences, self._context(sequences * 256, sequences)
        context = self._many[1]
        api.llama_memory_clear(api.llama_get_memory(context), False)
        latest = []
        for s in range(sequences):
            self._decode([(t, i, s) for i, t in enumerate(tokens)], context, sample=False)
            latest.append(self._choose(-1, context))
        began = time.perf_counter()
        for step in range(steps):
            at = len(tokens) + step
            self._decode([(token, at, s) for s, token in enumerate(latest)], context)
            latest = [self._choose(s, context) for s in range(sequences)]
        return {"seconds": time.perf_counter() - began, "tokens": sequences * steps}

    # --- generating --------------------------------------------------------------------------

    def generate(
        self, mode: str, prompt: dict[str, Any], max_tokens: int, stop: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Greedy text, without speculation, up to a token of ``stop``."""
        if mode != "plain":
            raise UnsupportedError(f"no mode {mode!r}")
        tokens = prompt["token_ids"]
        self._keep(0, self.context)
        began = time.perf_counter()
        self._decode([(t, i, 0) for i, t in enumerate(tokens)], self.context, sample=False)
        found, stamps = [self._choose(-1, self.context)], [time.perf_counter()]
        while len(found) < max_tokens and found[-1] not in stop:
            self._decode([(found[-1], len(tokens) + len(found) - 1, 0)], self.context)
            found.append(self._choose(-1, self.context))
            stamps.append(time.perf_counter())
        return generated(began, stamps, found)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(Llama)
