"""Models that nobody packed, read from disk: packed once, with the bits of the model in memory."""

from __future__ import annotations

import bisect
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.backends.native.native import why_not_native
from paceline.build import weight_memory
from paceline.config import EngineConfig
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.disk import packed_cache, streaming
from paceline.disk.packed_cache import packed_place, packed_tensors
from paceline.loading.catalogue import embedded_model
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.profiling.doctor import model_facts
from paceline.profiling.machine import Roofs
from paceline.tensors.placement import SLOTS, Placement
from tests.backends.block_rows import random_rows
from tests.loading.gguf_writing import convert
from tests.models.reference import save_model

TOKENS = torch.randint(3, 300, (12,), generator=torch.Generator().manual_seed(3)).tolist()
LAYERS = {"num_hidden_layers": 8}
WIDE = {**LAYERS, "hidden_size": 256, "intermediate_size": 512}
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True, logprobs=2)
pytestmark = [
    pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native())),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(streaming, "LEAST_BYTES", 1)
    return tmp_path / "cache" / "paceline" / "packed"


def gguf_of(qtype: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "model.gguf"
        convert("llama", path, qtype=qtype, changes=WIDE)
        return path

    return make


def mixture_file(folder: Path) -> Path:
    changes = {**LAYERS, "moe_intermediate_size": 128}
    convert("qwen3-moe", folder / "model.gguf", qtype="Q8_0", changes=changes)
    return folder / "model.gguf"


def floats_folder(folder: Path) -> Path:
    save_model("llama", folder / "model", **LAYERS)
    return folder / "model"


SOURCES: dict[str, Callable[[Path], Path]] = {
    **{qtype: gguf_of(qtype) for qtype in ("Q8_0", "Q4_0", "Q4_K", "Q6_K")},
    "mixture": mixture_file,
    "floats": floats_folder,
}


@pytest.fixture(scope="module")
def written() -> dict[str, Path]:
    return {}


@pytest.fixture
def model(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    written: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    request: Any,
) -> Path:
    """A model that nobody packed: a copy of the one that was written first."""
    quantize = gguf.quants.quantize

    def with_k_types(data: np.ndarray, kind: Any) -> np.ndarray:
        if kind.name not in ("Q4_K", "Q6_K"):  # which the package cannot write
            found: np.ndarray = quantize(data, kind)
            return found
        return random_rows(kind.name, *data.shape, seed=data.size)

    monkeypatch.setattr(gguf.quants, "quantize", with_k_types)
    source = getattr(request, "param", "Q8_0")
    if source not in written:
        written[source] = SOURCES[source](tmp_path_factory.mktemp(source))
    shutil.copytree(written[source].parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / written[source].name


def least_memory(checkpoint: Checkpoint) -> int:
    """The smallest limit that is kept."""
    tensors, layers = packed_tensors(checkpoint, dtype_of(checkpoint)), checkpoint.config.num_layers
    return least_of(lambda limit: streaming.placement_of(tensors, layers, limit))


def dtype_of(checkpoint: Checkpoint) -> str:
    return "file" if checkpoint.is_quantised else "int8"


def least_of(place: Callable[[int], Placement]) -> int:
    """The smallest limit that a rule takes."""

    def is_enough(pages: int) -> bool:
        try:
            place(pages << 12)
        except ConfigError:
            return False
        return True

    return bisect.bisect_left(range(1 << 12), True, key=is_enough) << 12


def answers(model: Path, **options: Any) -> tuple[Any, int]:
    """What is said with all bits of its log-probabilities, and bytes that came from disk."""
    with LLM(str(model), speculative_config=[], max_model_len=64, **options) as llm:
        said = llm.generate(TOKENS, PARAMS)
        return (said.token_ids, said.logprobs), llm.stats().num_weight_bytes_read


@pytest.mark.parametrize("model", SOURCES, indirect=True)
def test_it_is_packed_once_and_says_the_same(model: Path, cache: Path) -> None:
    expected, read = answers(model)
    assert read == 0
    assert not cache.exists()
    limit = least_memory(load_checkpoint(model, with_tokenizer=False))
    shutil.rmtree(cache)
    found, read = answers(model, weight_memory=limit)
    assert found == expected
    assert read > 0
    (folder,) = cache.iterdir()
    stamp = folder.stat().st_mtime_ns
    assert answers(model, weight_memory=limit)[0] == expected
    assert [each.stat().st_mtime_ns for each in cache.iterdir()] == [stamp]


def test_what_fits_is_not_packed(model: Path, cache: Path) -> None:
    assert answers(model, weight_memory=1 << 30) == answers(model)
    assert not cache.exists()


def test_another_file_of_the_name_is_packed_anew(model: Path, cache: Path) -> None:
    packed_tensors(load_checkpoint(model, with_tokenizer=False), "file")
    old = model.stat()
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    os.utime(model, ns=(old.st_atime_ns, old.st_mtime_ns + 1))
    other = packed_place(load_checkpoint(embedded_model("draft")), "file")
    other.mkdir()
    packed_tensors(load_checkpoint(model, with_tokenizer=False), "file")
    kept = {packed_place(load_checkpoint(model, with_tokenizer=False), "file"), other}
    assert set(cache.iterdir()) == kept  # what is of no use any more has gone


def test_a_damaged_copy_is_packed_anew(model: Path, cache: Path) -> None:
    checkpoint = load_checkpoint(model, with_tokenizer=False)
    whole = packed_tensors(checkpoint, "file")
    (file,) = packed_place(checkpoint, "file").glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert packed_cache.find_packed(checkpoint, "file") is None
    assert set(packed_tensors(checkpoint, "file")) == set(whole)
    assert file.read_bytes() == data


def test_without_room_the_refusal_says_how_much_and_where(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=1000)
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda place: free)
    with pytest.raises(ConfigError, match=r"takes 0.* GB in .*packed; 0.00 GB .*paceline convert"):
        packed_tensors(load_checkpoint(model, with_tokenizer=False), "file")
    assert not cache.exists()


@pytest.fixture
def copies(cache: Path) -> list[Path]:
    """Of other models, 1000 bytes each; the one that was used last comes last."""
    places = [cache / name for name in ("b", "a", "c")]
    for age, place in enumerate(places):
        place.mkdir(parents=True)
        (place / "config.json").write_bytes(bytes(1000))
        os.utime(place / "config.json", (age, age))
    return places


HOLD = "import sys; from pathlib import Path; from paceline.disk.packed_cache import hold"
HOLD += "; held = hold(Path(sys.argv[1])); print(held is not None, flush=True); sys.stdin.read()"


@pytest.mark.parametrize(("room", "left"), [(3000, 3), (2999, 2), (1000, 1)])
def test_what_was_not_used_for_the_longest_makes_room(
    model: Path, copies: list[Path], caplog: pytest.LogCaptureFixture, room: int, left: int
) -> None:
    checkpoint = load_checkpoint(model, with_tokenizer=False)
    size = int(checkpoint.num_bytes * packed_cache.MARGIN)
    packed_tensors(checkpoint, "file", size + room)
    assert [each.exists() for each in copies] == [False] * (3 - left) + [True] * left
    told = [r.getMessage() for r in caplog.records if "not used for the longest" in r.getMessage()]
    assert len(told) == (left < 3)
    assert all(f"removed {', '.join(each.name for each in copies[: 3 - left])}," in t for t in told)


def test_what_is_in_use_stays_and_the_limit_is_kept(model: Path, copies: list[Path]) -> None:
    checkpoint = load_checkpoint(model, with_tokenizer=False)
    size = int(checkpoint.num_bytes * packed_cache.MARGIN)
    command = [sys.executable, "-c", HOLD, str(copies[0])]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        with pytest.raises(
            ConfigError, match=r"takes .* GB beside 0.00 GB of models in use: raise"
        ):
            packed_tensors(checkpoint, "file", size + 999)
        assert [each.exists() for each in copies] == [True, False, False]
        process.communicate("")
    packed_tensors(checkpoint, "file", size + 999)
    assert not copies[0].exists()


def test_a_limit_below_the_model_itself_removes_nothing(model: Path, copies: list[Path]) -> None:
    checkpoint = load_checkpoint(model, with_tokenizer=False)
    with pytest.raises(ConfigError, match=r"this one takes 0.* GB: raise --packed-space, or write"):
        packed_tensors(checkpoint, "file", checkpoint.num_bytes)
    assert all(each.exists() for each in copies)


@pytest.mark.parametrize(("parts", "more", "left"), [(2, 6000, 3), (2, 5998, 2), (1, 0, 0)])
def test_without_a_limit_copies_take_half_of_the_room_but_the_last_one_more(
    model: Path,
    copies: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    parts: int,
    more: int,
    left: int,
) -> None:
    checkpoint = load_checkpoint(model, with_tokenizer=False)
    size = int(checkpoint.num_bytes * packed_cache.MARGIN)
    usage = SimpleNamespace(free=parts * size + more - 3000)
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda place: usage)
    monkeypatch.setattr(packed_cache, "_check_room", lambda *arguments: None)
    packed_tensors(checkpoint, "file")
    assert sum(each.exists() for each in copies) == left


def test_a_model_that_runs_keeps_its_copy(model: Path, cache: Path) -> None:
    """And using it again makes it the latest."""
    checkpoint = load_checkpoint(model, with_tokenizer=False)
    limit = least_memory(checkpoint)
    place = packed_place(checkpoint, "file")
    os.utime(place / "config.json", (0, 0))
    with LLM(str(model), speculative_config=[], max_model_len=64, weight_memory=limit):
        assert (place / "config.json").stat().st_mtime > 0
        packed_cache.make_room(cache / "other", 1, None)
        with pytest.raises(ConfigError, match="in use"):
            packed_cache.make_room(cache / "other", 1000, 1000)
        assert place.exists()
    gc.collect()
    packed_cache.make_room(cache / "other", 1000, 1000)
    assert not place.exists()


def test_what_a_dead_process_left_goes(model: Path, cache: Path) -> None:
    checkpoint = load_checkpoint(model, with_tokenizer=False)
    name = packed_place(checkpoint, "file").name
    gone, alive = (cache / f".{name}.{pid}.partial" for pid in (1 << 30, os.getppid()))
    gone.mkdir(parents=True)
    alive.mkdir()
    packed_tensors(checkpoint, "file")
    assert not gone.exists()
    assert alive.exists()


def test_two_at_once_end_with_one_folder(model: Path, cache: Path) -> None:
    """The second one to finish finds the first one's folder."""
    checkpoint = load_checkpoint(model, with_tokenizer=False)
    both, write = threading.Barrier(2), packed_cache.write_packed
    found: list[Any] = []

    def meeting(*arguments: Any) -> int:
        both.wait(60)
        return write(*arguments)

    def pack() -> None:
        found.append(packed_tensors(checkpoint, "file"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_cache, "write_packed", meeting)
        # In one process both write the same partial folder unless they have names of their own.
        names = iter("ab")
        patch.setattr("paceline.core.files._beside", lambda path: path.with_name(f".{next(names)}"))
        threads = [threading.Thread(target=pack) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 2
    assert len(list(cache.iterdir())) == 1


def test_a_file_that_changes_while_it_is_packed_is_refused(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = packed_cache.write_packed

    def touched(*arguments: Any) -> int:
        size = write(*arguments)
        os.utime(model)
        return size

    monkeypatch.setattr(packed_cache, "write_packed", touched)
    with pytest.raises(ModelLoadError, match="changed while it was packed"):
        packed_tensors(load_checkpoint(model, with_tokenizer=False), "file")
    assert list(cache.iterdir()) == []


def test_a_model_in_memory_is_refused(model: Path) -> None:
    checkpoint = replace(load_checkpoint(model, with_tokenizer=False), files=())
    with pytest.raises(ConfigError, match="was given in memory"):
        LLM(checkpoint, weight_memory=1 << 16)


def test_without_a_wish_only_what_cannot_fit_is_packed(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = load_checkpoint(model, with_tokenizer=False).num_bytes
    expected = answers(model)[0]
    for available, packs in ((size, False), (size - 1, True)):
        monkeypatch.setattr(
            weight_memory, "memory", lambda available=available: (available, available)
        )
        assert answers(model)[0] == expected
        assert cache.exists() == packs


def test_doctor_says_where_to_and_about_what_will_stay(model: Path, cache: Path) -> None:
    checkpoint = load_checkpoint(model, with_tokenizer=False)
    config = EngineConfig(weight_memory=checkpoint.num_bytes * 4 // 5, max_model_len=64)
    roofs = Roofs(read_gb_per_s=10.0, gflop_per_s=10.0)
    before = model_facts(str(model), config, roofs)
    assert Path(before.packs_into).parent == cache
    packed_tensors(checkpoint, "file")
    after = model_facts(str(model), config, roofs)
    assert after.packs_into == ""
    assert after.streamed_layers > 0
    assert abs(before.streamed_layers - after.streamed_layers) <= SLOTS


def test_a_limit_that_is_far_too_small_is_refused_before_packing(model: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"--weight-memory is 0M; this model needs \d+M or more"):
        LLM(str(model), weight_memory=1 << 10)
    assert not cache.exists()


@pytest.mark.parametrize("model", SOURCES, indirect=True)
def test_what_is_expected_before_packing_is_about_what_comes(model: Path) -> None:
    checkpoint = load_checkpoint(model, with_tokenizer=False)
    expected = least_of(partial(weight_memory.expected_placement, checkpoint, dtype_of(checkpoint)))
    assert expected == pytest.approx(least_memory(checkpoint), rel=weight_memory.ABOUT - 1.0)
