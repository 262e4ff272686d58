"""Heads of blocks in llama.cpp itself: it drafts the same tokens by the same GGUF files.

llama.cpp reads as many rows of a block as it drafts tokens, so it is asked for whole blocks. Needs
an interpreter that has xllamacpp: that of ``PACELINE_LLAMA_PYTHON``. Skips without.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import gguf
import pytest

from paceline.proposers.heads import build
from tests.proposers.dflash import MASK, SIZE, FollowingBlocks, dflash_tensors
from tests.proposers.drive import make_request, propose
from tests.proposers.gguf_heads import stored_name, write_gguf_head
from tests.proposers.heads import Tensors, head_options, made_to_follow, target_info
from tests.proposers.parallel_heads import (
    GROUP,
    RANK,
    TOP_K,
    FollowingMarkov,
    dflash2_tensors,
    dspark_tensors,
)
from tests.toy import TOY, VOCAB, toy_runner, toy_tensors

PYTHON = os.environ.get("PACELINE_LLAMA_PYTHON", "")
SCRIPT = Path(__file__).with_name("llama_drafts.py")
Drafts = dict[int, list[list[int]]]
TAPS = [0, 1]
"""llama.cpp gives a head what enters a layer of the target, but not what leaves the last one."""
PROMPT = [5, 9, 2, 7, 7, 30, 11, 29, 18, 23, 10, 39, 38, 10, 5]
END = VOCAB - 2
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [chr(33 + token) for token in range(VOCAB)],
    "tokenizer.ggml.token_type": [1] * VOCAB,
    "tokenizer.ggml.merges": ['! "'],
    "tokenizer.ggml.eos_token_id": END,
}
SELECTOR = {
    "conv_kernel_size": 2,
    "conv_group_size": GROUP,
    "selector_rank": RANK,
    "selector_top_k": TOP_K,
}
FORMS: dict[str, tuple[str, dict[str, Any], Tensors]] = {
    "dflash": ("dflash", {}, dflash_tensors(1, taps=2)),
    "dspark": ("dspark", {}, dspark_tensors(5, taps=2)),
    "dspark, another": ("dspark", {}, dspark_tensors(taps=2)),
    "dspark behind the anchor": (
        "dspark",
        {"sample_from_anchor": False},
        dspark_tensors(1, taps=2),
    ),
}
SELECTED: dict[str, tuple[str, dict[str, Any], Tensors]] = {
    "dflash2": ("dflash2", SELECTOR, dflash2_tensors(taps=2)),
    "dflash2, another": (
        "dflash2",
        SELECTOR | {"conv_kernel_size": 3},
        dflash2_tensors(3, own_ends=True, taps=2, kernel=3),
    ),
    "dflash2, sliding": (
        "dflash2",
        SELECTOR
        | {"attention.sliding_window": 4, "attention.sliding_window_pattern": [True, False]},
        dflash2_tensors(5, taps=2),
    ),
}
"""Whose drafts llama.cpp does not log."""


def write_target(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3")
    sizes = {
        "block_count": TOY.num_layers,
        "context_length": TOY.max_position,
        "embedding_length": TOY.hidden_size,
        "feed_forward_length": TOY.intermediate_size,
        "attention.head_count": TOY.num_heads,
        "attention.head_count_kv": TOY.num_kv_heads,
        "attention.key_length": TOY.head_dim,
        "attention.value_length": TOY.head_dim,
    }
    for key, value in sizes.items():
        writer.add_uint32(f"qwen3.{key}", value)
    writer.add_rope_freq_base(TOY.positions.rope.theta)
    writer.add_layer_norm_rms_eps(TOY.norms.eps)
    for key, value in VOCABULARY.items():
        is_count = isinstance(value, int)
        kind = gguf.GGUFValueType.UINT32 if is_count else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    for name, tensor in toy_tensors().items():
        writer.add_tensor(stored_name(name.removeprefix("model.")), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def log_of_llama(target: Path, head: Path, kind: str, prompts: list[dict[str, Any]]) -> list[str]:
    """The lines in which it says what it has done with these completions."""
    command = [PYTHON, str(SCRIPT), str(target), str(head), kind, str(SIZE), json.dumps(prompts)]
    log = subprocess.run(command, check=True, timeout=120, stderr=subprocess.PIPE).stderr
    return log.decode(errors="replace").splitlines()


def drafts_of_llama(target: Path, head: Path, kind: str, prompts: list[list[int]]) -> Drafts:
    """By the number of tokens that the target has read: what was drafted behind the next one."""
    drafts: Drafts = {}
    draft = list[int]()
    for line in log_of_llama(target, head, kind, [{"prompt": prompt} for prompt in prompts]):
        if candidate := re.search(r"draft candidate +0, pos +\d+: +(\d+)", line):
            draft.append(int(candidate[1]))
        elif made := re.search(r"generate_draft: .*#tokens=(\d+)", line):
            drafts.setdefault(int(made[1]), []).append(draft)
            draft = []
    return drafts


def drafter_of(kind: str, keys: dict[str, Any], tensors: Tensors, head: Path) -> Any:
    """A proposer by a head's file, which it writes."""
    told = {"block_size": SIZE, "tokenizer.ggml.mask_token_id": MASK, "target_layers": TAPS}
    write_gguf_head(head, tensors, "dflash", **told, **VOCABULARY, **keys)
    runner = toy_runner("float32", prefix_caching=False)
    options = {"model": str(head), "num_speculative_tokens": SIZE}
    proposer = build(head_options(kind, **options), target_info(runner))
    follows: Any = FollowingBlocks if kind == "dflash" else FollowingMarkov
    return made_to_follow(proposer, follows, runner)


@pytest.mark.real
@pytest.mark.skipif(not PYTHON, reason="PACELINE_LLAMA_PYTHON names no interpreter")
@pytest.mark.parametrize("form", FORMS)
def test_llama_cpp_drafts_the_same(form: str, tmp_path: Path) -> None:
    kind, keys, tensors = FORMS[form]
    target, head = write_target(tmp_path / "target.gguf"), tmp_path / "head.gguf"
    followed = drafter_of(kind, keys, tensors, head)
    lengths = range(7, len(PROMPT))
    found = drafts_of_llama(target, head, kind, [PROMPT[:length] for length in lengths])
    for length in lengths:
        request = make_request(length, PROMPT[: length + 1])  # the target's own greedy tokens
        (tree,) = propose(followed, request)
        assert len(tree) >= SIZE - 1
        assert tree.token_ids in found[length]
        whole = [draft for draft in found[length] if len(draft) == len(tree)]
        assert all(draft == tree.token_ids for draft in whole)


def grammar(tokens: list[int]) -> str:
    """Of texts that begin with these tokens, each of which is a character."""
    said = "".join(f"\\x{33 + token:02X}" for token in tokens)
    return f'root ::= "{said}" [!-P]*'


@pytest.mark.real
@pytest.mark.skipif(not PYTHON, reason="PACELINE_LLAMA_PYTHON names no interpreter")
@pytest.mark.parametrize("form", SELECTED)
def test_llama_cpp_drafts_what_its_target_is_made_to_say(form: str, tmp_path: Path) -> None:
    """It accepts all of its own draft where a grammar has the target say ours, and less than that
    where one token is another."""
    target, head = write_target(tmp_path / "target.gguf"), tmp_path / "head.gguf"
    followed = drafter_of(*SELECTED[form], head)
    prompts, expected = list[dict[str, Any]](), list[int]()
    for length in range(7, len(PROMPT)):
        (tree,) = propose(followed, make_request(length, PROMPT[: length + 1]))
        assert len(tree) == SIZE - 1
        for right in (len(tree), length % len(tree)):
            draft = [(t + (at == right)) % VOCAB for at, t in enumerate(tree.token_ids)]
            if END not in draft:  # which ends a text, whatever a grammar says
                said = grammar([PROMPT[length], *draft])
                prompts.append({"prompt": PROMPT[:length], "grammar": said})
                expected.append(right)
    assert len(expected) >= 8
    log = "\n".join(log_of_llama(target, head, "dflash", prompts))
    # Of each completion the first draft alone is as long; the last id is the target's own.
    found = re.findall(rf"add accepted tokens: .*ids.size=(\d+), n_draft={SIZE - 1}", log)
    assert [int(size) - 1 for size in found] == expected
