"""Training of parallel drafts (PARD): one forward drafts several tokens, the later ones by masks.

After the tokens that are known, a parallel draft reads mask tokens at the positions that follow;
the row of mask number i predicts what comes i tokens later than plain decoding would. All of these
sub-tasks are packed behind a window's own rows and learnt in one forward. The later ones keep fewer
of their rows (conditional drop), by which training takes a third of the time and loses little.

Source: An et al., PARD, arXiv 2504.18583. Knows no optimiser, no files and no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from paceline.backends.rows.rows import Rows
from paceline.core.errors import TrainingError
from paceline.models.config import ModelConfig
from paceline_lab.train.model_files import TrainableModel, vocabulary_size
from paceline_lab.train.ops import by_head, dense_hidden, masked_attention
from paceline_lab.train.trainer import divergence, in_slices

Tensor = torch.Tensor

MASK_TOKEN = "pard_token"
"""Key of the mask token in ``config.json``."""
KEEP = 0.7
KEEP_LEAST = 0.2


@dataclass(frozen=True, slots=True)
class ChainRows:
    """The rows of one window: its own tokens, then chains of mask tokens that continue it.

    A chain's base is the last token that is known to it; mask number i of it is ``depths`` i, at
    the position ``bases + i``. Own rows have depth 0 and are their own base.

    Attributes:
        bases, depths: ``[rows]`` int64.
    """

    bases: Tensor
    depths: Tensor

    @property
    def positions(self) -> Tensor:
        return self.bases + self.depths

    @property
    def seen(self) -> Tensor:
        """``[rows, rows]``: a row sees the tokens up to its base, and its chain up to itself."""
        known = (self.depths[None] == 0) & (self.bases[None] <= self.bases[:, None])
        same = (self.bases[None] == self.bases[:, None]) & (self.depths[None] > 0)
        return known | (same & (self.depths[None] <= self.depths[:, None]))

    def tokens(self, inputs: Tensor, mask_token: int) -> Tensor:
        """What the rows read of ``inputs`` ``[size, time]``: ``[size, rows]``."""
        return torch.where(self.depths > 0, mask_token, inputs[:, self.positions])


@dataclass(frozen=True, slots=True)
class _ChainBatch:
    """Attention of ``size`` windows of the same rows."""

    size: int
    positions: Tensor
    seen: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, config: ModelConfig) -> Tensor:
        queries, keys, values = (by_head(x, self.size, len(self.positions)) for x in (q, k, v))
        seen = self.seen
        if config.attention.is_sliding(layer):
            distance = self.positions[:, None] - self.positions[None]
            seen = seen & (distance < config.attention.sliding_window)
        return masked_attention(queries, keys, values, seen, config)


def keep_share(depth: int) -> float:
    """Share of the chains that are trained as deep as mask number ``depth``."""
    return max(KEEP**depth, KEEP_LEAST) if depth else 1.0


def chain_rows(time: int, num_tokens: int, generator: torch.Generator | None) -> ChainRows:
    """Rows of a window of ``time`` tokens whose chains draft ``num_tokens``.

    Chains lie within the window whole. Those that are kept at a depth are among those that are kept
    at the depth before, so that every mask sees the masks before it.

    Args:
        generator: chooses what is dropped; None drops nothing.
    """
    count = max(0, time - num_tokens + 1)
    order = torch.arange(count)
    if generator is not None:
        order = torch.as_tensor(torch.randperm(count, generator=generator, device="cpu"))
    bases, depths = [torch.arange(time)], [torch.zeros(time, dtype=torch.int64)]
    for depth in range(1, num_tokens):
        share = 1.0 if generator is None else keep_share(depth)
        kept = order[: round(count * share)].sort().values
        bases.append(kept)
        depths.append(torch.full_like(kept, depth))
    return ChainRows(torch.cat(bases), torch.cat(depths))


def chain_hidden(decoder: Rows, inputs: Tensor, rows: ChainRows, mask_token: int) -> Tensor:
    """Final hidden rows ``[size * rows, hidden]`` of the packed sub-tasks of ``inputs``."""
    size = inputs.shape[0]
    tokens = rows.tokens(inputs, mask_token).reshape(-1)
    batch = _ChainBatch(size, rows.positions, rows.seen)
    return decoder.hidden(tokens, rows.positions.repeat(size), batch)


def parallel_loss(
    target: Rows, mask_token: int, num_tokens: int
) -> Callable[[Rows, Tensor], Tensor]:
    """The loss of a parallel draft against ``target`` on windows, a mean over the kept rows.

    Whatever a row knows, it is compared with what the target says at its position, knowing all.
    What is dropped is a function of the windows alone.

    Args:
        target: is run on the same windows, without gradients.
        num_tokens: drafted by one forward; one less are masks.
    """

    def loss(draft: Rows, windows: Tensor) -> Tensor:
        inputs = windows[:, :-1]
        size, time = inputs.shape
        digest = xxhash.xxh3_64_intdigest(windows.numpy(force=True).tobytes())
        rows = chain_rows(time, num_tokens, torch.Generator().manual_seed(digest >> 1))
        with torch.no_grad():
            taught = dense_hidden(target, inputs)
        hidden = chain_hidden(draft, inputs, rows, mask_token)
        teachers = torch.arange(size)[:, None] * time + rows.positions  # several rows share one

        def part(own: Tensor, teachers: Tensor) -> Tensor:
            with torch.no_grad():
                each, place = teachers.unique(return_inverse=True)
                wanted = target.logits(taught[each]).float()[place]
            if draft.head_tokens is not None:
                wanted = wanted[:, draft.head_tokens]
            return divergence(draft.logits(own).float(), wanted)

        total = in_slices(part, draft.config.vocab_size, hidden, teachers.flatten())
        return total / hidden.shape[0]

    return loss


@dataclass(frozen=True, slots=True)
class ChainAcceptance:
    """How a draft's greedy chains fare on the target's own greedy text.

    Attributes:
        positions: chains that were measured.
        by_depth: share of them whose token at each depth is the target's.
        tokens: mean tokens before the first that is not.
    """

    positions: int
    by_depth: tuple[float, ...]
    tokens: float

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.1%}" for share in self.by_depth)
        return f"{self.tokens:.2f} tokens of {len(self.by_depth)}; by depth {shares}"


@torch.no_grad()
def measure_chains(
    draft: Rows, text: Tensor, prompt_tokens: int, mask_token: int, num_tokens: int
) -> ChainAcceptance:
    """Draft behind every token of ``text`` ``[n, length]`` that follows the prompts."""
    rows = chain_rows(text.shape[1] - 1, num_tokens, None)
    first, last = prompt_tokens - 1, text.shape[1] - 1 - num_tokens
    measured = ((rows.bases >= first) & (rows.bases <= last)).nonzero().squeeze(1)
    wanted = rows.positions[measured] + 1
    hits = []
    for row in text:  # one at a time: this many logits are large
        hidden = chain_hidden(draft, row[None, :-1], rows, mask_token)
        best = draft.logits(hidden[measured]).argmax(-1)
        if draft.head_tokens is not None:
            best = draft.head_tokens[best]
        hits.append(best == row[wanted])
    by_chain = torch.stack(hits).unflatten(1, (num_tokens, -1)).float()  # [n, depth, chain]
    shares = tuple(by_chain.mean((0, 2)).tolist())
    tokens = by_chain.cumprod(1).sum(1).mean().item()
    return ChainAcceptance(by_chain.shape[0] * by_chain.shape[2], shares, tokens)


def make_parallel(model: TrainableModel, tokenizer: Any, wanted: int | None) -> TrainableModel:
    """``model`` with a configuration that names its mask token, as PARD checkpoints do.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        wanted: the mask token; None keeps the one that the model was trained with, else chooses an
            entry of the embedding beyond the tokenizer's, else the padding token.

    Raises:
        TrainingError: there is none that text cannot contain, or ``wanted`` is no token.
    """
    token = _mask_token(model, tokenizer) if wanted is None else wanted
    size = model.config.vocab_size
    if token is None:
        raise TrainingError(
            "the vocabulary has no token that text cannot contain (no unused entry, no padding "
            "token of its own); name one that is never written with mask_token_id"
        )
    if not 0 <= token < size:
        raise TrainingError(f"mask_token_id is {token}; allowed: 0 to {size - 1}")
    raw = {**model.raw, MASK_TOKEN: token, "spd_type": "pard"}
    return TrainableModel(raw, model.params, model.fixed)


def _mask_token(model: TrainableModel, tokenizer: Any) -> int | None:
    config, beyond = model.config, vocabulary_size(tokenizer)
    if isinstance(known := model.raw.get(MASK_TOKEN), int):
        return known
    if beyond < config.vocab_size:
        return beyond
    padding = model.raw.get("pad_token_id")
    said = (config.bos_token_id, *config.eos_token_ids)
    return padding if isinstance(padding, int) and padding not in said else None
