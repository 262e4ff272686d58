"""A training run's state in one file, replaced atomically. Knows no model, data or loss.

The file is safetensors, never pickle: trained tensors, both moments of AdamW, and a JSON header
with the step, the elapsed seconds, the random state and the options that must not change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.core.errors import TrainingError
from paceline.core.files import whole_file

Tensor = torch.Tensor
FILE_NAME = "training-state.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Progress:
    """How far a run is.

    Attributes:
        step: optimiser steps done. Step ``s`` reads the windows from ``s * windows_per_step`` on,
            so this is the data position too.
        seconds: wall time spent, over all starts.
        history: ``(step, seconds, held-out loss)`` of every evaluation.
        train_loss: smoothed training loss.
    """

    step: int = 0
    seconds: float = 0.0
    history: list[tuple[int, float, float]] = field(default_factory=list)
    train_loss: float = float("nan")


def save_state(
    folder: Path,
    params: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    fingerprint: str,
) -> None:
    """Write the state; ``TrainingError`` if it cannot. A crash leaves the old or the new file."""
    tensors = {f"param.{name}": p.detach() for name, p in params.items()}
    for name, p in params.items():
        for moment in _MOMENTS:
            if moment in optimizer.state.get(p, {}):
                tensors[f"{moment}.{name}"] = optimizer.state[p][moment]
    tensors["random"] = torch.get_rng_state()
    header = {
        "step": progress.step,
        "seconds": progress.seconds,
        "history": progress.history,
        "train_loss": progress.train_loss,
        "fingerprint": fingerprint,
    }
    with whole_file(folder / FILE_NAME, TrainingError, make_folder=True) as partial:
        save_file(tensors, partial, {"paceline": json.dumps(header)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())


def load_state(
    folder: Path,
    params: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    fingerprint: str,
) -> Progress | None:
    """Restore a saved state in place; None where there is none.

    Raises:
        TrainingError: the file is damaged, or was written with other data, sizes or options.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["paceline"])
            if header["fingerprint"] != fingerprint:
                raise TrainingError(
                    f"{path} belongs to a run with other options, texts or sizes. Continue with "
                    "those, or choose another output folder"
                )
            _restore(file, params, optimizer, header["step"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read ({error}); delete it to begin again") from error
    return Progress(
        header["step"],
        header["seconds"],
        [tuple(entry) for entry in header["history"]],
        header["train_loss"],
    )


def _restore(
    file: Any, params: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, step: int
) -> None:
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(file.get_tensor(f"param.{name}"))
            if step:
                state = {m: file.get_tensor(f"{m}.{name}").to(p.device) for m in _MOMENTS}
                optimizer.state[p] = {"step": torch.tensor(float(step)), **state}
    torch.set_rng_state(file.get_tensor("random"))


def remove_state(folder: Path) -> None:
    (folder / FILE_NAME).unlink(missing_ok=True)
