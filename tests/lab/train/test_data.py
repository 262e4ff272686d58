"""Files to documents to windows: nothing lost, nothing twice, nothing held out is trained on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import TrainingError
from paceline_lab.train.data import (
    STDLIB_EXCLUDE,
    TokenDocuments,
    Windows,
    pack,
    read_documents,
    sample_documents,
    split_held_out,
    split_passages,
    window_count,
)

SEPARATOR = 0


def _documents(count: int = 37, seed: int = 0) -> TokenDocuments:
    """Documents in which every token occurs once."""
    lengths = np.random.default_rng(seed).integers(1, 40, count)
    ids = np.arange(1, lengths.sum() + 1, dtype=np.int32)
    return TokenDocuments.of(np.split(ids, np.cumsum(lengths)[:-1]))


def test_each_kind_of_file_becomes_documents(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "sub" / "b.txt").write_bytes(b"caf\xe9\n")  # not UTF-8
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n\n{"prompt": "two"}\n')
    (tmp_path / "d.json").write_text(json.dumps(["three", {"content": "four"}]))
    (tmp_path / "e.bin").write_bytes(b"\0")
    (tmp_path / "skip.py").write_text("no")
    texts = [d.text for d in read_documents([tmp_path], exclude=("skip*",))]
    assert texts == ["x = 1\n", "one", "two", "three", "four", "caf\ufffd\n"]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", "{"), ("a.jsonl", '{"other": 1}'), ("a.json", '{"text": "x"}'), ("a.json", "[1]")],
)
def test_a_file_without_texts_is_refused_where_it_is_named(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(TrainingError, match=name):
        list(read_documents([tmp_path / name]))


def test_json_files_without_texts_are_skipped_in_a_folder_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "b.json").write_text('{"name": "package"}')
    (tmp_path / "c.jsonl").write_text('{"event": "no text"}\n{"text": "left out"}')
    (tmp_path / "d.json").write_text('["two"]')
    for number in range(4):
        (tmp_path / f"e{number}.json").write_text("{")
    assert [d.text for d in read_documents([tmp_path])] == ["one", "two"]
    (warning,) = caplog.messages
    assert warning.startswith(f"skipped: {tmp_path / 'b.json'} is no JSON list of strings")
    assert f"{tmp_path / 'c.jsonl'}:1" in warning
    assert warning.endswith("; and 1 more")


def test_a_bad_row_behind_texts_is_an_error_in_a_folder_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{')
    with pytest.raises(TrainingError, match=r"a\.jsonl:2 is not JSON"):
        list(read_documents([tmp_path]))


def test_a_row_is_a_line_whatever_its_text_has(tmp_path: Path) -> None:
    """U+2028, U+2029 and U+0085 stand unescaped in JSON, and Windows' editors begin with a mark."""
    text = "one\u2028two\u2029three\u0085four"
    row = json.dumps({"text": text}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(f"{row}\n{row}\n", encoding="utf-8-sig")
    (tmp_path / "b.json").write_text(f"[{row}]", encoding="utf-8-sig")
    (tmp_path / "c.md").write_text("five", encoding="utf-8-sig")
    assert [d.text for d in read_documents([tmp_path])] == [text] * 3 + ["five"]


def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('"fine"\n{"text": "x\\ud800"}\n')
    with pytest.raises(TrainingError, match=r"a\.jsonl:2: .* character 1 is U\+D800"):
        list(read_documents([tmp_path]))


def test_what_the_system_does_not_let_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"cannot read .*too long"):
        list(read_documents([tmp_path / ("x" * 300)]))


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no file or folder"):
        list(read_documents([tmp_path / "nothing"]))


def test_the_standard_library_comes_without_its_tests() -> None:
    sources = [d.source for d in read_documents([], stdlib=True)]
    assert len(sources) > 200
    assert not any("/test/" in s or "site-packages" in s for s in sources)
    assert STDLIB_EXCLUDE


def test_passages_joined_are_the_text() -> None:
    text = "\n\n".join(f"paragraph {i} " + "word " * (i % 50) for i in range(400))
    passages = split_passages(text, 500)
    assert "".join(passages) == text
    assert max(map(len, passages)) <= 500
    assert split_passages("x" * 1200, 500) == ["x" * 500, "x" * 500, "x" * 200]


def test_split_is_by_document_and_disjoint() -> None:
    documents = _documents()
    train, held_out = split_held_out(documents, 150, seed=3)
    assert 0 < len(held_out.tokens) <= 150
    assert not set(train.tokens) & set(held_out.tokens)
    assert sorted([*train.tokens, *held_out.tokens]) == list(documents.tokens)
    again = split_held_out(documents, 150, seed=3)[1]
    assert list(again.tokens) == list(held_out.tokens)


def test_a_sample_is_of_whole_documents() -> None:
    documents = _documents()
    sample = sample_documents(documents, 100, seed=0)
    assert 100 <= len(sample.tokens) < 140
    assert {tuple(d) for d in sample} <= {tuple(d) for d in documents}
    assert sample_documents(documents, 0, seed=0) is documents
    assert sample_documents(documents, 10**6, seed=0) is documents


def test_too_much_held_out_is_refused() -> None:
    documents = _documents()
    with pytest.raises(TrainingError, match="more than half"):
        split_held_out(documents, len(documents.tokens), seed=0)
    with pytest.raises(TrainingError, match="none can be held out"):
        split_held_out(TokenDocuments.of([np.arange(100, dtype=np.int32)]), 40, seed=0)


@pytest.mark.parametrize("seq_len", [2, 7, 16, 5000])
def test_packing_predicts_every_token_once(seq_len: int) -> None:
    documents = _documents()
    order = np.random.default_rng(1).permutation(len(documents))
    windows = pack(documents, order, seq_len, SEPARATOR)
    assert windows.shape == (window_count(documents, seq_len), seq_len + 1)
    predicted = windows[:, 1:].reshape(-1)
    assert sorted(predicted[predicted != SEPARATOR]) == list(documents.tokens)
    separators = int((predicted == SEPARATOR).sum())
    assert len(documents) <= separators < len(documents) + seq_len
    assert list(windows[1:, 0]) == list(windows[:-1, -1])


def test_windows_are_a_function_of_their_number() -> None:
    documents = _documents()
    windows = Windows(documents, 8, SEPARATOR, seed=5)
    whole = windows.take(0, 2 * windows.per_epoch)
    fresh = Windows(documents, 8, SEPARATOR, seed=5)
    at = windows.per_epoch - 3
    assert (fresh.take(at, 7) == whole[at : at + 7]).all()
    first, second = whole[: windows.per_epoch, 1:], whole[windows.per_epoch :, 1:]
    assert sorted(first.reshape(-1)) == sorted(second.reshape(-1))
    assert not (first == second).all()


def test_no_documents_are_refused() -> None:
    with pytest.raises(TrainingError, match="no tokens"):
        Windows(TokenDocuments.of([]), 8, SEPARATOR, seed=0)
