"""What is picked of stored tensors: matrices of stacks, rows and columns, and transposes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.core.errors import ModelLoadError
from paceline.loading.safetensors_files import SafetensorsFolder
from paceline.tensors.stored import Place, PlacedTensors, renamed

STACK = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)
ORDER = np.array([2, 0, 3, 1])
PLACES = {
    "matrix of a stack": (Place("stack", 1, total=2), STACK[1]),
    "some of its rows": (Place("stack", 1, slice(0, None, 2)), STACK[1, ::2]),
    "its columns, transposed": (
        Place("stack", 0, columns=slice(1, None, 2), transposed=True),
        STACK[0, :, 1::2].T,
    ),
    "rows": (Place("matrix", rows=np.array([2, 0]), total=3), MATRIX[[2, 0]]),
    "rows, transposed": (Place("matrix", rows=slice(1, 3), transposed=True), MATRIX[1:3].T),
    "columns": (Place("matrix", columns=ORDER), MATRIX[:, ORDER]),
    "whole": (Place("matrix"), MATRIX),
}


@pytest.fixture
def stored(tmp_path: Path) -> SafetensorsFolder:
    save_file({"stack": STACK, "matrix": MATRIX}, tmp_path / "model.safetensors")
    return SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("name", PLACES)
def test_parts_as_floats_and_as_stored(name: str, stored: SafetensorsFolder) -> None:
    place, wanted = PLACES[name]
    tensors = PlacedTensors(stored, {"part": place})
    assert np.array_equal(tensors["part"], wanted)
    assert tensors.shape_of("part") == wanted.shape
    assert np.array_equal(tensors.rows("part", 1, 2), wanted[1:2])
    kept = tensors.as_stored("part")
    if kept is not None:
        floats, order = kept.rows.view(np.float32), kept.order
        by_input = floats if order is None else floats[:, np.argsort(order)]
        assert np.array_equal(by_input, wanted)
    assert (tensors.file_part("part") is not None) == (name == "whole")


def test_as_many_rows_and_matrices_as_the_configuration_needs(stored: SafetensorsFolder) -> None:
    places = {"rows": Place("matrix", rows=ORDER, total=4), "one": Place("stack", 0, total=3)}
    tensors = PlacedTensors(stored, places)
    for read in (tensors.__getitem__, tensors.as_stored):
        with pytest.raises(ModelLoadError, match="matrix has 3 rows; the configuration needs 4"):
            read("rows")
        with pytest.raises(ModelLoadError, match="stack has 2 matrices; the configuration needs 3"):
            read("one")


def test_what_was_left_out_is_not_found_below(stored: SafetensorsFolder) -> None:
    """Another layer may have the name; the error says which checkpoint lacks the tensor."""
    for tensors in (
        renamed(stored, {"new": "stack"}),
        renamed(stored, {"matrix": "matrix"}).only([]),
    ):
        for read in (tensors.__getitem__, tensors.as_stored, tensors.shape_of, tensors.type_of):
            with pytest.raises(ModelLoadError, match=r"checkpoint in .* has no tensor matrix"):
                read("matrix")


def test_bytes_are_those_of_what_is_kept(stored: SafetensorsFolder) -> None:
    parts = {"first": Place("stack", 0), "second": Place("stack", 1)}
    assert PlacedTensors(stored, parts).num_bytes() == STACK.nbytes
    assert renamed(stored, {"new": "matrix"}).num_bytes() == MATRIX.nbytes
