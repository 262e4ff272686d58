"""The attention kernels against a float64 softmax, and the independence of a row's bits."""

import functools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from paceline.backends.rows.tensor_memory import DTYPES, decode, encode
from tests.quick import in_turns

native = pytest.importorskip("paceline._native")

pytestmark = pytest.mark.usefixtures("isa")
TILE = 16
NAN = float("nan")


def stored(x, kv):
    """The elements of heads [.., head_dim] as the cache holds them."""
    elements = encode(torch.from_numpy(np.array(x, np.float32)), DTYPES[kv])
    return (elements.view(torch.uint16) if kv == "bfloat16" else elements).numpy()


def numbers(elements, head_dim):
    """The heads that elements hold."""
    tensor = torch.from_numpy(np.array(elements))
    tensor = tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
    return decode(tensor, head_dim).numpy()


@dataclass(frozen=True)
class Heads:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    kv: str = "float32"
    window: int = 0
    softcap: float = 0.0
    magnitude: float = 1.0  # of the queries

    @property
    def scale(self):
        return self.head_dim**-0.5


@dataclass
class Context:
    """Logical keys and values of `length` positions, and queries for any of them."""

    shape: Heads
    length: int
    seed: int = 0
    k: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)
    q: np.ndarray = field(init=False)

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        s = self.shape
        self.k = rng.standard_normal((self.length, s.kv_heads, s.head_dim), np.float32)
        self.v = rng.standard_normal((self.length, s.kv_heads, s.head_dim), np.float32)
        q = rng.standard_normal((self.length, s.heads, s.head_dim), np.float32)
        self.q = q * np.float32(s.magnitude)

    def references(self, positions):
        """[rows, heads, head_dim] of the rows at `positions`, in float64."""
        s = self.shape
        held = [numbers(stored(x, s.kv), s.head_dim).astype(np.float64) for x in (self.k, self.v)]
        keys, values = (np.repeat(x, s.heads // s.kv_heads, axis=1) for x in held)
        return np.stack([self._reference(p, keys, values) for p in positions])

    def _reference(self, position, keys, values):
        s = self.shape
        seen = slice(max(0, position - s.window + 1) if s.window else 0, position + 1)
        q = self.q[position].astype(np.float64)
        scores = np.einsum("hd,khd->hk", q, keys[seen]) * s.scale
        if s.softcap:
            scores = s.softcap * np.tanh(scores / s.softcap)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return np.einsum("hk,khd->hd", weights, values[seen])

    @functools.cached_property
    def elements(self):
        """Keys and values as a cache holds them."""
        return elements(self.shape, self.k, self.v)


def elements(shape, k, v):
    """What a cache holds of keys and values [.., head_dim]; the values' numbers are padded."""
    padded = np.pad(v, [(0, 0)] * (np.ndim(v) - 1) + [(0, -shape.head_dim % TILE)])
    return stored(k, shape.kv), stored(padded, shape.kv)


@functools.cache
def poison(shape):
    """What a cache holds where nothing was written: a key and a value."""
    return elements(shape, *np.full((2, shape.head_dim), NAN))


class Cache:
    """One layer's cache with randomly placed blocks, every slot poisoned until it is written."""

    def __init__(self, shape, slots, seed=0):
        rng = np.random.default_rng(seed)
        self.shape = shape
        needed = -(-slots // TILE)
        total = needed + 3
        self.blocks = rng.permutation(total)[:needed].astype(np.int32)
        key, value = poison(shape)
        self.k = np.empty((total, shape.kv_heads, len(key), TILE), key.dtype)
        self.v = np.empty((total, shape.kv_heads, TILE, len(value)), value.dtype)
        self.k[:], self.v[:] = key[:, None], value

    def write(self, slots, context, rows=None):
        """Put rows of a context into slots, the same if no others are told."""
        slots = np.asarray(slots)
        rows = slots if rows is None else rows
        block, lane = self.blocks[slots // TILE], slots % TILE
        keys, values = context.elements
        self.k[block, :, :, lane] = keys[rows]
        self.v[block, :, lane] = values[rows]
        return self

    def attend(self, q, start, positions, paths=None, rows_per_item=8):
        s = self.shape
        return native.attend(
            np.ascontiguousarray(q),
            self.k,
            self.v,
            self.blocks,
            start,
            np.asarray(positions, np.int32),
            [None] * len(positions) if paths is None else paths,
            s.scale,
            s.softcap,
            s.window,
            rows_per_item,
        )


def chain(context, first, last, seed=0, rows_per_item=8):
    """Rows first..last - 1 of the context, as one span of a fresh cache."""
    cache = Cache(context.shape, last, seed).write(range(last), context)
    rows = range(first, last)
    return cache.attend(context.q[first:last], first, rows, rows_per_item=rows_per_item)


def assert_same_bits(a, b):
    assert np.isfinite(a).all()
    np.testing.assert_array_equal(a.view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


SHAPES = [
    Heads(heads=2, kv_heads=2, head_dim=8),
    Heads(heads=3, kv_heads=1, head_dim=12),
    Heads(heads=9, kv_heads=3, head_dim=64),
    Heads(heads=4, kv_heads=4, head_dim=64, kv="bfloat16"),
    Heads(heads=4, kv_heads=2, head_dim=64, kv="float16"),
    Heads(heads=6, kv_heads=2, head_dim=64, kv="int8"),
    Heads(heads=10, kv_heads=2, head_dim=80, kv="int8", magnitude=4.0),
    Heads(heads=7, kv_heads=1, head_dim=36, kv="int8", window=100),
    Heads(heads=2, kv_heads=1, head_dim=256, kv="int8", softcap=5.0),
    Heads(heads=10, kv_heads=2, head_dim=80),
    Heads(heads=8, kv_heads=1, head_dim=128, kv="bfloat16"),
    Heads(heads=7, kv_heads=1, head_dim=40, kv="bfloat16", window=100),
    Heads(heads=6, kv_heads=1, head_dim=64, window=37),
    Heads(heads=4, kv_heads=2, head_dim=256, softcap=5.0, window=530),
    Heads(heads=12, kv_heads=1, head_dim=64, softcap=2.0, kv="bfloat16", magnitude=8.0),
]


@pytest.mark.parametrize(
    ("shape", "rows", "isa"),
    in_turns(SHAPES, [(0, 37), (505, 530), (1090, 1100)], native.isas()),
    indirect=["isa"],
)
def test_matches_a_softmax_in_float64(shape, rows):
    first, last = rows
    context = Context(shape, last)
    expected = context.references(range(first, last))
    np.testing.assert_allclose(chain(context, first, last), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "first", "isa"), in_turns(SHAPES, [0, 501, 1020], native.isas()), indirect=["isa"]
)
def test_a_row_does_not_depend_on_its_span(shape, first):
    """Any number of rows, of rows per item, any placement, one or two threads: equal bits."""
    last = first + 21
    context = Context(shape, last)
    whole = chain(context, first, last)
    for count in range(1, 10):
        begin = first + count
        part = chain(context, begin, begin + count, seed=count, rows_per_item=count)
        assert_same_bits(part, whole[count : 2 * count])
    assert_same_bits(chain(context, first, last, seed=77, rows_per_item=21), whole)
    assert_same_bits(chain(context, first, last, seed=78, rows_per_item=1), whole)
    native.set_threads(2)
    assert_same_bits(chain(context, first, last, seed=79, rows_per_item=3), whole)


def test_prefill_of_any_chunk_size_gives_equal_bits():
    context = Context(Heads(heads=2, kv_heads=1, head_dim=32), 560)
    cache = Cache(context.shape, 560).write(range(560), context)
    whole = cache.attend(context.q, 0, range(560), rows_per_item=64)
    for size in (16, 61, 200):
        for first in range(0, 560, size):
            rows = range(first, min(first + size, 560))
            part = cache.attend(context.q[first : rows.stop], first, rows)
            assert_same_bits(part, whole[first : rows.stop])


def random_tree(rng, nodes, branching):
    """Parents, each lower than its child; the higher `branching`, the wider."""
    parents = [-1]
    for node in range(1, nodes):
        back = 1 if rng.random() > branching else int(rng.integers(1, node + 1))
        parents.append(node - back)
    return parents


def paths_of(parents):
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


def check_tree(shape, start, parents, rng, rows_per_item):
    """Every node's bits equal those of its path as a chain elsewhere, siblings being NaN."""
    paths = paths_of(parents)
    nodes = len(parents)
    context = Context(shape, start + nodes, seed=int(rng.integers(1 << 30)))
    full = Cache(shape, start + nodes, seed=1).write(range(start + nodes), context)
    positions = [start + len(path) - 1 for path in paths]
    as_arrays = [np.array(path, np.int32) for path in paths]
    got = full.attend(context.q[start:], start, positions, as_arrays, rows_per_item)
    for node, path in enumerate(paths):
        logical = [*range(start), *(start + n for n in path)]
        last = len(logical)
        alone = Cache(shape, last, seed=2 + node).write(range(last), context, logical)
        expected = alone.attend(context.q[[start + node]], last - 1, [last - 1])
        assert_same_bits(got[[node]], expected)
        poisoned = Cache(shape, start + nodes, seed=3 + node).write(logical, context)
        rows = poisoned.attend(context.q[start:], start, positions, as_arrays, rows_per_item)
        assert_same_bits(rows[[node]], expected)


TREE_SHAPES = [
    Heads(heads=3, kv_heads=1, head_dim=24),
    Heads(heads=2, kv_heads=2, head_dim=16, kv="float16"),
    Heads(heads=3, kv_heads=1, head_dim=40, kv="int8", window=21),
    Heads(heads=8, kv_heads=1, head_dim=12, window=19),
    Heads(heads=2, kv_heads=1, head_dim=64, kv="bfloat16", softcap=3.0, window=3),
]


@pytest.mark.parametrize(
    ("offset", "shape", "isa"), in_turns(range(TILE), TREE_SHAPES, native.isas()), indirect=["isa"]
)
def test_a_tree_node_equals_its_path_as_a_chain(shape, offset):
    rng = np.random.default_rng(offset)
    for base, branching in ((0, 0.8), (32, 0.3), (496, 0.5)):
        nodes = int(rng.integers(2, 25))
        parents = random_tree(rng, nodes, branching)
        rows_per_item = int(rng.integers(1, 9))
        check_tree(shape, base + offset, parents, rng, rows_per_item)


def test_a_deep_tree_across_chunks_equals_its_paths():
    """A spine of even nodes, each with a leaf: far from its slots in logical order."""
    parents = [-1, *(max(0, node - 2 + node % 2) for node in range(1, 90))]
    check_tree(Heads(2, 1, 16), 470, parents, np.random.default_rng(5), 4)


def test_straight_paths_equal_no_paths():
    context = Context(Heads(), 540)
    cache = Cache(context.shape, 540).write(range(540), context)
    rows = range(500, 540)
    paths = [np.arange(p - 500 + 1, dtype=np.int32) for p in rows]
    expected = cache.attend(context.q[500:], 500, rows)
    assert_same_bits(cache.attend(context.q[500:], 500, rows, paths), expected)
    mixed = [path if i % 3 else None for i, path in enumerate(paths)]
    assert_same_bits(cache.attend(context.q[500:], 500, rows, mixed), expected)


def test_ties_by_soft_capping_weigh_equally():
    """Scores that the cap makes equal: the mean of the values, whoever shares the span."""
    shape = Heads(heads=2, kv_heads=1, head_dim=16, softcap=1.0)
    context = Context(shape, 530)
    context.k[:] = 1e4
    context.q[:] = 1e4
    got = chain(context, 510, 530)
    for i, position in enumerate(range(510, 530)):
        mean = context.v[: position + 1, 0].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(got[i], np.stack([mean, mean]), atol=1e-6)
        assert_same_bits(chain(context, position, position + 1, seed=i), got[[i]])


@pytest.mark.parametrize("magnitude", [30.0, 300.0, 1e6])
def test_scores_far_below_the_highest_weigh_nothing(magnitude):
    """One key beats all others by more than the exponentials reach."""
    shape = Heads(heads=9, kv_heads=1, head_dim=16)
    context = Context(shape, 530)
    context.k[:], context.q[:] = -1.0, magnitude
    context.k[[7, 515]] = 1.0
    got = chain(context, 512, 530)
    for i, position in enumerate(range(512, 530)):
        seen = [7, 515] if position >= 515 else [7]
        mean = context.v[seen, 0].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(got[i], np.tile(mean, (9, 1)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_bad_row_harms_no_other(bad):
    context = Context(Heads(), 530)
    expected = chain(context, 505, 530)
    context.q[512, 1, 3] = bad
    got = chain(context, 505, 530)
    assert not np.isfinite(got[512 - 505, 1]).any()
    keep = np.ones(got.shape[:2], bool)
    keep[512 - 505, 1] = False
    assert_same_bits(got[keep], expected[keep])


@pytest.mark.parametrize("kv", ["float32", "int8"])
@pytest.mark.parametrize("at", [3, 511, 512, 525])
def test_a_key_that_is_nan_shows_in_every_row_that_sees_it(at, kv):
    context = Context(Heads(heads=2, kv_heads=1, kv=kv), 530)
    expected = chain(context, 500, 530)
    bad = Context(context.shape, 530)
    bad.k[at, 0, 5] = NAN
    got = chain(bad, 500, 530)
    blind = max(0, at - 500)
    assert_same_bits(got[:blind], expected[:blind])
    assert not np.isfinite(got[blind:]).any()


def test_attend_refuses_what_does_not_fit():
    context = Context(Heads(), 40)
    cache = Cache(context.shape, 40).write(range(40), context)

    def path(*nodes):
        return [np.array(nodes, np.int32)]

    q = context.q[:1]
    with pytest.raises(ValueError, match="beyond the block table"):
        cache.attend(q, 48, [48])
    with pytest.raises(ValueError, match="below start"):
        cache.attend(q, 30, [29])
    with pytest.raises(ValueError, match="does not ascend"):
        cache.attend(q, 30, [32], path(0, 2, 2))
    with pytest.raises(ValueError, match="does not hold"):
        cache.attend(q, 30, [32], path(0, 1))
    with pytest.raises(ValueError, match="beyond the block table"):
        cache.attend(q, 30, [31], path(0, 18))
    with pytest.raises(ValueError, match="head dimensions"):
        cache.attend(q[..., :32], 30, [30])
    with pytest.raises(ValueError, match="no multiple"):
        cache.attend(q[:, :3], 30, [30])
    cache.blocks[0] = 99
    with pytest.raises(ValueError, match="not in the cache"):
        cache.attend(q, 30, [30])


# --- slots of the cache -------------------------------------------------------------------------


HEAD_DIMS = {"float32": 20, "float16": 20, "bfloat16": 20, "int8": 36}


def whole_cache(kv, layers=3, blocks=5, kv_heads=2):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, layers, blocks, kv_heads, TILE, HEAD_DIMS[kv]), np.float32)
    v = np.pad(v, [(0, 0)] * 4 + [(0, -HEAD_DIMS[kv] % TILE)])
    return np.ascontiguousarray(stored(k, kv).swapaxes(3, 4)), stored(v, kv)


def by_slot(k, v):
    """[layers, slots, kv_heads, elements] of both, as stored."""
    layers, blocks, kv_heads = k.shape[:3]
    keys, values = k.transpose(0, 1, 4, 2, 3), v.transpose(0, 1, 3, 2, 4)
    shape = (layers, blocks * TILE, kv_heads, -1)
    return keys.reshape(shape).copy(), values.reshape(shape).copy()


@pytest.mark.parametrize("kv", HEAD_DIMS)
def test_slots_move_in_order(kv, threads):
    k, v = whole_cache(kv)
    source = np.array([40, 42, 45, 47, 49, 79])
    target = np.array([40, 41, 42, 43, 45, 47])
    keys, values = by_slot(k, v)
    for a, b in zip(source, target, strict=True):
        keys[:, b], values[:, b] = keys[:, a].copy(), values[:, a].copy()
    native.move_kv(k, v, source, target)
    moved_keys, moved_values = by_slot(k, v)
    np.testing.assert_array_equal(moved_keys, keys)
    np.testing.assert_array_equal(moved_values, values)


@pytest.mark.parametrize("kv", HEAD_DIMS)
def test_slots_are_filled_and_read(kv):
    k, v = whole_cache(kv)
    slots = np.array([3, 16, 31, 79])
    keys, values = by_slot(k, v)
    read = native.read_kv(k, v, slots)
    head_dim = HEAD_DIMS[kv]
    np.testing.assert_array_equal(read[0], numbers(keys[:, slots], head_dim))
    width = -(-head_dim // TILE) * TILE
    np.testing.assert_array_equal(read[1], numbers(values[:, slots], width)[..., :head_dim])
    native.fill_kv(k, v, slots, NAN)
    others = np.setdiff1d(np.arange(80), slots)
    for got, before in zip(by_slot(k, v), (keys, values), strict=True):
        np.testing.assert_array_equal(got[:, others], before[:, others])
    assert all(np.isnan(each).all() for each in native.read_kv(k, v, slots))
    assert not v[..., head_dim:width].any()
    native.fill_kv(k, v, slots, 1.5)
    filled = numbers(stored(np.full(head_dim, 1.5), kv), head_dim)
    assert all((each == filled).all() for each in native.read_kv(k, v, slots))


def test_slots_outside_the_cache_are_refused():
    k, v = whole_cache("float32")
    good = np.array([0, 1])
    for bad in (np.array([-1, 1]), np.array([0, 80])):
        with pytest.raises(ValueError, match="is not in the cache of 80 slots"):
            native.move_kv(k, v, bad, good)
        with pytest.raises(ValueError, match="is not in the cache of 80 slots"):
            native.move_kv(k, v, good, bad)
        with pytest.raises(ValueError, match="is not in the cache of 80 slots"):
            native.fill_kv(k, v, bad, 0.0)
        with pytest.raises(ValueError, match="is not in the cache of 80 slots"):
            native.read_kv(k, v, bad)
    with pytest.raises(ValueError, match="different lengths"):
        native.move_kv(k, v, good, good[:1])
    with pytest.raises(ValueError, match="element types"):
        native.read_kv(k, v.astype(np.uint16), good)
    with pytest.raises(ValueError, match="neither float32, float16"):
        native.read_kv(k.astype(np.float64), v.astype(np.float64), good)
    with pytest.raises(ValueError, match="layers, blocks"):
        native.read_kv(k[0], v[0], good)
