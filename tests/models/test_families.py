"""Every family against transformers: prefill, decode and draft trees of tiny random checkpoints."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from paceline.backends.rows.reference import ReferenceOps
from paceline.request.span import DraftTree
from tests.arrays import assert_close, same
from tests.models.reference import (
    COMMON,
    DENSE,
    FAMILIES,
    HYBRIDS,
    MIXTURES,
    VOCAB,
    Driver,
    save_model,
    saved_model,
)
from tests.quick import once, share

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
EVERY = [*FAMILIES, *MIXTURES, *HYBRIDS]


@pytest.fixture(scope="module", params=EVERY)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Any, Driver]:
    """The same checkpoint on both sides. Short texts, so that tables are the short-text ones."""
    folder: Path = tmp_path_factory.mktemp("model")
    model = saved_model(request.param, folder)
    return model, Driver.of(folder, max_len=64)


@pytest.fixture
def pair(loaded: tuple[Any, Driver]) -> tuple[Any, Driver]:
    """Both, before they have read anything."""
    model, driver = loaded
    return model, driver.again()


def want(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_prefill_and_decode(pair: tuple[Any, Driver]) -> None:
    model, driver = pair
    truth = want(model, TOKENS)
    assert truth.std() > 0.05  # the tolerance would hide a model that says nothing
    for first, last in itertools.pairwise([0, 17, 23, 30, 31, 32, 33, 34, 40]):
        close(driver.chunk(TOKENS[first:last]), truth[first:last])


@pytest.mark.parametrize("loaded", share(EVERY, 2), indirect=True)
def test_tree(pair: tuple[Any, Driver]) -> None:
    """Each node sees exactly the text on its own path; a committed branch goes on from there."""
    model, driver = pair
    prompt, root = TOKENS[:20], TOKENS[20]
    driver.chunk(prompt)
    tokens, parents = [5, 9, 7, 7, 11, 12], [-1, -1, 0, 1, 3, 3]
    draft = DraftTree(tokens, parents, [1.0] * 6, ["x"] * 6)
    logits = driver.run(draft, root, path=[0, 2, 4, 6])
    following = driver.chunk([33])
    for path in ([0, 2], [1, 3, 4], [1, 3, 5]):
        truth = want(model, [*prompt, root, *(tokens[node] for node in path), 33])[20:]
        close(logits[[0, *(node + 1 for node in path)]], truth[:-1])
    close(following, truth[-1:])


@pytest.mark.parametrize(("family", "dtype"), once(DENSE, ["float32", "int8"]))
def test_chunks_do_not_change_a_bit(tmp_path: Path, family: str, dtype: str) -> None:
    save_model(family, tmp_path)
    whole = Driver.of(tmp_path, max_len=64, ops=ReferenceOps(dtype))
    parts = whole.again()
    cuts = [0, 1, 17, 20, 33, 40]
    chunks = [parts.chunk(TOKENS[a:b]) for a, b in itertools.pairwise(cuts)]
    assert same(torch.cat(chunks), whole.chunk(TOKENS))


def test_weights_are_counted(loaded: tuple[Any, Driver]) -> None:
    model, driver = loaded
    named = [each for each in model.named_parameters() if each[1].requires_grad]
    matrices = [each for name, each in named if each.ndim > 1 and not name.endswith("_bias")]
    assert driver.checkpoint.config.num_weights == sum(map(torch.numel, matrices))


def test_bfloat16_embeddings_of_gemma_are_scaled_as_in_training(tmp_path: Path) -> None:
    save_model("gemma3", tmp_path, "bfloat16", hidden_size=60, num_attention_heads=4)
    config = Driver.of(tmp_path).checkpoint.config
    assert config.dtype == "bfloat16"
    assert config.multipliers.embedding == torch.tensor(60**0.5).bfloat16().item() != 60**0.5


@pytest.mark.parametrize(
    "activation", ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu2", "swish"]
)
def test_activations(tmp_path: Path, activation: str) -> None:
    model = saved_model("llama", tmp_path, hidden_act=activation)
    close(Driver.of(tmp_path).chunk(TOKENS), want(model, TOKENS))


def test_long_factors_rule_a_long_context(tmp_path: Path) -> None:
    """Beyond the trained length the other table is used, for the whole text."""
    model = saved_model("phi3-long", tmp_path)
    text = (TOKENS * 2)[:80]  # longer than the 64 trained positions
    close(Driver.of(tmp_path, max_len=128).chunk(text), want(model, text))


def test_gemma3_inside_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """Old and present prefixes of the language model are both understood."""
    model = saved_model("gemma3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": raw, "eos_token_id": [2, 7]}
    outer["architectures"] = ["Gemma3ForConditionalGeneration"]
    raw.pop("architectures")
    (tmp_path / "config.json").write_text(json.dumps(outer))
    truth = want(model, TOKENS)
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {prefix + name.removeprefix("model."): t for name, t in tensors.items()}
        save_file(renamed | {"vision_tower.x": torch.ones(1)}, tmp_path / "model.safetensors")
        close(Driver.of(tmp_path).chunk(TOKENS), truth)


def test_llama4_inside_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """With Scout's rotary scaling, whose blend has no width, and its number that means true."""
    step = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0}
    step |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    step |= {"original_max_position_embeddings": 32}
    text = {**COMMON, **MIXTURES["llama4-some"][1], "rope_parameters": step}
    vision = {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 8}
    vision |= {"num_attention_heads": 2, "patch_size": 4, "vision_output_dim": 8}
    vision |= {"projector_input_dim": 8, "projector_output_dim": 8}
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["model_type"] == "llama4"
    raw["text_config"]["attn_temperature_tuning"] = 4
    (tmp_path / "config.json").write_text(json.dumps(raw))
    close(Driver.of(tmp_path, max_len=64).chunk(TOKENS), want(model, TOKENS))


@pytest.mark.parametrize("name", ["tinystories-656k", "stories260k", "babyllama-tok105"])
def test_trained_models_tell_the_same_story(shared_data: Path, name: str) -> None:
    """80 greedy tokens: each is the reference's choice after the same text."""
    folder = shared_data / "models" / name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    driver = Driver.of(folder, max_len=256)
    prompt = transformers.AutoTokenizer.from_pretrained(folder)("Once upon a time").input_ids
    text = list(prompt)
    logits = driver.chunk(prompt)
    for _ in range(80):
        text.append(int(logits[-1].argmax()))
        logits = driver.chunk(text[-1:])
    assert text[len(prompt) :] == want(model, text).argmax(-1)[len(prompt) - 1 : -1].tolist()
