"""Gemma 4 assistants draft what transformers drafts by them, and change no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.api.llm import LLM
from paceline.build.default_drafts import bundled_drafts
from paceline.cache.kv_cache import KVCache
from paceline.cache.memory_needs import bytes_per_block
from paceline.cache.model_runner import ModelRunner
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.decoder import Decoder
from paceline.models.families.rope import FULL
from paceline.proposers.base import TargetInfo
from paceline.proposers.heads import assistant as module
from paceline.proposers.heads import build
from paceline.proposers.heads.assistant import AssistantProposer
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from tests.arrays import assert_close
from tests.loading.gguf_writing import convert
from tests.models.reference import VOCAB, save_model
from tests.models.test_gemma_layers import KINDS
from tests.proposers.assistants import (
    TARGETS,
    drafted,
    target_model,
    write_assistant,
    write_gguf_assistant,
)
from tests.proposers.drive import make_request, propose
from tests.proposers.self_drafts import read_all_but_last
from tests.proposers.trained_assistants import DEPTH as PAIR_DEPTH
from tests.proposers.trained_assistants import LENGTH, texts, write_pair
from tests.quick import in_turns

TEXT = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(5)).tolist()
DEPTH = 8
CHAIN = {"max_tree_nodes": 0, "max_branching": 1, "min_accept_prob": 0.0}
TREE = {"max_tree_nodes": 12, "max_branching": 3, "min_accept_prob": 0.0}


def target_runner(folder: Path, backend: str) -> ModelRunner:
    checkpoint = load_checkpoint(folder, with_tokenizer=False)
    ops: Any = KINDS[backend]("float32")
    decoder = Decoder(checkpoint.config, checkpoint.tensors, ops, 64)
    return ModelRunner(decoder, KVCache(ops.kv_memory(checkpoint.config, 40, "float32")))


def info(runner: ModelRunner, backend: str = "auto") -> TargetInfo:
    return TargetInfo(VOCAB, None, "cpu", 64, 8, 1 << 22, backend, runner)


def chain(model: Path, **options: Any) -> SpeculativeConfig:
    options = {**CHAIN, "num_speculative_tokens": DEPTH, **options}
    return SpeculativeConfig("gemma4_assistant", str(model), **options)


def read_for(proposer: AssistantProposer, runner: ModelRunner, request: Request) -> None:
    """Let the target read all of a request but its last token."""
    runner.taps = tuple(proposer.taps)
    assert proposer.follows(request)
    start, features = read_all_but_last(runner, request)
    assert features is not None
    proposer.read(request, start, features)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits that candidates are ranked by, level by level."""
    levels, ranked = list[torch.Tensor](), module.ranked

    def record(logits: Any, *rest: Any) -> Any:
        levels.append(torch.from_numpy(logits.copy()))
        return ranked(logits, *rest)

    monkeypatch.setattr(module, "ranked", record)
    return levels


@pytest.mark.parametrize(("family", "backend", "clusters"), in_turns(TARGETS, KINDS, (0, 12)))
def test_chains_and_logits_are_those_of_transformers(
    tmp_path: Path, family: str, backend: str, clusters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(family, tmp_path / "target")
    assistant = write_assistant(tmp_path / "assistant", family, clusters)
    runner = target_runner(tmp_path / "target", backend)
    proposer = build(chain(tmp_path / "assistant"), info(runner, backend))
    assert isinstance(proposer, AssistantProposer)
    levels = recorded(monkeypatch)
    for count in (2, 7, 17, 40):  # a window has 10
        levels.clear()
        request = make_request(count, TEXT[:count])
        read_for(proposer, runner, request)
        (tree,) = propose(proposer, request)
        wanted, logits = drafted(target_model(family), assistant, TEXT[:count], DEPTH)
        assert list(tree.token_ids) == wanted
        for level, found in enumerate(levels):
            kept = found[0] > -torch.inf
            assert int(kept.sum()) == (VOCAB if not clusters else VOCAB // clusters * 4)
            assert_close(found[0, kept], logits[level, kept], atol=1e-4, rtol=1e-4)
        assert len(levels) == DEPTH


@pytest.mark.parametrize(("family", "backend"), in_turns(TARGETS, KINDS))
def test_gguf_files_draft_as_transformers(
    tmp_path: Path, family: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.gguf"
    convert(family, model)
    file = tmp_path / "model.speculators" / "assistant.gguf"
    file.parent.mkdir()
    assistant = write_gguf_assistant(file, family)
    (config,) = bundled_drafts(str(model))
    assert config.method == "gemma4_assistant"
    runner = target_runner(model, backend)
    proposer = build(chain(file), info(runner, backend))
    assert isinstance(proposer, AssistantProposer)
    levels, request = recorded(monkeypatch), make_request(1, TEXT)
    read_for(proposer, runner, request)
    (tree,) = propose(proposer, request)
    wanted, logits = drafted(target_model(family), assistant, TEXT, DEPTH)
    assert list(tree.token_ids) == wanted
    for level, found in enumerate(levels):
        assert_close(found[0], logits[level], atol=1e-4, rtol=1e-4)


def prompts() -> list[list[int]]:
    """Three of one beginning, so that prefix caching shares it, and another."""
    return [[*TEXT[:20], 7], [*TEXT[:20], 9, 11], TEXT[:20], TEXT[25:30]]


@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("family", "backend"), in_turns(TARGETS, KINDS))
def test_it_changes_no_token(
    tmp_path: Path, family: str, backend: str, options: dict[str, Any]
) -> None:
    """Several requests at once, sampled ones and a group too, some preempted."""
    save_model(family, tmp_path / "target")
    write_assistant(tmp_path / "assistant", family, 12)
    config = {"method": "gemma4_assistant", "model": str(tmp_path / "assistant"), **options}
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0),
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9, seed=5),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.7, seed=8, n=2),
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0),
    ]
    shape = load_checkpoint(tmp_path / "target", with_tokenizer=False).config
    found = []
    for speculative in ([], [config]):
        with LLM(
            str(tmp_path / "target"),
            dtype="float32",
            backend=backend,
            max_model_len=64,
            planner="fixed",
            kv_cache_memory=8 * bytes_per_block(shape, "float32"),
            speculative_config=speculative,
        ) as llm:
            answers = llm.generate(prompts(), params)
            again = llm.generate(prompts(), params)
            assert [each.token_ids for each in answers] == [each.token_ids for each in again]
            found.append([[c.token_ids for c in each.outputs] for each in answers])
            stats = llm.stats()
            assert (stats.speculation.num_draft_tokens > 0) == bool(speculative)
            assert stats.num_preemptions > 0 or not speculative
    assert found[0] == found[1]


def test_it_is_found_beside_its_model(tmp_path: Path) -> None:
    save_model("gemma4", tmp_path)
    write_assistant(tmp_path / "speculators" / "assistant", "gemma4")
    (config,) = bundled_drafts(str(tmp_path))
    assert config.method == "gemma4_assistant"
    with LLM(str(tmp_path), dtype="float32") as llm:
        assert llm.proposers == ("suffix", "gemma4_assistant")


@pytest.mark.parametrize(
    ("changes", "sides"),
    [
        ({"vocab_size": VOCAB + 4}, "tokens: 304 there, 300 in this target"),
        ({"head_dim": 24}, "dimensions of a head of sliding layers: 24 there, 16 in this target"),
        ({"sliding_window": 12}, "sliding window: 12 there, 10 in this target"),
        ({"num_key_value_heads": 1}, "KV heads of sliding layers: 1 there, 4 in this target"),
    ],
)
def test_one_for_another_target_is_refused(
    tmp_path: Path, changes: dict[str, Any], sides: str
) -> None:
    save_model("gemma4", tmp_path / "target")
    write_assistant(tmp_path / "assistant", "gemma4", **changes)
    runner = target_runner(tmp_path / "target", "reference")
    with pytest.raises(ConfigError, match="assistant was made for another target: " + sides):
        build(chain(tmp_path / "assistant"), info(runner))


def test_width_and_rotation_of_another_target_are_refused(tmp_path: Path) -> None:
    save_model("gemma4", tmp_path / "target")
    write_assistant(tmp_path / "assistant", "gemma4")
    runner = target_runner(tmp_path / "target", "reference")
    path = tmp_path / "assistant" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"backbone_hidden_size": 48}))
    with pytest.raises(ConfigError, match="hidden states of the target: 48 there, 64 in this"):
        build(chain(tmp_path / "assistant"), info(runner))
    config["text_config"]["rope_parameters"][FULL]["rope_theta"] = 700.0
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"rotary embedding of full layers: .* there"):
        build(chain(tmp_path / "assistant"), info(runner))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("post_projection.weight", "post_projection"),
        ("masked_embedding.centroids.weight", "masked_embedding.centroids"),
        ("masked_embedding.token_ordering", "masked_embedding.token_ordering"),
    ],
)
def test_incomplete_ones_are_refused(tmp_path: Path, name: str, told: str) -> None:
    save_model("gemma4", tmp_path / "target")
    write_assistant(tmp_path / "assistant", "gemma4", 12)
    file = tmp_path / "assistant" / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=told):
        build(chain(tmp_path / "assistant"), info(target_runner(tmp_path / "target", "reference")))


@pytest.mark.slow
@pytest.mark.timeout(900)  # it trains for a minute or two
def test_a_trained_one_is_accepted(tmp_path: Path) -> None:
    """Wrong positions, stale keys and shifted hidden states show here, as low acceptance."""
    target, assistant = write_pair(tmp_path)
    config = {"method": "gemma4_assistant", "model": str(assistant), **CHAIN}
    params = SamplingParams(max_tokens=LENGTH - 8, ignore_eos=True, temperature=0.0)
    with LLM(
        str(target),
        dtype="float32",
        planner="fixed",
        speculative_config=[{**config, "num_speculative_tokens": PAIR_DEPTH}],
    ) as llm:
        llm.generate([text[:8] for text in texts(24, 12345).tolist()], params)
        counted = llm.stats().speculation
    accepted = counted.by_proposer["gemma4_assistant"].num_accepted_tokens_per_pos
    reached = [
        sum(count for depth, count in counted.drafts_by_depth.items() if depth > level)
        for level in range(PAIR_DEPTH)
    ]
    assert reached[-1] > 24
    assert all(a >= 0.95 * r for a, r in zip(accepted, reached, strict=True)), (accepted, reached)
