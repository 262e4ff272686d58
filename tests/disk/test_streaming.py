"""Layers that are read from disk: the limit is kept, the bits stay, and what fails is told."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import native_module, why_not_native
from paceline.backends.native.packing import Packer
from paceline.build import weight_memory
from paceline.build.weight_memory import limit_beside_copy
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.errors import ConfigError, RequestFailedError
from paceline.disk import streaming
from paceline.disk.packed_folder import write_packed
from paceline.disk.streaming import StreamedTensors
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.decoder import Decoder
from paceline.profiling.doctor import model_facts
from paceline.profiling.machine import Roofs
from paceline.proposers.draft_model.self_draft import cheaper_decoder
from paceline.request.span import DraftTree, Span
from paceline.tensors.placement import SLOTS, Placement, place_experts, place_layers
from paceline.tensors.stored import StoredTensors
from tests.arrays import same
from tests.models.reference import Driver, save_model
from tests.profiling.exact_clock import run_exactly

TOKENS = torch.randint(3, 300, (30,), generator=torch.Generator().manual_seed(3)).tolist()
TREE = DraftTree([5, 6, 7, 8], [-1, 0, 0, 2], [0.5] * 4, "x")
native = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")


@pytest.mark.parametrize("limit", range(40, 150, 7))
def test_layers_are_placed_within_the_limit(limit: int) -> None:
    sizes = [10, 11, 9, 10, 10, 8, 10, 10, 10, 12]
    placed = place_layers(sizes, 3, limit)
    assert placed.resident_bytes <= limit
    assert placed.streamed_bytes == sum(sizes[i] for i in placed.streamed)
    assert sorted(set(placed.streamed)) == list(placed.streamed)
    assert bool(placed.streamed) == (limit < 103)
    if len(placed.streamed) > SLOTS:
        # With a round less there would be too much.
        fewer = place_layers(sizes, 3, placed.resident_bytes).streamed
        assert len(fewer) == len(placed.streamed)
        assert len(placed.streamed) % SLOTS == 0 or len(placed.streamed) == len(sizes)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (lambda limit: place_layers([12_900_000] * 8, 3_000_000, limit), "3 of its 8 layers"),
        (lambda limit: place_experts([[140_000] * 16] * 2, 40, limit), "and 8 of these"),
    ],
)
def test_a_limit_below_what_has_to_stay_is_refused(place: Any, said: str) -> None:
    """The one that is asked for is enough."""
    with pytest.raises(ConfigError, match=rf"--weight-memory is 1M; .* needs .*{said}") as refused:
        place(1 << 20)
    asked = re.search(r"needs (\d+)M or more", str(refused.value))
    assert asked is not None
    assert place(int(asked[1]) << 20).resident_bytes <= int(asked[1]) << 20


@pytest.mark.parametrize("limit", range(152, 300, 13))
def test_experts_are_placed_within_the_limit(limit: int) -> None:
    """All else stays, and as many experts as fit beside it."""
    placed = place_experts([[4] * 16, [6] * 16, [4] * 16], 40, limit)
    assert placed.resident_bytes <= limit
    assert bool(placed.experts) == (limit < 40 + 14 * 16)
    if placed.experts:
        assert placed.experts == 48
        assert placed.kept * placed.expert_bytes <= limit - 40
        assert placed.bytes_of_row(48) == (48 - placed.kept) * placed.expert_bytes


def test_a_limit_below_a_few_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="all but its experts, and 8 of these"):
        place_experts([[4] * 16, [6] * 16, [4] * 16], 40, 40 + 8 * 10)


PER_TOKEN = 3
HYBRIDS = ["falcon-h1", "mamba2"]
MIXTURES = ["qwen3-moe", "gpt-oss", "deepseek-v3"]


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Path:
    """A tiny model of more layers than there are slots, all of whose linears can be streamed."""
    monkeypatch.setattr(streaming, "LEAST_BYTES", 1)
    save_model(getattr(request, "param", "llama"), tmp_path / "plain", num_hidden_layers=8)
    write_packed(load_checkpoint(tmp_path / "plain"), tmp_path / "packed", Packer("int8"))
    return tmp_path / "packed"


def drivers(folder: Path) -> tuple[Driver, Driver, Any]:
    """With all weights in memory, and with as few as can be; what streams."""
    whole = load_checkpoint(folder, with_tokenizer=False)
    layers = whole.config.num_layers
    for limit in range(0, 1 << 22, 1 << 12):
        try:
            tensors = StreamedTensors(whole.tensors, layers, limit)
        except ConfigError:
            continue
        few = replace(whole, tensors=tensors)
        assert len(tensors.placement.streamed) > SLOTS or tensors.placement.experts
        return Driver(whole, ops=CpuOps("int8")), Driver(few, ops=CpuOps("int8")), tensors.stream
    raise AssertionError("no limit is large enough")


@native
@linux
@pytest.mark.parametrize("packed", ["llama", "qwen3", *HYBRIDS, *MIXTURES], indirect=True)
def test_prefill_decoding_and_trees_have_the_same_bits(packed: Path) -> None:
    resident, streamed, stream = drivers(packed)
    for _ in range(3):
        assert same(streamed.chunk(TOKENS[:9]), resident.chunk(TOKENS[:9]))
        assert same(streamed.chunk(TOKENS[9:10]), resident.chunk(TOKENS[9:10]))
        expected = resident.run(TREE, 4, [0, 1, 3])
        assert same(streamed.run(TREE, 4, [0, 1, 3]), expected)
    assert stream.bytes_read > 0


@native
@linux
def test_layers_come_in_any_order(packed: Path) -> None:
    """What is asked for out of its turn is read anew; memory of the others is not touched."""
    _, driver, stream = drivers(packed)
    first = driver.chunk(TOKENS[:4])
    for layer in (5, 2, 2, 7, 0, 0, 6, 1):
        stream.begin(layer)
        if layer % 2:
            stream.end(layer)
    again = drivers(packed)[1]
    assert same(again.chunk(TOKENS[:4]), first)
    driver.kv.free(0)
    driver.kv.open(0)
    assert same(driver.chunk(TOKENS[:4]), first)


@native
@linux
@pytest.mark.parametrize("packed", ["llama", "qwen3-moe"], indirect=True)
def test_a_file_that_changes_ends_the_requests_and_not_the_engine(packed: Path) -> None:
    checkpoint = load_checkpoint(packed, with_tokenizer=False)
    least = drivers(packed)[2] and min_limit(checkpoint)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with LLM(checkpoint, weight_memory=least, speculative_config=[], max_model_len=64) as llm:
        first = llm.generate(TOKENS[:5], params).token_ids
        (file,) = packed.glob("*.safetensors")
        stamp = file.stat()
        os.truncate(file, stamp.st_size // 2)
        for _ in range(2):
            with pytest.raises(RequestFailedError, match="was changed while it was in use"):
                llm.generate(TOKENS[:5], params)
        assert llm.stats().num_running == 0
    assert len(first) == 4


def min_limit(checkpoint: Any) -> int:
    limit = 1 << 12
    while True:
        try:
            StreamedTensors(checkpoint.tensors, checkpoint.config.num_layers, limit)
        except ConfigError:
            limit += 1 << 12
        else:
            return limit


@native
@linux
@pytest.mark.parametrize("packed", ["llama", "qwen3-moe"], indirect=True)
def test_a_file_that_is_deleted_is_still_read(packed: Path) -> None:
    resident, streamed, _ = drivers(packed)
    for file in packed.glob("*.safetensors"):
        file.unlink()
    assert same(streamed.chunk(TOKENS), resident.chunk(TOKENS))


def test_without_the_native_kernels_a_limit_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "plain")
    with pytest.raises(ConfigError, match="for the native kernels on Linux; this is reference"):
        LLM(str(tmp_path / "plain"), weight_memory=1 << 10, backend="reference")


@native
@linux
def test_what_was_read_at_once_is_not_read_again(packed: Path) -> None:
    with pytest.raises(ConfigError, match="--load-format"):
        LLM(str(packed), weight_memory=1 << 20, load_format="memory")


@native
@linux
@pytest.mark.parametrize("layer", [-1, 2, 1 << 40])
def test_a_layer_that_is_not_there_is_refused(tmp_path: Path, layer: int) -> None:
    (tmp_path / "weights").write_bytes(bytes(range(100)))
    stream = native_module().LayerStream([str(tmp_path / "weights")], [[(0, 10, 8)], []], 1, 1)
    stream.begin(0)
    assert stream.array(0, 0).tolist() == list(range(10, 18))
    stream.begin(1)  # in memory
    for refused in (stream.begin, stream.end, lambda index: stream.array(index, 0)):
        with pytest.raises(IndexError, match=f"no layer {layer}; there are 2"):
            refused(layer)
    for at, extent, there in ((0, 1, 1), (0, -1, 1), (1, 0, 0)):
        with pytest.raises(IndexError, match=f"no extent {extent}; there are {there}"):
            stream.array(at, extent)


@native
@linux
@pytest.mark.parametrize(
    ("index", "said"),
    [
        ((2, 0, 0), "no layer 2; there are 2"),
        ((-1, 0, 0), "no layer -1; there are 2"),
        ((1, 0, 0), "no expert 0; there are 0"),
        ((0, 3, 0), "no expert 3; there are 3"),
        ((0, 2, 1), "no extent 1; there are 1"),
    ],
)
def test_an_expert_that_is_not_there_is_refused(
    tmp_path: Path, index: tuple[int, int, int], said: str
) -> None:
    (tmp_path / "weights").write_bytes(bytes(100))
    experts = [[[(0, 10 * each, 8)] for each in range(3)], []]
    cache = native_module().ExpertCache([str(tmp_path / "weights")], experts, 1 << 20, 1)
    assert len(cache.array(0, 2, 0)) == 8
    with pytest.raises(IndexError, match=said):
        cache.array(*index)


@native
@linux
def test_a_stream_of_fewer_layers_than_a_decoder_is_refused(packed: Path) -> None:
    whole = load_checkpoint(packed, with_tokenizer=False)
    tensors = StreamedTensors(whole.tensors, whole.config.num_layers, min_limit(whole))
    file = next(packed.glob("*.safetensors"))
    tensors.stream = native_module().LayerStream([str(file)], [[(0, 0, 8)]], 1, 1)
    with pytest.raises(ValueError, match="fewer layers than the decoder"):
        Driver(replace(whole, tensors=tensors), ops=CpuOps("int8"))


@native
@linux
def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    native_ = native_module()
    with pytest.raises(native_.ReadError, match="no-such-file"):
        native_.LayerStream([str(tmp_path / "no-such-file")], [[(0, 0, 8)]], 1, 1)


@native
@linux
@pytest.mark.parametrize(
    ("packed", "dtype"),
    [("llama", "int4"), ("llama", "int3"), ("llama", ""), ("falcon-h1", "int4")],
    indirect=["packed"],
)
def test_a_model_from_disk_drafts_with_a_copy_of_itself_if_there_is_room(
    packed: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """In as many bits as there is room for."""
    checkpoint = load_checkpoint(packed, with_tokenizer=False)
    sizes = {"int4": 1 << 20, "int3": 1 << 19, "": 1 << 30}
    monkeypatch.setattr(weight_memory, "copy_bytes", lambda shape, dtype: sizes[dtype] >> 12)
    left = int(sizes[dtype or "int3"] >> 12) / weight_memory.ROOM + (1 << 20)
    memory = int(left) + 1 if dtype else 1000
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    options = {"max_model_len": 64, "kv_cache_memory": 1 << 20}
    with LLM(checkpoint, speculative_config=[], **options) as llm:
        expected = llm.generate(TOKENS[:5], params).token_ids
    monkeypatch.setattr(weight_memory, "memory", lambda: (memory, memory))
    with LLM(checkpoint, weight_memory=min_limit(checkpoint), planner="fixed", **options) as llm:
        drafting = llm.call(lambda engine: [each.name for each in engine.drafting.proposers])
        assert llm.generate(TOKENS[:5], params).token_ids == expected
        accepted = llm.stats().speculation.by_proposer.get("self")
        own = llm.call(
            lambda engine: [
                each.config.dtype for each in engine.drafting.proposers if each.name == "self"
            ]
        )
    assert drafting == ["suffix", *(["self"] if dtype else [])]
    assert own == ([dtype] if dtype else [])
    assert (accepted is not None) == bool(dtype)


@pytest.mark.parametrize(
    ("available", "kv_bytes", "rest"),
    [
        (250, 10, 45),  # 30 layers of 10 come from disk instead of 18, and 3 bits fit
        (250, None, 175),  # keys and values take the room
        (400, 10, 280),  # 21 layers instead of 6 cost more than drafts bring
        (500, 10, 350),  # all fit
    ],
)
def test_fewer_layers_stay_where_that_makes_room_for_a_copy(
    monkeypatch: pytest.MonkeyPatch, available: int, kv_bytes: int | None, rest: int
) -> None:
    sizes = {"int4": 160, "int3": 130}
    monkeypatch.setattr(weight_memory, "copy_bytes", lambda shape, dtype: sizes[dtype])
    shape: Any = SimpleNamespace(num_layers=30)
    limit = available * 7 // 10

    def place(least: int) -> Placement:
        return place_layers([10] * 30, 3, least)

    assert limit_beside_copy(shape, available, limit, kv_bytes, place) == rest


@native
@linux
def test_without_a_wish_layers_make_room_for_a_copy(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = load_checkpoint(packed, with_tokenizer=False)
    available = int(1.2 * checkpoint.num_bytes)
    monkeypatch.setattr(weight_memory, "memory", lambda: (available, available))
    monkeypatch.setattr(weight_memory, "copy_bytes", lambda shape, dtype: checkpoint.num_bytes // 4)
    streamed, drafting = [], []
    for drafts in ([], None):
        found = load_checkpoint(packed, with_tokenizer=False)
        options = {"max_model_len": 64, "kv_cache_memory": 1 << 16}
        with LLM(found, speculative_config=drafts, **options) as llm:
            streamed.append(llm.call(lambda engine: engine.runner.decoder.placement.streamed))
            drafting.append(llm.call(lambda e: [each.name for each in e.drafting.proposers]))
    assert len(streamed[0]) < len(streamed[1])
    assert ("self" in drafting[0], "self" in drafting[1]) == (False, True)


@native
@linux
def test_a_draft_in_fewer_bits_reads_nothing_from_disk(packed: Path) -> None:
    """Its layers are in memory, whatever the target's are."""
    checkpoint = load_checkpoint(packed, with_tokenizer=False)
    tensors = StreamedTensors(checkpoint.tensors, 8, min_limit(checkpoint))
    whole = Decoder(checkpoint.config, tensors, CpuOps("int8"), 64)
    config = SpeculativeConfig("self", dtype="int4")
    assert whole.stream is not None
    assert cheaper_decoder(config, whole, checkpoint).stream is None
    first = cheaper_decoder(replace(config, dtype="auto", draft_layers=2), whole, checkpoint)
    assert first.stream is whole.stream


@native
@linux
def test_what_is_read_is_counted(packed: Path) -> None:
    checkpoint = load_checkpoint(packed, with_tokenizer=False)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with LLM(
        checkpoint, weight_memory=min_limit(checkpoint), speculative_config=[], max_model_len=64
    ) as llm:
        llm.generate(TOKENS[:5], params)
        stats = llm.stats()
    assert stats.num_weight_bytes_read > 0
    assert stats.weight_wait_seconds >= 0.0


@native
@linux
def test_experts_that_are_there_are_not_read_again(tmp_path: Path) -> None:
    """The same token chooses the same experts."""
    driver = caching_driver(tmp_path, 0.9)
    assert [fetched_for(driver, TOKENS[:1]) for _ in range(3)] == [4 * PER_TOKEN, 0, 0]


@native
@linux
def test_experts_that_rows_choose_more_often_stay(tmp_path: Path) -> None:
    """A token that comes again and again between others, which together need all experts."""
    driver = caching_driver(tmp_path, 0.6)
    often, rarely = [], []
    for token in TOKENS:
        often.append(fetched_for(driver, [7]))
        rarely.append(fetched_for(driver, [token]))
    assert sum(often[3:]) < 0.3 * sum(rarely[3:])


def caching_driver(folder: Path, part: float) -> Driver:
    """A mixture of experts of 100 KB, with memory for that part of them."""
    save_model("qwen3-moe", folder / "large", num_hidden_layers=4, moe_intermediate_size=512)
    write_packed(load_checkpoint(folder / "large"), folder / "packed", Packer("int8"))
    whole = load_checkpoint(folder / "packed", with_tokenizer=False)
    stored = whole.tensors
    assert isinstance(stored, StoredTensors)
    experts = sum(stored[name].nbytes for name in stored if ".experts." in name)
    limit = stored.num_bytes() - int((1.0 - part) * experts)
    return Driver(replace(whole, tensors=StreamedTensors(stored, 4, limit)), ops=CpuOps("int8"))


def fetched_for(driver: Driver, tokens: list[int]) -> int:
    """Experts that a chunk reads from disk."""
    driver.kv.reserve(0, len(tokens))
    batch = driver.runner.pack([Span.chunk(0, 0, tokens, True)])
    found = driver.runner.forward(batch).experts_fetched
    driver.kv.rollback(0)
    return found


FEW_WORDS = SamplingParams(
    max_tokens=160, temperature=2.0, seed=1, ignore_eos=True, allowed_token_ids=TOKENS[:16]
)
"""A text that often repeats itself, and whose repetitions are often not what follows."""


@native
@linux
def test_drafts_are_left_out_where_their_rows_read_too_much_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text by suffix matching, from disks that take nothing and 2 ms for an expert."""
    changes = {"num_hidden_layers": 4, "num_experts": 32, "max_position_embeddings": 256}
    save_model("qwen3-moe", tmp_path / "plain", **changes)
    write_packed(load_checkpoint(tmp_path / "plain"), tmp_path / "packed", Packer("int8"))
    checkpoint = load_checkpoint(tmp_path / "packed", with_tokenizer=False)
    suffix = {"method": "suffix"}
    texts, drafted, fetched = [], [], []
    for fetch, drafts in ((0.0, []), (0.0, [suffix]), (2.0, [suffix])):
        with monkeypatch.context() as patch:
            run_exactly(patch, fetch=fetch)
            limit = min_limit(checkpoint)
            with LLM(
                checkpoint, weight_memory=limit, speculative_config=drafts, max_model_len=256
            ) as llm:
                texts.append(llm.generate(TOKENS[:8], FEW_WORDS).token_ids)
                stats = llm.stats()
        drafted.append(stats.speculation.num_draft_tokens / len(texts[-1]))
        fetched.append(stats.num_experts_fetched / len(texts[-1]))
    assert texts[0] == texts[1] == texts[2]
    assert drafted[1] > 2.0
    assert drafted[2] < drafted[1] / 5
    assert fetched[1] > 1.5 * fetched[0] > 1.3 * fetched[2]


@native
@linux
def test_doctor_says_that_a_limit_is_too_small(packed: Path) -> None:
    """It looks at the machine all the same."""
    config = EngineConfig(weight_memory=1, max_model_len=64)
    found = model_facts(str(packed), config, Roofs(read_gb_per_s=10.0, gflop_per_s=10.0))
    assert "--weight-memory is 0M; this model needs" in (found.problem or "")


@native
@linux
def test_doctor_says_what_would_be_read(packed: Path) -> None:
    checkpoint = load_checkpoint(packed, with_tokenizer=False)
    config = EngineConfig(weight_memory=min_limit(checkpoint), max_model_len=64)
    roofs = Roofs(read_gb_per_s=10.0, gflop_per_s=10.0)
    found = model_facts(str(packed), config, roofs)
    assert found.problem is None
    assert SLOTS < found.streamed_layers <= found.layers == 8
    assert found.disk_gb_per_s is not None
    assert 0 < found.streamed_bytes < checkpoint.num_bytes
