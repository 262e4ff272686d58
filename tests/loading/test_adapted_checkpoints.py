"""Adapters over stored checkpoints: GGUF files of several families, and quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.api.llm import LLM
from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import why_not_native
from paceline.backends.rows.reference import ReferenceOps
from paceline.loading.adapter import load_adapter
from paceline.loading.checkpoint import load_checkpoint
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import Span
from tests.adapters import adapter_folder, adapter_tensors, merged
from tests.arrays import assert_close, same
from tests.loading.gguf_writing import convert
from tests.loading.test_quantised_checkpoints import save_quantised
from tests.models.reference import Driver

needs_native = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
TOKENS = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(3)).tolist()
TARGETS: dict[str, Sequence[str]] = {
    "llama": ("q_proj", "k_proj", "o_proj", "down_proj"),
    "qwen3": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    "glm4": ("q_proj", "k_proj", "gate_up_proj"),
    "gpt-neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "starcoder2": ("v_proj", "c_fc", "c_proj"),
}


def adapted(driver: Driver, folder: Path, tokens: Sequence[int], chunk: int) -> torch.Tensor:
    """Logits of a text that is read in chunks, with an adapter; with none where there is none."""
    checkpoint, runner, kv = driver.checkpoint, driver.runner, driver.kv
    adapter = None
    if folder.exists():
        layers = load_adapter(folder, checkpoint.config, checkpoint.hf_config)
        adapter = runner.adapter(layers)
    rows = []
    kv.open(1)
    for at in range(0, len(tokens), chunk):
        part = tokens[at : at + chunk]
        assert kv.reserve(1, len(part))
        span = Span(1, at, part, range(-1, len(part) - 1), range(len(part)))
        rows.append(torch.from_numpy(runner.forward(runner.pack([span], [adapter])).logits))
        kv.commit(1, range(len(part)))
    kv.free(1)
    return torch.cat(rows)


@pytest.mark.parametrize("family", TARGETS)
def test_an_adapter_of_a_gguf_file_is_that_of_the_model_it_was_made_of(
    family: str, tmp_path: Path
) -> None:
    model = convert(family, tmp_path / "model.gguf")
    added = adapter_tensors(model.state_dict(), targets=TARGETS[family])
    folder = adapter_folder(tmp_path / "adapter", added)
    driver = Driver.of(tmp_path / "model.gguf")
    got = adapted(driver, folder, TOKENS, len(TOKENS))
    model.load_state_dict(merged(model.state_dict(), added))
    with torch.inference_mode():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert_close(got, want, atol=1e-3, rtol=1e-3)
    plain = adapted(driver, tmp_path / "none", TOKENS, len(TOKENS))
    assert (plain - want).abs().max() > 0.05 * want.abs().max()


def gguf(name: str, path: Path) -> Path:
    """A file whose matrices are of a type, or of several in one linear."""
    kinds = name.split("+")
    others = {f"blk.{i}.attn_q.weight": kinds[-1] for i in range(4)}
    convert("qwen3", path, qtype=kinds[0], other_types=others, changes={"intermediate_size": 128})
    return path


STORED = ["Q8_0", "Q5_1", "Q8_0+F16", "F16+Q8_0"]
QUANTISED = ["gptq-act", "gptq-act-shared", "awq"]


@needs_native
@pytest.mark.parametrize("name", [*STORED, *QUANTISED])
@pytest.mark.parametrize("rank", [4, 40])
def test_adapters_are_added_to_quantised_weights(name: str, rank: int, tmp_path: Path) -> None:
    """Near what floats make of the same weights, and with the bits of each row alone."""
    path = tmp_path / "model"
    if name in QUANTISED:
        save_quantised(path, name)
    else:
        path = gguf(name, tmp_path / "model.gguf")
    checkpoint = load_checkpoint(path, with_tokenizer=False)
    state = {n: torch.from_numpy(checkpoint.tensors[n]) for n in checkpoint.tensors if "_proj" in n}
    added = adapter_tensors(state, rank=rank, dtype=torch.bfloat16)
    folder = adapter_folder(tmp_path / "adapter", added, r=rank, lora_alpha=2 * rank)
    truth, native = (Driver.of(path, ops=ops) for ops in (ReferenceOps("float32"), CpuOps("file")))
    want, got = (adapted(each, folder, TOKENS, 24) for each in (truth, native))
    plain = adapted(native, tmp_path / "none", TOKENS, 24)
    size = want.square().mean().sqrt()
    assert (got - want).square().mean().sqrt() < 0.2 * size
    assert (plain - want).square().mean().sqrt() > 0.5 * size
    assert same(got, adapted(native, folder, TOKENS, 1))
    assert same(got, adapted(native, folder, TOKENS, 7))


ALWAYS = {"min_accept_prob": 0.0}
DRAFTS: dict[str, list[dict[str, Any]]] = {
    "self": [{"method": "self", "draft_layers": 1, **ALWAYS}],
    "fewer bits": [{"method": "self", "dtype": "int4", **ALWAYS}],
    "texts": [{"method": "prompt_lookup", **ALWAYS}, {"method": "suffix", **ALWAYS}],
}


@needs_native
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_drafts_change_no_answer_of_adapters_over_gguf(
    name: str, drafts: str, tmp_path: Path
) -> None:
    path = gguf(name, tmp_path / "model.gguf")
    tensors = load_checkpoint(path, with_tokenizer=False).tensors
    state = {n: torch.from_numpy(tensors[n]) for n in tensors if "_proj" in n}
    lora = {
        f"a{seed}": str(adapter_folder(tmp_path / str(seed), adapter_tensors(state, seed)))
        for seed in range(2)
    }
    prompts = [TOKENS[: 6 + i] * 2 for i in range(4)]
    chosen = [None, "a0", "a1", "a0"]
    params = [
        SamplingParams(
            temperature=0.7 * (i % 2), seed=i, max_tokens=24, ignore_eos=True, logprobs=3
        )
        for i in range(4)
    ]

    def answers(**how: Any) -> list[Any]:
        with LLM(path, lora=lora, max_model_len=128, planner="fixed", **how) as llm:
            together = llm.generate(prompts, params, lora=chosen)
            drafted = llm.stats().speculation.num_draft_tokens
        assert bool(how["speculative_config"]) == (drafted > 0)
        return [(each.token_ids, each.logprobs) for each in together]

    plain = answers(speculative_config=[])
    assert answers(speculative_config=DRAFTS[drafts]) == plain
    assert len({str(tokens) for tokens, _ in plain}) == len(plain)
