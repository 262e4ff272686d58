"""``paceline convert``: a model packed for the native kernels, once and for all.

Owns which dtype is meant; the format is :mod:`paceline.models.packed_folder`'s.
"""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.commands.convert_options import ConvertOptions
from paceline.commands.display import Screen
from paceline.config import PACKED_DTYPES, check_number
from paceline.errors import ConfigError
from paceline.models.checkpoint import load_checkpoint
from paceline.models.ops.native import why_not_native
from paceline.models.ops.packing import Packer
from paceline.models.packed_folder import write_packed


def convert_command(options: ConvertOptions) -> int:
    """Run the command; returns its exit code.

    Raises:
        PacelineError: the options, the model or the folder cannot be used.
    """
    if options.dtype not in ("auto", *PACKED_DTYPES):
        allowed = ", ".join(("auto", *PACKED_DTYPES))
        raise ConfigError(f"dtype is {options.dtype!r}; allowed are {allowed}")
    if (reason := why_not_native()) is not None:
        raise ConfigError(f"packing needs the native kernels: {reason}")
    if options.threads is not None:
        check_number("threads", options.threads, 1, 1024)
        torch.set_num_threads(options.threads)
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
