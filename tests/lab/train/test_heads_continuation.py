"""A head that is trained further takes its own place only where a replay proves it better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError, TrainingError
from paceline.core.files import read_json
from paceline.loading.checkpoint import load_checkpoint, model_fingerprint
from paceline.request.traces import Trace, TraceWriter, read_traces
from paceline_lab.train.card import ReplayedGain
from paceline_lab.train.configs import HeadTrainingConfig
from paceline_lab.train.heads import continuation
from paceline_lab.train.heads.continuation import continue_head
from paceline_lab.train.heads.features import split_prompts
from paceline_lab.train.heads.train import train_head
from paceline_lab.train.lm import LMTrainingResult, train_lm
from tests.lab.train.toy_text import lm_config

OPTIONS: dict[str, Any] = {
    "seq_len": 128,
    "warmup_steps": 5,
    "learning_rate": 5e-3,
    "eval_every": 0,
    "threads": 1,
    "show_progress": False,
}
PROMPTS, ANSWER = 60, 24


@pytest.fixture(scope="module")
def tuned(
    corpus: Path, trained: LMTrainingResult, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The toy model after a training on other sentences."""
    folder = tmp_path_factory.mktemp("tuned")
    rng = np.random.default_rng(3)
    words = ["moss", "grows", "on", "old", "stone", "under", "slow", "rain"]
    rows = [" ".join(rng.permutation(words[:4]).tolist() + words[4:]) for _ in range(120)]
    text = folder / "other.jsonl"
    text.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    output = folder / "target"
    train_lm(lm_config(text, output, init=str(trained.folder), steps=40, held_out_tokens=0))
    return output


def answer(target: Path, folder: Path, temperature: float = 0.0) -> Path:
    """The target's answers to short prompts, as ``paceline trace`` writes them."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 280, 4).tolist() for _ in range(PROMPTS)]
    params = [
        SamplingParams(max_tokens=ANSWER, temperature=temperature, seed=i, logprobs=1)
        for i in range(PROMPTS)
    ]
    with LLM(str(target), speculative_config=[], num_threads=1) as llm:
        outputs = llm.generate(prompts, params)
    meta = {
        "model_fingerprint": model_fingerprint(load_checkpoint(str(target))),
        "params": {"max_tokens": ANSWER, "temperature": temperature, "seed": 0},
    }
    traces = []
    for index, output in enumerate(outputs):
        tokens = np.array([*output.prompt_token_ids, *output.token_ids], np.int32)
        rows = np.zeros((len(output.token_ids), 1), np.float32)
        traces.append(Trace(index, 4, tokens, rows[:, 0], rows.astype(np.int32), rows))
    TraceWriter(folder, meta).write_shard(traces)
    return folder


@pytest.fixture(scope="module")
def answers(tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return answer(tuned, tmp_path_factory.mktemp("answers"))


def old_head(trained: LMTrainingResult, folder: Path, **options: Any) -> Path:
    """A head of the model as it was before."""
    answers = answer(Path(trained.folder), folder / "old-answers")
    head = folder / "head"
    if options.get("kind") != "mtp":
        options["draft_vocab_size"] = 200
    config = {**OPTIONS, "steps": 40, "held_out_tokens": 300, **options}
    train_head(
        HeadTrainingConfig(
            target=str(trained.folder), traces=(str(answers),), output=str(head), **config
        )
    )
    return head


def continued(head: Path, target: Path, answers: Path, **options: Any) -> HeadTrainingConfig:
    return HeadTrainingConfig(
        target=str(target),
        traces=(str(answers),),
        continue_from=str(head),
        **{**OPTIONS, "steps": 60, **options},
    )


@pytest.mark.parametrize(
    "options",
    [
        {"weights_dtype": "int8"},
        {"kind": "mtp", "verifier": "org/name"},
        {"kind": "dflash", "block_size": 4, "weights_dtype": "float32"},
    ],
)
def test_a_better_head_takes_the_old_ones_place(
    trained: LMTrainingResult, tuned: Path, answers: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    head = old_head(trained, tmp_path, **options)
    before = {path.name: path.read_bytes() for path in head.iterdir()}
    done = continue_head(continued(head, tuned, answers))
    gain = done.result.gain
    assert gain is not None
    assert gain.is_proven
    assert gain.gain > 1.1
    assert gain.low < gain.gain < gain.high
    assert done.previous == tmp_path / "head.previous"
    assert {path.name: path.read_bytes() for path in done.previous.iterdir()} == before
    assert f"| replayed | {gain} |" in (head / "README.md").read_text()
    was, now = (read_json(folder / "config.json") for folder in (done.previous, head))
    assert was == now
    assert (head / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert {path.name for path in tmp_path.iterdir()} == {"old-answers", "head", "head.previous"}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_steps_are_those_of_an_engine_on_the_same_traffic(
    trained: LMTrainingResult, tuned: Path, tmp_path: Path, temperature: float
) -> None:
    head, answers = old_head(trained, tmp_path), answer(tuned, tmp_path / "new", temperature)
    done = continue_head(continued(head, tuned, answers))
    gain = done.result.gain
    traces = [trace for trace in read_traces(answers) if len(trace.logprobs) > 1]
    assert gain is not None
    assert done.previous is not None
    share = sum(len(trace.token_ids) for trace in traces) // 5
    held = [traces[number] for number in split_prompts(traces, share, seed=0)[1]]
    assert (gain.requests, gain.tokens) == (len(held), sum(len(t.logprobs) for t in held))
    chain = {"method": "eagle3", "num_speculative_tokens": 5, "max_branching": 1}
    for folder, steps in ((done.previous, gain.old_steps), (head, gain.new_steps)):
        config = {**chain, "model": str(folder), "max_tree_nodes": 0, "min_accept_prob": 0.0}
        counted = 0
        with LLM(str(tuned), speculative_config=config, planner="fixed", num_threads=1) as llm:
            for trace in held:  # one at a time
                params = SamplingParams(
                    max_tokens=len(trace.logprobs), temperature=temperature, seed=trace.prompt_index
                )
                (output,) = llm.generate([trace.token_ids[: trace.prompt_len].tolist()], params)
                assert list(output.token_ids) == trace.output_token_ids.tolist()
                counted += output.completions[0].counters.num_steps
        assert counted == steps


def test_a_head_without_a_proven_gain_is_not_adopted(
    trained: LMTrainingResult, tmp_path: Path
) -> None:
    """It has learnt what this target answers already; hardly any learning goes on."""
    head = old_head(trained, tmp_path, steps=80)
    before = {path.name: (path.read_bytes(), path.stat().st_ino) for path in head.iterdir()}
    answers = tmp_path / "old-answers"
    config = continued(head, Path(trained.folder), answers, steps=1, learning_rate=1e-7)
    done = continue_head(config)
    assert done.previous is None
    assert done.result.gain is not None
    assert done.result.gain.low <= 1.0
    assert {p.name: (p.read_bytes(), p.stat().st_ino) for p in head.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"old-answers", "head"}


def test_a_gain_within_chance_is_no_proof() -> None:
    even = ReplayedGain(20, 20, 400, 200, 190, 0.99, 1.12)
    assert not even.is_proven
    assert even.gain > 1.0


def test_what_an_interrupted_training_left_is_used_or_dropped(
    trained: LMTrainingResult,
    tuned: Path,
    answers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = old_head(trained, tmp_path)
    begun = (head / "model.safetensors").read_bytes()

    def interrupt(*_: Any) -> ReplayedGain:
        raise KeyboardInterrupt

    config = continued(head, tuned, answers)
    with monkeypatch.context() as patched:
        patched.setattr(continuation, "_replayed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            continue_head(config)
    assert (head / "model.safetensors").read_bytes() == begun
    # With other options nothing of it is of use.
    done = continue_head(continued(head, tuned, answers, steps=61))
    assert done.result.steps == 61
    assert done.previous is not None


def test_what_cannot_be_trained_further_is_refused(
    trained: LMTrainingResult, tuned: Path, answers: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no folder of a head"):
        continue_head(continued(tmp_path / "none", tuned, answers))
    with pytest.raises(TrainingError, match="heads that can be trained further are eagle3"):
        continue_head(continued(tuned, tuned, answers))
    head = old_head(trained, tmp_path, steps=1)
    with pytest.raises(TrainingError, match=r"at least 10 are needed"):
        continue_head(continued(head, tuned, answers, held_out_tokens=100))
    for options in ({"kind": "mtp"}, {"init": "x"}, {"output": "x"}, {"weights_dtype": "int4"}):
        with pytest.raises(ConfigError, match="leave"):
            continued(head, tuned, answers, **options)


def test_a_training_ends_by_itself(tmp_path: Path) -> None:
    config = HeadTrainingConfig(target="x", traces=("y",), continue_from="z")
    assert (config.steps, config.max_minutes) == (0, 10.0)
    assert (
        HeadTrainingConfig(target="x", traces=("y",), continue_from="z", steps=3).max_minutes == 0
    )
