"""The training loop: batches in, trained tensors out. It is the same for all that is trained.

What differs is a :class:`Task`. Owns the losses on dense windows, in slices that bound memory, and
what a person sees meanwhile: a bar on a terminal, lines elsewhere. Knows no files other than its
own state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as ProgressBar
from torch.utils.checkpoint import checkpoint

from paceline.backends.resolve import check_device, is_cpu
from paceline.backends.rows.rows import Rows
from paceline.core.errors import TrainingError
from paceline_lab.train.checkpoint import Progress, load_state, save_state
from paceline_lab.train.configs import TrainingConfig, learning_rate, run_progress
from paceline_lab.train.data import TokenArray, Windows
from paceline_lab.train.model_files import TrainableModel
from paceline_lab.train.ops import TrainingOps, dense_hidden, differentiable_decoder
from paceline_lab.train.surgery import HybridRows

Tensor = torch.Tensor
SLICE_ELEMENTS = 1 << 26  # logits that exist at once before rows are processed in slices


def cross_entropy(decoder: Rows, windows: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats of ``windows[:, 1:]`` given what precedes it."""
    hidden = dense_hidden(decoder, windows[:, :-1])
    targets = windows[:, 1:].reshape(-1)

    def part(rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(decoder.logits(rows).float(), wanted, reduction="sum")

    return in_slices(part, decoder.config.vocab_size, hidden, targets) / targets.numel()


def in_slices(function: Callable[..., Tensor], vocab: int, *rows: Tensor) -> Tensor:
    """Sum of ``function`` over slices of rows; logits are recomputed when there are several."""
    count = rows[0].shape[0]
    step = max(16, SLICE_ELEMENTS // vocab)
    if count <= step:
        return function(*rows)
    slices = zip(*(r.split(step) for r in rows), strict=True)
    parts = [checkpoint(function, *part, use_reentrant=False) for part in slices]
    return torch.stack(parts).sum()


def distillation_loss(target: Rows) -> Callable[[Rows, Tensor], Tensor]:
    """KL(target || draft) of a draft on windows, a mean over positions, in nats.

    A draft with a pruned head is held against the target's distribution over the tokens of the
    head, so that it spends nothing on tokens that it cannot draft.

    Args:
        target: is run on the same windows, without gradients.
    """

    def loss(draft: Rows, windows: Tensor) -> Tensor:
        inputs = windows[:, :-1]
        with torch.no_grad():
            taught = dense_hidden(target, inputs)
        hidden = dense_hidden(draft, inputs)

        def part(rows: Tensor, teacher: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = target.logits(teacher).float()
            if draft.head_tokens is not None:
                wanted = wanted[:, draft.head_tokens]
            return divergence(draft.logits(rows).float(), wanted)

        return in_slices(part, draft.config.vocab_size, hidden, taught) / inputs.numel()

    return loss


def divergence(draft: Tensor, target: Tensor) -> Tensor:
    """KL(target || draft) of two sets of logits, summed over their rows."""
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="sum")


def imbalance(decoder: Rows) -> Tensor:
    """How unevenly the rows of the latest forward used the experts: 1 where all were used alike.

    The load-balancing loss of Switch Transformers (Fedus et al., 2021), a mean over the layers: the
    number of experts times the sum over experts of their share of the choices and their mean
    probability.
    """
    parts = []
    for ids, logits in decoder.routed:
        number = logits.shape[1]
        share = torch.bincount(ids.flatten(), minlength=number) / ids.numel()
        parts.append(number * (share * logits.float().softmax(1).mean(0)).sum())
    return torch.stack(parts).mean()


LINE_SECONDS = 30.0


class ProgressDisplay:
    """Context manager; :meth:`update` is cheap enough for every step."""

    def __init__(self, enabled: bool, title: str) -> None:
        self._console = Console(stderr=True, soft_wrap=True)
        self._enabled = enabled
        self._title = title
        self._bar: ProgressBar | None = None
        self._last_line = 0.0

    def __enter__(self) -> ProgressDisplay:
        if self._enabled and self._console.is_terminal:
            columns = (TextColumn(self._title), BarColumn(), TextColumn("{task.description}"))
            self._bar = ProgressBar(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=1.0)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._enabled:
            self._console.print(f"{self._title}: {text}", highlight=False, markup=False)

    def update(
        self, done: float, step: int, loss: float, speed: float, seconds_left: float
    ) -> None:
        """``done`` is the share of the run, ``speed`` in tokens per second."""
        left = f"{seconds_left / 60:.0f} min" if seconds_left > 90 else f"{seconds_left:.0f} s"
        text = f"step {step}  loss {loss:.3f}  {speed:,.0f} tok/s  {left} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=min(done, 1.0), description=text)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            self.note(f"{done:5.1%}  {text}")


Loss = Callable[[Rows, Tensor], Tensor]
"""Mean loss of a decoder on windows ``[batch, seq_len + 1]`` of token ids."""

BALANCE = 0.01
"""Weight of :func:`~paceline_lab.train.trainer.imbalance`, as of Switch Transformers."""
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
                f"{config.learning_rate:g}) and continue from the last saved state",
                "learning_rate",
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
