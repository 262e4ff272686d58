"""Hybrid models: their states in any chunking, tree and company, and after a step that fails."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from paceline.backends.rows.reference import ReferenceOps
from paceline.models.threads import set_num_threads
from paceline.request.span import DraftTree, Span
from tests.arrays import same
from tests.models.reference import HYBRIDS, VOCAB, Driver, save_model
from tests.quick import in_turns, once

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
FAMILIES = [*HYBRIDS]


def driver(path: Path, dtype: str = "float32") -> Driver:
    return Driver.of(path, max_len=64, ops=ReferenceOps(dtype))


def chain(tokens: list[int]) -> DraftTree:
    return DraftTree.chain(tokens, [1.0] * len(tokens), "x")


@pytest.mark.parametrize(("family", "dtype"), in_turns(FAMILIES, ["float32", "int8"]))
def test_chunks_trees_and_threads_do_not_change_a_bit(
    tmp_path: Path, family: str, dtype: str
) -> None:
    save_model(family, tmp_path)
    whole = driver(tmp_path, dtype)
    truth = whole.chunk(TOKENS)
    draft = DraftTree([5, TOKENS[21], 7, TOKENS[22]], [-1, -1, 0, 1], [1.0] * 4, ["x"] * 4)
    for count, cuts in ((1, [0, 1, 17, 20]), (2, [0, 5, 6, 20])):
        set_num_threads(count)
        parts = whole.again()
        chunks = [parts.chunk(TOKENS[a:b]) for a, b in itertools.pairwise(cuts)]
        chunks.append(parts.run(draft, TOKENS[20], path=[0, 2, 4])[[0, 2, 4]])
        chunks.append(parts.chunk(TOKENS[23:]))
        assert same(torch.cat(chunks), truth)


@pytest.mark.parametrize(("family", "certain"), in_turns(FAMILIES, [0, 1, 3, 19, 20]))
def test_what_is_certain_changes_no_bit(tmp_path: Path, family: str, certain: int) -> None:
    """Rows that go into the state at once and those that are logged give the same numbers."""
    save_model(family, tmp_path)
    parts = driver(tmp_path)
    truth = parts.again().chunk(TOKENS)
    first = parts.run(chain(TOKENS[1:20]), TOKENS[0], certain=certain)
    parts.kv.poison_free()
    second = parts.run(chain(TOKENS[21:30]), TOKENS[20], certain=min(certain, 5))
    parts.kv.poison_free()
    assert same(torch.cat([first, second, parts.chunk(TOKENS[30:])]), truth)


@pytest.mark.parametrize(("family", "layers_run", "certain"), once(FAMILIES, [0, 2, 4], [0, 4]))
def test_a_step_that_fails_in_any_layer_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, certain: int, layers_run: int
) -> None:
    """Layers before the failure have folded what was due; those after it have not."""
    save_model(family, tmp_path)
    parts = driver(tmp_path)
    truth = parts.again().chunk(TOKENS)
    parts.run(DraftTree([5, TOKENS[1]], [-1, -1], [1.0] * 2, ["x"] * 2), TOKENS[0], path=[0, 2])
    assert parts.kv.reserve(0, 5, certain)
    span = Span.tree(0, 2, 7, chain([9, 9, 9, 9]))
    linear, count = ReferenceOps.row_linear, itertools.count()

    def fails(*args: object) -> object:
        if next(count) == 2 * layers_run:
            raise RuntimeError("no memory")
        return linear(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceOps, "row_linear", fails)
        with pytest.raises(RuntimeError):
            parts.runner.forward(parts.runner.pack([span]))
    parts.kv.rollback(0)
    parts.kv.poison_free()
    assert same(parts.run(chain(TOKENS[3:20]), TOKENS[2], certain=certain), truth[2:20])
    assert same(parts.chunk(TOKENS[20:]), truth[20:])


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_in_one_forward_and_forks_of_them(tmp_path: Path, family: str) -> None:
    save_model(family, tmp_path)
    parts = driver(tmp_path)
    truth, other = parts.again().chunk(TOKENS), parts.again().chunk(TOKENS[::-1])
    kv, runner = parts.kv, parts.runner
    kv.open(1)
    assert kv.reserve(0, 8, 7)
    assert kv.reserve(1, 5, 5)
    spans = [
        Span(0, 0, TOKENS[:8], range(-1, 7), range(8)),
        Span(1, 0, TOKENS[::-1][:5], range(-1, 4), range(5)),
    ]
    logits = torch.from_numpy(runner.forward(runner.pack(spans)).logits)
    assert same(logits, torch.cat([truth[:8], other[:5]]))
    kv.commit(0, range(8))
    kv.commit(1, range(5))
    kv.free(1)
    assert kv.can_fork(0, 7)
    assert not kv.can_fork(0, 8)  # its last token is not in the state yet
    assert kv.reserve(0, 1)
    assert kv.fork(0, 2, 7)
    kv.poison_free()
    assert kv.reserve(2, 2)
    spans = [
        Span(0, 8, TOKENS[8:9], [-1], [0]),
        Span(2, 7, [TOKENS[7], 5], [-1, 0], [0]),
    ]
    logits = torch.from_numpy(runner.forward(runner.pack(spans)).logits)
    assert same(logits, truth[[8, 7]])


def test_a_configuration_need_not_speak_of_experts_where_there_are_none(tmp_path: Path) -> None:
    save_model("nemotron-h", tmp_path)
    truth, path = driver(tmp_path).chunk(TOKENS), tmp_path / "config.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({key: told[key] for key in told if key != "n_routed_experts"}))
    assert same(driver(tmp_path).chunk(TOKENS), truth)
