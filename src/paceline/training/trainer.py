"""The training loop: batches in, trained tensors out. Knows neither what the loss means nor files
other than its own state.

``run_training`` is the same for all that is trained; they differ in their :class:`Task`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from paceline.backends.resolve import check_device, is_cpu
from paceline.backends.rows.rows import Rows
from paceline.core.errors import TrainingError
from paceline.training.checkpoint import Progress, load_state, save_state
from paceline.training.data import TokenArray
from paceline.training.hybrid import HybridRows
from paceline.training.losses import imbalance
from paceline.training.model_files import TrainableModel
from paceline.training.ops import TrainingOps, differentiable_decoder
from paceline.training.options import TrainingConfig, learning_rate, run_progress
from paceline.training.packing import Windows
from paceline.training.progress import ProgressDisplay

Tensor = torch.Tensor
Loss = Callable[[Rows, Tensor], Tensor]
"""Mean loss of a decoder on windows ``[batch, seq_len + 1]`` of token ids."""

BALANCE = 0.01
"""Weight of :func:`~paceline.training.losses.imbalance`, as of Switch Transformers."""
SMOOTHING = 0.98  # of the training loss that is shown


class Task(Protocol):
    """What is trained: ``params``, float32, which training changes in place."""

    @property
    def params(self) -> Mapping[str, Tensor]: ...

    def loss(self, start: int, count: int) -> Tensor:
        """Mean loss of the training windows ``start`` to ``start + count``, with gradients."""
        ...

    def held_out(self, windows: int | None) -> tuple[float, str] | None:
        """Mean loss of the first held-out windows (None: of all), and what else to say of it.

        None where nothing is held out.
        """
        ...


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Training windows by number, and the held-out ones, ``[n, seq_len + 1]``, n may be 0."""

    windows: Windows
    held_out: TokenArray


@dataclass(frozen=True, slots=True)
class DecoderTask:
    """A decoder, the loss of which is a function of windows of tokens."""

    model: TrainableModel
    data: TrainingData
    decoder_loss: Loss
    config: TrainingConfig

    @property
    def params(self) -> Mapping[str, Tensor]:
        return self.model.params

    def loss(self, start: int, count: int) -> Tensor:
        windows = self.data.windows.take(start, count)
        decoder = self._decoder(windows)
        value = self.decoder_loss(decoder, torch.as_tensor(windows).long())
        return value + BALANCE * imbalance(decoder) if decoder.routed else value

    def held_out(self, windows: int | None) -> tuple[float, str] | None:
        chosen, size = self.data.held_out[:windows], self.config.batch_size
        if not len(chosen):
            return None
        total = 0.0
        with torch.no_grad():
            decoder = self._decoder(chosen)
            for at in range(0, len(chosen), size):
                part = torch.as_tensor(chosen[at : at + size]).long()
                total += self.decoder_loss(decoder, part).item() * len(part)
        return total / len(chosen), f"{len(chosen)} of {len(self.data.held_out)} windows"

    def _decoder(self, windows: TokenArray) -> Rows:
        dtype = resolve_dtype(self.config)
        if self.model.config.recurrent is not None:
            return cast(Rows, HybridRows(self.model, dtype, self.config.device))
        ops = TrainingOps(dtype)
        return differentiable_decoder(self.model.config, self.model.tensors, ops, windows.shape[1])


@contextmanager
def computing_on(device: str) -> Iterator[None]:
    """Make new tensors there, all that a loss on them needs; ``ConfigError`` if that cannot be."""
    check_device(device)
    before = torch.get_float32_matmul_precision()
    if not is_cpu(device):
        torch.set_float32_matmul_precision("high")
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def run_training(task: Task, config: TrainingConfig, fingerprint: str, title: str) -> Progress:
    """Train ``task.params`` in place, from the beginning or from the state in ``config.output``.

    A run that was interrupted at any moment and is started again with the same options ends, bit
    for bit, like one that was not (given a number of steps, not a time, to stop at).

    Raises:
        TrainingError: the loss is no longer finite, or the saved state does not fit.
    """
    return _Run(task, config, fingerprint).to_end(title)


def spent(config: TrainingConfig, model: TrainableModel, progress: Progress) -> dict[str, Any]:
    """What every finished training reports."""
    return {
        "folder": Path(config.output),
        "num_params": model.num_params,
        "steps": progress.step,
        "seconds": progress.seconds,
        "train_tokens": progress.step * config.tokens_per_step,
    }


class _Run:
    def __init__(self, task: Task, config: TrainingConfig, fingerprint: str) -> None:
        self.task, self.config = task, config
        self.fingerprint = fingerprint
        self.folder = Path(config.output)
        for p in task.params.values():
            p.requires_grad_(True)
        self.optimizer = _optimizer(task.params, config)
        self.progress = (
            load_state(self.folder, task.params, self.optimizer, fingerprint) or Progress()
        )
        self._started = time.monotonic() - self.progress.seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def to_end(self, title: str) -> Progress:
        with ProgressDisplay(self.config.show_progress, title) as display:
            self._begin(display)
            saved_at, first_step, first_second = self.seconds, self.progress.step, self.seconds
            try:
                while run_progress(self.config, self.progress.step, self.seconds) < 1.0:
                    self._one_step()
                    if self.seconds - saved_at >= self.config.save_minutes * 60:
                        self._save()
                        saved_at = self.seconds
                    every = self.config.eval_every
                    if every and self.progress.step % every == 0:
                        self._evaluate(display, self.config.eval_windows)
                    self._show(display, first_step, first_second)
            except KeyboardInterrupt:  # perhaps in the middle of an update: nothing to save
                ago = (self.seconds - saved_at) / 60
                display.note(f"stopped; the same options continue from {ago:.0f} minutes ago")
                raise
            self._evaluate(display, None)
        self._save()
        return self.progress

    def _begin(self, display: ProgressDisplay) -> None:
        if self.progress.step:
            display.note(f"continuing at step {self.progress.step}")
        else:
            self._evaluate(display, None)
            self._started = time.monotonic()  # the schedule is of training time

    def _one_step(self) -> None:
        config, step = self.config, self.progress.step
        rate = learning_rate(config, step, self.seconds)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        for part in range(config.grad_accumulation):
            start = step * config.windows_per_step + part * config.batch_size
            value = self.task.loss(start, config.batch_size)
            (value / config.grad_accumulation).backward()
            total += value.item() / config.grad_accumulation
        if not math.isfinite(total):
            raise TrainingError(
                f"the loss is {total} at step {step}; lower learning_rate (it is "
                f"{config.learning_rate:g}) and continue from the last saved state"
            )
        torch.nn.utils.clip_grad_norm_(self.task.params.values(), config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step = step + 1
        smooth = self.progress.train_loss
        kept = 0.0 if math.isnan(smooth) else min(SMOOTHING, step / (step + 1))
        self.progress.train_loss = total if not kept else kept * smooth + (1.0 - kept) * total

    def _evaluate(self, display: ProgressDisplay, windows: int | None) -> None:
        measured = self.task.held_out(windows)
        if measured is None:
            return
        value, note = measured
        self.progress.history.append((self.progress.step, self.seconds, value))
        display.note(f"held-out loss {value:.4f} at step {self.progress.step} ({note})")

    def _show(self, display: ProgressDisplay, first_step: int, first_second: float) -> None:
        done = run_progress(self.config, self.progress.step, self.seconds)
        spent = max(1e-9, self.seconds - first_second)
        speed = (self.progress.step - first_step) * self.config.tokens_per_step / spent
        left = self.seconds * (1.0 - done) / done
        display.update(done, self.progress.step, self.progress.train_loss, speed, left)

    def _save(self) -> None:
        self.progress.seconds = self.seconds
        save_state(self.folder, self.task.params, self.optimizer, self.progress, self.fingerprint)


def _optimizer(params: Mapping[str, Tensor], config: TrainingConfig) -> torch.optim.Optimizer:
    matrices = [p for p in params.values() if p.dim() > 1]
    vectors = [p for p in params.values() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def resolve_dtype(config: TrainingConfig) -> str:
    """``auto`` is bfloat16 where the device multiplies it natively, float32 elsewhere."""
    if config.dtype != "auto":
        return config.dtype
    if not is_cpu(config.device):
        return "bfloat16"
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return "bfloat16" if supported() else "float32"
