"""Drafts by a head: those of EAGLE-3 in plain torch, whatever an engine does to its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backends.native.native import why_not_native
from paceline.cache.model_runner import ForwardResult, ModelRunner
from paceline.engine.engine import Engine
from paceline.proposers.base import DraftBudget
from paceline.proposers.heads.checkpoint import LAYER_IDS
from paceline.proposers.heads.proposer import LARGEST, Features, Fusion, HeadProposer, first_tap
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import ROOT, DraftTree
from paceline.sampling.logit_edits import SamplingRow
from paceline.sampling.sampler import sample_tokens
from tests.arrays import same
from tests.contracts.test_identity import MIXES, answers, draft, prompts
from tests.proposers.drive import make_request, propose
from tests.proposers.heads import (
    KEPT,
    TREE,
    PlainHead,
    Tensors,
    following_head,
    fresh_features,
    head_config,
    head_tensors,
    toy_head,
)
from tests.quick import only
from tests.toy import (
    VOCAB,
    Job,
    assert_no_leak,
    run_jobs,
    toy_engine,
    toy_runner,
    toy_tensors,
)

DEPTH = 3
PROMPT = [5, 9, 2, 7, 7, 30, 11]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
native = pytest.mark.skipif(why_not_native() is not None, reason="the extension was not built")


def with_norms(tensors: Tensors, **sizes: int) -> Tensors:
    """The same with norms before fc."""
    generator = torch.Generator().manual_seed(9)
    norms = {
        name: 1.0 + 0.3 * torch.randn(size, generator=generator) for name, size in sizes.items()
    }
    return tensors | norms


FORMS: dict[str, tuple[Tensors, dict[str, Any]]] = {
    "own ends": (head_tensors(), {}),
    "the target's ends": (head_tensors(own_ends=False), {}),
    "norm before residual": (head_tensors(1), {"norm_before_residual": True}),
    "norm before fc": (
        with_norms(head_tensors(2), **{"input_norm.weight": 96}),
        {"norm_before_fc": True},
    ),
    "a norm for each tap": (
        with_norms(head_tensors(3), **{f"fc_norm.{i}.weight": 32 for i in range(3)}),
        {"fc_norm": True},
    ),
    "output after the norm": (head_tensors(4), {"norm_output": True}),
    "layers in another order": (
        head_tensors(5),
        {"eagle_aux_hidden_state_layer_ids": [2, 0, 1]},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_is_that_of_plain_torch(form: str) -> None:
    tensors, fields = FORMS[form]
    config = head_config("lm_head.weight" in tensors, **fields)
    plain, taps = PlainHead(tensors, config, toy_tensors()), config[LAYER_IDS]
    proposer = following_head(tensors=tensors, fields=fields, num_speculative_tokens=5)
    request, seen = make_request(1, PROMPT), set()
    for step in range(8):
        (tree,) = propose(proposer, request)
        features = fresh_features(request.token_ids[:-1], taps)
        assert tree.token_ids == plain.chain(request.token_ids, features, 5)
        seen.update(tree.token_ids)
        # Some drafts are accepted in part, others not at all.
        request.token_ids += [*tree.token_ids[: step % 4], 3 + step]
    assert len(seen) > 3
    assert seen.issubset(KEPT if "d2t" in tensors else range(VOCAB))


def test_a_tree_branches_as_plain_torch_ranks() -> None:
    tensors = head_tensors(6)
    plain, proposer = PlainHead(tensors, head_config()), following_head(tensors=tensors, **TREE)
    request = make_request(1, PROMPT)
    for step in range(6):
        (tree,) = propose(proposer, request)
        assert len(tree) == TREE["max_tree_nodes"]
        for node, path in enumerate(paths(tree)):
            children = [t for t, p in zip(tree.token_ids, tree.parents, strict=True) if p == node]
            assert children == below(plain, request, path)[: len(children)]
        tops = [t for t, p in zip(tree.token_ids, tree.parents, strict=True) if p == ROOT]
        assert tops == below(plain, request, [])[: len(tops)]
        request.token_ids += [tree.token_ids[step % 3], step]


def paths(tree: DraftTree) -> list[list[int]]:
    found: list[list[int]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def below(plain: PlainHead, request: Request, path: Sequence[int]) -> list[int]:
    """The likeliest tokens after a path, best first."""
    read, hidden = request.token_ids[1:], plain.fuse(fresh_features(request.token_ids[:-1]))
    for token in path:
        _, output = plain.forward(read, hidden)
        read, hidden = [*read, token], torch.cat([hidden, output[None]])
    logits, _ = plain.forward(read, hidden)
    assert plain.ids is not None
    return [int(plain.ids[i]) for i in logits.topk(TREE["max_branching"]).indices]


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 5, "presence_penalty": 0.8}]
)
def test_sampled_requests_rank_with_the_noise_of_the_target(params: dict[str, Any]) -> None:
    tensors = head_tensors(7)
    plain, proposer = PlainHead(tensors, head_config()), following_head(tensors=tensors)
    request, tops = make_request(3, PROMPT, **params), set()
    for _ in range(8):
        (tree,) = propose(proposer, request)
        read, hidden = request.token_ids[1:], plain.fuse(fresh_features(request.token_ids[:-1]))
        logits = torch.full((1, VOCAB), -torch.inf)
        assert plain.ids is not None
        logits[0, plain.ids] = plain.forward(read, hidden)[0]
        (wanted,), _ = sample_tokens(logits.numpy(), [SamplingRow(request)])
        assert tree.token_ids[0] == wanted
        tops.add((wanted, int(logits.argmax())))
        request.token_ids.append(wanted)
    assert any(sampled != best for sampled, best in tops)


@pytest.mark.parametrize("times", [1, 2])
def test_a_slot_holds_what_was_written_last_within_the_range_of_16_bits(times: int) -> None:
    features = Features(toy_runner().kv, first_tap, (1, 2), 2)
    slots = np.array([3, 4, 5])
    for _ in range(times):
        features.write(slots, [7, 8, 9], np.ones((3, 1, 2), np.float32))
    features.write(slots[1:], [8, 9], np.array([[[2, -1e9]], [[1e9, 3]]], np.float32))
    wanted = [[1, 1], [2, -LARGEST], [LARGEST, 3]]
    assert features.read(slots).tolist() == wanted
    assert features.read(slots).tolist() == wanted
    assert features.known(slots, [0, 8, 9]) == 2


# --- in an engine ---------------------------------------------------------------------------------


class Watched(HeadProposer):
    """Keeps what it drafted, and the KV with which it did."""

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        trees = super().propose(requests, budget)
        for request, tree in zip(requests, trees, strict=True):
            if len(tree):
                seen.append((tuple(request.token_ids), tuple(tree.token_ids), kv_of(self, request)))
        return trees


Seen = list[tuple[tuple[int, ...], tuple[int, ...], Any]]
seen: Seen = []


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()


def kv_of(proposer: HeadProposer, request: Request) -> torch.Tensor:
    """Keys and values of all rows that are made of the request's tokens."""
    runner = proposer._runner
    memory, kv = runner.kv.memory, runner.kv[request.request_id]
    slots = kv.slots[: len(request.token_ids) - 1]
    layers: list[torch.Tensor] = memory.layers  # type: ignore[attr-defined]
    return torch.stack(layers)[:, :, torch.from_numpy(slots)]


def jobs() -> list[Job]:
    """Requests of every length that come and go; two of them are samples of one prompt."""
    base, shorter = prompts()[0] * 2, [replace(GREEDY, max_tokens=10 + 7 * i) for i in range(4)]
    many = [Job(p, shorter[i], at=2 * i) for i, p in enumerate(prompts())]
    return [
        *many,
        Job(base[:21], replace(GREEDY, n=2), at=3),
        Job(base[:33], GREEDY, at=9),  # shares two blocks with the one before
    ]


def check_seen(tensors: Tensors) -> None:
    """Every draft and its KV are those of a head that reads the same tokens for the first time."""
    plain = PlainHead(tensors, head_config())
    proposer, known = following_head("float32", tensors=tensors, num_speculative_tokens=1), {}
    for tokens in {tokens for tokens, _, _ in seen}:
        request = make_request(1, tokens)
        propose(proposer, request)
        drafted = plain.chain(tokens, fresh_features(tokens[:-1]), DEPTH)
        known[tokens] = drafted, kv_of(proposer, request)
        proposer.finish(request)
    assert seen
    for tokens, drafted, kv in seen:
        chain, fresh_kv = known[tokens]
        assert list(drafted) == chain[: len(drafted)]
        assert same(kv, fresh_kv)


def watched(tensors: Tensors, **config: Any) -> Engine:
    def make(runner: ModelRunner) -> HeadProposer:
        return toy_head(runner, tensors=tensors, kind=Watched, num_speculative_tokens=DEPTH)

    return reference_engine([make], **config)


reference_engine = partial(toy_engine, dtype="float32")
"""Native heads draft by no calls of their runner, and their KV is no tensor."""


@cache
def plain_answers() -> list[list[Any]]:
    return answers(run_jobs(reference_engine(), jobs()))


@pytest.mark.parametrize("mix", only(("preempted_cached",), MIXES))
def test_no_state_is_stale_whatever_happens_to_requests(mix: str) -> None:
    tensors = head_tensors(1)
    plain = plain_answers()
    engine = watched(tensors, **MIXES[mix])
    for _ in range(2):  # the second time out of the prefix cache
        assert answers(run_jobs(engine, jobs())) == plain
        assert_no_leak(engine)
    check_seen(tensors)
    stats = engine.stats()
    assert stats.num_proposer_failures == 0
    assert (stats.num_preemptions > 0) == mix.startswith("preempted")
    assert stats.speculation.num_draft_tokens > stats.speculation.num_accepted_tokens > 0
    if mix != "preempted":
        assert stats.num_cached_tokens > 0


def test_steps_in_which_it_is_not_asked_leave_no_gap() -> None:
    """The planner may pause it; hidden states are kept all the same."""
    tensors = head_tensors(1)
    engine = watched(tensors)
    ask, pauses = engine.drafting.planner.ask, iter(range(1000))

    def seldom(*arguments: Any) -> Any:
        return ask(*arguments) if next(pauses) % 5 == 4 else ()

    engine.drafting.planner.ask = seldom  # type: ignore[method-assign]
    run_jobs(engine, jobs())
    check_seen(tensors)


def test_a_head_that_joins_late_drafts_with_what_it_gets() -> None:
    plain, engine = plain_answers(), reference_engine()

    def join(engine: Engine, _: Any) -> None:
        engine.set_speculation([toy_head(engine.runner)])

    assert answers(run_jobs(engine, jobs(), {6: join})) == plain
    assert engine.stats().speculation.num_draft_tokens > 0
    assert engine.stats().num_proposer_failures == 0


def test_hidden_states_are_computed_for_those_who_read_them() -> None:
    engine = toy_engine()
    run_jobs(engine, jobs()[:1])
    assert engine.runner.taps == ()
    engine.set_speculation([toy_head(engine.runner)])
    run_jobs(engine, jobs()[:1])
    assert engine.runner.taps == (0, 1, 2)
    engine.set_speculation([])
    run_jobs(engine, jobs()[:1])
    assert engine.runner.taps == ()


def test_two_heads_read_different_layers() -> None:
    """Each gets its own, in its own order."""
    tensors = head_tensors(1)
    other = {"eagle_aux_hidden_state_layer_ids": [1, 0]}

    def make(runner: ModelRunner) -> HeadProposer:
        return toy_head(runner, head_tensors(8, taps=2), other)

    def watch(runner: ModelRunner) -> HeadProposer:
        return toy_head(runner, tensors=tensors, kind=Watched, num_speculative_tokens=DEPTH)

    run_jobs(reference_engine([make, watch]), jobs())
    check_seen(tensors)


# --- failures -------------------------------------------------------------------------------------


def broken_forward(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Heads' forwards return something else."""
    forward = ModelRunner.forward

    def changed(self: ModelRunner, batch: Any, greedy: bool = False, inputs: Any = None) -> Any:
        result = forward(self, batch, greedy, inputs)
        return result if inputs is None else change(result)

    monkeypatch.setattr(ModelRunner, "forward", changed)


def raising(result: ForwardResult) -> ForwardResult:
    raise RuntimeError("out of luck")


BROKEN = {
    "raises": raising,
    "NaN logits": lambda result: replace(result, logits=result.logits * torch.nan),
    "NaN outputs": lambda result: replace(result, features=result.features * torch.nan),
    "too narrow outputs": lambda result: replace(result, features=result.features[:, :, :7]),
    "no outputs": lambda result: replace(result, features=None),
    "too few logits": lambda result: replace(result, logits=result.logits[:-1]),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_head_costs_drafts_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_answers()
    engine = reference_engine([lambda runner: toy_head(runner, **TREE)])
    broken_forward(monkeypatch, BROKEN[kind])
    assert answers(run_jobs(engine, jobs())) == plain
    assert_no_leak(engine)
    if "NaN" not in kind:
        assert engine.stats().num_proposer_failures == 3
        assert not engine.drafting.is_on


def test_hidden_states_of_a_wrong_width_cost_drafts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_answers()
    engine = reference_engine([toy_head])
    forward = ModelRunner.forward

    def narrow(self: ModelRunner, batch: Any, greedy: bool = False, inputs: Any = None) -> Any:
        result = forward(self, batch, greedy, inputs)
        return replace(result, features=result.features[:, :, 1:]) if self.taps else result

    monkeypatch.setattr(ModelRunner, "forward", narrow)
    assert answers(run_jobs(engine, jobs())) == plain
    assert engine.stats().num_proposer_failures >= 3
    assert not engine.drafting.is_on


def test_a_broken_fc_costs_drafts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where KV moves, which takes hidden states along in the middle of a commit."""
    plain = plain_answers()
    drafter = draft(0.1, max_branching=3, max_tree_nodes=10)  # whose branches are accepted
    engine = reference_engine([toy_head, drafter()])

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Fusion, "__call__", fail)
    assert answers(run_jobs(engine, jobs())) == plain
    assert [proposer.name for proposer in engine.drafting.proposers] == ["draft_model"]


def test_a_failed_step_is_run_singly_and_its_hidden_states_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = head_tensors(1)
    plain, engine = plain_answers(), watched(tensors)
    forward, calls = ModelRunner.forward, iter(range(10_000))

    def fail(self: ModelRunner, batch: Any, greedy: bool = False, inputs: Any = None) -> Any:
        is_shared = len(batch.sample_offsets) > 2
        if self is engine.runner and is_shared and next(calls) % 3 == 1:
            raise RuntimeError("out of luck")
        return forward(self, batch, greedy, inputs)

    monkeypatch.setattr(ModelRunner, "forward", fail)
    assert answers(run_jobs(engine, jobs())) == plain
    monkeypatch.setattr(ModelRunner, "forward", forward)
    check_seen(tensors)


class Told(HeadProposer):
    """Keeps its budgets and what it drafted."""

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        trees = super().propose(requests, budget)
        for request, depth, tree in zip(requests, budget.max_depth, trees, strict=True):
            told.append((list(request.token_ids), depth, replace(tree)))
        return trees


told: list[tuple[list[int], int, DraftTree]] = []


@native
@pytest.mark.parametrize("dtype", ["native-int8", "native-int4"])
@pytest.mark.parametrize("mix", ["staggered", "preempted_cached"])
def test_company_changes_no_native_draft(dtype: str, mix: str) -> None:
    """Each draft is, bit for bit, that of a head that reads the same tokens alone and at once."""
    told.clear()
    options: dict[str, Any] = {"dtype": "int8", **TREE}
    engine = toy_engine(
        [lambda runner: toy_head(runner, kind=Told, **options)], dtype=dtype, **MIXES[mix]
    )
    for _ in range(2):  # the second time out of the prefix cache
        run_jobs(engine, jobs())
    fresh = following_head(target_dtype=dtype, **options)
    assert len(told) > 50
    for tokens, depth, tree in told:
        request = make_request(1, tokens)
        assert propose(fresh, request, depth=depth) == [tree]
        fresh.finish(request)
