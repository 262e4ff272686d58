"""What a model folder says: logits and greedy text, by Paceline and by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.build.build import build_engine
from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.loading.checkpoint import load_checkpoint
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import Span
from tests.programs import module

TOLERANCE = 1e-4
MAX_TOKENS = 24
MAX_MODEL_LEN = 256


def paceline_says(folder: Path, prompt: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Logits of all rows, ``[rows, vocab]``, and the greedy continuation."""
    config = EngineConfig(
        dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=2, enable_prefix_caching=False
    )
    engine: Engine = build_engine(str(folder), config).engine
    runner, rows = engine.runner, range(len(prompt))
    request = -1
    runner.kv.open(request)
    assert runner.kv.reserve(request, len(prompt), certain=len(prompt))
    span = Span(request, 0, prompt, range(-1, len(prompt) - 1), rows)
    logits = torch.from_numpy(runner.forward(runner.pack([span])).logits)
    runner.kv.free(request)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
    (id_,) = engine.add_request(prompt, params)
    found = engine.requests[id_]
    while engine.has_work:
        engine.step()
    return logits, list(found.token_ids)[-MAX_TOKENS:]


def transformers_says(folder: Path, prompt: list[int]) -> tuple[torch.Tensor, list[int]]:
    """The same by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = torch.tensor([prompt])
    with torch.inference_mode():
        logits = model(inputs).logits[0]
        text = model.generate(
            inputs, max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, do_sample=False
        )
    return logits, text[0, len(prompt) :].tolist()


def compare(small: Path, large: Path) -> dict[str, dict[str, Any]]:
    """By engine the largest difference of two logits, and whether it and the text are equal."""
    tokenizer = load_checkpoint(str(small)).tokenizer
    assert tokenizer is not None
    text = module("prompt_sets").load_prompts("embedded").kind("code")[0]
    prompt = tokenizer.encode(text)[: MAX_MODEL_LEN // 4]
    found = {}
    for name, ask in (("paceline", paceline_says), ("transformers", transformers_says)):
        (a, a_text), (b, b_text) = (ask(folder, prompt) for folder in (small, large))
        worst = float((a - b).abs().max())
        same = worst <= TOLERANCE and a_text == b_text and len(a_text) == MAX_TOKENS
        found[name] = {"largest_difference": worst, "same_text": a_text == b_text, "same": same}
    return found
