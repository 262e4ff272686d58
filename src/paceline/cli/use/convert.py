"""``paceline convert``: a model packed for the native kernels, once and for all.

Owns which dtype is meant; the format is :mod:`paceline.disk.packed_folder`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.backends.native.native import why_not_native
from paceline.cli.options.options import argument, option
from paceline.cli.terminal.display import Screen
from paceline.config import MAX_THREADS, PACKED_DTYPES
from paceline.core.checks import check_choice, check_number
from paceline.core.errors import ConfigError
from paceline.models.threads import set_num_threads


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ConvertOptions:
    """Options of ``paceline convert``."""

    model: str = argument(..., "Folder, GGUF file, name or hub id.")
    out: str = argument(..., "Folder to write. It must be empty or not exist yet.")
    dtype: str = option(
        "auto",
        f"Precision: auto, {', '.join(PACKED_DTYPES)}. auto keeps the file's own "
        "formats if its weights are quantised, and is int8 otherwise.",
    )
    threads: int | None = option(None, "Number of compute threads.")


def convert_command(options: ConvertOptions) -> int:
    """The work of ``paceline convert``."""
    from paceline.backends.native.packing import Packer
    from paceline.disk.packed_folder import write_packed
    from paceline.loading.checkpoint import load_checkpoint

    check_choice("dtype", options.dtype, ("auto", *PACKED_DTYPES))
    if (reason := why_not_native()) is not None:
        raise ConfigError(f"packing needs the native kernels: {reason}")
    if options.threads is not None:
        check_number("threads", options.threads, 1, MAX_THREADS)
        set_num_threads(options.threads)
    checkpoint = load_checkpoint(options.model)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "file" if checkpoint.is_quantised else "int8"
    try:
        folder = Path(options.out).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"cannot write {options.out}: {error}") from error
    size = write_packed(checkpoint, folder, Packer(dtype))
    Screen().say(f"{folder}: {checkpoint.name} as {dtype}, {size / 1e6:.1f} MB of weights")
    return 0
