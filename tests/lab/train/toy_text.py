"""A toy corpus that a toy model learns in seconds, and the options of such a run."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from paceline_lab.train.configs import DraftTrainingConfig, LMTrainingConfig, ModelShape

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    max_position=128,
)


def write_corpus(folder: Path, count: int = 120) -> Path:
    """Sentences of a small grammar, one document a row."""
    rng = random.Random(7)
    who = ["the rider", "a runner", "the captain", "one of them"]
    does = ["leads", "follows", "drafts behind", "overtakes", "waits for"]
    rows = []
    for _ in range(count):
        size = rng.randrange(2, 6)
        lines = [f"{rng.choice(who)} {rng.choice(does)} {rng.choice(who)}." for _ in range(size)]
        rows.append(json.dumps({"text": " ".join(lines)}))
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def lm_config(corpus: Path, output: Path, **options: Any) -> LMTrainingConfig:
    defaults: dict[str, Any] = {
        "output": str(output),
        "text": (str(corpus),),
        "shape": SHAPE,
        "vocab_size": 280,
        "held_out_tokens": 300,
        "seq_len": 32,
        "batch_size": 8,
        "steps": 40,
        "warmup_steps": 5,
        "learning_rate": 1e-2,
        "dtype": "float32",
        "weights_dtype": "float32",
        "eval_every": 0,
        "show_progress": False,
    }
    return LMTrainingConfig(**{**defaults, **options})


def draft_config(corpus: Path, target: Path, output: Path, **options: Any) -> DraftTrainingConfig:
    defaults: dict[str, Any] = {
        "target": str(target),
        "output": str(output),
        "text": (str(corpus),),
        "shape": dataclasses.replace(SHAPE, num_layers=1, hidden_size=16, intermediate_size=24),
        "held_out_tokens": 300,
        "seq_len": 32,
        "batch_size": 8,
        "steps": 40,
        "warmup_steps": 5,
        "learning_rate": 2e-2,
        "dtype": "float32",
        "weights_dtype": "float32",
        "eval_every": 0,
        "eval_prompts": 12,
        "eval_prompt_tokens": 4,
        "eval_new_tokens": 24,
        "show_progress": False,
    }
    return DraftTrainingConfig(**{**defaults, **options})
