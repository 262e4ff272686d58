"""Mixtures of experts: layouts of checkpoints, rows that stand alone, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import why_not_native
from paceline.backends.native.packing import Packer, read_layers
from paceline.backends.rows.reference import ReferenceOps
from paceline.backends.rows.rows import choose
from paceline.build.default_drafts import bundled_drafts
from paceline.core.errors import ModelLoadError, PacelineError, TrainingError
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.layer_sizes import Experts
from paceline.models.threads import set_num_threads
from paceline.request.span import DraftTree, Span
from paceline_lab.train.heads.initial import TargetWeights
from paceline_lab.train.model_files import load_model
from tests.arrays import assert_close, same
from tests.models.reference import MIXTURES, VOCAB, Driver, edit, save_model, saved_model
from tests.quick import in_turns, once, share

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
ROUTER = "model.layers.0.mlp.gate.weight"


KINDS = {"reference": ReferenceOps, **({} if why_not_native() else {"native": CpuOps})}
backends = pytest.mark.parametrize("backend", KINDS)


def driver(folder: Path, dtype: str = "float32", backend: str = "reference") -> Driver:
    return Driver.of(folder, max_len=64, ops=KINDS[backend](dtype))


@pytest.mark.parametrize("family", share(MIXTURES, 3))
def test_stacked_experts_are_the_same_model(tmp_path: Path, family: str) -> None:
    save_model(family, tmp_path / "each")
    save_model(family, tmp_path / "stacked", stacked=True)
    truth = driver(tmp_path / "each").chunk(TOKENS)
    assert same(driver(tmp_path / "stacked").chunk(TOKENS), truth)


@pytest.mark.parametrize(
    ("family", "dtype", "backend"),
    in_turns(
        ["qwen2-moe", "olmoe", "glm4-moe-groups", "gpt-oss", "deepseek-v3"],
        ["float32", "bfloat16", "int8"],
        KINDS,
    ),
)
def test_chunks_and_threads_do_not_change_a_bit(
    tmp_path: Path, family: str, dtype: str, backend: str
) -> None:
    save_model(family, tmp_path)
    whole = driver(tmp_path, dtype, backend)
    truth = whole.chunk(TOKENS)
    for count, cuts in ((1, [0, 1, 17, 20, 33, 40]), (2, [0, 5, 6, 40])):
        set_num_threads(count)
        parts = whole.again()
        chunks = [parts.chunk(TOKENS[a:b]) for a, b in itertools.pairwise(cuts)]
        assert same(torch.cat(chunks), truth)


@backends
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_a_tree_has_the_bits_of_its_paths(tmp_path: Path, family: str, backend: str) -> None:
    save_model(family, tmp_path)
    draft = DraftTree([5, 9, 7, 7], [-1, -1, 0, 1], [1.0] * 4, ["x"] * 4)
    tree = driver(tmp_path, backend=backend)
    chain = tree.again()
    tree.chunk(TOKENS[:20])
    chain.chunk(TOKENS[:20])
    found = tree.run(draft, TOKENS[20], path=[0, 2, 4])
    truth = torch.cat([chain.chunk([token]) for token in (TOKENS[20], 9, 7)])
    assert same(found[[0, 2, 4]], truth)


@backends
def test_one_expert_for_all_rows(tmp_path: Path, backend: str) -> None:
    """Equal logits choose the lowest ids, so that a router of zeros has hot experts alone."""
    save_model("qwen3-moe", tmp_path, num_experts_per_tok=1)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name].zero_()
    save_file(tensors, tmp_path / "model.safetensors")
    truth = driver(tmp_path, backend=backend).chunk(TOKENS)
    for name in tensors:
        if ".experts." in name and ".experts.0." not in name:
            tensors[name].zero_()  # never read
    save_file(tensors, tmp_path / "model.safetensors")
    parts = driver(tmp_path, backend=backend)
    assert same(torch.cat([parts.chunk([token]) for token in TOKENS]), truth)


def chosen_by(model: Any, tokens: list[int]) -> list[torch.Tensor]:
    """The experts of each token ``[tokens, per_token]``, by mixture, as transformers chooses."""
    found: list[torch.Tensor] = []
    hooks = []

    def watch(module: Any, chosen: Any) -> None:
        hook = module.register_forward_hook(lambda _, __, out: found.append(chosen(out)))
        hooks.append(hook)

    for name, module in model.named_modules():
        if name.endswith(".feed_forward.router"):  # which tells the scores, 0 of those not chosen
            watch(module, lambda out: out[0].topk(model.config.num_experts_per_tok).indices)
        elif name.endswith((".mlp.gate", ".router")):
            watch(module, lambda out: out[2])
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(("family", "backend"), once(MIXTURES, KINDS))
def test_experts_are_counted_as_the_routers_choose(
    tmp_path: Path, family: str, backend: str
) -> None:
    """Of 200 rows too, which the native kernels take in slices."""
    tokens = torch.randint(3, VOCAB, (200,), generator=torch.Generator().manual_seed(5)).tolist()
    model = saved_model(family, tmp_path, max_position_embeddings=256)
    checkpoint = load_checkpoint(tmp_path, with_tokenizer=False)
    found = Driver(checkpoint, max_len=256, ops=KINDS[backend]("float32"))
    begin = 0
    for end in (1, 3, 20, len(tokens)):
        chosen = [each[begin:].unique() for each in chosen_by(model, tokens[:end])]
        span = Span.chunk(0, begin, tokens[begin:end], sample=True)
        assert found.kv.reserve(0, end - begin)
        result = found.runner.forward(found.runner.pack([span]), greedy=True)
        found.kv.commit(0, range(end - begin))
        assert result.experts_read == sum(map(len, chosen))
        by_layer = found.runner.chosen_experts
        assert [len({*ids.ravel().tolist()}) for ids in by_layer] == list(map(len, chosen))
        assert {ids.shape[0] for ids in by_layer} == {end - begin}
        begin = end


def test_ties_and_nans_have_an_order() -> None:
    nan = float("nan")
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0], [1.0, nan, 2.0, nan], [0.0, -0.0, 0.0, 0.0]])
    ids, weights = choose(logits, Experts(4, 3, 8))
    assert ids.tolist() == [[1, 2, 0], [1, 3, 2], [0, 1, 2]]
    assert weights[1].isnan().all()
    assert_close(weights[[0, 2]].sum(1), torch.ones(2))
    _, weights = choose(logits[:1], Experts(4, 2, 8, renormalise=False, scale=2.0))
    assert_close(weights, 2 * torch.softmax(logits[:1], 1)[:, 1:3])


def test_groups_limit_the_choice() -> None:
    """A group counts as its best two experts together; a bias changes the choice, not weights."""
    nan, few = float("nan"), Experts(6, 2, 8, renormalise=False, groups=3, groups_per_token=1)
    logits = torch.tensor([[5.0, -9.0, 3.0, 3.0, 3.0, 3.0], [1.0, 1.0, 2.0, nan, 9.0, 9.0]])
    assert choose(logits, few)[0].tolist() == [[0, 1], [3, 2]]
    two = replace(few, sigmoid=True, group_best=2)
    ids, weights = choose(logits, two)
    assert ids.tolist() == [[2, 3], [3, 2]]
    assert_close(weights[0], logits[0, 2:4].sigmoid())
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.1])
    ids, weights = choose(logits, replace(two, choice_bias=True, scale=3.0), bias)
    assert ids.tolist() == [[5, 4], [3, 2]]
    assert_close(weights[0], 3.0 * logits[0, 4:].sigmoid())
    none = torch.full((1, 6), -torch.inf)
    assert choose(none, replace(two, groups_per_token=2))[0].tolist() == [[0, 1]]
    assert choose(none, replace(two, renormalise=True))[1].tolist() == [[0.0, 0.0]]


def test_sparse_mixer_weighs_an_expert_against_those_near_it() -> None:
    logits = torch.tensor([[4.0, 3.9, 3.0, -4.0], [-2.0, -2.1, -9.0, -9.5]])
    ids, weights = choose(logits, Experts(4, 3, 8, jitter=0.02))
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    both = 1 / (1 + math.exp(-0.1))  # the first two are within 4 %
    assert_close(weights, torch.tensor([[both, 1.0, 1.0], [1.0, 1.0, 1.0]]))
    _, weights = choose(logits, Experts(4, 3, 8, jitter=0.03))  # the last two are within 6 %
    third = 1 / (1 + math.exp(-0.5))
    assert_close(weights[1], torch.tensor([both, 1.0, third]))


@backends
@pytest.mark.parametrize("family", ["qwen2-moe", "glm4-moe-groups", "phimoe"])
def test_a_row_of_nans_stays_alone(tmp_path: Path, family: str, backend: str) -> None:
    """A prompt that reads NaN makes NaN from there on, and what came before keeps its bits."""
    save_model(family, tmp_path)
    truth = driver(tmp_path, backend=backend).chunk(TOKENS[:8])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][VOCAB - 1] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    found = driver(tmp_path, backend=backend).chunk([*TOKENS[:8], VOCAB - 1])
    assert same(found[:8], truth)
    assert found[8].isnan().all()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_local_experts": 0}, "num_local_experts = 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9; .* from 1 to 8"),
        ({"num_local_experts": 9}, "shape"),
        ({"num_local_experts": 7, "num_experts_per_tok": 3}, "shape"),
        ({"num_experts": 4}, "num_experts = 4"),
        ({"moe_intermediate_size": 24}, "shape"),
        ({"mlp_only_layers": [0]}, "no tensor .*mlp.gate_proj"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_configurations_that_do_not_fit(
    tmp_path: Path, stacked: bool, changes: dict[str, Any], match: str
) -> None:
    save_model("qwen3-moe", tmp_path, stacked=stacked)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(PacelineError, match=match):
        driver(tmp_path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"n_routed_experts": 0}, "n_routed_experts = 0"),
        ({"n_group": 3}, "n_group = 3; it must be a divisor of the number of experts, 8"),
        ({"n_group": 9}, "n_group = 9"),
        ({"topk_group": 5}, "topk_group = 5; .* from 1 to 4"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5; .* from 1 to 4"),
        ({"scoring_func": "tanh"}, "'tanh' is not supported"),
        ({"first_k_dense_replace": 1}, r"no tensor .*0\.mlp\.gate_proj"),
        ({"n_shared_experts": 2}, "shape"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor"),
    ],
)
def test_routings_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    save_model("glm4-moe-groups", tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(PacelineError, match=match):
        driver(tmp_path)


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_bias_of_the_choice_that_is_none(tmp_path: Path, value: float | None) -> None:
    save_model("minimax-m2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("e_score_correction_bias"))
    if value is None:
        del tensors[name]
    else:
        tensors[name][2] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="e_score_correction"):
        driver(tmp_path)


def test_an_mtp_layer_behind_the_last_one_is_left_out(tmp_path: Path) -> None:
    """It has experts and a router of its own, as GLM-4.5 and DeepSeek-V3 publish it."""
    save_model("glm4-moe", tmp_path)
    truth = driver(tmp_path).chunk(TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    last, behind = "model.layers.2.", "model.layers.3."
    mtp = {behind + n.removeprefix(last): t.clone() for n, t in tensors.items() if last in n}
    mtp[behind + "eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors | mtp, tmp_path / "model.safetensors")
    assert same(driver(tmp_path).chunk(TOKENS), truth)
    assert [each.method for each in bundled_drafts(str(tmp_path))] == ["mtp"]


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    save_model("qwen3-moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"experts\.3\.down_proj"):
        driver(tmp_path)


def test_training_refuses_those_that_it_does_not_write(tmp_path: Path) -> None:
    save_model("qwen3-moe", tmp_path / "stacks", stacked=True)
    with pytest.raises(TrainingError, match="mixture"):
        load_model(tmp_path / "stacks")
    save_model("mixtral", tmp_path / "mixtral")
    checkpoint = load_checkpoint(tmp_path / "mixtral", with_tokenizer=False)
    with pytest.raises(TrainingError, match="mixture"):
        load_model(tmp_path / "mixtral")
    with pytest.raises(TrainingError, match="mixture"):
        TargetWeights(checkpoint)


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
@pytest.mark.parametrize("family", share(MIXTURES, 3, 1))
def test_a_converted_folder_is_the_same(tmp_path: Path, family: str) -> None:
    save_model(family, tmp_path / "plain")
    source = load_checkpoint(tmp_path / "plain", with_tokenizer=False)
    write_packed(source, tmp_path / "packed", Packer("int8"))
    packed = load_checkpoint(tmp_path / "packed", with_tokenizer=False)
    found, truth = (
        Driver(each, max_len=64, ops=CpuOps("int8")).chunk(TOKENS) for each in (packed, source)
    )
    assert same(found, truth)
    assert len(read_layers(packed, packed.config, CpuOps("int4"))) == packed.config.num_layers


def test_the_first_layers_keep_their_kinds(tmp_path: Path) -> None:
    save_model("qwen2-moe-some", tmp_path)
    config = load_checkpoint(tmp_path, with_tokenizer=False).config
    assert json.loads((tmp_path / "config.json").read_text())["mlp_only_layers"] == [1]
    assert [config.mlp.experts_of(i) is not None for i in range(4)] == [False, False, False, True]
    assert config.first_layers(3).mlp.experts is None
    first = load_checkpoint(tmp_path, with_tokenizer=False).first_layers(2)
    assert torch.isfinite(Driver(first, max_len=64).chunk(TOKENS)).all()
