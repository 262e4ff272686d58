"""A target and drafts of three sizes, inflated from the embedded pair and kept under ``.peers``."""

from __future__ import annotations

from pathlib import Path

from inflate import Shape, embedded_folder, write_inflated
from peers_models import PEERS, hugging_face, made, void

DRAFTS: dict[str, dict[str, Shape]] = {
    "0.5b": {
        # 18 M, 57 M and 102 M parameters beside 512 M.
        "1/28": Shape(4, 2, 4, 4, 6),
        "1/9": Shape(8, 16, 2, 8, 4),
        "1/5": Shape(8, 8, 2, 16, 5),
    },
    # For tests and for trying the program out.
    "tiny": {
        "1/28": Shape(1, 2, 2, 2, 3),
        "1/9": Shape(2, 2, 4, 2, 5),
        "1/5": Shape(4, 4, 2, 2, 4),
    },
}
"""By the target's size, shapes of drafts by their share of its bytes."""


def target_folder(size: str) -> Path:
    return hugging_face(size, "target")


def draft_folder(size: str, share: str) -> Path:
    shape = DRAFTS[size][share]
    place = PEERS / "models" / size / f"draft-{share.replace('/', '-')}"
    return made(place, lambda path: void(write_inflated(path, embedded_folder(True), shape)))
