"""Training of heads that read the target's hidden states."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from paceline.build.build import open_runner, resolve_config
from paceline.config import EngineConfig
from paceline.core.errors import ConfigError, TraceError, TrainingError
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.config import ModelConfig
from paceline.proposers.heads.checkpoint import load_head
from paceline.request.traces import Trace, TraceWriter, read_traces
from paceline_lab.train.acceptance import continue_prompts
from paceline_lab.train.configs import HeadTrainingConfig
from paceline_lab.train.heads import train as train_module
from paceline_lab.train.heads.features import (
    FeatureRows,
    Grid,
    HeadBatch,
    Packs,
    join_rows,
    make_features,
    num_rows,
    num_wanted,
    pack_rows,
    split_prompts,
    unpack_rows,
)
from paceline_lab.train.heads.initial import LiveFeatures, TargetWeights
from paceline_lab.train.heads.losses import (
    AcceptanceCount,
    Wanted,
    cross_entropy,
    head_loss,
)
from paceline_lab.train.heads.modules import Eagle3
from paceline_lab.train.heads.train import train_head
from paceline_lab.train.lm import LMTrainingResult
from paceline_lab.train.model_files import load_model
from paceline_lab.train.ops import TrainingOps, differentiable_decoder
from tests.arrays import tensor

CONFIG = ModelConfig("llama", 50, 16, 24, 1, 4, 2, 4, 64)
SIZES = {
    "fc": (16, 48),
    "layers.0.input_layernorm": (16,),
    "layers.0.hidden_norm": (16,),
    "layers.0.self_attn.q_proj": (16, 32),
    "layers.0.self_attn.k_proj": (8, 32),
    "layers.0.self_attn.v_proj": (8, 32),
    "layers.0.self_attn.o_proj": (16, 16),
    "layers.0.post_attention_layernorm": (16,),
    "layers.0.mlp.gate_proj": (24, 16),
    "layers.0.mlp.up_proj": (24, 16),
    "layers.0.mlp.down_proj": (16, 24),
    "norm": (16,),
    "lm_head": (30, 16),
}
LENGTHS = ((9, 4), (5, 2), (12, 3))  # of texts and their prompts


@pytest.fixture
def params() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {n: torch.randn(s, generator=generator) * 0.4 for n, s in SIZES.items()}
    return {f"{n}.weight": p + (1.0 if p.dim() == 1 else 0.0) for n, p in made.items()}


def random_traces() -> list[Trace]:
    rng = np.random.default_rng(1)
    traces = []
    for index, (length, prompt) in enumerate(LENGTHS):
        tokens = rng.integers(0, 50, length).astype(np.int32)
        rows = np.zeros((length - prompt, 1), np.float32)
        traces.append(Trace(index, prompt, tokens, rows[:, 0], rows.astype(np.int32), rows))
    return traces


def _rows(trace: Trace) -> FeatureRows:
    generator = torch.Generator().manual_seed(trace.prompt_index)
    count = num_wanted(trace)
    probs, ids = torch.randn(count, 50, generator=generator).softmax(-1).topk(5)
    return FeatureRows(torch.randn(num_rows(trace), 48, generator=generator), ids, probs)


def _batch() -> HeadBatch:
    traces = random_traces()
    return HeadBatch.of(traces, join_rows([_rows(trace) for trace in traces]))


def one_text(tokens: torch.Tensor, features: torch.Tensor) -> HeadBatch:
    """A batch whose row ``j`` reads token ``j``, all of them wanted."""
    every, nothing = torch.arange(len(tokens)), torch.zeros(len(tokens), 1)
    grid = Grid(1, len(tokens), every)
    return HeadBatch(
        tokens=tokens,
        positions=every,
        features=features,
        grid=grid,
        wanted=every,
        wanted_grid=grid,
        left=every.flip(0),
        emitted=tokens,
        top_ids=nothing.long(),
        top_probs=nothing,
    )


def _head(params: dict[str, torch.Tensor]) -> Eagle3:
    embedding = torch.randn(50, 16, generator=torch.Generator().manual_seed(9))
    return Eagle3(CONFIG, params, embedding, TrainingOps(), 64)


def _column_of() -> torch.Tensor:
    """Every token with an odd id, and 5 more, has no column."""
    columns = torch.full((50,), -1)
    columns[torch.arange(0, 50, 2)] = torch.arange(25)
    columns[torch.arange(1, 10, 2)] = torch.arange(25, 30)
    return columns


def _plain(
    params: dict[str, torch.Tensor],
    embedding: torch.Tensor,
    tokens: list[int],
    inputs: torch.Tensor,
    positions: list[int],
) -> torch.Tensor:
    """The layer's outputs of a chain of rows, written down as simply as can be."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (16,), params[f"{name}.weight"], CONFIG.norms.eps)

    def turned(x: torch.Tensor) -> torch.Tensor:  # [rows, heads, 4]
        angles = torch.tensor(positions)[:, None] * 10000.0 ** (-torch.arange(2) / 2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :2], x[..., 2:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    p = {n.removeprefix("layers.0.").removesuffix(".weight"): w for n, w in params.items()}
    embedded = norm(embedding[tokens], "layers.0.input_layernorm")
    read = torch.cat((embedded, norm(inputs, "layers.0.hidden_norm")), -1)
    q, k, v = (
        (read @ p[f"self_attn.{n}_proj"].T).view(len(tokens), heads, 4)
        for n, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    q, k, v = turned(q), turned(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 2.0
    causal = torch.ones(len(tokens), len(tokens)).tril().bool()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
    x = inputs + attended @ p["self_attn.o_proj"].T
    read = norm(x, "layers.0.post_attention_layernorm")
    gated = F.silu(read @ p["mlp.gate_proj"].T) * (read @ p["mlp.up_proj"].T)
    return x + gated @ p["mlp.down_proj"].T


def test_first_step_is_what_plain_code_computes(params: dict[str, torch.Tensor]) -> None:
    head, batch = _head(params), _batch()
    every = torch.arange(len(batch.wanted))
    _, x = next(iter(head.steps(batch, 1, every)))
    expected = []
    for trace in random_traces():
        inputs = _rows(trace).features @ params["fc.weight"].T
        tokens = trace.token_ids[1:-1].tolist()
        out = _plain(params, head.embedding, tokens, inputs, list(range(len(tokens))))
        expected.append(out[trace.prompt_len - 1 :])
    expected_read = F.rms_norm(torch.cat(expected), (16,), params["norm.weight"], CONFIG.norms.eps)
    torch.testing.assert_close(x, expected_read, rtol=1e-5, atol=1e-5)


def test_unrolled_steps_are_what_a_rollout_computes(params: dict[str, torch.Tensor]) -> None:
    """A rollout has no batch: rows with features up to one, then one row after another."""
    head, batch = _head(params), _batch()
    continued = torch.tensor([0, 2, 4, 5, 6, 8])  # not all, of every text
    steps = list(head.steps(batch, 4, continued))
    wanted = [(t, j) for t in random_traces() for j in range(t.prompt_len - 1, num_rows(t))]
    compared = 0
    for begin in continued.tolist():
        trace, last = wanted[begin]
        inputs = _rows(trace).features[: last + 1] @ params["fc.weight"].T
        for step in range(1, min(4, num_rows(trace) - last)):
            tokens = trace.token_ids[1 : last + 1 + step].tolist()
            places = list(range(len(tokens)))
            out = _plain(params, head.embedding, tokens, inputs, places)
            inputs = torch.cat((inputs, out[-1:]))
            tokens = trace.token_ids[1 : last + 2 + step].tolist()
            out = _plain(params, head.embedding, tokens, inputs, [*places, len(places)])
            rows, x = steps[step]
            found = x[(rows == begin + step).nonzero().item()]
            read = F.rms_norm(out[-1], (16,), params["norm.weight"], CONFIG.norms.eps)
            torch.testing.assert_close(found, read, rtol=1e-4, atol=1e-5)
            compared += 1
    assert compared == sum(len(rows) for rows, _ in steps[1:])


def test_cross_entropy_and_its_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 16, generator=generator) for n in (40, 30))
    wanted = Wanted.of(_batch(), _column_of())
    hidden = hidden[: len(wanted.probs)]

    def gradients(slices: bool) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, head)]
        if slices:
            total = cross_entropy(*leaves, wanted, 30 * 4)
        else:
            logs = (leaves[0] @ leaves[1].T).log_softmax(-1).gather(1, wanted.columns)
            total = -(wanted.probs * logs).sum()
        (total * 3.0).backward()
        return [total.detach(), *(x.grad for x in leaves if x.grad is not None)]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_tokens_without_a_column_count_for_nothing() -> None:
    batch, columns = _batch(), _column_of()
    wanted = Wanted.of(batch, columns)
    for row, ids in enumerate(batch.top_ids.tolist()):
        for place, token in enumerate(ids):
            has = columns[token] >= 0
            expected = batch.top_probs[row, place] if has else 0.0
            assert wanted.probs[row, place] == expected


def test_gradients_reach_every_tensor(params: dict[str, torch.Tensor]) -> None:
    for p in params.values():
        p.requires_grad_()
    batch = _batch()
    every = torch.arange(len(batch.wanted))
    matrix, columns = params["lm_head.weight"], _column_of()
    head_loss(_head(params), matrix, batch, columns, 3, 0.8, every).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in params.values())


def test_counted_loss_is_the_trained_one(params: dict[str, torch.Tensor]) -> None:
    head, batch, columns = _head(params), _batch(), _column_of()
    every = torch.arange(len(batch.wanted))
    counted = AcceptanceCount(3)
    counted.add(head, params["lm_head.weight"], batch, columns)
    loss = head_loss(head, params["lm_head.weight"], batch, columns, 3, 0.8, every)
    assert counted.loss(0.8) == pytest.approx(loss.item(), rel=1e-5)


def test_packs_hold_every_trace_once_an_epoch() -> None:
    traces = random_traces() * 5
    packs = Packs(traces, lambda n: join_rows([_rows(traces[i]) for i in n]), 20, seed=3)
    for epoch in range(2):
        found = np.concatenate(packs.epoch(epoch))
        assert sorted(found) == list(range(len(traces)))
    assert [p.tolist() for p in packs.epoch(0)] != [p.tolist() for p in packs.epoch(1)]
    assert all(sum(num_rows(traces[i]) for i in pack) <= 20 for pack in packs.epoch(0))
    later = len(packs.epoch(0)) + 1
    fresh = Packs(traces, lambda n: join_rows([_rows(traces[i]) for i in n]), 20, seed=3)
    assert torch.equal(packs.take(later, 2).tokens, fresh.take(later, 2).tokens)
    assert torch.equal(packs.take(0, 1).tokens, fresh.take(0, 1).tokens)


def test_features_in_eight_bits() -> None:
    rows = torch.randn(7, 3, 64) * 5.0
    rows[:, 0, 3] = 3000.0  # one number of a residual stream is often that much larger
    found = unpack_rows(pack_rows(rows)).view_as(rows)
    assert ((found - rows).abs() <= rows.abs() * 0.07 + 0.05).all()
    assert torch.equal(unpack_rows(pack_rows(torch.zeros(1, 1, 8))), torch.zeros(1, 8))


def test_no_prompt_is_on_both_sides() -> None:
    traces = [dataclasses.replace(t, prompt_index=i) for i, t in enumerate(random_traces() * 3)]
    train, held = split_prompts(traces, 10, seed=0)
    prompts = [
        {traces[i].token_ids[: traces[i].prompt_len].tobytes() for i in s} for s in (train, held)
    ]
    assert held
    assert not prompts[0] & prompts[1]
    assert sorted(train + held) == list(range(9))


# --- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def traces(trained: LMTrainingResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the toy model answers to short prompts."""
    target = load_model(trained.folder)
    with torch.no_grad():
        decoder = differentiable_decoder(target.config, target.params, TrainingOps(), 64)
    prompts = torch.randint(1, 280, (60, 4), generator=torch.Generator().manual_seed(1))
    texts = continue_prompts(decoder, prompts, 24, 0.0, seed=0).numpy().astype(np.int32)
    zeros = np.zeros((24, 1), np.float32)
    folder = tmp_path_factory.mktemp("traces")
    writer = TraceWriter(folder, {"model": "toy"})
    writer.write_shard(
        [Trace(i, 4, t, zeros[:, 0], t[4:, None], zeros) for i, t in enumerate(texts)]
    )
    return folder


def head_config(target: Path, answers: Path, output: Path, **options: Any) -> HeadTrainingConfig:
    defaults: dict[str, Any] = {
        "output": str(output),
        "target": str(target),
        "traces": (str(answers),),
        "draft_vocab_size": None if options.get("kind") == "mtp" else 100,
        "held_out_tokens": 300,
        "seq_len": 128,
        "steps": 40,
        "warmup_steps": 5,
        "learning_rate": 5e-3,
        "weights_dtype": "float32",
        "eval_every": 0,
        "show_progress": False,
    }
    return HeadTrainingConfig(**{**defaults, **options})


def test_training_raises_acceptance(
    trained: LMTrainingResult, traces: Path, tmp_path: Path
) -> None:
    result = train_head(head_config(trained.folder, traces, tmp_path))
    assert result.before is not None
    assert result.after is not None
    assert result.after.greedy[0] > result.before.greedy[0] + 0.1
    assert result.after.overlap[0] > result.before.overlap[0] + 0.1
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    assert "held-out acceptance by depth, after" in (tmp_path / "README.md").read_text()


def test_what_is_written(trained: LMTrainingResult, traces: Path, tmp_path: Path) -> None:
    train_head(head_config(trained.folder, traces, tmp_path, steps=1))
    told = json.loads((tmp_path / "config.json").read_text())
    assert told["speculators_model_type"] == "eagle3"
    assert told["draft_vocab_size"] == 100
    tensors = load_file(tmp_path / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(100)
    assert torch.equal(tensors["t2d"].nonzero().squeeze(1), ids)
    assert set(load_checkpoint(trained.folder).config.eos_token_ids) <= set(ids.tolist())
    width = load_checkpoint(trained.folder).config.hidden_size
    taps = len(told["eagle_aux_hidden_state_layer_ids"])
    assert tensors["fc.weight"].shape == (width, taps * width)
    assert tensors["lm_head.weight"].shape == (100, width)


@pytest.mark.parametrize(
    ("kind", "bits", "error", "size"), [("int8", 8, 0.6 / 127, 0.35), ("int4", 4, 0.075, 0.25)]
)
def test_few_bits_are_read_back(
    trained: LMTrainingResult,
    traces: Path,
    tmp_path: Path,
    kind: str,
    bits: int,
    error: float,
    size: float,
) -> None:
    for each in ("float32", kind):
        folder = tmp_path / each
        train_head(head_config(trained.folder, traces, folder, steps=3, weights_dtype=each))
    exact, rounded = (load_head(str(tmp_path / each)) for each in ("float32", kind))
    compared = 0
    for of_exact, of_rounded in (
        (exact.fusion, rounded.fusion),
        (exact.decoder.tensors, rounded.decoder.tensors),
    ):
        for name in of_exact:
            found, expected = (tensor(each[name]).float() for each in (of_rounded, of_exact))
            if expected.dim() == 2 and expected.shape[1] % 32 == 0:
                compared += 1
                assert f"{bits}-bit" in of_rounded.type_of(name)
                largest = expected.unflatten(1, (-1, 32)).abs().amax(2)
                off = (found - expected).unflatten(1, (-1, 32)).square().mean(2).sqrt()
                assert (off <= error * largest).all(), name
    assert compared == 8
    sizes = [(tmp_path / each / "model.safetensors").stat().st_size for each in ("float32", kind)]
    assert sizes[1] < size * sizes[0]


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_resumed_training_equals_uninterrupted_one(
    trained: LMTrainingResult,
    traces: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    options: dict[str, Any] = {
        "kind": kind,
        "steps": 8,
        "save_minutes": 0.0,
        "held_out_tokens": 0,
        "features": str(tmp_path / "features"),
    }
    train_head(head_config(trained.folder, traces, tmp_path / "whole", **options))
    broken = head_config(trained.folder, traces, tmp_path / "broken", **options)
    left = [5]

    def failing(*arguments: Any) -> torch.Tensor:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return head_loss(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "head_loss", failing)
        with pytest.raises(KeyboardInterrupt):
            train_head(broken)
    train_head(broken)
    whole, resumed = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "broken"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash"])
def test_training_goes_on_from_an_earlier_head(
    trained: LMTrainingResult, traces: Path, tmp_path: Path, kind: str
) -> None:
    options: dict[str, Any] = {"kind": kind, "features": str(tmp_path / "features")}
    earlier = head_config(
        trained.folder, traces, tmp_path / "earlier", weights_dtype="int8", **options
    )
    known = train_head(earlier).after
    later = head_config(
        trained.folder, traces, tmp_path / "later", init=earlier.output, steps=1, **options
    )
    begun = train_head(later).before
    assert known is not None
    assert begun is not None
    assert begun.greedy[0] == pytest.approx(known.greedy[0], abs=0.03)  # but for the rounding
    found = (tmp_path / "later" / "README.md").read_text()
    assert "begun from" in found
    assert "earlier" in found


def test_a_head_of_another_shape_is_no_beginning(
    trained: LMTrainingResult, traces: Path, tmp_path: Path
) -> None:
    earlier = head_config(trained.folder, traces, tmp_path / "earlier", steps=1)
    train_head(earlier)
    for options, reason in (
        ({"kind": "dflash"}, "speculators_model_type"),
        ({"taps": (0, 1)}, "layer_ids"),
        ({"draft_vocab_size": 99}, "draft_vocab_size"),
    ):
        later = {"init": earlier.output, **options}
        with pytest.raises(TrainingError, match=reason):
            train_head(head_config(trained.folder, traces, tmp_path / "later", **later))


def test_features_are_made_once(
    trained: LMTrainingResult, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"steps": 1, "features": str(tmp_path / "features")}
    train_head(head_config(trained.folder, traces, tmp_path / "first", **options))
    files = {p: p.read_bytes() for p in (tmp_path / "features").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "open_runner", None)
        train_head(head_config(trained.folder, traces, tmp_path / "second", **options))
    gone = next(iter(files))
    gone.unlink()
    train_head(head_config(trained.folder, traces, tmp_path / "third", **options))
    assert gone.read_bytes() == files[gone]
    for path, length in zip(files, (0, 200), strict=True):  # as a crash may leave them
        path.write_bytes(files[path][:length])
    train_head(head_config(trained.folder, traces, tmp_path / "fourth", **options))
    assert {p: p.read_bytes() for p in files} == files


def test_traces_of_another_model_are_refused(trained: LMTrainingResult, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    tokens, rows = np.array([1, 2, 3], np.int32), np.zeros((2, 1), np.float32)
    trace = Trace(0, 1, tokens, rows[:, 0], tokens[1:, None], rows)
    TraceWriter(folder, {"model_fingerprint": "x"}).write_shard([trace])
    with pytest.raises(TraceError, match="another model"):
        train_head(head_config(trained.folder, folder, tmp_path / "out"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"traces": ()}, ConfigError),
        ({"kind": "medusa"}, ConfigError),
        ({"num_steps": 0}, ConfigError),
        ({"text": ("corpus.txt",)}, ConfigError),
        ({"stdlib": True}, ConfigError),
        ({"block_size": 4}, ConfigError),
        ({"kind": "mtp", "block_size": 4}, ConfigError),
        ({"kind": "dflash", "num_steps": 2}, ConfigError),
        ({"kind": "dflash", "deep_share": 0.1}, ConfigError),
        ({"taps": (1, 99)}, TrainingError),
        ({"taps": (1, 1)}, TrainingError),
    ],
)
def test_impossible_options_are_refused(
    trained: LMTrainingResult,
    traces: Path,
    tmp_path: Path,
    options: dict[str, Any],
    error: type[Exception],
) -> None:
    with pytest.raises(error):
        train_head(head_config(trained.folder, traces, tmp_path, **options))


def test_features_made_on_the_way_are_those_of_the_files(
    trained: LMTrainingResult, traces: Path, tmp_path: Path
) -> None:
    """But for the rounding of files, and of the arithmetic that makes them."""
    target, texts, taps = load_checkpoint(str(trained.folder)), list(read_traces(traces)), (1, 3)
    settings = EngineConfig(enable_prefix_caching=False, dtype="float32")
    resolved, ops = resolve_config(settings, target)
    files = make_features(
        [texts], lambda: open_runner(target, resolved, ops)[0], taps, tmp_path, "toy"
    )
    live = LiveFeatures(TargetWeights(target), texts, taps, "float32", "cpu")
    numbers = [5, 0, 31, 58]
    kept, made = files(numbers), live(numbers)
    assert made.features.shape == kept.features.shape
    assert ((made.features - kept.features).abs() <= kept.features.abs() * 0.07 + 0.05).all()
    assert torch.equal(made.top_ids[:, 0], kept.top_ids[:, 0])
    torch.testing.assert_close(made.top_probs, kept.top_probs, rtol=1e-2, atol=1e-3)
