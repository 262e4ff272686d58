"""Which backend and which arithmetic run a model on this machine. Owns the rule, no kernels."""

from __future__ import annotations

import logging

import torch

from paceline.errors import ConfigError
from paceline.models.ops.base import Ops
from paceline.models.ops.reference import ReferenceOps

log = logging.getLogger(__name__)


def check_device(device: str) -> None:
    """Raise :class:`ConfigError` unless tensors can live on the device."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {device!r} cannot be used: {reason}") from error


def has_fast_int8(device: str) -> bool:
    """True where 8-bit dot products are instructions (VNNI, AMX) rather than emulated."""
    if torch.device(device).type != "cpu":
        return False
    probe = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(probe and probe())


def resolve_dtype(dtype: str, device: str, checkpoint_dtype: str) -> str:
    """``auto`` is int8 where that is fast, otherwise the checkpoint's own precision."""
    check_device(device)
    if dtype != "auto":
        return dtype
    if has_fast_int8(device):
        return "int8"
    return "bfloat16" if checkpoint_dtype in ("bfloat16", "float16") else "float32"


def resolve_kv_dtype(kv_dtype: str, dtype: str) -> str:
    if kv_dtype != "auto":
        return kv_dtype
    return "bfloat16" if dtype == "bfloat16" else "float32"


def resolve_ops(dtype: str, device: str, deterministic: bool | None = None) -> Ops:
    """The backend for a resolved dtype on a device.

    Raises:
        ConfigError: the device does not exist here.
    """
    check_device(device)
    ops = ReferenceOps(dtype, device, deterministic)
    log.info("ops backend %s, %s on %s: no native kernels are built", ops.name, dtype, device)
    return ops
