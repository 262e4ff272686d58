"""Trace files: what is written is read, and damage is an error instead of a surprise."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import TraceError
from paceline.request.traces import Trace, TraceWriter, read_meta, read_traces

META = {"model": "toy", "params": {"temperature": 0.0}}


def make_trace(index: int, prompt: list[int], output: list[int], k: int = 2) -> Trace:
    rng = np.random.default_rng(index)
    return Trace(
        prompt_index=index,
        prompt_len=len(prompt),
        token_ids=np.array([*prompt, *output], np.int32),
        logprobs=rng.normal(size=len(output)).astype(np.float32),
        top_ids=rng.integers(0, 9, (len(output), k)).astype(np.int32),
        top_logprobs=rng.normal(size=(len(output), k)).astype(np.float32),
    )


TRACES = [make_trace(0, [1, 2], [3]), make_trace(1, [4], [5, 6, 7]), make_trace(2, [8, 8], [9])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = TraceWriter(tmp_path / "traces", META)
    writer.write_shard(TRACES[:2])
    writer.write_shard(TRACES[2:])
    return writer.folder


def test_round_trip(folder: Path) -> None:
    found = list(read_traces(folder))
    assert len(found) == len(TRACES)
    for one, other in zip(found, TRACES, strict=True):
        assert (one.prompt_index, one.prompt_len) == (other.prompt_index, other.prompt_len)
        for name in ("token_ids", "logprobs", "top_ids", "top_logprobs", "output_token_ids"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert read_meta(folder).items() >= META.items()


def test_experts_are_kept_where_they_are_known(tmp_path: Path) -> None:
    """Shards of older versions have none."""
    read = np.arange(15, dtype=np.int32).reshape(3, 5)
    writer = TraceWriter(tmp_path / "traces", META)
    writer.write_shard([dataclasses.replace(TRACES[1], experts_read=read)])
    writer.write_shard(TRACES[2:])
    known, older = read_traces(writer.folder)
    np.testing.assert_array_equal(known.experts_read, read)
    assert older.experts_read is None
    damaged = dict(np.load(writer.folder / "shard-00000.npz"))
    damaged["experts_read"] = read[:2]
    np.savez(writer.folder / "shard-00000.npz", **damaged)
    with pytest.raises(TraceError, match="not one row of experts per output token"):
        list(read_traces(writer.folder))


def test_a_writer_continues_after_what_is_whole(folder: Path) -> None:
    assert TraceWriter(folder, META).num_shards == 2
    (folder / "shard-00001.npz").write_bytes(b"PK")
    (folder / "shard-00002.partial").write_bytes(b"")
    writer = TraceWriter(folder, META)
    assert writer.num_shards == 1
    writer.write_shard(TRACES[2:])
    assert [trace.prompt_index for trace in read_traces(folder)] == [0, 1, 2]


def test_a_model_may_be_moved_while_traces_are_added(tmp_path: Path) -> None:
    for source in ("/somewhere", "/elsewhere"):
        TraceWriter(tmp_path / "new", {**META, "model_source": source})
    assert read_meta(tmp_path / "new")["model_source"] == "/somewhere"


def test_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(TraceError, match="params is"):
        TraceWriter(folder, {**META, "params": {"temperature": 1.0}})
    with pytest.raises(TraceError, match="seed is None there"):
        TraceWriter(folder, {**META, "seed": 1})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "paceline-traces", "format_version": 99}', "[" * 100_000]
)
def test_bad_meta(folder: Path, text: str) -> None:
    (folder / "meta.json").write_text(text)
    with pytest.raises(TraceError, match=r"meta\.json"):
        list(read_traces(folder))


def arrays_of(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def with_change(folder: Path, **changes: Any) -> None:
    path = folder / "shard-00000.npz"
    arrays = {**arrays_of(path), **changes}
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})


I4 = np.int32


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": np.array([1, 2, 3, 4, 5, 6], I4)}, "offsets"),
        ({"token_ids": np.array([1, -2, 3, 4, 5, 6, 7], I4)}, "negative"),
        ({"token_ids": np.arange(7, dtype=np.int64)}, "int64"),
        ({"token_ids": np.array([{}] * 7, object)}, "object"),
        ({"token_ids": np.zeros((7, 1), I4)}, "shape"),
        ({"offsets": np.array([0, 9, 7], I4)}, "offsets"),
        ({"offsets": np.array([0, 7], I4)}, "number of traces"),
        ({"offsets": np.array([], I4)}, "number of traces"),
        ({"prompt_lens": np.array([2, 0], I4)}, "prompt is empty"),
        ({"prompt_lens": np.array([2, 9], I4)}, "longer than"),
        ({"prompt_lens": np.array([1, 1], I4)}, "number of rows"),
        ({"row_offsets": np.array([0, 2, 4], I4)}, "number of rows"),
        ({"top_ids": np.zeros((4, 3), I4)}, "differ in shape"),
        ({"top_ids": np.zeros((3, 2), I4), "top_logprobs": np.zeros((3, 2), "<f4")}, "per output"),
        ({"top_ids": np.full((4, 2), -1, I4)}, "negative"),
        ({"top_ids": np.asfortranarray(np.zeros((4, 2), I4))}, "top_ids"),
    ],
)
def test_a_damaged_shard(folder: Path, changes: dict[str, Any], problem: str) -> None:
    with_change(folder, **changes)
    with pytest.raises(TraceError, match=problem):
        list(read_traces(folder))


def test_a_shard_that_claims_more_than_it_has(folder: Path) -> None:
    path = folder / "shard-00000.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<i4", "fortran_order": False, "shape": (1 << 60,)}
    )
    members = {f"{name}.npy": None for name in arrays_of(path)}
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in members}
    members["token_ids.npy"] = header.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(TraceError, match="states"):
        list(read_traces(folder))


def test_a_compressed_shard_is_refused(folder: Path) -> None:
    path = folder / "shard-00000.npz"
    np.savez_compressed(path, **arrays_of(path))
    with pytest.raises(TraceError, match="compressed"):
        list(read_traces(folder))


@pytest.mark.parametrize("cut", range(0, 1400, 100))
def test_a_truncated_shard(folder: Path, cut: int) -> None:
    path = folder / "shard-00000.npz"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TraceError, match="damaged"):
        list(read_traces(folder))


def test_older_traces_without_a_models_fingerprint_are_continued(folder: Path) -> None:
    wanted = META | {"model_fingerprint": "x"}
    assert TraceWriter(folder, wanted).num_shards == 2
    assert "model_fingerprint" not in read_meta(folder)
    other = TraceWriter(folder.parent / "other", wanted).folder
    with pytest.raises(TraceError, match="model_fingerprint is 'x' there and 'y' here"):
        TraceWriter(other, META | {"model_fingerprint": "y"})


def test_meta_is_json(folder: Path) -> None:
    assert json.loads((folder / "meta.json").read_text())["format_version"] == 1
