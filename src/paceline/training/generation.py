"""Continuations that a model writes itself, many at once, to distil from. No speculation, no
requests: rows of equal length grow together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from paceline.backends.rows.rows import Rows
from paceline.core.errors import TrainingError
from paceline.training.data import TokenArray, TokenDocuments
from paceline.training.ops import CachedBatch, TrainingOps

Tensor = torch.Tensor


@torch.no_grad()
def continue_prompts(
    decoder: Rows, prompts: Tensor, new_tokens: int, temperature: float, seed: int
) -> Tensor:
    """Extend every row by ``new_tokens`` of the model's own.

    An end of sequence is followed by whatever the model writes next, as in packed training text.

    Args:
        decoder: runs on :class:`TrainingOps`.
        prompts: ``[n, length]`` int64.
        temperature: 0 takes the most likely token.
        seed: of the sampling; torch's global random state is neither read nor changed.

    Returns:
        ``[n, length + new_tokens]`` int64.
    """
    assert isinstance(decoder.ops, TrainingOps)
    size, length = prompts.shape
    rows = torch.empty(size, length + new_tokens, dtype=torch.int64)
    rows[:, :length] = prompts
    generator = torch.Generator(prompts.device).manual_seed(seed)
    batch = CachedBatch(decoder.config, size, length + new_tokens, decoder.ops.compute)
    fresh = prompts
    for at in range(length, length + new_tokens):
        hidden = decoder.hidden(fresh.reshape(-1), batch.grow(fresh.shape[1]), batch)
        last = hidden.view(size, -1, hidden.shape[-1])[:, -1]
        rows[:, at] = _choose(decoder.logits(last).float(), temperature, generator)
        fresh = rows[:, at : at + 1]
    return rows


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature <= 0.0:
        return logits.argmax(-1)
    probabilities = (logits / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def generate_documents(
    decoder: Rows,
    texts: TokenDocuments,
    *,
    tokens: int,
    prompt_tokens: int,
    new_tokens: int,
    temperatures: tuple[float, ...],
    batch_size: int,
    seed: int,
    report: Callable[[int], None] = lambda done: None,
) -> TokenDocuments:
    """At least ``tokens`` generated tokens, after prompts cut out of ``texts``, prompts included.

    Temperatures take turns, batch by batch. ``report`` is told the tokens generated so far.

    Raises:
        TrainingError: no text is as long as a prompt.
    """
    rng = np.random.default_rng((seed, 0x6E4))
    rows: list[TokenArray] = []
    done = 0
    while done < tokens:
        prompts = torch.as_tensor(random_prompts(texts, batch_size, prompt_tokens, rng)).long()
        number = done // (batch_size * new_tokens)
        temperature = temperatures[number % len(temperatures)]
        written = continue_prompts(decoder, prompts, new_tokens, temperature, seed + number)
        rows += list(written.numpy(force=True).astype(np.int32))
        done += batch_size * new_tokens
        report(done)
    return TokenDocuments.of(rows)


def random_prompts(
    texts: TokenDocuments, count: int, length: int, rng: np.random.Generator
) -> TokenArray:
    """``count`` pieces ``[count, length]`` from random places; ``TrainingError`` without any."""
    room = np.maximum(0, texts.lengths - length + 1)
    if not room.sum():
        raise TrainingError(f"no text has {length} tokens, which a prompt needs")
    chosen = rng.choice(len(texts), size=count, p=room / room.sum())
    starts = [int(texts.offsets[i]) + int(rng.integers(room[i])) for i in chosen]
    return np.stack([texts.tokens[s : s + length] for s in starts])
