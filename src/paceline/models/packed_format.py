"""What a folder that ``paceline convert`` wrote says of itself, and how its tensors are named.

Knows no file and no arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import PACKED_DTYPES
from paceline.core.errors import ModelLoadError
from paceline.models.backend import PackedPart
from paceline.tensors.arrays import Array
from paceline.tensors.blocks import FLOAT_BYTES, FORMATS

FORMAT, VERSION = "paceline-packed", "3"
PACKED_FORMATS = (*FORMATS, *FLOAT_BYTES, "F8_128")
ORDER = "order"
"""How the name of the tensor ends that holds the order of a part's inputs."""


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """What the files of such a folder say of themselves.

    Attributes:
        dtype: what the model was converted to, one of :data:`~paceline.config.PACKED_DTYPES`.
    """

    dtype: str

    @property
    def metadata(self) -> dict[str, str]:
        return {"format": FORMAT, "version": VERSION, "dtype": self.dtype}


def folder_format(files: Sequence[Mapping[str, str]], where: Path) -> PackedFormat | None:
    """The format that the metadata of a folder's files speak of; None for other checkpoints.

    Raises:
        ModelLoadError: the files differ, or are of a version or a dtype that is not known.
    """
    if not any(metadata.get("format") == FORMAT for metadata in files):
        return None
    said = files[0]
    if any(metadata != said for metadata in files):
        raise ModelLoadError(f"the files in {where} were not converted together; convert again")
    if said.get("version") != VERSION or said.get("dtype") not in PACKED_DTYPES:
        raise ModelLoadError(
            f"{where} is packed as {str(said.get('dtype'))[:20]!r} in version "
            f"{str(said.get('version'))[:20]!r} of the format; {' and '.join(PACKED_DTYPES)} in "
            f"version {VERSION} are supported: convert the model again"
        )
    return PackedFormat(said["dtype"])


def packed_name(linear: str, index: int, kind: str) -> str:
    """The tensor that holds a part of a packed linear: a format's name or :data:`ORDER`."""
    return f"{linear}.{index}.{kind}"


def packed_formats(tensors: Mapping[str, Array], linear: str) -> list[str]:
    """The formats of a packed linear's parts; empty where it is not packed."""
    found: list[str] = []
    while True:
        names = (
            form for form in PACKED_FORMATS if packed_name(linear, len(found), form) in tensors
        )
        form = next(names, None)
        if form is None:
            return found
        found.append(form)


def packed_parts(tensors: Mapping[str, Array], linear: str, outs: list[int]) -> list[PackedPart]:
    """The parts of a packed linear: one, or one for each of the stacked linears."""
    formats = packed_formats(tensors, linear)
    if len(formats) not in (1, len(outs)):
        raise ModelLoadError(
            f"{linear} is not packed as the configuration says: it has {len(formats)} parts; "
            f"needed are 1 or {len(outs)}"
        )
    counts = [sum(outs)] if len(formats) == 1 else outs
    parts = []
    for index, (form, count) in enumerate(zip(formats, counts, strict=True)):
        order = packed_name(linear, index, ORDER)
        ordered = tensors[order] if order in tensors else None  # noqa: SIM401 (get of a lazy mapping)
        data = tensors[packed_name(linear, index, form)]
        parts.append(PackedPart(form, data, count, ordered))
    return parts
