"""Drafts of heads, recorded beside their target: replayed they are the heads' own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from paceline import LLM
from paceline.api.llm import embedded_model
from paceline.build.build import resolve_config, target_info
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.loading.checkpoint import load_checkpoint
from paceline.planner.planner import PLANNERS
from paceline.proposers.heads.proposer import FeatureDrafter
from paceline.request.traces import Trace, TraceWriter
from paceline_lab.simulate.recorded_drafts import (
    BLOCK,
    LEVELS,
    MASKS,
    DraftsKey,
    HeadTarget,
    RecordedDrafts,
    cached_proposer,
    draft_source,
    drafts_key,
)
from paceline_lab.simulate.recording import HeadRecorder, record_drafts
from paceline_lab.simulate.setup import open_simulator
from paceline_lab.trace.command import TraceOptions, trace_command
from paceline_lab.trace.requests import trace_params
from tests.lab.test_drafts import (
    BUDGETS,
    CHAIN,
    CONTEXT,
    TREE,
    make_meta,
    make_trace,
    steps,
    toy_traces,
)
from tests.models.reference import save_model
from tests.proposers.assistants import write_assistant
from tests.proposers.dflash import dflash_options, following_dflash, toy_dflash
from tests.proposers.heads import embedded_head, following_head, head_options, toy_head, write_head
from tests.proposers.mtp import following_mtp, mtp_options, toy_mtp
from tests.proposers.parallel_heads import following, toy_dflash2, toy_dspark, toy_peagle
from tests.toy import toy_runner

Make = Callable[..., Any]
KINDS: dict[str, tuple[str, Make, Make, Make]] = {
    "eagle3": (LEVELS, head_options, toy_head, following_head),
    "mtp": (LEVELS, mtp_options, toy_mtp, following_mtp),
    "dflash": (MASKS, dflash_options, toy_dflash, following_dflash),
    "peagle": (
        MASKS,
        lambda **options: head_options("peagle", **options),
        toy_peagle,
        lambda **options: following(toy_peagle, **options),
    ),
    "dflash2": (
        BLOCK,
        lambda **options: head_options("dflash2", **options),
        toy_dflash2,
        lambda **options: following(toy_dflash2, **options),
    ),
    "dspark": (
        BLOCK,
        lambda **options: head_options("dspark", **options),
        toy_dspark,
        lambda **options: following(toy_dspark, **options),
    ),
}


def recorded(kind: str, traces: list[Trace], meta: dict[str, Any], **largest: Any) -> Any:
    form, options, make, _ = KINDS[kind]
    target = toy_runner(prefix_caching=False)
    drafter: FeatureDrafter = make(target, **largest)
    config = options(**largest)
    recorder = HeadRecorder(config, drafter, target)
    key = DraftsKey(config, CONTEXT, "", form)
    found = record_drafts(key, recorder, traces, meta, lambda done: None)
    assert target.kv.pool.num_used == 0
    return found


@pytest.mark.parametrize(("temperature", "largest"), [(0.0, TREE), (0.8, CHAIN), (0.8, TREE)])
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_drafts_are_the_heads_own(
    kind: str, temperature: float, largest: dict[str, Any]
) -> None:
    traces, meta = toy_traces(temperature), make_meta(temperature)
    drafts: RecordedDrafts = recorded(kind, traces, meta, **largest)
    _, options, _, follow = KINDS[kind]
    nodes = 0
    for smaller, budget in [({}, BUDGETS[0]), ({"num_speculative_tokens": 2}, BUDGETS[1])]:
        real = follow(**largest | smaller)
        cached = cached_proposer(
            options(**largest | smaller), drafts, dict(enumerate(range(len(traces))))
        )
        assert cached.costs_levels == real.costs_levels
        pairs = zip(
            steps(real, traces, meta, budget), steps(cached, traces, meta, budget), strict=True
        )
        for trees, again in pairs:
            assert again == trees
            nodes += sum(map(len, trees))
    assert nodes > 100


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_replay_counts_what_the_engine_counts(tmp_path: Path, temperature: float) -> None:
    config = dataclasses.replace(
        embedded_head(tmp_path / "head"), num_speculative_tokens=3, min_accept_prob=0.0
    )
    simulator = _simulator(tmp_path, config, temperature)
    replayed = simulator.run((config,), PLANNERS["fixed"])
    with LLM(
        "embedded", speculative_config=[config], planner="fixed", enable_prefix_caching=False
    ) as llm:
        for trace, of_replay in zip(simulator.traces, replayed.traces, strict=True):
            prompt = trace.token_ids[: trace.prompt_len].tolist()
            (output,) = llm.generate([prompt], trace_params(trace, simulator.meta))
            assert output.token_ids == trace.output_token_ids.tolist()
            of_engine, counted = output.completions[0].counters, of_replay.counters
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
                assert getattr(counted, name) == getattr(of_engine, name)
            assert counted.num_draft_tokens > 20


def _simulator(folder: Path, config: SpeculativeConfig, temperature: float) -> Any:
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "def add(a, b):"}\n{"prompt": "The night was"}\n')
    wish = TraceOptions(
        model="embedded",
        prompts=str(prompts),
        output=str(folder / "traces"),
        max_tokens=16,
        temperature=temperature,
    )
    trace_command(wish, is_kept=True)
    return open_simulator(
        folder / "traces", "embedded", EngineConfig(max_num_seqs=1), [config]
    ).simulator


def test_a_recording_is_of_the_targets_weights_and_arithmetic(tmp_path: Path) -> None:
    config = embedded_head(tmp_path / "head")
    traces, meta = toy_traces(0.0), make_meta(0.0)
    checkpoint = load_checkpoint(embedded_model("target"))

    def digest(**options: Any) -> str:
        built, ops = resolve_config(EngineConfig(**options), checkpoint)
        target = target_info(checkpoint, built, 0)
        running, source = HeadTarget(target, built, ops), draft_source(config, target)
        key = drafts_key(traces, meta, config, target, source, running)
        assert key.form == LEVELS
        return key.digest

    found = [digest(), digest(dtype="bfloat16"), digest(kv_cache_dtype="float32")]
    write_head(tmp_path / "head", *_other_head(tmp_path / "head"))
    assert len({*found, digest()}) == 4


def _other_head(folder: Path) -> tuple[dict[str, Any], Any]:
    """The same layers behind another ``fc``."""
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].flip(0)
    return json.loads((folder / "config.json").read_text()), tensors


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_assistants_are_replayed_as_the_engine_runs_them(
    tmp_path: Path, temperature: float
) -> None:
    """They read the target's own keys and values."""
    save_model("gemma4", tmp_path / "target")
    write_assistant(tmp_path / "assistant", "gemma4")
    sizes = {"num_speculative_tokens": 4, "max_tree_nodes": 9, "min_accept_prob": 0.0}
    config = SpeculativeConfig("gemma4_assistant", str(tmp_path / "assistant"), **sizes)
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 1, "max_model_len": 64}
    meta = make_meta(temperature, 20, 64)
    plan = [trace_params(make_trace(i, [3 + i] * 9, []), meta) for i in range(3)]
    with LLM(
        str(tmp_path / "target"), speculative_config=[config], planner="fixed", **options
    ) as llm:
        answers = llm.generate([[3 + i] * 9 for i in range(3)], plan)
    traces = [make_trace(i, [3 + i] * 9, each.token_ids) for i, each in enumerate(answers)]
    TraceWriter(tmp_path / "traces", meta).write_shard(traces)
    built = EngineConfig(**options)
    opened = open_simulator(tmp_path / "traces", str(tmp_path / "target"), built, [config])
    replayed = opened.simulator.run((config,), PLANNERS["fixed"])
    for answer, of_replay in zip(answers, replayed.traces, strict=True):
        of_engine = answer.completions[0].counters
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            assert getattr(of_replay.counters, name) == getattr(of_engine, name)
        assert of_engine.num_draft_tokens > 20
