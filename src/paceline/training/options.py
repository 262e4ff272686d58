"""What every training run can be told, checked on construction. Knows no model and no data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from paceline.config import MAX_THREADS
from paceline.core.checks import check_choice, check_number
from paceline.core.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
WEIGHT_DTYPES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Options that a language model's training and a draft's distillation share.

    Attributes:
        output: folder for the finished model and, during training, for the state to resume from.
        text: files and folders of training text.
        exclude: glob patterns of files to leave out, relative to their folder.
        stdlib: also train on Python's standard library, as found on this machine.
        held_out_tokens: tokens of whole documents that are held out and never trained on.
        seq_len: number of predictions per window.
        batch_size: windows per forward pass.
        grad_accumulation: forward passes per optimiser step.
        steps: number of optimiser steps; 0 leaves the end to ``max_minutes``.
        max_minutes: training time in minutes; 0 leaves the end to ``steps``. With both, the
            schedule follows whichever is further along, so that it always completes.
        learning_rate: peak learning rate.
        warmup_steps: steps of linear warm-up.
        decay_start: fraction of the run after which the learning rate falls linearly.
        final_lr_fraction: fraction of the peak learning rate at the end.
        weight_decay: weight decay of matrices; vectors have none.
        beta1, beta2: parameter of AdamW.
        grad_clip: maximum norm of the gradient.
        dtype: precision of matrix products; ``auto`` is bfloat16 on a GPU and on processors with
            instructions for it, and float32 elsewhere.
        weights_dtype: precision of the written weights; int8 applies only to linear layers.
        seed: seed of the initialisation, the order of documents and the held-out split.
        threads: number of torch threads; 0 keeps torch's default.
        device: device to train on, such as cuda; the finished files are the same everywhere.
        save_minutes: minutes between saved states; 0 saves after every step.
        eval_every: steps between held-out losses; 0 measures only at the beginning and the end.
        eval_windows: number of windows for the intermediate held-out losses; the last one uses all.
        overwrite: replace a finished model in ``output``.
        show_progress: show a progress bar on a terminal, and lines elsewhere.
        command: the exact command, for the model card.
        data_note: source and licence of the texts, for the model card.
        licence: licence of the weights as an SPDX identifier, for the model card.
    """

    output: str
    text: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    stdlib: bool = False
    held_out_tokens: int = 65_536
    seq_len: int = 512
    batch_size: int = 12
    grad_accumulation: int = 1
    steps: int = 0
    max_minutes: float = 0.0
    learning_rate: float = 1e-3
    warmup_steps: int = 40
    decay_start: float = 0.5
    final_lr_fraction: float = 0.03
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    dtype: str = "auto"
    weights_dtype: str = "bfloat16"
    seed: int = 0
    threads: int = 0
    device: str = "cpu"
    save_minutes: float = 5.0
    eval_every: int = 200
    eval_windows: int = 32
    overwrite: bool = False
    show_progress: bool = True
    command: str = ""
    data_note: str = ""
    licence: str = "unknown"

    def __post_init__(self) -> None:
        if not self.output:
            raise ConfigError("output is empty; name the folder of the trained model")
        for name, low, high in _RANGES:
            check_range(name, getattr(self, name), low, high)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("weights_dtype", self.weights_dtype, WEIGHT_DTYPES)
        if not self.steps and not self.max_minutes:
            raise ConfigError("steps and max_minutes are both 0; one of them must end the training")

    @property
    def windows_per_step(self) -> int:
        return self.batch_size * self.grad_accumulation

    @property
    def tokens_per_step(self) -> int:
        return self.windows_per_step * self.seq_len

    def fixed_options(self) -> dict[str, Any]:
        """The options that a continued run must share with the one it continues."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _FREE}


TEXTS = ("text", "exclude", "stdlib")
"""Where texts come from, which the training of heads does not read."""
_REPORTING = ("overwrite", "show_progress", "command", "data_note", "licence")
_FREE = frozenset(
    (
        "output",
        "features",
        "verifier",
        "with_embedding",
        "threads",
        "device",
        "save_minutes",
        *_REPORTING,
        *TEXTS,
    )
)

_RANGES = (
    ("held_out_tokens", 0, 1 << 32),
    ("seq_len", 2, 1 << 20),
    ("batch_size", 1, 1 << 16),
    ("grad_accumulation", 1, 1 << 16),
    ("steps", 0, 1 << 32),
    ("max_minutes", 0.0, 1e6),
    ("learning_rate", 0.0, 10.0),
    ("warmup_steps", 0, 1 << 32),
    ("decay_start", 0.0, 1.0),
    ("final_lr_fraction", 0.0, 1.0),
    ("weight_decay", 0.0, 10.0),
    ("beta1", 0.0, 1.0),
    ("beta2", 0.0, 1.0),
    ("grad_clip", 1e-9, 1e9),
    ("seed", 0, (1 << 63) - 1),
    ("threads", 0, MAX_THREADS),
    ("save_minutes", 0.0, 1e6),
    ("eval_every", 0, 1 << 32),
    ("eval_windows", 1, 1 << 32),
)


def check_range(name: str, value: Any, low: float, high: float) -> None:
    """Raises ConfigError unless ``value`` is a number in ``[low, high]``, whole where they are."""
    check_number(name, value, low, high, int if isinstance(low, int) else float)


def check_unused(config: Any, names: Iterable[str], reason: str) -> None:
    """Raises ConfigError, which begins with ``reason``, if options that it makes void are given.

    Args:
        config: a dataclass; of a value that is the default nobody can tell whether it was given.
    """
    defaults = {field.name: field.default for field in fields(config)}
    given = [name for name in names if getattr(config, name) != defaults[name]]
    if given:
        raise ConfigError(f"{reason}; leave {', '.join(given)} out")


def learning_rate(config: TrainingConfig, step: int, seconds: float) -> float:
    """The rate of step ``step`` (from 0), ``seconds`` into the run: warm up, hold, fall linearly.

    Progress is the larger of the shares of steps and of time that are used, so that a run bounded
    by time ends at the final rate whatever the machine's speed.
    """
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    done = run_progress(config, step, seconds)
    if done <= config.decay_start or config.decay_start >= 1.0:
        return config.learning_rate * warm
    fallen = min(1.0, (done - config.decay_start) / (1.0 - config.decay_start))
    low = config.final_lr_fraction
    return config.learning_rate * warm * (1.0 - fallen * (1.0 - low))


def run_progress(config: TrainingConfig, step: int, seconds: float) -> float:
    """Share of the run that is done, 0 to 1 and beyond; 1 ends it."""
    by_steps = step / config.steps if config.steps else 0.0
    by_time = seconds / (config.max_minutes * 60.0) if config.max_minutes else 0.0
    return max(by_steps, by_time)
