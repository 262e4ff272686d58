"""Requests of hybrids that are sent back in the middle of their answers, while drafts are accepted:
their states are lost and computed anew, and the answers are those of plain decoding, one by one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.api.llm import LLM
from paceline.backends.native.native import why_not_native
from paceline.backends.native.packing import Packer
from paceline.build.build import DRAFT_SHARE
from paceline.cache.memory_needs import LEAST_NODES, least_budget
from paceline.disk.packed_folder import write_packed
from paceline.engine.engine import Engine
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.backend import BLOCK_SIZE
from paceline.request.sampling_params import SamplingParams
from tests.contracts.test_hybrid_identity import USUAL, check, engine_of, plain
from tests.contracts.test_identity import GREEDY, WARM, prompts
from tests.loading.gguf_writing import convert
from tests.loading.test_gguf_hybrids import CHANGES, WITHOUT_FILES
from tests.models.reference import HYBRIDS, edit, save_model
from tests.proposers.test_mtp_mixtures import saved as with_mtp_layer
from tests.quick import in_turns, only
from tests.toy import Job

# --- toy models: log-probabilities of the whole vocabulary are compared --------------------------


def interruptions(engine: Engine) -> list[int]:
    """Of preemptions that follow, how many tokens of the answer there were."""
    found: list[int] = []
    step = engine.step

    def watched() -> Any:
        outputs = step()
        found.extend(request.num_output_tokens for request in engine.scheduler.preempted)
        return outputs

    engine.step = watched  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("caching", "proposer", "kind"), in_turns([False, True], ["lookup_tree", "several"], USUAL)
)
def test_toys_are_interrupted_within_answers(caching: bool, proposer: str, kind: str) -> None:
    jobs = [
        Job(prompt[:16], replace(params, max_tokens=40, ignore_eos=True), at=i)
        for i, (prompt, params) in enumerate(zip(prompts(), [GREEDY, WARM] * 2, strict=True))
    ]
    truth = plain(kind, jobs)
    engine = engine_of(kind, proposer, num_blocks=9, enable_prefix_caching=caching)
    lengths = interruptions(engine)
    for _ in range(2):  # the second time there may be states in the prefix cache
        check(engine, jobs, truth)
    assert len([length for length in lengths if length > 2]) > 2
    assert engine.stats().speculation.num_accepted_tokens > 0


# --- folders and files, as a user runs them ------------------------------------------------------

MOST = 900
"""Tokens of an answer."""
WISH = SamplingParams(seed=3, ignore_eos=True, logprobs=2)
QUICK = ("qwen3-5", "lfm2", "granite-hybrid", "falcon-h1", "nemotron-h.gguf", "qwen3-5.packed")
FOLDERS = [family for family in HYBRIDS if family != "mamba2"]  # which lacks no room for keys
SOURCES = [*FOLDERS, *(f"{name}.gguf" for name in FOLDERS if name not in WITHOUT_FILES)]
SOURCES += ["qwen3-5.packed", "qwen3-next.packed"]  # with their MTP layers
TEXTS = [[7, 9, 11, 4] * 3, [5, 5, 8, 30, 31] * 2, [40, 41, 42], [9, 8, 7, 6, 5] * 2]
COMMON = {"dtype": "float32", "kv_cache_dtype": "float32"}
DRAFTS = [
    {"method": "self", "dtype": "int8", "num_speculative_tokens": 3, "min_accept_prob": 0.0},
    {"method": "prompt_lookup", "num_speculative_tokens": 4, "min_accept_prob": 0.0},
]
MTP = {"method": "mtp", "num_speculative_tokens": 3, "max_tree_nodes": 4, "min_accept_prob": 0.0}


def saved(source: str, folder: Path) -> Path:
    family, _, kind = source.partition(".")
    if kind == "packed":
        with_mtp_layer(family, folder / family)
        edit(folder / family / "config.json", max_position_embeddings=1024)
        checkpoint = load_checkpoint(folder / family, with_tokenizer=False)
        write_packed(checkpoint, folder / source, Packer("float32"))
        return folder / source
    changes = CHANGES.get(family, {}) | {"max_position_embeddings": 1024}
    if kind:
        convert(family, folder / source, changes=changes)
        return folder / source
    save_model(family, folder / family, **changes)
    return folder / family


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
@pytest.mark.parametrize("source", only(QUICK, SOURCES))
def test_folders_and_files_with_little_memory(tmp_path: Path, source: str) -> None:
    """There are states for all requests, but keys and values for half of their answers."""
    path = str(saved(source, tmp_path))
    recurrent = load_checkpoint(path, with_tokenizer=False).config.recurrent
    assert recurrent is not None
    needed, drafts = least_budget(recurrent, len(TEXTS), LEAST_NODES), DRAFTS
    if source.endswith(".packed"):  # whose drafts have keys and values of their own
        needed, drafts = needed * DRAFT_SHARE // (DRAFT_SHARE - 1), [MTP, *DRAFTS]
    with LLM(
        path,
        speculative_config=drafts,
        strict=True,
        planner="fixed",
        max_num_seqs=len(TEXTS),
        kv_cache_memory=needed,
        **COMMON,
    ) as llm:
        room = llm.call(lambda engine: engine.kv.pool.num_blocks - 1) * BLOCK_SIZE
        most = min(MOST, room // 2)
        params = [replace(WISH, temperature=t, max_tokens=most) for t in (0.0, 0.0, 0.3, 1.0)]
        found = llm.generate(TEXTS, params)
        stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.speculation.num_accepted_tokens > 0
    assert ("mtp" in stats.speculation.by_proposer) == (MTP in drafts)
    with LLM(path, speculative_config=[], max_num_seqs=1, **COMMON) as llm:
        for text, wish, one in zip(TEXTS, params, found, strict=True):
            (other,) = llm.generate([text], wish)
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs
