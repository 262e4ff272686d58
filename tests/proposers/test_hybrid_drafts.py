"""Hybrid models that draft, as draft models and for themselves: never wrong where they are the
target itself, whatever lies in slots and logs that nobody may read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.api.llm import LLM
from paceline.backends.native.native import why_not_native
from paceline.cache.model_runner import ModelRunner
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigError
from paceline.models.layer_sizes import DELTA, MAMBA2, SHORT_CONV
from paceline.proposers.draft_model import loading
from paceline.proposers.draft_model.proposer import DraftModelProposer, build_parallel_draft
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree
from tests.models.reference import edit, save_model
from tests.proposers.drive import Target, commit, make_request, propose
from tests.proposers.heads import target_info
from tests.proposers.self_drafts import begun, self_drafter
from tests.quick import in_turns
from tests.toy import HYBRIDS, TOY, draft_config, toy_runner

PROMPT = [5, 9, 2, 7, 7, 30, 11]
LONG = [1 + 7 * i % 40 for i in range(40)]  # more than a log has room for
TREE = {"max_tree_nodes": 12, "max_branching": 3, "num_speculative_tokens": 4}
DTYPES = ["float32", *([] if why_not_native() else ["native-int8"])]
KINDS = [DELTA, MAMBA2, "beside"]
CONVOLVED = HYBRIDS[SHORT_CONV].recurrent
assert CONVOLVED is not None


def runner_of(kind: str, dtype: str = "float32", **options: Any) -> ModelRunner:
    return toy_runner(dtype, prefix_caching=False, shape=HYBRIDS[kind], **options)


@pytest.mark.parametrize(
    ("kind", "method", "is_long", "dtype"),
    in_turns(KINDS, ["draft_model", "self"], [False, True], DTYPES),
)
def test_the_target_itself_is_always_right(
    kind: str, method: str, is_long: bool, dtype: str
) -> None:
    prompt, options, sampling = (LONG, TREE, {"temperature": 0.8}) if is_long else (PROMPT, {}, {})
    model, request = Target(runner_of(kind, dtype)), make_request(1, prompt, **sampling)
    proposer: DraftModelProposer
    if method == "self":
        proposer = self_drafter(model.runner, HYBRIDS[kind].num_layers, **options)
        drafts = model.runner
        begun(model, request)
    else:
        drafts = runner_of(kind, dtype)
        proposer = DraftModelProposer(draft_config(**options), drafts)
    for step in range(5):
        drafts.kv.poison_free()
        draft, result = model.step(proposer, request)
        assert len(draft) == (12 if options else 4)
        assert result.num_accepted == 4 or options
        assert result.path[-1] - 1 not in draft.parents
        if step % 3 == 2:  # a step without drafts, and one that came to nothing
            model.verify(request, DraftTree())
            assert propose(proposer, request) == propose(proposer, request)


def test_accepted_nodes_are_not_read_again() -> None:
    runner = runner_of(DELTA)
    proposer, request = DraftModelProposer(draft_config(), runner), make_request(1, PROMPT)
    (draft,) = propose(proposer, request)
    assert runner.num_rows == len(PROMPT) + 2 + 3 + 4  # the last token again with each level
    commit(proposer, request, [*draft.token_ids, 3])
    propose(proposer, request)
    assert runner.num_rows == len(PROMPT) + 2 * (2 + 3 + 4) + 2


def test_there_may_be_fewer_lanes_than_requests() -> None:
    runner = runner_of(MAMBA2, max_num_seqs=2)
    proposer = DraftModelProposer(draft_config(), runner)
    requests = [make_request(i, PROMPT[i:]) for i in range(3)]
    for _ in range(2):
        assert [len(tree) for tree in propose(proposer, *requests)] == [4, 4, 0]
    proposer.finish(requests[0])
    assert [len(tree) for tree in propose(proposer, *requests[1:])] == [4, 4]


def test_states_have_their_part_of_the_memory() -> None:
    shape, config = HYBRIDS[DELTA], SpeculativeConfig("draft_model", "toy")
    target = target_info(toy_runner())
    ops = target.runner.decoder.ops
    kv = loading.draft_kv(shape, ops, config, target, 64)
    assert kv.states is not None
    assert kv.states.memory.num_lanes == target.max_num_seqs
    with pytest.raises(ConfigError, match="raise --kv-cache-memory"):
        loading.draft_kv(shape, ops, config, replace(target, kv_bytes=10_000), 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recurrent", [(False, False, False, True), (True, True, False, True)])
def test_self_of_layers_that_are_all_alike(dtype: str, recurrent: tuple[bool, ...]) -> None:
    shape = replace(
        HYBRIDS[SHORT_CONV],
        recurrent=replace(CONVOLVED, layers=recurrent),
    )
    model = Target(toy_runner(dtype, shape=shape, prefix_caching=False))
    proposer, request = self_drafter(model.runner, 2), make_request(1, PROMPT)
    begun(model, request)
    assert len(model.step(proposer, request)[0]) == 4


@pytest.mark.parametrize("family", ["qwen3-5", "granite-hybrid", "mamba2"])
def test_engines_find_them(tmp_path: Path, family: str) -> None:
    save_model(family, tmp_path / "target")
    save_model(family, tmp_path / "draft", num_hidden_layers=3, **LAYERS[family])
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)
    answers = []
    for config in (
        [],
        {"method": "draft_model", "model": str(tmp_path / "draft")},
        {"method": "self", "draft_layers": 2},
        {"method": "self", "dtype": "int8"},
    ):
        folder = str(tmp_path / "target")
        options = {"dtype": "float32", "max_model_len": 96, "planner": "fixed"}
        with LLM(folder, speculative_config=config, **options) as llm:
            assert len(llm.proposers) == bool(config)
            outputs = llm.generate([PROMPT, LONG], params)
            drafted = llm.stats().speculation.num_draft_tokens
            assert bool(drafted) == bool(config)
        answers.append([output.token_ids for output in outputs])
    assert all(answer == answers[0] for answer in answers)


FEWER = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
LAYERS: dict[str, dict[str, Any]] = {"qwen3-5": FEWER, "granite-hybrid": FEWER, "mamba2": {}}


def test_a_parallel_draft_has_attention_alone(tmp_path: Path) -> None:
    save_model("qwen3-5", tmp_path, vocab_size=TOY.vocab_size)
    edit(tmp_path / "config.json", pard_token=3)
    config = SpeculativeConfig("parallel_draft", str(tmp_path))
    with pytest.raises(ConfigError, match='runs by method "draft_model"'):
        build_parallel_draft(config, target_info(toy_runner()))
