"""How often a draft would be accepted, measured by teacher forcing on the target's own text.

Owns the definitions of the offline figures, and the continuations that a model writes itself, many
at once, to distil from: rows of equal length grow together. Knows no engine: neither trees nor
verification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch

from paceline.backends.rows.rows import Rows
from paceline.core.errors import TrainingError
from paceline_lab.train.data import TokenArray, TokenDocuments
from paceline_lab.train.ops import CachedBatch, TrainingOps, dense_hidden

Tensor = torch.Tensor
TOP = 4
ROWS = 16  # sequences per forward


@dataclass(frozen=True, slots=True)
class OwnText:
    """What the target writes after the same prompts, ``[n, length]`` each, prompts included."""

    prompt_tokens: int
    greedy: Tensor
    sampled: Tensor  # at temperature 1


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of positions, 0 to 1. Drafts are single tokens given the target's own context. A token
    of the target that the draft's head lacks is one that it cannot have drafted.

    Attributes:
        positions: tokens of each of the two texts.
        greedy_top1, greedy_top4: the target's greedy token is the draft's first choice, or among
            its first four.
        one_minus_tv: 1 - total variation between the two distributions at temperature 1: what
            rejection sampling would accept.
        shared_top1, shared_top4: at temperature 1, the target's token is the draft's first choice
            (among its first four) when both rank by ``log p + g`` with the same Gumbel noise g.
    """

    positions: int
    greedy_top1: float
    greedy_top4: float
    one_minus_tv: float
    shared_top1: float
    shared_top4: float

    def __str__(self) -> str:
        return (
            f"greedy {self.greedy_top1:.1%} (first {TOP}: {self.greedy_top4:.1%}); temperature 1: "
            f"shared noise {self.shared_top1:.1%} (first {TOP}: {self.shared_top4:.1%}), "
            f"1-TV {self.one_minus_tv:.1%}; {self.positions} positions"
        )


def write_own_text(target: Rows, prompts: Tensor, new_tokens: int, seed: int) -> OwnText:
    """Let the target continue ``prompts`` ``[n, length]``, greedily and at temperature 1."""
    greedy = continue_prompts(target, prompts, new_tokens, 0.0, seed)
    sampled = continue_prompts(target, prompts, new_tokens, 1.0, seed)
    return OwnText(prompts.shape[1], greedy, sampled)


@torch.no_grad()
def measure_acceptance(draft: Rows, target: Rows, text: OwnText, seed: int) -> Acceptance:
    """Figures of ``draft`` against ``target``; the same ``seed`` gives the same noise."""
    generator = torch.Generator(text.sampled.device).manual_seed(seed)
    counts = dict.fromkeys((f.name for f in fields(Acceptance) if f.name != "positions"), 0.0)
    for greedy, sampled in zip(text.greedy.split(ROWS), text.sampled.split(ROWS), strict=True):
        wanted = greedy[:, text.prompt_tokens :].reshape(-1)
        _count(counts, "greedy", _log_probs(draft, greedy, text.prompt_tokens), wanted)
        p = _log_probs(target, sampled, text.prompt_tokens)
        q = _log_probs(draft, sampled, text.prompt_tokens)
        counts["one_minus_tv"] += torch.minimum(p.exp(), q.exp()).sum().item()
        noise = -torch.empty_like(p).exponential_(generator=generator).log()
        _count(counts, "shared", q + noise, (p + noise).argmax(-1))
    positions = text.sampled[:, text.prompt_tokens :].numel()
    return Acceptance(positions, **{name: count / positions for name, count in counts.items()})


def _count(counts: dict[str, float], kind: str, scores: Tensor, wanted: Tensor) -> None:
    ranked = scores.topk(min(TOP, scores.shape[-1]))
    hit = (ranked.indices == wanted[:, None]) & (ranked.values > -torch.inf)
    counts[f"{kind}_top1"] += hit[:, 0].sum().item()
    counts[f"{kind}_top4"] += hit.any(1).sum().item()


def _log_probs(decoder: Rows, rows: Tensor, prompt_tokens: int) -> Tensor:
    """Log-probabilities of every generated token's distribution, ``[n * new, vocab]``."""
    hidden = dense_hidden(decoder, rows[:, :-1]).view(rows.shape[0], rows.shape[1] - 1, -1)
    wanted = hidden[:, prompt_tokens - 1 :].reshape(-1, hidden.shape[-1])
    logits = decoder.logits(wanted).float()
    if decoder.head_tokens is None:
        return logits.log_softmax(-1)
    whole = logits.new_full((len(logits), decoder.config.vocab_size), -torch.inf)
    return whole.index_copy_(1, decoder.head_tokens, logits).log_softmax(-1)


@dataclass(frozen=True, slots=True)
class DepthAcceptance:
    """How often a head's drafts would be accepted, by depth, on the target's own text.

    Attributes:
        positions: where chains begin.
        greedy: by depth, of the chains whose earlier drafts were the text's tokens, the share whose
            first choice is the target's.
        overlap: by depth, the mean of sum(min(p, q)) over the target's listed tokens: what
            rejection sampling at temperature 1 accepts at least, given the text so far.
    """

    positions: int
    greedy: tuple[float, ...]
    overlap: tuple[float, ...]

    @property
    def greedy_length(self) -> float:
        """Tokens per step of a chain this deep, the target's own included."""
        return _length(self.greedy)

    @property
    def sampled_length(self) -> float:
        return _length(self.overlap)

    def __str__(self) -> str:
        greedy, overlap = (" ".join(f"{x:.1%}" for x in s) for s in (self.greedy, self.overlap))
        return (
            f"greedy {greedy} (length {self.greedy_length:.2f}); temperature 1: {overlap} "
            f"(length {self.sampled_length:.2f}); {self.positions} positions"
        )


def _length(shares: tuple[float, ...]) -> float:
    total, product = 1.0, 1.0
    for share in shares:
        product *= share
        total += product
    return total


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
