"""What is in memory while a model is loaded and run. Linux says how much that is."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.native.native import why_not_native
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.models.decoder import Decoder
from paceline.models.tensor_reader import TensorReader, stacked_rows
from paceline.request.span import Span
from paceline.tensors.arrays import BFLOAT16, HUGE_PAGE, MAP_BYTES, Arena, sparse_zeros
from tests.arrays import arrays, same
from tests.toy import TOY, toy_ops, toy_tensors

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
linux = pytest.mark.skipif(not CLEAR.exists(), reason="the peak can be reset on Linux alone")
native = pytest.mark.skipif(why_not_native() is not None, reason="the kernels are not built")


def resident(key: str) -> int:
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


def reset_peak() -> int:
    """Let the peak begin at what is resident."""
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")
    return resident("VmHWM")


def test_arrays_of_an_arena_are_aligned_zero_and_apart() -> None:
    arena = Arena()
    sizes = [3, 1000, MAP_BYTES - 64, 5, MAP_BYTES + 1, 70, 8]  # some need a map of their own
    arrays = [arena.zeros(size, np.uint8) for size in sizes]
    del arena
    for number, array in enumerate(arrays, 1):
        assert array.ctypes.data % 64 == 0
        assert not array[:3].any()
        assert not array[-3:].any()
        array[:3] = array[-3:] = number
    for number, (size, array) in enumerate(zip(sizes, arrays, strict=True), 1):
        assert array.shape == (size,)
        assert (array[:3] == number).all()
        assert (array[-3:] == number).all()


@linux
def test_sparse_zeros_take_memory_where_they_are_written() -> None:
    array = sparse_zeros((32, HUGE_PAGE), np.uint8)
    before = resident("RssAnon")
    array[:, 12345] = 1  # one page in each
    assert resident("RssAnon") - before < 1 << 20
    assert array.sum() == 32
    assert sparse_zeros((2, 0, 16), np.uint16).shape == (2, 0, 16)


def test_stacked_rows_are_those_of_the_stacked_matrix() -> None:
    parts = [np.random.default_rng(n).random((n, 3)) for n in (5, 1, 7)]
    whole = np.concatenate(parts)
    for first in range(len(whole)):
        for last in range(first + 1, len(whole) + 1):
            assert same(stacked_rows(np.concatenate, parts, first, last), whole[first:last])


@linux
@native
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_stacked_linear_is_packed_without_a_copy_of_its_parts(dtype: str) -> None:
    size = 2048
    names = [f"part{i}" for i in range(8)]
    parts = {f"{name}.weight": np.ones((size, size), BFLOAT16) for name in names}
    packed = len(parts) * size * size
    before = reset_peak()
    reader = TensorReader(parts, TOY, toy_ops(f"native-{dtype}"))
    linear = reader.linear(names, "all", [size] * len(parts), size, bias=False)
    assert linear.n == len(parts) * size
    assert resident("VmHWM") - before < packed + (32 << 20)  # the parts are twice as much


@linux
@native
@pytest.mark.parametrize(("greedy", "sampled"), [(True, 256), (False, 1)])
def test_a_wide_forward_holds_no_logits_that_nobody_asked_for(greedy: bool, sampled: int) -> None:
    vocab, rows = 1 << 17, 256  # all logits would be 128 MiB
    config = dataclasses.replace(TOY, vocab_size=vocab)
    ops = toy_ops("native-int8")
    decoder = Decoder(config, arrays(toy_tensors(config=config)), ops, TOY.max_position)
    runner = ModelRunner(decoder, KVCache(ops.kv_memory(config, 20, "bfloat16")))
    runner.kv.open(0)
    assert runner.kv.reserve(0, rows)
    span = Span(0, 0, [7] * rows, range(-1, rows - 1), range(rows - sampled, rows))
    before = reset_peak()
    result = runner.forward(runner.pack([span]), greedy=greedy)
    assert resident("VmHWM") - before < 16 << 20
    assert len(result.argmax or result.logits) == sampled
