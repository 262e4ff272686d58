"""Worker: transformers in bfloat16, with its assisted generation and its prompt lookup.

Runs under Paceline's environment, whose development extra has transformers.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
import transformers
from peers_worker import UnsupportedError, generated, serve, timed
from transformers import AutoModelForCausalLM, DynamicCache


class Stamps:
    """What ``generate`` calls a streamer: notes when tokens came. The prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, _: Any) -> None:
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None: ...


class Transformers:
    """One folder on ``threads`` threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        torch.set_grad_enabled(False)
        self.options = options
        self.model = self._load(options["model"])
        self._draft: Any = None

    @staticmethod
    def _load(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def describe(self) -> dict[str, Any]:
        return {"engine": "transformers", "version": transformers.__version__, "dtype": "bfloat16"}

    def forward(self, width: int, context: int, repeats: int, tokens: list[int]) -> list[float]:
        """Seconds of forwards over ``width`` tokens after ``context`` ones, without the first."""
        cache = DynamicCache(config=self.model.config)
        self.model(torch.tensor([tokens[:context]]), past_key_values=cache, logits_to_keep=1)
        rows = torch.tensor([tokens[context : context + width]])
        times = timed(
            lambda: self.model(rows, past_key_values=cache),
            repeats + 1,
            before=lambda: cache.crop(-(cache.get_seq_length() - context)),
        )
        return times[1:]

    def prefill(self, tokens: list[int], repeats: int) -> list[float]:
        return timed(lambda: self.model(torch.tensor([tokens]), logits_to_keep=1), repeats)

    def parallel(self, sequences: int, tokens: list[int], steps: int) -> dict[str, Any]:
        """Greedy steps of a batch: a longer generation less a shorter one."""
        prompts = torch.tensor([tokens] * sequences)
        short, long = (
            timed(lambda: self._generate(prompts, count), 1)[0]  # noqa: B023
            for count in (1, 1 + steps)
        )
        return {"seconds": long - short, "tokens": sequences * steps}

    def _generate(self, prompts: torch.Tensor, max_tokens: int, **options: Any) -> torch.Tensor:
        return self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            **options,
        )

    def prepare(self, mode: str) -> None:
        if mode.startswith("draft") and self._draft is None:
            self._draft = self._load(self.options["draft"])

    def _options(self, mode: str) -> dict[str, Any]:
        method, _, most = mode.partition(" ")
        if method == "plain":
            return {}
        if method == "lookup":
            return {"prompt_lookup_num_tokens": int(most)}
        if method == "draft":
            wish = self._draft.generation_config
            wish.num_assistant_tokens = int(most)
            wish.num_assistant_tokens_schedule = "constant"
            return {"assistant_model": self._draft}
        raise UnsupportedError(f"transformers has no mode {mode!r}")

    def generate(self, mode: str, prompt: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        ids, stamps = torch.tensor([prompt["token_ids"]]), Stamps()
        began = time.perf_counter()
        text = self._generate(ids, max_tokens, streamer=stamps, **self._options(mode))
        return generated(began, stamps.times, text[0, ids.shape[1] :].tolist())


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(Transformers)
