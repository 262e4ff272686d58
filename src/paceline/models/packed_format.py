"""What the files of a folder that ``paceline convert`` wrote say of themselves. Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import PACKED_DTYPES
from paceline.errors import ModelLoadError

FORMAT, VERSION = "paceline-packed", "2"


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


def packed_format(files: Sequence[Mapping[str, str]], where: Path) -> PackedFormat | None:
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
