"""Which backend and which arithmetic run a model on this machine. Owns the rule, no kernels."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import TYPE_CHECKING

from paceline.backends.native.cpu import MAX_KERNEL, CpuOps
from paceline.backends.native.native import check_isa, why_not_native
from paceline.backends.native.packing import FEW_BITS
from paceline.config import PACKED_DTYPES, REFERENCE_DTYPES
from paceline.core.checks import require_torch
from paceline.core.errors import ConfigError
from paceline.models.backend import Ops
from paceline.models.config import ModelConfig

if TYPE_CHECKING:
    from paceline.loading.checkpoint import Checkpoint

log = logging.getLogger(__name__)


def reference_module(purpose: str) -> ModuleType:
    """The reference ops; ``ConfigError`` says the ``purpose`` where torch is not installed."""
    require_torch(purpose)
    return importlib.import_module("paceline.backends.rows.reference")


def check_device(device: str) -> None:
    """Raise :class:`ConfigError` unless a model can run on the device."""
    if device == "cpu":
        return
    torch = reference_module(f"on the device {device!r} the reference ops compute").torch
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError.of("device", f"{device!r} cannot be used: {reason}") from error


def is_cpu(device: str) -> bool:
    return device.partition(":")[0] == "cpu"


def has_fast_int8(device: str, backend: str = "auto") -> bool:
    """True where 8-bit dot products beat 16- and 32-bit floats."""
    if not is_cpu(device):
        return False
    if backend != "reference" and why_not_native() is None:
        return True
    torch = reference_module("the reference ops are to compute").torch
    probe = getattr(torch.cpu, "_is_vnni_supported", None)  # VNNI or AMX, not emulated
    return bool(probe and probe())


def backend_of(config: ModelConfig, backend: str) -> str:
    """The backend that can run a model, of those that were asked for; ``ConfigError`` if none."""
    recurrent = config.recurrent
    if backend == "reference" or recurrent is None or recurrent.kernel <= MAX_KERNEL:
        return backend
    why = f"its convolutions see {recurrent.kernel} rows, and those of the native kernels at most"
    if backend == "native":
        raise ConfigError(
            f"the native kernels cannot run {config.architecture}: {why} {MAX_KERNEL}; leave "
            "--backend away, or set it to reference"
        )
    log.info("%s runs on the reference ops: %s %d", config.architecture, why, MAX_KERNEL)
    return "reference"


def resolve_dtype(dtype: str, device: str, checkpoint: Checkpoint, backend: str = "auto") -> str:
    """What ``auto`` is: the file's own formats where its weights are quantised or packed; else int8
    where that is fast; else the checkpoint's own precision.

    Raises:
        ConfigError: the device does not exist here, or the weights are packed for another dtype.
    """
    check_device(device)
    if checkpoint.packed is not None:
        return _packed_dtype(dtype, device, checkpoint, backend)
    if dtype != "auto":
        return dtype
    if checkpoint.is_quantised:
        return "file"
    if has_fast_int8(device, backend):
        return "int8"
    own = checkpoint.config.dtype
    return "bfloat16" if own in ("bfloat16", "float16") else "float32"


def _packed_dtype(dtype: str, device: str, checkpoint: Checkpoint, backend: str) -> str:
    assert checkpoint.packed is not None
    packed = checkpoint.packed.dtype
    if dtype not in ("auto", packed):
        raise ConfigError(
            f"{checkpoint.name} is packed as {packed} and cannot run as {dtype}: leave --dtype "
            "away, or load the model that it was converted from"
        )
    reason = "they are switched off" if backend == "reference" else _why_reference(packed, device)
    if reason is not None:
        raise ConfigError(
            f"{checkpoint.name} is packed for the native kernels, and {reason}: load the model "
            "that it was converted from"
        )
    return packed


def resolve_ops(
    dtype: str,
    device: str,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Ops:
    """The backend for a resolved dtype on a device.

    Raises:
        ConfigError: the device does not exist here, or the backend that was asked for cannot run.
    """
    check_device(device)
    reason = _why_reference(dtype, device)
    if backend != "reference" and reason is None:
        check_isa()
        ops: Ops = CpuOps(dtype)
        log.info("ops backend %s, %s", ops.name, dtype)
        return ops
    if backend == "native" or dtype in FEW_BITS:
        raise ConfigError(
            f"the native backend cannot run {dtype} on {device}: {reason or 'it is switched off'}"
        )
    why = reason or "as asked for"
    log.info("ops backend reference, %s on %s: %s", dtype, device, why)
    module = reference_module(f"the reference ops are to compute in {dtype} on {device} ({why})")
    reference: Ops = module.ReferenceOps(dtype, device, deterministic)
    return reference


def fewer_bits(dtype: str, ops: Ops) -> Ops:
    """A backend of the same kind in fewer bits: both can compute over the same KV memory.

    Returns:
        ``ops`` itself where ``dtype`` is ``auto`` or its own.

    Raises:
        ConfigError: that would be more bits, or backends of this kind cannot run them.
    """
    if dtype in ("auto", ops.dtype):
        return ops
    dtypes = PACKED_DTYPES if isinstance(ops, CpuOps) else REFERENCE_DTYPES
    allowed = dtypes[dtypes.index(ops.dtype) :]
    if dtype not in allowed:
        raise ConfigError(
            f"dtype is {dtype}; what shares a KV cache with a model in {ops.dtype} on the backend "
            f"{ops.name} can run in {', '.join(allowed)}"
        )
    if isinstance(ops, CpuOps):
        return CpuOps(dtype)
    module = reference_module("the reference ops are to compute")
    other: Ops = module.ReferenceOps(dtype, ops.device, getattr(ops, "deterministic", None))
    return other


def _why_reference(dtype: str, device: str) -> str | None:
    """Why the native kernels cannot be used; None where they can."""
    if not is_cpu(device):
        return "the native kernels run on the CPU"
    if dtype not in PACKED_DTYPES:
        return f"the native kernels compute in {' and '.join(PACKED_DTYPES)}"
    return why_not_native()
