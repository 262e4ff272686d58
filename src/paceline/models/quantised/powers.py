"""Scales stored as exponents in a byte each (e8m0): ``2 ** (byte - 127)``."""

from __future__ import annotations

import numpy as np
import torch

from paceline.models.quantised.parts import Parts

_NO_NUMBER = 255


def powers_of_two(parts: Parts, part: str, exponents: torch.Tensor, lower: int = 0) -> torch.Tensor:
    """``2 ** (exponent - 127 - lower)``, float32 and exact.

    Raises:
        ModelLoadError: an exponent is 255, which stands for no number.
    """
    if (exponents == _NO_NUMBER).any():
        raise parts.error(part, "holds a scale that is no number", "below 255 throughout")
    found = np.ldexp(np.float32(1.0), exponents.numpy().astype(np.int32) - 127 - lower)
    return torch.from_numpy(np.asarray(found, np.float32))
