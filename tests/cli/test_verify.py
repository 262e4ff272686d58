"""``paceline verify``: what passes, what has to fail, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import paceline.engine.engine
import paceline.engine.verifier
from paceline.api.llm import LLM
from paceline.backends.native.cpu import NativeKV
from paceline.backends.rows.tensor_memory import TensorKV
from paceline.cache.model_runner import ModelRunner
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.request.sampling_params import SamplingParams
from paceline.sampling.logit_edits import SamplingRow
from paceline_lab.verify.command import IdentityArms
from paceline_lab.verify.verification import mixed_requests
from tests.arrays import arrays
from tests.cli.conftest import Result
from tests.contracts.test_identity import RandomTrees, draft
from tests.loading.gguf_writing import convert, tokenizer_metadata
from tests.text.vocabularies import byte_fallback_json
from tests.toy import EOS, TOY, VOCAB, toy_tensors

Cli = Callable[..., Result]
QUICK = ("--dtype", "float32", "--threads", "1")
PROMPTS = [[7, 3, 11, 7, 3, 11, 7], [1, 2, 3, 4], [20, 21, 20, 21, 20]]


def toy_llm(**options: Any) -> LLM:
    config = replace(TOY, eos_token_ids=(EOS,))
    usual = {"planner": "fixed", "dtype": "float32", "max_num_seqs": 8, "speculative_config": []}
    options = usual | options
    options.setdefault("kv_cache_memory", 8 << 20)
    return LLM(Checkpoint(config, arrays(toy_tensors()), None, "toy"), **options)


@pytest.fixture
def arms() -> Iterator[IdentityArms]:
    with toy_llm(max_num_seqs=1) as plain, toy_llm() as speculative:
        yield IdentityArms(plain, speculative)


def mixed(count: int, max_tokens: int = 24) -> list[tuple[list[int], SamplingParams]]:
    found = mixed_requests(
        PROMPTS,
        seed=4,
        max_tokens=max_tokens,
        context=TOY.max_position,
        vocab_size=VOCAB,
        methods=("prompt_lookup",),
    )
    return list(islice(found, count))


def draft_with(arms: IdentityArms, *proposers: Any) -> None:
    arms.speculative.call(lambda engine: engine.set_speculation(proposers))


def test_a_mixture_is_identical(arms: IdentityArms) -> None:
    for proposers in ([RandomTrees()], [draft(0.3, max_branching=3)(), RandomTrees()]):
        draft_with(arms, *proposers)
        arms.run(mixed(30))
    figures = arms.tally.figures()
    assert arms.speculative_figures.num_accepted_tokens > 20
    assert figures["num_prompts"] == 60
    assert figures["num_tokens"] == arms.speculative_figures.output_tokens > 500
    assert not arms.tally.failures(True, 0.0)


def test_rounding_passes_where_identity_is_not_promised() -> None:
    options = {"dtype": "bfloat16", "deterministic": False, "backend": "reference"}
    with toy_llm(**options) as plain, toy_llm(**options) as speculative:
        arms = IdentityArms(plain, speculative)
        draft_with(arms, RandomTrees())
        arms.run(mixed(30))
        assert not speculative.promises_identity
        assert not arms.tally.failures(False, 0.5)


# Controls: faults that only speculation can have, each of which has to be found.


def accept_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emits the first draft token, whatever the target says."""
    honest = paceline.engine.verifier.verify

    def verify(logits: Any, items: Sequence[Any]) -> list[Any]:
        results = honest(logits, items)
        for item, result in zip(items, results, strict=True):
            if len(item.draft) and not result.num_accepted:
                result.token_ids[0] = item.draft.token_ids[0]
        return results

    monkeypatch.setattr(paceline.engine.engine, "verify", verify)


def forget_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples every node as if it followed the root: noise and penalties are another's."""
    monkeypatch.setattr(
        paceline.engine.verifier, "SamplingRow", lambda request, path, mask: SamplingRow(request)
    )


def leave_kv_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not move the accepted nodes' KV to where the next step looks for it."""
    for memory in (TensorKV, NativeKV):
        monkeypatch.setattr(memory, "move", lambda self, source, target: None)


def sample_wrongly_in_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes another token than the sampler's at nodes below the root."""
    honest = paceline.engine.verifier.sample_tokens

    def sample(logits: Any, rows: Sequence[SamplingRow], at: Any = None) -> Any:
        tokens, valid = honest(logits, rows, at)
        pairs = zip(tokens, rows, strict=True)
        return [(token + bool(row.path)) % VOCAB for token, row in pairs], valid

    monkeypatch.setattr(paceline.engine.verifier, "sample_tokens", sample)


@pytest.mark.parametrize(
    "fault", [accept_anything, forget_the_path, leave_kv_behind, sample_wrongly_in_depth]
)
def test_a_fault_is_found(arms: IdentityArms, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    draft_with(arms, draft(0.3, max_branching=3)(), RandomTrees())
    arms.run(mixed(20))
    figures = arms.tally.figures()
    worst = max(figures["max_regret"], figures["max_boundary_excess"])
    assert not figures["identical"]
    assert figures["num_differences"] > 0
    assert figures["max_regret"] > 0
    assert figures["mean_regret"] > 0
    assert worst > 0.5
    assert arms.tally.failures(True, 0.5)
    assert arms.tally.failures(False, 0.5)


# The command


def test_prompts_pass(cli: Cli) -> None:
    result = cli(
        "verify",
        "-p",
        "def add(a, b):",
        "--max-tokens",
        "12",
        "--temperature",
        "0.8",
        "--json",
        *QUICK,
    )
    document = result.document
    assert result.code == 0
    assert document["passed"] is True
    assert document["identical"] is True
    assert document["num_tokens"] == document["plain"]["output_tokens"] > 0
    assert (document["num_differences"], document["max_regret"]) == (0, 0.0)
    assert (document["p99_regret"], document["mean_regret"]) == (0.0, 0.0)
    assert document["speculative"]["num_draft_tokens"] > 0
    assert "passed: identical over" in result.err


def test_a_fault_fails_the_command(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_anything(monkeypatch)
    result = cli(
        *("verify", "-p", "def add(a, b):", "--max-tokens", "24", "--json", *QUICK),
        *("--temperature", "1", "--seed", "1"),
    )
    assert result.code == 1
    assert result.document["passed"] is False
    assert result.document["num_differences"] > 0
    assert result.document["max_regret"] > 0
    assert "FAILED over" in result.err


def test_bits_that_depend_on_company_fail_the_command(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens stay as they are: only log-probabilities, and only beside a neighbour, differ."""
    honest = ModelRunner.forward

    def forward(self: ModelRunner, batch: Any, greedy: bool = False) -> Any:
        result = honest(self, batch, greedy)
        if len(batch.sample_offsets) > 2:  # one more than there are requests
            result.logits = result.logits * (1.0 + 2.0**-20)
        return result

    monkeypatch.setattr(ModelRunner, "forward", forward)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def add(a, b):"}\n' * 4)
    result = cli(
        *("verify", "--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "8", "--json"),
        *("--method", "prompt_lookup", *QUICK),
    )
    assert result.document["num_differences"] == 0
    assert result.document["num_logprob_differences"] > 0
    assert result.code == 1
    assert "log-probabilities differ" in result.out


def test_a_number_of_tokens_is_reached(cli: Cli) -> None:
    result = cli(
        *("verify", "--num-tokens", "30", "--max-tokens", "8", "--max-num-seqs", "1"),
        *("-p", "def add(a, b):", "--method", "prompt_lookup", "--seed", "3", "--json", *QUICK),
    )
    assert result.code == 0
    assert result.document["num_tokens"] >= 30
    assert result.document["seed"] == 3
    assert "of 30 tokens" in result.err


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_tokens_of_the_embedded_models(cli: Cli) -> None:
    result = cli("verify", "--num-tokens", "10000", "--seed", "0", "--json", *QUICK)
    assert result.code == 0
    assert result.document["identical"] is True
    assert result.document["speculative"]["num_accepted_tokens"] > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-speculation"], "drop --no-speculation"),
        (["--text", "x"], "--text belongs to --quality"),
        (["--text-tokens", "5"], "--text-tokens belongs to --quality"),
        (["--num-tokens", "5", "--temperature", "1"], "drop --temperature"),
        (["-p", "x", "--prompts", "y"], "cannot be used together"),
        (["--quality", "--num-tokens", "5"], "--num-tokens has no meaning with --quality"),
        (["--quality", "--dtype", "int8"], "use --dtypes"),
        (["--quality", "--dtypes", "int8,int9"], "'int9'"),
        (["--quality", "--llama-kv-type", "f32"], "belongs to --llama"),
        (["--quality", "--llama", "x", "--llama-kv-type", "q8"], "allowed: f16, f32"),
        (["--quality", "--window", "8", "--stride", "8"], "allowed: 1 to 7"),
        (["--quality", "--text", "/no/such/file"], "cannot read a text"),
    ],
)
def test_refusals(cli: Cli, arguments: list[str], message: str) -> None:
    result = cli("verify", *arguments)
    assert result.code == 2
    assert message in result.err


def test_quality(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("def add(a, b):\n    return a + b\n\n\n" * 3)
    result = cli(
        *("verify", "--quality", "--text", str(tmp_path / "text"), "--text-tokens", "30"),
        *("--window", "32", "--dtypes", "bfloat16", "--llama", "/no/such/python", "--json"),
        *("--threads", "1"),
    )
    assert result.code == 0
    exact, rounded = result.document["rows"]
    assert [row["arithmetic"] for row in (exact, rounded)] == ["float32", "bfloat16"]
    assert exact["num_tokens"] == rounded["num_tokens"] == 30
    assert (exact["ratio"], exact["mean_kl"], exact["top1_agreement"]) == (1.0, 0.0, 1.0)
    assert 0 < rounded["mean_kl"] <= rounded["kl_99"] < 0.05
    assert sum(each["kl"] for each in rounded["windows"]) == pytest.approx(rounded["mean_kl"] * 30)
    assert set(result.document["skipped"]) == {f"llama.cpp {k}" for k in ("F32", "Q8_0", "Q4_0")}
    assert "llama.cpp Q8_0: not measured:" in result.err
    assert result.document["pairs"] == []


def test_quality_names_what_auto_is_once(cli: Cli) -> None:
    result = cli(
        *("verify", "--quality", "--text-tokens", "40", "--window", "32", "--json"),
        *("--dtypes", "auto,float32,bfloat16,int8", "--threads", "1"),
    )
    names = [row["arithmetic"] for row in result.document["rows"]]
    assert names[0] == "float32"
    assert names[1] in ("auto (bfloat16)", "auto (int8)")
    assert sorted(name.removeprefix("auto (").rstrip(")") for name in names[1:]) == [
        "bfloat16",
        "int8",
    ]


def test_quality_of_the_embedded_prompts(cli: Cli) -> None:
    result = cli(
        *("verify", "--quality", "--text-tokens", "100", "--dtypes", "float32", "--json"),
        *("--threads", "1"),
    )
    assert result.document["rows"][0]["num_tokens"] == 100
    assert 1 < result.document["rows"][0]["perplexity"] < 100


LLAMA_CHILD = """
import json, os, sys
import numpy as np
width = {width}
for line in sys.stdin:
    task = json.loads(line)
    if "source" in task:
        assert task["kind"] is None
        out = task["out"]
        answer = dict.fromkeys(("library", "version", "system_info", "flash_attention"), "toy")
        answer |= {{"vocab_size": width, "kv_type": task["kv_type"], "source": task["source"]}}
    else:
        rows = len(task["tokens"]) - task["first"]
        np.zeros((rows, width), np.float32).tofile(out)
        answer = {{"rows": rows}}
    print(json.dumps(answer), flush=True)
"""


def test_quality_of_a_gguf_file_compares_with_llama_cpp_on_that_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, vocab_size = tmp_path / "model.gguf", 600
    tokenizer = tokenizer_metadata(json.loads(byte_fallback_json()), "llama")
    convert("qwen3", path, metadata=tokenizer, changes={"vocab_size": vocab_size})
    child = tmp_path / "child.py"
    child.write_text(LLAMA_CHILD.format(width=vocab_size), encoding="utf-8")
    monkeypatch.setattr("paceline_lab.quality.llama_peer_child.__file__", str(child))
    (tmp_path / "text").write_text("a" * 60)
    result = cli(
        *("verify", str(path), "--quality", "--text", str(tmp_path / "text"), "--window", "16"),
        *("--dtypes", "bfloat16", "--llama", sys.executable, "--llama-kv-type", "f32", "--json"),
        *("--threads", "1"),
    )
    assert result.code == 0, result.err
    document = result.document
    assert [row["arithmetic"] for row in document["rows"]] == ["float32", "bfloat16", "llama.cpp"]
    assert document["peers"]["llama.cpp"]["source"] == str(path)
    assert document["peers"]["llama.cpp"]["kv_type"] == "f32"
    assert document["rows"][2]["perplexity"] == pytest.approx(vocab_size)
    scored = load_checkpoint(path).tokenizer.encode("a" * 60, add_special_tokens=False)
    # Every window begins with the BOS token, so the text's first token is scored as well.
    assert document["rows"][0]["num_tokens"] == len(scored)
    (pair,) = document["pairs"]
    assert pair["difference"] < 0
    assert "bfloat16 against llama.cpp: mean KL -" in result.err
