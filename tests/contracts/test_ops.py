"""Every ops backend through one suite: the same numbers as plain torch, and rows that stand alone.

The bitwise half is what identity rests on: a row's bits may not depend on how many rows share the
call, on where the row sits among them, or on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import native_module, why_not_native
from paceline.backends.rows.reference import ReferenceOps
from paceline.backends.rows.row_batch import lane_class
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ForwardResult, ModelRunner
from paceline.config import KV_DTYPES, PACKED_DTYPES
from paceline.core.errors import ConfigError
from paceline.models.backend import WeightPart
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.layer_sizes import Experts
from paceline.models.threads import num_threads, set_num_threads
from paceline.request.span import Span
from tests.arrays import arrays, assert_close, same, tensor
from tests.heads import head_tensors
from tests.levels import BETWEEN, LEVELS
from tests.toy import DEVICE, TOY, VOCAB, toy_tensors

ROW_BACKENDS = {
    f"reference-{dtype}": partial(ReferenceOps, dtype, deterministic=True)
    for dtype in ("float32", "bfloat16", "int8")
}
NATIVE = {f"native-{dtype}-{isa}": (dtype, isa) for dtype in PACKED_DTYPES for isa in LEVELS}
WIDTHS = [1, 2, 5, 16, 17, 48]
SHAPES = [(44, 32), (172, 64), (1728, 320), (320, 864), (105, 128), (512, 1024)]


@pytest.fixture(params=ROW_BACKENDS)
def ops(request: pytest.FixtureRequest) -> Any:
    """Backends that compute step by step; tests/native has the same for the native kernels."""
    return ROW_BACKENDS[request.param]()


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The backend of that name; the native one's names its instruction-set level."""
    if request.param in ROW_BACKENDS:
        yield ROW_BACKENDS[request.param](device=DEVICE)
        return
    dtype, isa = NATIVE[request.param]
    before = native_module().isa()
    native_module().set_isa(isa)
    yield CpuOps(dtype)
    native_module().set_isa(before)


def on_backends(name: str, values: Iterable[Any]) -> pytest.MarkDecorator:
    """Every value on every backend. Quick are: of the reference, whose dtypes differ in their
    linears alone, one dtype in turn; of the native one, every pair of a value, a dtype and a level
    that is not between others."""
    found, values = [], list(values)
    for i, value in enumerate(values):
        for j, backend in enumerate(ROW_BACKENDS):
            is_quick = (i + j) % len(ROW_BACKENDS) == 0
            marks = () if is_quick else pytest.mark.slow
            found.append(pytest.param(backend, value, marks=marks))
        for backend, (dtype, isa) in NATIVE.items():
            places = i + PACKED_DTYPES.index(dtype) + LEVELS[:1].count(isa)
            is_quick = isa not in BETWEEN and (places % 2 == 0 or len(values) == 1)
            found.append(pytest.param(backend, value, marks=() if is_quick else pytest.mark.slow))
    return pytest.mark.parametrize(("backend", name), found, indirect=["backend"])


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = num_threads()
    yield
    set_num_threads(before)


def padded(x: torch.Tensor, ops: Any) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, -len(x) % ops.row_multiple))


@pytest.mark.parametrize("shape", SHAPES)
def test_linear_is_close_to_torch(ops: Any, shape: tuple[int, int]) -> None:
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(5, shape[1])
    packed = ops.pack_linear([WeightPart.of(weight.numpy())], shape[1], bias.numpy())
    got = tensor(ops.linear(x.numpy(), packed))
    want = F.linear(x, weight, bias)
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2, "int8": 4e-2}[ops.dtype]
    assert (got - want).abs().max() < tolerance * want.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_linear_rows_stand_alone(ops: Any, shape: tuple[int, int]) -> None:
    weight, x = torch.randn(shape), torch.randn(48, shape[1])
    truth = None
    for count in (1, 2):
        set_num_threads(count)
        packed = ops.pack_linear([WeightPart.of(weight.numpy())], weight.shape[1], None)
        if truth is None:
            truth = ops.row_linear(x, packed)
        for width in WIDTHS:
            order = torch.randperm(48)[:width]
            got = ops.row_linear(padded(x[order], ops), packed)[:width]
            assert same(got, truth[order])


def test_other_rows_may_be_anything(ops: Any) -> None:
    """A NaN or an enormous value in one row leaves its neighbours' bits alone."""
    weight, x = torch.randn(64, 64), torch.randn(16, 64)
    packed = ops.pack_linear([WeightPart.of(weight.numpy())], weight.shape[1], None)
    truth = ops.row_linear(x, packed).clone()
    for value in (float("nan"), float("inf"), 1e30):
        bad = x.clone()
        bad[3] = value
        got = ops.row_linear(bad, packed)
        keep = [i for i in range(16) if i != 3]
        assert same(got[keep], truth[keep])


@pytest.mark.parametrize("width", [8, 44, 172, 864, 3000])
@pytest.mark.parametrize(
    "name", ["silu", "gelu_tanh", "gelu", "relu2", "clamped_swiglu", "softcap", "rms_norm"]
)
def test_row_kernels_stand_alone(ops: Any, name: str, width: int) -> None:
    x = torch.randn(48, 2 * width) * 4
    weight = torch.rand(2 * width)

    def run(rows: torch.Tensor) -> torch.Tensor:
        if name == "rms_norm":
            return ops.rms_norm(rows, weight, 1e-6)
        if name == "softcap":
            return ops.softcap(rows, 5.0)
        return ops.gated_activation(rows, name)

    truth = run(x)
    for count in (1, 2):
        set_num_threads(count)
        for rows in WIDTHS:
            order = torch.randperm(48)[:rows]
            got = run(padded(x[order], ops))[:rows]
            assert same(got, truth[order])


def test_row_kernels_are_right(ops: Any) -> None:
    x = torch.randn(16, 88)
    gate, up = x.chunk(2, dim=1)
    assert_close(ops.gated_activation(x, "silu"), F.silu(gate) * up)
    assert_close(ops.gated_activation(x, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up)
    assert_close(ops.gated_activation(x, "gelu"), F.gelu(gate) * up)
    assert_close(ops.gated_activation(x, "relu2"), F.relu(gate) ** 2 * up)
    bounded, above = (8 * gate).clamp(max=7), (8 * up).clamp(-7, 7) + 1
    want = bounded * torch.sigmoid(1.702 * bounded) * above
    assert_close(ops.gated_activation(8 * x, "clamped_swiglu"), want)
    assert_close(ops.softcap(x, 3.0), 3.0 * torch.tanh(x / 3.0))
    weight = torch.rand(88)
    assert_close(ops.rms_norm(x, weight, 1e-5), F.rms_norm(x, (88,), weight, 1e-5))


def test_unknown_dtype_lists_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match="float32, bfloat16, float16, file, int8"):
        ReferenceOps("float8")


def test_lane_classes_hold_their_rows_and_waste_little() -> None:
    for tokens in range(1, 5000):
        lanes = lane_class(tokens)
        assert tokens <= lanes
        assert lanes % 16 == 0
        assert lanes <= max(16, 1.5 * (tokens + 15))


# --- whole forwards ------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_kv_head": {"num_kv_heads": 1},
    "softcap": {
        "attention.softcap": 3.0,
        "multipliers.logits_softcap": 4.0,
        "mlp.activation": "gelu_tanh",
    },
    "sliding": {"attention.sliding_window": 11, "attention.sliding_layers": (True, False)},
    "head_16": {"head_dim": 16},
    "eagle3": {"entry.kind": "eagle3", "tie_embeddings": False},
    "mtp": {"entry.kind": "mtp", "tie_embeddings": False},
    "mixture": {"mlp.experts": Experts(5, 2, 20, shared_width=24, shared_gate=True)},
    "one_expert": {
        "mlp.experts": Experts(3, 1, 33, renormalise=False, sparse_layers=(True, False))
    },
}


INPUTS = torch.randn(VOCAB, TOY.hidden_size, generator=torch.Generator().manual_seed(2))


def variant(name: str) -> ModelConfig:
    return TOY.with_traits(VARIANTS[name])


def runner(config: ModelConfig, ops: Any, kv_dtype: str = "auto") -> ModelRunner:
    tensors = head_tensors(config) if config.entry.kind else toy_tensors(config=config)
    decoder = Decoder(config, arrays(tensors), ops, config.max_position)
    kv_dtype = ops.default_kv_dtype if kv_dtype == "auto" else kv_dtype
    model = ModelRunner(decoder, KVCache(ops.kv_memory(config, 40, kv_dtype)))
    model.taps = tuple(range(config.num_layers + 2))
    return model


def run(model: ModelRunner, *spans: Span) -> ForwardResult:
    """One forward, in which the hidden states that a head takes in are a function of the token."""
    tokens = [token for span in spans for token in span.token_ids[span.num_cached :]]
    inputs = INPUTS[tokens].numpy() if model.decoder.entry is not None else None
    return model.forward(model.pack(spans), inputs=inputs)


def said(result: ForwardResult) -> torch.Tensor:
    """Logits and features of rows all of which are sampled, side by side."""
    assert result.features is not None
    flat = result.features.reshape(len(result.logits), -1)
    return tensor(np.concatenate((result.logits, flat), axis=1))


def rows_of(model: ModelRunner, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    """What is said of every position, in the given chunks; what ran before shows in none."""
    model.kv.poison_free()
    model.kv.open(0)
    rows, start = [], 0
    for size in chunks:
        model.kv.reserve(0, size)
        part = tokens[start : start + size]
        span = Span(0, start, part, range(-1, size - 1), range(size))
        rows.append(said(run(model, span)))
        model.kv.commit(0, range(size))
        start += size
    model.kv.free(0)
    return torch.cat(rows)


@on_backends("name", VARIANTS)
def test_chunking_does_not_change_a_bit(backend: Any, name: str) -> None:
    model = runner(variant(name), backend)
    tokens = [(7 * i * i + 3) % VOCAB for i in range(70)]
    truth = rows_of(model, tokens, [70])
    assert torch.isfinite(truth).all()
    for count, chunks in ((1, [1] * 20 + [3, 30, 1, 16]), (2, [16, 16, 18] + [1] * 20)):
        set_num_threads(count)
        assert same(rows_of(model, tokens, chunks), truth), chunks


@on_backends("name", ["plain", "sliding", "softcap", "eagle3", "mtp", "mixture"])
def test_trees_equal_their_paths(backend: Any, name: str) -> None:
    """Every node of a tree has the bits of the same tokens decoded one after another."""
    model, other = (runner(variant(name), backend) for _ in range(2))
    for start in range(17):  # wherever in a block the tree begins
        check_tree(model, other, start)


def check_tree(model: ModelRunner, other: ModelRunner, start: int) -> None:
    prompt = [(5 * i + 1) % VOCAB for i in range(start)]
    tokens = [9, 4, 8, 4, 6, 7, 2, 1, 3]
    parents = [-1, 0, 0, 1, 1, 2, 3, 6, 2]
    model.kv.poison_free()
    model.kv.open(0)
    if start:
        model.kv.reserve(0, start)
        run(model, Span.chunk(0, 0, prompt, sample=False))
        model.kv.commit(0, range(start))
    model.kv.reserve(0, len(tokens))
    span = Span(0, start, tokens, parents, range(len(tokens)))
    got = said(run(model, span))
    for leaf in set(range(len(tokens))) - set(parents):
        nodes, at = [], leaf
        while at >= 0:
            nodes.insert(0, at)
            at = parents[at]
        path = prompt + [tokens[node] for node in nodes]
        assert same(got[nodes], rows_of(other, path, [len(path)])[start:]), (start, leaf)
    kept = [0, 2, 5]  # close the gaps, and go on
    model.kv.commit(0, kept)
    model.kv.reserve(0, 1)
    following = said(run(model, Span.chunk(0, start + len(kept), [5], True)))
    path = prompt + [tokens[node] for node in kept] + [5]
    assert same(following[0], rows_of(other, path, [len(path)])[-1]), start
    model.kv.free(0)


KV_HEADS = replace(TOY, head_dim=40)  # in int8 a group of 32 dimensions, and one of the rest
LOSS = {"float32": 0.0, "float16": 1e-3, "bfloat16": 1e-2, "int8": 3e-2}
ROUNDING = 0.05  # of arithmetic that rounds activations, and then some of them the other way


@pytest.mark.skipif(DEVICE == "cpu", reason="compares with the CPU")
@pytest.mark.parametrize("name", VARIANTS)
def test_other_devices_say_what_the_cpu_does(name: str) -> None:
    tokens, found = list(range(30)), []
    for device in ("cpu", DEVICE):
        model = runner(variant(name), ReferenceOps("float32", device))
        found.append(rows_of(model, tokens, [17, 13]))
    assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


@on_backends("kv_dtype", KV_DTYPES[1:])
def test_every_kv_dtype_leaves_rows_alone(backend: Any, kv_dtype: str) -> None:
    """A row's bits depend on neither chunks nor tree, and its numbers on the dtype a little."""
    tokens = [(7 * i * i + 3) % VOCAB for i in range(70)]
    model, other = (runner(KV_HEADS, backend, kv_dtype) for _ in range(2))
    truth = rows_of(model, tokens, [70])
    for chunks in ([1] * 20 + [3, 30, 1, 16], [50] + [1] * 20):
        assert same(rows_of(model, tokens, chunks), truth)
    for start in (0, 13):
        check_tree(model, other, start)
    exact = rows_of(runner(KV_HEADS, backend, "float32"), tokens, [70])
    error = (truth - exact).square().mean() / exact.square().mean()
    assert error.sqrt() <= (LOSS[kv_dtype] if backend.dtype == "float32" else ROUNDING)


@on_backends("name", ["plain", "eagle3", "mtp", "mixture", "one_expert"])
def test_batch_mix_does_not_change_a_bit(backend: Any, name: str) -> None:
    """Prefill, decode and tree spans of five requests in one forward."""
    config = variant(name)
    model, other = (runner(config, backend) for _ in range(2))
    alone = {n: rows_of(other, [n] * 40, [40])[-1] for n in range(5)}
    model.kv.poison_free()
    spans = []
    for n in range(5):
        model.kv.open(n)
        first = 40 - 3**n if n < 4 else 0
        if first:
            model.kv.reserve(n, first)
            run(model, Span.chunk(n, 0, [n] * first, sample=False))
            model.kv.commit(n, range(first))
        model.kv.reserve(n, 40 - first)
        spans.append(Span.chunk(n, first, [n] * (40 - first), sample=True))
    result = run(model, *spans)
    assert result.features is not None
    last = np.cumsum([len(span.token_ids) for span in spans]) - 1
    result.features = result.features[last]
    for n in range(5):
        assert same(said(result)[n], alone[n])


# --- one activation scale per 128 inputs ---------------------------------------------------------

WIDE = replace(TOY, hidden_size=288, intermediate_size=300)  # groups of 128, 128 and what is left


@pytest.mark.skipif(not LEVELS, reason=str(why_not_native()))
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_scales_of_activations_leave_rows_alone(dtype: str) -> None:
    """Neither the chunks nor a neighbour, whatever it holds, changes a bit of a row."""
    tokens = [(7 * i * i + 3) % VOCAB for i in range(40)]
    model = runner(WIDE, CpuOps(dtype))
    truth = rows_of(model, tokens, [40])
    for chunks in ([1] * 40, [3, 30, 7]):
        assert same(rows_of(model, tokens, chunks), truth)
    for n in range(3):
        model.kv.open(n)
        model.kv.reserve(n, 40)
    parts = [[n] * 40 for n in range(2)] + [tokens]
    spans = [Span(n, 0, part, range(-1, 39), range(40)) for n, part in enumerate(parts)]
    assert same(said(run(model, *spans))[80:], truth)


LONG = 300  # tokens of context: enough for a library to split one row's products over threads


@on_backends(
    "heads", [(1, 1, 0.0), (1, 1, 3.0), (4, 1, 0.0), (2, 2, 0.0), (4, 2, 0.0), (4, 4, 0.0)]
)
def test_alone_equals_a_batch_at_any_thread_count(
    backend: Any, heads: tuple[int, int, float]
) -> None:
    """A step of one request has the bits that it has beside three others."""
    num_heads, kv_heads, softcap = heads
    shape = {"num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": 64, "max_position": 512}
    config = TOY.with_traits({"attention.softcap": softcap, **shape})
    decoder = Decoder(config, arrays(toy_tensors(config=config)), backend, config.max_position)
    kv = KVCache(backend.kv_memory(config, 4 * (LONG // 16 + 2), backend.default_kv_dtype))
    model = ModelRunner(decoder, kv)
    model.taps = (1, 2)
    for n in range(4):
        kv.open(n)
        kv.reserve(n, LONG)
        run(model, Span.chunk(n, 0, [(n + i) % VOCAB for i in range(LONG)], False))
        kv.commit(n, range(LONG))
        kv.reserve(n, 1)
    spans = [Span.chunk(n, LONG, [7], sample=True) for n in range(4)]
    set_num_threads(1)
    truth = said(run(model, *spans))
    for count in (1, 2, 4):
        set_num_threads(count)
        assert same(said(run(model, *spans)), truth), count
        for n in (0, 2):
            assert same(said(run(model, spans[n]))[0], truth[n]), count
