"""Recorded drafts: replayed, they are the trees that the draft model itself would propose."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from paceline.api.llm import LLM, embedded_model
from paceline.cache.model_runner import ModelRunner
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigError, TraceError
from paceline.planner.drafts import FREE, Prices
from paceline.proposers.base import DraftBudget, Proposer, TargetInfo
from paceline.proposers.draft_model.loading import load_draft
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.request.request import Request, VerifyResult
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import ROOT, DraftTree
from paceline.request.traces import Trace
from paceline_lab.simulate import recording
from paceline_lab.simulate.recorded_drafts import (
    CachedDrafts,
    DraftsKey,
    RecordedDrafts,
    cached_proposer,
    draft_source,
    drafts_key,
    read_drafts,
    write_drafts,
)
from paceline_lab.simulate.recording import Recorder, cached_drafts, record_drafts
from paceline_lab.trace.requests import trace_request
from tests.toy import TOY, VOCAB, Job, draft_config, run_jobs, toy_engine, toy_runner

CONTEXT = TOY.max_position
LENGTHS = (3, 9, 40, 7)
"""Of the prompts; one is longer than what is read in one step."""


def make_meta(temperature: float, max_tokens: int = 16, context: int = CONTEXT) -> dict[str, Any]:
    params = {
        "temperature": temperature,
        "seed": 5,
        "max_tokens": max_tokens,
        "max_model_len": context,
    }
    return {"params": params}


def make_trace(index: int, prompt: Sequence[int], output: Sequence[int]) -> Trace:
    none = np.zeros((len(output), 0))
    return Trace(
        index,
        len(prompt),
        np.array([*prompt, *output], np.int32),
        np.zeros(len(output), np.float32),
        none.astype(np.int32),
        none.astype(np.float32),
    )


def toy_traces(temperature: float) -> list[Trace]:
    """What the toy target answers, sampled as the meta says; the last of them is empty."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, VOCAB, length).tolist() for length in LENGTHS]
    params = [
        SamplingParams(max_tokens=16, temperature=temperature, seed=5 + i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    jobs = [Job(*each) for each in zip(prompts, params, strict=True)]
    outputs = [results[0].token_ids for results in run_jobs(toy_engine(), jobs)]
    traces = [make_trace(i, *each) for i, each in enumerate(zip(prompts, outputs, strict=True))]
    return [*traces, make_trace(len(traces), [4, 2], [])]


def toy_drafter(config: SpeculativeConfig, num_blocks: int = 400) -> DraftModelProposer:
    return DraftModelProposer(config, draft_runner(num_blocks))


def draft_runner(num_blocks: int = 400) -> ModelRunner:
    return toy_runner(num_blocks=num_blocks, prefix_caching=False, noise=0.4)


def make_key(config: SpeculativeConfig) -> DraftsKey:
    form = "masks" if config.method == "parallel_draft" else "levels"
    return DraftsKey(config, CONTEXT, "", form)


def toy_recording(
    config: SpeculativeConfig, traces: Sequence[Trace], meta: dict[str, Any]
) -> RecordedDrafts:
    recorder = Recorder(config, draft_runner())
    return record_drafts(make_key(config), recorder, traces, meta, lambda done: None)


def accepted(tree: DraftTree, tokens: Sequence[int]) -> int:
    """How many of the tokens to come the tree has drafted."""
    node, depth = ROOT, 0
    for token in tokens:
        found = [
            child
            for child, parent in enumerate(tree.parents)
            if parent == node and tree.token_ids[child] == token
        ]
        if not found:
            break
        node, depth = found[0], depth + 1
    return depth


def steps(
    proposer: Proposer,
    traces: Sequence[Trace],
    meta: dict[str, Any],
    budget: Callable[[int], dict[str, Any]],
    first_id: int = 0,
) -> Iterator[list[DraftTree]]:
    """Decode all traces together, as an engine would; the trees of each step."""
    requests = [trace_request(first_id + i, trace, meta) for i, trace in enumerate(traces)]
    step = 0
    while running := [
        (request, trace)
        for request, trace in zip(requests, traces, strict=True)
        if len(request.token_ids) < len(trace.token_ids)
    ]:
        limits = budget(step)
        depths = [min(limits["depth"], request.remaining - 1) for request, _ in running]
        trees = proposer.propose(
            [request for request, _ in running],
            DraftBudget([limits["nodes"]] * len(running), depths, limits.get("prices", FREE)),
        )
        yield trees
        for (request, trace), tree in zip(running, trees, strict=True):
            commit(proposer, request, tree, trace)
        step += 1


def commit(proposer: Proposer, request: Request, tree: DraftTree, trace: Trace) -> None:
    rest = trace.token_ids[len(request.token_ids) :].tolist()
    emitted = rest[: accepted(tree, rest) + 1]
    request.token_ids += emitted
    proposer.observe(request, VerifyResult([0], emitted, ["target"] * len(emitted), tree))
    if len(emitted) == len(rest):
        proposer.finish(request)


CHAIN = {"num_speculative_tokens": 6}
TREE = {"max_tree_nodes": 24, "max_branching": 3, "num_speculative_tokens": 5}
SMALLER: list[dict[str, Any]] = [
    {},
    {},
    {"num_speculative_tokens": 3, "min_accept_prob": 0.1, "catch_up_tokens": 16},
    {"num_speculative_tokens": 2},
]
BUDGETS: list[Callable[[int], dict[str, Any]]] = [
    lambda step: {"nodes": 64, "depth": 8},
    lambda step: {"nodes": 1 + step % 7, "depth": 1 + step % 5},
    lambda step: {"nodes": 64, "depth": 8, "prices": Prices((0.02, 0.05), 0.2)},
    lambda step: {"nodes": 0 if step % 3 else 9, "depth": 4},
]


# --- the same trees ------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [CHAIN, TREE, TREE | {"temperature": 0.5, "top_k": 6}])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replayed_drafts_are_the_models_own(temperature: float, largest: dict[str, Any]) -> None:
    traces, meta = toy_traces(temperature), make_meta(temperature)
    recorded = toy_recording(draft_config(**largest), traces, meta)
    nodes = 0
    for smaller, budget in zip(SMALLER, BUDGETS, strict=True):
        if smaller and "max_tree_nodes" in largest:
            smaller = {"max_tree_nodes": 7, **smaller}
        config = draft_config(**largest | smaller)
        runner = draft_runner()
        real = DraftModelProposer(config, runner)
        cached = replaying(config, recorded, traces, first_id=70)
        pairs = zip(
            steps(real, traces, meta, budget), steps(cached, traces, meta, budget, 70), strict=True
        )
        for trees, again in pairs:
            assert again == trees
            nodes += sum(map(len, trees))
        assert cached.num_forwards == real.num_forwards
        assert cached.num_rows == runner.num_rows
        for trees, once_more in zip(  # nothing of the finished requests is left
            steps(real, traces, meta, budget), steps(cached, traces, meta, budget, 70), strict=True
        ):
            assert once_more == trees
    assert nodes > 200


def replaying(
    config: SpeculativeConfig, recorded: RecordedDrafts, traces: Sequence[Trace], first_id: int = 0
) -> CachedDrafts:
    return CachedDrafts(config, recorded, {first_id + i: i for i in range(len(traces))})


def test_a_draft_ends_where_the_context_of_its_model_does() -> None:
    trace = make_trace(0, [3] * (CONTEXT - 9), list(range(1, 13)))
    meta = make_meta(0.0, context=2 * CONTEXT)
    config = draft_config(**CHAIN)
    recorded = toy_recording(config, [trace], meta)
    cached = replaying(config, recorded, [trace])
    real = toy_drafter(config)
    trees = [list(steps(proposer, [trace], meta, BUDGETS[0])) for proposer in (real, cached)]
    assert trees[0] == trees[1]
    assert cached.num_forwards == real.num_forwards
    assert {len(tree) for (tree,) in trees[0]} > {0, 6}


# --- recording -----------------------------------------------------------------------------------


def test_recording_does_not_depend_on_who_is_recorded_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traces, meta, config = toy_traces(0.8), make_meta(0.8), draft_config(num_speculative_tokens=2)
    done: list[int] = []
    recorder = Recorder(config, draft_runner())
    together = record_drafts(make_key(config), recorder, traces, meta, done.append)
    assert done == sorted(done)
    assert done[-1] == sum(len(trace.output_token_ids) for trace in traces)
    assert together.positions[-1] == done[-1]
    monkeypatch.setattr(recording, "BATCH", 1)
    config = dataclasses.replace(config, catch_up_tokens=16)
    for other in (draft_runner(), draft_runner(num_blocks=15)):
        recorder = Recorder(config, other)
        alone = record_drafts(make_key(config), recorder, traces, meta, done.append)
        assert arrays_of(alone) == arrays_of(together)
        assert other.kv.pool.num_used == 0


def arrays_of(drafts: RecordedDrafts) -> dict[str, list[Any]]:
    fields = ("positions", "offsets", "token_ids", "parents", "accept_probs")
    return {name: getattr(drafts, name).tolist() for name in fields}


def test_a_cache_without_room_is_refused_rather_than_cutting_drafts_short() -> None:
    config = draft_config(**TREE)
    recorder = Recorder(config, draft_runner(num_blocks=8))
    with pytest.raises(ConfigError, match="a trace with its drafts takes 144: raise"):
        record_drafts(make_key(config), recorder, toy_traces(0.0), make_meta(0.0), print)


@pytest.mark.parametrize(
    ("smaller", "problem"),
    [
        (CHAIN, "branching 1"),
        (TREE | {"max_tree_nodes": 25}, "24 nodes"),
        (TREE | {"num_speculative_tokens": 6}, "5 tokens deep"),
        (TREE | {"min_accept_prob": 0.01}, "probability of 0.02"),
        (TREE | {"top_k": 3}, "top_k 3"),
    ],
)
def test_what_was_not_recorded_is_refused(smaller: dict[str, Any], problem: str) -> None:
    recorded = toy_recording(draft_config(**TREE, min_accept_prob=0.02), [], make_meta(0.0))
    config = draft_config(**{"min_accept_prob": 0.02} | smaller)
    with pytest.raises(ConfigError, match=problem):
        cached_proposer(config, recorded, {})


# --- the file ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> RecordedDrafts:
    return toy_recording(draft_config(**TREE), toy_traces(0.8), make_meta(0.8))


def test_round_trip(recorded: RecordedDrafts, tmp_path: Path) -> None:
    path = tmp_path / "new" / "drafts"
    write_drafts(path, recorded)
    found = read_drafts(path, recorded.key)
    assert arrays_of(found) == arrays_of(recorded)
    assert [each.name for each in path.parent.iterdir()] == ["drafts"]
    blocked = path / "file"
    with pytest.raises(TraceError, match="cannot write"):
        write_drafts(blocked, recorded)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("token_ids", lambda a: a.astype(np.int64)),
        ("token_ids", lambda a: a[None]),
        ("parents", lambda a: a - 1),
        ("accept_probs", lambda a: a * np.nan),
        ("offsets", lambda a: a[:-1]),
        ("positions", lambda a: a * 0),
    ],
)
def test_a_damaged_file(recorded: RecordedDrafts, tmp_path: Path, name: str, change: Any) -> None:
    path = tmp_path / "drafts"
    write_drafts(path, recorded)
    with safe_open(path, framework="numpy") as file:
        said = file.metadata()
    arrays = load_file(path)
    arrays[name] = np.ascontiguousarray(change(arrays[name]))
    save_file(arrays, path, said)
    with pytest.raises(TraceError, match="damaged: its checksum does not match"):
        read_drafts(path, recorded.key)


def test_a_file_that_is_incomplete_or_of_something_else(
    recorded: RecordedDrafts, tmp_path: Path
) -> None:
    path = tmp_path / "drafts"
    write_drafts(path, recorded)
    other = dataclasses.replace(recorded.key, text="another")
    with pytest.raises(TraceError, match="something else"):
        read_drafts(path, other)
    assert other.digest != recorded.key.digest
    data = path.read_bytes()
    for size in (0, 7, 200, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(TraceError, match="damaged"):
            read_drafts(path, recorded.key)
    arrays = load_file_of(data, tmp_path)
    del arrays["parents"]
    save_file(arrays, path, {"key": recorded.key.text})
    with pytest.raises(TraceError, match="damaged"):
        read_drafts(path, recorded.key)


def load_file_of(data: bytes, folder: Path) -> dict[str, Any]:
    (folder / "whole").write_bytes(data)
    return load_file(folder / "whole")


# --- the embedded pair ---------------------------------------------------------------------------

TEXTS = ["def add(a, b):", "Once upon a time", "import os\nimport", "The king said"]
CONFIG = SpeculativeConfig(
    "draft_model",
    embedded_model("draft"),
    num_speculative_tokens=4,
    max_tree_nodes=8,
    max_branching=2,
)


@pytest.fixture(scope="module", params=[0.0, 0.8])
def embedded(request: pytest.FixtureRequest) -> tuple[list[Trace], dict[str, Any], TargetInfo]:
    with LLM("embedded", speculative_config=[]) as llm:
        params = [
            SamplingParams(max_tokens=12, temperature=request.param, seed=5 + i)
            for i in range(len(TEXTS))
        ]
        outputs = llm.generate(TEXTS, params)
        target = TargetInfo(
            llm.call(lambda engine: engine.vocab_size),
            llm.tokenizer.fingerprint,
            "cpu",
            llm.config.max_model_len or 0,
            4,
            1 << 26,
        )
    traces = [
        make_trace(i, output.prompt_token_ids, output.token_ids) for i, output in enumerate(outputs)
    ]
    meta = make_meta(request.param, max_tokens=12, context=target.max_model_len)
    return traces, meta, target


def test_drafts_of_the_embedded_pair(
    embedded: tuple[list[Trace], dict[str, Any], TargetInfo],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    traces, meta, target = embedded
    done: list[int] = []
    drafts = cached_drafts(tmp_path, traces, meta, CONFIG, target, done.append)
    assert done[-1] == sum(len(trace.output_token_ids) for trace in traces)
    (path,) = (tmp_path / "drafts").iterdir()

    runner = load_draft(CONFIG, target)
    real = DraftModelProposer(CONFIG, runner)
    if not runner.decoder.ops.identity:
        pytest.skip("this backend's logits depend on what shares the forward")
    cached = replaying(CONFIG, drafts, traces)
    budget = BUDGETS[1]
    for trees, again in zip(
        steps(real, traces, meta, budget), steps(cached, traces, meta, budget), strict=True
    ):
        assert again == trees

    done.clear()
    again = cached_drafts(tmp_path, traces, meta, CONFIG, target, done.append)
    assert not done
    assert arrays_of(again) == arrays_of(drafts)
    path.write_bytes(path.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING):
        again = cached_drafts(tmp_path, traces, meta, CONFIG, target, done.append)
    assert "made again" in caplog.text
    assert done
    assert arrays_of(again) == arrays_of(drafts)


def retrained(folder: Path) -> str:
    """The embedded draft under its own name with one number changed."""
    copy = Path(shutil.copytree(embedded_model("draft"), folder / "draft"))
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return str(copy)


@pytest.mark.parametrize("embedded", [0.8], indirect=True)
def test_other_traces_and_settings_have_other_keys(
    embedded: tuple[list[Trace], dict[str, Any], TargetInfo], tmp_path: Path
) -> None:
    traces, meta, target = embedded

    def key(
        traces: Sequence[Trace] = traces,
        meta: dict[str, Any] = meta,
        target: TargetInfo = target,
        **changes: Any,
    ) -> str:
        config = dataclasses.replace(CONFIG, **changes)
        return drafts_key(traces, meta, config, target, draft_source(config, target)).digest

    other = make_trace(0, [*traces[0].token_ids[:-1], 7], [])
    keys = [
        key(),
        key(traces=traces[:3]),
        key(traces=[other, *traces[1:]]),
        key(meta={"params": meta["params"] | {"seed": 6}}),
        key(meta={"params": meta["params"] | {"temperature": 0.7}}),
        key(target=dataclasses.replace(target, max_model_len=64)),
        key(max_tree_nodes=9),
        key(temperature=0.5),
        key(dtype="float32"),
        key(model=retrained(tmp_path)),
    ]
    assert len(set(keys)) == len(keys)
    assert key(catch_up_tokens=99) == key() == keys[0]


@pytest.mark.parametrize("embedded", [0.8], indirect=True)
def test_traces_of_another_vocabulary_are_refused(
    embedded: tuple[list[Trace], dict[str, Any], TargetInfo], tmp_path: Path
) -> None:
    traces, meta, target = embedded
    with pytest.raises(TraceError, match="another vocabulary"):
        cached_drafts(tmp_path, traces, meta | {"vocab_fingerprint": "x"}, CONFIG, target)
    small = dataclasses.replace(target, vocab_size=10)
    with pytest.raises(TraceError, match="the target's vocabulary has 10"):
        cached_drafts(tmp_path, traces, meta, CONFIG, small)


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        (None, "do not say how"),
        ({}, "seed is None"),
        ({"seed": True}, "seed is True"),
        ({"seed": 1, "temperature": "hot"}, "impossible sampling parameters: temperature"),
        ({"seed": 1, "temperature": 0.0}, "max_model_len is None"),
    ],
)
def test_meta_that_does_not_say_how_it_was_sampled(params: Any, problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        trace_request(0, make_trace(0, [1], [2]), {"params": params})
