"""Random rows of blocks of every format, whose scales are small finite numbers."""

from __future__ import annotations

import numpy as np

from paceline.tensors.quantised_blocks import FORMATS

HALVES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
"""Where a format's 16-bit floats are in a block."""
OWN = ("Z4_32", "Z4_128", "Z8_32", "Z8_128", "F4_16", "C8_32", "C8_128")


def random_rows(name: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """uint8 ``[n, bytes of a row]``; every code, zero point and integer scale occurs."""
    rng = np.random.default_rng(seed)
    form = FORMATS[name]
    count = -(-k // form.inputs)
    blocks = rng.integers(0, 256, (n, count, form.num_bytes), dtype=np.uint8)
    for at in HALVES.get(name, ()):
        halves = (0.01 * rng.standard_normal((n, count, 1))).astype(np.float16)
        blocks[:, :, at : at + 2] = halves.view(np.uint8)
    for at in (0, 4)[: 1 + (name == "F4_16")] if name in OWN else ():
        scales = (0.01 * rng.standard_normal((n, count, 1))).astype(np.float16).astype(np.float32)
        blocks[:, :, at : at + 4] = scales.view(np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = rng.integers(0, 135, (n, count))
    return blocks.reshape(n, -1)
