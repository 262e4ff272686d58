"""The prompts and answers of head_data.py on a GPU, thousands at a time.

Writes prompts that are not among the known ones, then answers to all, each with a temperature of
its own, as a folder of traces. Products are rounded as the device does it, so an answer may differ
from the engine's where two tokens are nearly tied: to learn from, it is as good.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from head_data import MARK, TEMPERATURES, append, is_usable, judged, plain, read, trace

from paceline.backends.rows.rows import Rows
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.loading.fingerprint import model_fingerprint
from paceline.models.config import ModelConfig
from paceline.request.traces import TraceWriter
from paceline.training.heads.initial import TargetWeights
from paceline.training.ops import TrainingOps, by_head, differentiable_decoder
from paceline.training.trainer import computing_on

Tensor = torch.Tensor
PROMPT_TOKENS, ANSWER_TOKENS = 200, 256
LONGEST = 512
TOP_P, CANDIDATES = 0.95, 512


class Padded:
    """Rows that grow together behind prompts which are padded at their beginnings.

    Args:
        pads: int64 ``[size]``, how much each is padded.
    """

    def __init__(self, config: ModelConfig, pads: Tensor, capacity: int, kind: torch.dtype) -> None:
        size = len(pads)
        shape = (config.num_layers, 2, size, config.num_kv_heads, capacity, config.head_dim)
        self._cache = torch.zeros(shape, dtype=kind)
        self._pads, self._size, self._length, self._time = pads, size, 0, 0

    def grow(self, time: int) -> Tensor:
        self._length, self._time = self._length + self._time, time
        steps = torch.arange(self._length, self._length + time)
        return (steps - self._pads[:, None]).clamp_min(0).flatten()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, config: ModelConfig) -> Tensor:
        first, last = self._length, self._length + self._time
        queries, keys, values = (by_head(x, self._size, self._time) for x in (q, k, v))
        kept = self._cache[layer]
        kept[0, :, :, first:last], kept[1, :, :, first:last] = keys, values
        keys, values = kept[0, :, :, :last], kept[1, :, :, :last]
        columns = torch.arange(last)
        seen = columns >= self._pads[:, None]
        if self._time == 1:  # heads that share a key are rows of one problem
            grouped = queries.view(self._size, config.num_kv_heads, -1, config.head_dim)
            mask = seen[:, None, None].expand(-1, -1, grouped.shape[2], -1)
            out = F.scaled_dot_product_attention(
                grouped.to(keys.dtype), keys, values, attn_mask=mask, scale=config.scale
            )
            return out.reshape(self._size, -1)
        rows = torch.arange(first, last)[:, None]
        mask = (columns <= rows) & seen[:, None] | (columns == rows)  # pads see themselves
        groups = config.num_heads // config.num_kv_heads
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        out = F.scaled_dot_product_attention(
            queries.to(keys.dtype), keys, values, attn_mask=mask[:, None], scale=config.scale
        )
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


class Writer:
    """Continues prompts."""

    def __init__(self, target: Checkpoint, device: str) -> None:
        tensors = {name: tensor.to(device) for name, tensor in TargetWeights(target).all().items()}
        self._ops, self.config = TrainingOps("float32"), target.config
        self._decoder: Rows = differentiable_decoder(target.config, tensors, self._ops, 2 * LONGEST)
        self._random = torch.Generator(device)

    @torch.inference_mode()
    def __call__(
        self, prompts: Sequence[Sequence[int]], temperatures: Tensor, tokens: int, top_p: float
    ) -> list[list[int]]:
        """
        Args:
            temperatures: ``[n]``; 0 takes the likeliest token.
            tokens: most of an answer, its end included.
        """
        width = max(map(len, prompts))
        padded = np.zeros((len(prompts), width), np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, width - len(prompt) :] = prompt
        pads = torch.as_tensor([width - len(prompt) for prompt in prompts])
        batch = Padded(self.config, pads, width + tokens, torch.bfloat16)
        fresh = torch.as_tensor(padded)
        ends = torch.as_tensor(self.config.eos_token_ids)
        done = torch.zeros(len(prompts), dtype=torch.bool)
        written = torch.full((len(prompts), tokens), -1)
        for step in range(tokens):
            hidden = self._decoder.hidden(fresh.flatten(), batch.grow(fresh.shape[1]), batch)
            last = hidden.view(len(prompts), -1, hidden.shape[-1])[:, -1]
            chosen = self._choose(self._decoder.logits(last).float(), temperatures, top_p)
            written[:, step] = torch.where(done, -1, chosen)
            done |= torch.isin(chosen, ends)
            if step % 16 == 15 and bool(done.all()):
                break
            fresh = chosen[:, None]
        return [[token for token in row if token >= 0] for row in written.tolist()]

    def _choose(self, logits: Tensor, temperatures: Tensor, top_p: float) -> Tensor:
        best = logits.argmax(-1)
        warm = logits / temperatures.clamp_min(1e-3)[:, None]
        if top_p < 1.0:
            top = warm.softmax(-1).topk(CANDIDATES)
            before = top.values.cumsum(-1) - top.values
            places = torch.multinomial(top.values * (before < top_p), 1, generator=self._random)
            drawn = top.indices.gather(1, places).squeeze(1)
        else:
            noise = torch.empty_like(warm).exponential_(generator=self._random)
            drawn = (warm - noise.log_()).argmax(-1)
        return torch.where(temperatures > 0, drawn, best)

    def seed(self, seed: int) -> None:
        self._random.manual_seed(seed)


def write_prompts(write: Writer, target: Checkpoint, options: argparse.Namespace) -> list[str]:
    assert target.tokenizer is not None
    rendered = target.tokenizer.apply_chat_template([{"role": "user", "content": MARK}])
    begin = target.tokenizer.encode(rendered[: rendered.index(MARK)], add_special_tokens=False)
    found = [row["prompt"] for path in options.known for row in read(path)]
    known, questions, fresh = {plain(text) for text in found}, judged(), list[str]()
    temperatures, started = torch.ones(options.batch), time.monotonic()
    while len(fresh) < options.count and time.monotonic() - started < options.prompt_seconds:
        for ids in write([begin] * options.batch, temperatures, PROMPT_TOKENS, TOP_P):
            text = target.tokenizer.decode(ids[:-1]).strip()
            ended = ids[-1] in target.config.eos_token_ids
            if ended and plain(text) not in known and is_usable(text, questions):
                fresh.append(text)
                known.add(plain(text))
        print(f"{len(fresh)} prompts, {time.monotonic() - started:.0f} s", flush=True)
    return fresh


def write_answers(
    write: Writer, target: Checkpoint, texts: Sequence[str], options: argparse.Namespace
) -> None:
    tokenizer = target.tokenizer
    assert tokenizer is not None
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": MARK}])
    encoded = [
        tokenizer.encode(rendered.replace(MARK, text), add_special_tokens=False) for text in texts
    ]
    numbers = [i for i in range(len(texts)) if len(encoded[i]) <= LONGEST]
    order = np.random.default_rng(options.seed).permutation(numbers)
    writer = TraceWriter(
        options.output,
        {
            "model": "smollm2",
            "model_fingerprint": model_fingerprint(target),
            "dtype": "float32",
            "vocab_fingerprint": tokenizer.fingerprint,
        },
    )
    started, total = time.monotonic(), 0
    for start in range(0, len(order), options.batch):
        if time.monotonic() - started > options.answer_seconds:
            break
        part = order[start : start + options.batch]
        warm = [TEMPERATURES[i % 2] for i in range(len(part))]
        found = write([encoded[i] for i in part], torch.as_tensor(warm), ANSWER_TOKENS, 1.0)
        writer.write_shard(
            [trace(int(i), encoded[i], ids) for i, ids in zip(part, found, strict=True)]
        )
        total += sum(map(len, found))
        print(f"{start + len(part)} answers, {total} tokens, {time.monotonic() - started:.0f} s")
        sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--known", type=Path, action="append", default=[], help="files of prompts")
    parser.add_argument("--fresh", type=Path, help="where new prompts are kept")
    parser.add_argument("--answer-known", action="store_true", help="answer the known ones too")
    parser.add_argument("--count", type=int, default=30_000, help="new prompts")
    parser.add_argument("--batch", type=int, default=3072)
    parser.add_argument("--prompt-seconds", type=float, default=60.0)
    parser.add_argument("--answer-seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of traces")
    options = parser.parse_args(argv)
    target = load_checkpoint(options.model)
    with computing_on(options.device), torch.inference_mode():
        write = Writer(target, options.device)
        write.seed(options.seed)
        texts = write_prompts(write, target, options)
        if options.fresh is not None:
            rows: list[dict[str, Any]] = [{"prompt": text} for text in texts]
            append(options.fresh, rows)
        if options.answer_known:
            texts += [row["prompt"] for path in options.known for row in read(path)]
        write_answers(write, target, texts, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
