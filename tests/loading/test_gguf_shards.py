"""Models in several GGUF files: any shard loads all, and sets that do not fit are told."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.build.default_drafts import bundled_drafts
from paceline.core.errors import ModelLoadError
from paceline.loading.checkpoint import load_checkpoint
from paceline.loading.gguf.choice import is_later_shard, shard_name, sibling_shards
from paceline.loading.safetensors_files import stored_names
from tests.arrays import same
from tests.loading.gguf_writing import convert

SPLIT = ("split.no", "split.count", "split.tensors.count")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("shards")
    model = convert("llama-biased", folder / "m.gguf", shard_tensors=14)
    return folder, model


@pytest.fixture
def shards(written: tuple[Path, Any], tmp_path: Path) -> list[Path]:
    """Copies of the shards, which a test may damage."""
    copies = [Path(shutil.copy(path, tmp_path)) for path in sorted(written[0].glob("m-*.gguf"))]
    assert len(copies) == 3
    return copies


@pytest.mark.parametrize("load_format", ["mmap", "memory"])
@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_shard_loads_all(
    written: tuple[Path, Any], shards: list[Path], named: int, load_format: str
) -> None:
    checkpoint = load_checkpoint(shards[named], load_format=load_format)
    state = written[1].state_dict()
    assert set(checkpoint.tensors) == set(state)
    for name, expected in state.items():
        assert same(checkpoint.tensors[name], expected), name
    assert set(stored_names(shards[named])) == set(state)


@pytest.mark.parametrize(("gone", "named"), [(0, 1), (1, 0), (2, 0)])
def test_a_missing_shard_is_named(shards: list[Path], gone: int, named: int) -> None:
    shards[gone].unlink()
    with pytest.raises(ModelLoadError, match=f"lacks m-0000{gone + 1}-of-00003.gguf of the 3"):
        load_checkpoint(shards[named])
    assert bundled_drafts(str(shards[named])) == ()


def test_a_shard_under_another_name_is_told(shards: list[Path]) -> None:
    other = shards[1].rename(shards[1].with_name("model.gguf"))
    with pytest.raises(ModelLoadError, match=r"shard 2 of 3: its name has to end in -00002-of"):
        load_checkpoint(other)


def test_a_shard_in_anothers_place_is_told(shards: list[Path]) -> None:
    shutil.copy(shards[1], shards[2])
    with pytest.raises(ModelLoadError, match=r"split.no = 1, and the other shards need 2"):
        load_checkpoint(shards[0])


def test_shards_of_two_models_are_told(shards: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    more = {"more": np.zeros(4)}
    convert("llama-biased", tmp_path / "other" / "m.gguf", shard_tensors=14, extra_tensors=more)
    shutil.copy(tmp_path / "other" / "m-00003-of-00003.gguf", shards[2])
    with pytest.raises(ModelLoadError, match=r"split.tensors.count = \d+, and the other shards"):
        load_checkpoint(shards[0])


def test_a_doubled_tensor_is_told(shards: list[Path]) -> None:
    edit_number(shutil.copy(shards[1], shards[2]), "split.no", 2)
    with pytest.raises(ModelLoadError, match=r"is in .*00003.* and in a shard before it"):
        load_checkpoint(shards[0])


def edit_number(path: str | Path, key: str, value: int) -> None:
    """Give a whole number in the metadata another value."""
    data = bytearray(Path(path).read_bytes())
    place = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)
    (kind,) = struct.unpack_from("<I", data, place)
    struct.pack_into({2: "<H", 5: "<i"}[kind], data, place + 4, value)
    Path(path).write_bytes(data)


@pytest.mark.parametrize(
    ("key", "value"),
    [("split.no", 7), ("split.count", 2), ("split.count", 65535), ("split.tensors.count", -1)],
)
@pytest.mark.parametrize("damaged", [0, 1])
def test_damaged_counts(shards: list[Path], key: str, value: int, damaged: int) -> None:
    edit_number(shards[damaged], key, value)
    with pytest.raises(ModelLoadError, match=r"split|shard"):
        load_checkpoint(shards[0])


def test_a_wrong_total_in_all_shards_is_told(shards: list[Path]) -> None:
    for shard in shards:
        edit_number(shard, "split.tensors.count", 99)
    with pytest.raises(ModelLoadError, match=r"tensors, and split.tensors.count announces 99"):
        load_checkpoint(shards[0])


def test_a_truncated_shard_is_named(shards: list[Path]) -> None:
    shards[2].write_bytes(shards[2].read_bytes()[:-4000])
    with pytest.raises(ModelLoadError, match=r"00003-of-00003.gguf is truncated"):
        load_checkpoint(shards[0])


@pytest.mark.parametrize(
    "name",
    [
        "m.gguf",
        "m-1-of-3.gguf",
        "m-00004-of-00003.gguf",
        "m-00000-of-00003.gguf",
        "m-00001-of-99999.gguf",
    ],
)
def test_names_that_are_no_shards(name: str) -> None:
    assert shard_name(name) is None
    assert sibling_shards(Path(name)) == [Path(name)]
    assert not is_later_shard(Path(name))


def test_siblings_keep_the_folder_and_the_ending() -> None:
    path = Path("a/b-00002-of-00002.GGUF")
    assert sibling_shards(path) == [Path("a/b-00001-of-00002.GGUF"), path]
    assert is_later_shard(path)
