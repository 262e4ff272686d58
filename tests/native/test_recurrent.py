"""The kernels of recurrent layers against float64, and their bits in every order of reading a text.

A text's results and its state must have the same bits whether it is read row by row, in chunks, or
as the accepted paths of trees, alone or with others, by any number of threads. Slots and entries of
logs that hold nothing are NaN.
"""

from __future__ import annotations

import numpy as np
import pytest

import paceline._native as native
from tests.native.recurrences import (
    Conv,
    Kind,
    Memory,
    Recurrence,
    Span,
    Text,
    chunk,
    silu,
    tree,
)

KINDS: dict[str, Kind] = {
    "delta": Recurrence(True, heads=4, groups=2, key_dim=32, value_dim=48),
    "delta_odd": Recurrence(True, heads=3, groups=3, key_dim=13, value_dim=21),
    "mamba2": Recurrence(False, heads=4, groups=2, key_dim=16, value_dim=32),
    "mamba2_odd": Recurrence(False, 6, 1, key_dim=7, value_dim=40, least=0.5, most=1.5),
    "conv": Conv(80, kernel=4, silu=True),
    "conv_odd": Conv(37, kernel=3, silu=False),
    "conv_of_one": Conv(16, kernel=1, silu=False),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def read_alone(kind: Kind, text: Text) -> tuple[np.ndarray, np.ndarray]:
    """Results and state of a text that is read in one chunk."""
    whole, memory = Text(text.rows, [0, 1], 0), Memory(kind)
    memory.start(whole)
    memory.step([whole], [chunk(whole, whole.length)])
    return np.stack(whole.results), memory.state(whole)


def text_of(kind: Kind, count: int, index: int = 0) -> Text:
    return Text(kind.rows(count, 100 + index), [2 * index, 2 * index + 1], index)


def assert_as_alone(kind: Kind, memory: Memory, text: Text) -> None:
    results, state = read_alone(kind, text)
    np.testing.assert_array_equal(np.stack(text.results), results)
    np.testing.assert_array_equal(memory.state(text), state)


@pytest.mark.usefixtures("isa")
@every_kind
def test_a_chain_and_a_tree_against_float64(kind: Kind) -> None:
    rng = np.random.default_rng(5)
    parents = [-1, *(int(rng.integers(0, row)) for row in range(1, 20))]
    for shape in (list(range(-1, 19)), parents):
        rows, memory, due = kind.rows(20, 3), kind.memory(), np.zeros(3, np.uint8)
        memory[0][2] = 0
        y = kind.run(rows, [(shape, 2, 2, 1, [], 0)], memory, due)
        exact = kind.exact(rows, shape)
        np.testing.assert_allclose(y, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


@pytest.mark.usefixtures("isa")
@every_kind
@pytest.mark.parametrize("size", [1, 2, 7])
def test_chunks(kind: Kind, size: int) -> None:
    text, memory = text_of(kind, 17), Memory(kind)
    memory.start(text)
    while text.read < text.length:
        memory.step([text], [chunk(text, size)])
    assert_as_alone(kind, memory, text)


@pytest.mark.usefixtures("isa")
@every_kind
@pytest.mark.parametrize("seed", range(6))
def test_accepted_paths_of_trees(kind: Kind, seed: int) -> None:
    rng = np.random.default_rng(seed)
    text, memory = text_of(kind, 25), Memory(kind)
    memory.start(text)
    memory.step([text], [chunk(text, 3)])
    while text.read < text.length:
        memory.step([text], [tree(text, kind, rng, certain=int(rng.integers(0, 3)))])
    assert_as_alone(kind, memory, text)


@pytest.mark.usefixtures("threads")
@every_kind
def test_with_other_texts(kind: Kind) -> None:
    rng = np.random.default_rng(8)
    texts, memory = [text_of(kind, 30 + i, i) for i in range(3)], Memory(kind)
    for text in texts:
        memory.start(text)
    while running := [text for text in texts if text.read < text.length]:
        running = [running[i] for i in rng.permutation(len(running))[: rng.integers(1, 4)]]
        drafts = [
            chunk(text, 4) if rng.random() < 0.3 else tree(text, kind, rng) for text in running
        ]
        memory.step(running, drafts)
    for text in texts:
        assert_as_alone(kind, memory, text)


@pytest.mark.usefixtures("isa")
@every_kind
def test_a_long_path_is_folded(kind: Kind) -> None:
    """More rows than one pass over a state adds."""
    text, memory = text_of(kind, 24), Memory(kind)
    memory.start(text)
    drafted = chunk(text, 24)
    drafted.certain = 0
    memory.step([text], [drafted])
    assert_as_alone(kind, memory, text)


@every_kind
def test_a_step_that_is_rolled_back_leaves_no_trace(kind: Kind) -> None:
    """Also one whose rows are not finite; and a path that was folded is not folded once more."""
    rng = np.random.default_rng(2)
    text, memory = text_of(kind, 12), Memory(kind)
    memory.start(text)
    while text.read < text.length:
        draft = tree(text, kind, rng)
        bad = {name: np.full_like(x, np.nan) for name, x in draft.rows.items()}
        memory.due[0] = bool(text.path)
        spans = [(draft.parents, text.slots[0], text.slots[0], 0, text.path, 0)]
        kind.run(bad, spans, memory.arrays, memory.due)
        text.path = []
        memory.step([text], [draft])
    assert_as_alone(kind, memory, text)


@every_kind
def test_values_that_are_not_finite_stay_below_their_row(kind: Kind) -> None:
    parents = [-1, 0, 0, 1, 2, 2, 4]
    rows = kind.rows(len(parents), 4)
    bad = {name: x.copy() for name, x in rows.items()}
    for x in bad.values():
        x[2] = np.nan

    def run(given: dict[str, np.ndarray]) -> np.ndarray:
        memory, due = kind.memory(), np.zeros(3, np.uint8)
        memory[0][0] = 0
        return kind.run(given, [(parents, 0, 0, 0, [], 0)], memory, due)

    good, got = run(rows), run(bad)
    apart = [0, 1, 3]
    np.testing.assert_array_equal(got[apart], good[apart])
    assert not np.isfinite(got[2]).any()


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (([-1, 1], 0, 0, 0, [], 0), "parent"),
        (([-1, -2], 0, 0, 0, [], 0), "parent"),
        (([-1, 0], 6, 0, 0, [], 0), "slot"),
        (([-1, 0], 0, -1, 0, [], 0), "slot"),
        (([-1, 0], 0, 0, 3, [], 0), "lane"),
        (([-1, 0], 0, 0, 0, [24], 0), "path"),
        (([-1, 0, 0], 0, 1, 0, [], 2), "certain"),
        (([-1, 0], 0, 0, 0, [], 3), "rows"),
    ],
)
def test_spans_are_checked(span: Span, message: str) -> None:
    kind = KINDS["conv"]
    with pytest.raises(ValueError, match=message):
        kind.run(kind.rows(len(span[0]), 1), [span], kind.memory(), np.zeros(3, np.uint8))


# --- gates ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("width", "groups"), [(64, 1), (64, 4), (48, 2), (30, 3), (24, 3), (7, 1)])
@pytest.mark.parametrize("kind", ["before_gate", "after_gate", "none"])
def test_gated_norm(kind: str, width: int, groups: int) -> None:
    rng = np.random.default_rng(width)
    x, gate = rng.normal(size=(2, 5, width)).astype(np.float32)
    weight = rng.normal(size=width).astype(np.float32)

    def norm(rows: np.ndarray) -> np.ndarray:
        parts = rows.reshape(5, groups, -1)
        scale = 1 / np.sqrt((parts**2).mean(axis=2, keepdims=True) + 1e-6)
        return (parts * scale).reshape(5, -1) * weight

    wide, by = x.astype(np.float64), silu(gate.astype(np.float64))
    exact = {
        "before_gate": lambda: norm(wide) * by,
        "after_gate": lambda: norm(wide * by),
        "none": lambda: wide * by,
    }[kind]()
    got = native.gated_norm(x, gate, None if kind == "none" else weight, kind, 1e-6, groups)
    np.testing.assert_allclose(got, exact, rtol=3e-6, atol=1e-6)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("width", [7, 16, 100])
def test_gate(width: int) -> None:
    x, by = np.random.default_rng(width).normal(size=(2, 3, width)).astype(np.float32) * 5
    exact = x.astype(np.float64) / (1 + np.exp(-by.astype(np.float64)))
    np.testing.assert_allclose(native.gate(x, by), exact, rtol=1e-6)
