"""Random P-EAGLE and DSpark heads for the toy target, and what they say in plain torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.cache.model_runner import ModelRunner
from paceline.proposers.heads import build
from paceline.proposers.heads.blocks import DSparkProposer, PEagleProposer
from paceline.proposers.heads.proposer import FeatureDrafter
from tests.proposers.dflash import (
    LAYERS,
    MASK,
    PlainDFlash,
    as_original,
    dflash_config,
    dflash_tensors,
)
from tests.proposers.heads import (
    HIDDEN,
    TAPS,
    Follows,
    PlainHead,
    Tensors,
    head_config,
    head_options,
    head_tensors,
    made_to_follow,
    target_info,
    write_head,
)
from tests.toy import TOY, USUAL, VOCAB, toy_runner, toy_tensors

RANK, GRU_WIDTH = 8, 12
GROUP, TOP_K = 4, 5
"""Channels that share a delta, and tokens among which a selector chooses."""
CHAIN = {"max_tree_nodes": 0, "max_branching": 1, "num_speculative_tokens": 4}


def peagle_tensors(seed: int = 0, own_ends: bool = True) -> Tensors:
    """Of two layers, the second of which is an ordinary one."""
    tensors, more = head_tensors(seed, own_ends=own_ends), head_tensors(seed + 100)
    for name, tensor in more.items():
        if name.startswith("layers.0.") and "hidden_norm" not in name:
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                tensor = tensor[:, :HIDDEN].contiguous()
            tensors[name.replace("layers.0.", "layers.1.")] = tensor
    generator = torch.Generator().manual_seed(seed)
    return tensors | {"mask_hidden": torch.randn(1, 1, len(TAPS) * HIDDEN, generator=generator)}


def peagle_config(own_ends: bool = True, **fields: Any) -> dict[str, Any]:
    """In the speculators layout."""
    config = head_config(own_ends) | {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "mask_token_id": MASK,
    }
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    return config | fields


def dspark_tensors(
    seed: int = 0, own_ends: bool = True, taps: int = 3, markov: str = "vanilla"
) -> Tensors:
    """A head whose Markov head is of type ``markov``."""
    generator = torch.Generator().manual_seed(seed + 100)
    tensors = dflash_tensors(seed, own_ends, taps)
    columns = len(tensors["d2t"]) if own_ends else VOCAB
    own = {"gated": ("gate", RANK, HIDDEN + RANK), "rnn": ("joint", 3 * RANK, 2 * RANK + HIDDEN)}
    if markov in own:
        name, rows, width = own[markov]
        weight = torch.randn(rows, width, generator=generator) / 3
        bias = torch.randn(rows, generator=generator) / 3
        tensors |= dict(zip(markov_names(f"{name}_proj"), (weight, bias), strict=True))
    return tensors | {
        "markov_head.markov_w1.weight": torch.randn(VOCAB, RANK, generator=generator),
        "markov_head.markov_w2.weight": torch.randn(columns, RANK, generator=generator),
        "confidence_head.proj.weight": torch.randn(1, HIDDEN + RANK, generator=generator) / 3,
        "confidence_head.proj.bias": torch.tensor([0.5]),
    }


def dflash2_tensors(
    seed: int = 0, own_ends: bool = False, taps: int = 3, kernel: int = 2
) -> Tensors:
    """A DFlash 2 head, which drafts all tokens of its target."""
    generator = torch.Generator().manual_seed(seed + 200)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors, outs = dflash_tensors(seed, own_ends=False, taps=taps), 2 * kernel * HIDDEN // GROUP
    for layer in range(LAYERS):
        for part in ("attention", "mlp"):
            p = f"layers.{layer}.{part}_conv."
            tensors[p + "base_kernel"] = 0.7 * drawn(2, kernel, HIDDEN)
            tensors[p + "kernel_projection.weight"] = drawn(outs, HIDDEN) / HIDDEN**0.5 / 2
    if own_ends:
        tensors["embed_tokens.weight"] = drawn(VOCAB, HIDDEN)
        tensors["lm_head.weight"] = drawn(VOCAB, HIDDEN)
    return tensors | {
        "candidate_selector.predecessor_codebook": 2 * drawn(VOCAB, RANK),
        "candidate_selector.successor_codebook": 2 * drawn(VOCAB, RANK),
        "candidate_selector.hidden_projection.weight": drawn(RANK, HIDDEN) / HIDDEN**0.5,
    }


def dflash2_config(**fields: Any) -> dict[str, Any]:
    """In the speculators layout."""
    return dflash_config(
        False,
        **{
            "architectures": ["DFlash2DraftModel"],
            "speculators_model_type": "dflash2",
            "conv_kernel_size": 2,
            "conv_group_size": GROUP,
            "selector_rank": RANK,
            "selector_top_k": TOP_K,
        }
        | fields,
    )


def markov_names(linear: str) -> tuple[str, str]:
    """What a linear of the Markov head and its bias are called."""
    return f"markov_head.{linear}.weight", f"markov_head.{linear}.bias"


def dspark_config(own_ends: bool = True, **fields: Any) -> dict[str, Any]:
    """In the speculators layout."""
    kind = {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"}
    return dflash_config(own_ends, **(kind | {"markov_rank": RANK} | fields))


def domino_tensors(seed: int = 0, taps: int = 3) -> Tensors:
    """Under the names of SpecForge's checkpoints."""
    generator = torch.Generator().manual_seed(seed + 200)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5

    return dflash_tensors(seed, False, taps) | {
        "prefix_gru.weight_ih_l0": drawn(3 * GRU_WIDTH, HIDDEN),
        "prefix_gru.weight_hh_l0": drawn(3 * GRU_WIDTH, GRU_WIDTH),
        "embed_proj.0.weight": drawn(RANK, HIDDEN + GRU_WIDTH),
        "embed_proj.2.weight": 3 * drawn(VOCAB, RANK),
    }


def domino_config(shift_label: bool = False, prefix: int = 0, **fields: Any) -> dict[str, Any]:
    """As SpecForge writes it, with what the plain code reads of the speculators layout."""
    config = dflash_config(False, sample_from_anchor=shift_label, **fields)
    sizes = {"emb_dim": RANK, "gru_hidden_dim": GRU_WIDTH}
    own = {"projector_type": "domino", "shift_label": shift_label, "pure_draft_prefix_len": prefix}
    return config | {"domino": sizes | own}


def as_domino(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration in SpecForge's layout."""
    original = as_original(config) | {"architectures": ["DominoDraftModel"]}
    original["dflash_config"] |= config["domino"]
    return original | {"num_target_layers": TOY.num_layers}


def built(
    runner: ModelRunner, config: dict[str, Any], tensors: Tensors, **options: Any
) -> FeatureDrafter:
    """A proposer by a head for a toy target."""
    with tempfile.TemporaryDirectory() as folder:
        written = as_domino(config) if "domino" in config else config
        write_head(Path(folder), written, tensors)
        method = config["speculators_model_type"]
        options = CHAIN | options
        return build(head_options(method, model=folder, **options), target_info(runner))


def toy_peagle(runner: ModelRunner, **options: Any) -> FeatureDrafter:
    return built(runner, peagle_config(), peagle_tensors(), **options)


def toy_dflash2(runner: ModelRunner, **options: Any) -> FeatureDrafter:
    return built(runner, dflash2_config(), dflash2_tensors(), **options)


def toy_dspark(runner: ModelRunner, **options: Any) -> FeatureDrafter:
    return built(runner, dspark_config(), dspark_tensors(), **options)


class FollowingMasks(Follows, PEagleProposer):
    pass


class FollowingMarkov(Follows, DSparkProposer):
    pass


def following(
    make: Callable[..., FeatureDrafter], *args: Any, target: str = USUAL, **options: Any
) -> FeatureDrafter:
    """A proposer that lets its own target read what it drafts for."""
    runner = toy_runner(target, prefix_caching=False)
    proposer = make(runner, *args, **options)
    if isinstance(proposer, PEagleProposer):
        return made_to_follow(proposer, FollowingMasks, runner)
    assert isinstance(proposer, DSparkProposer)
    return made_to_follow(proposer, FollowingMarkov, runner)


class PlainPEagle(PlainHead):
    """P-EAGLE as the speculators library has it, without any cache."""

    def below(
        self, tokens: Sequence[int], features: torch.Tensor, path: Sequence[int], count: int
    ) -> list[int]:
        """The likeliest tokens after a path, whose own are not read."""
        hidden, read = self.with_masks(torch.as_tensor(tokens), features, len(path))
        logits, _ = self.forward(read, hidden)
        best = logits.topk(count).indices
        return (best if self.ids is None else self.ids[best]).tolist()

    def with_masks(
        self, tokens: torch.Tensor, features: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What rows read of a text and of masks behind it: hidden states, and tokens."""
        mask = self.fuse_exactly(self.tensors["mask_hidden"].view(1, len(TAPS), HIDDEN))
        hidden = torch.cat([self.fuse(features), mask.expand(count, -1)])
        return hidden, torch.cat([tokens[1:], torch.full((count,), MASK)])


class PlainDSpark(PlainDFlash):
    """DSpark as the speculators library has it, without any cache."""

    def below(
        self, tokens: Sequence[int], features: torch.Tensor, path: Sequence[int], count: int
    ) -> list[int]:
        """The likeliest tokens after a path."""
        logits, _ = self.row(tokens, features, path)
        return self.kept[logits.topk(count).indices].tolist()

    def row(
        self, tokens: Sequence[int], features: torch.Tensor, path: Sequence[int]
    ) -> tuple[torch.Tensor, float]:
        """The logits after a path, and how likely the confidence head says their first is."""
        hidden, before = self.read(tokens[-1], features, path)
        at = len(before) - 1
        logits = self.after(hidden[: at + 1], before)
        weight = self.tensors["confidence_head.proj.weight"][0]
        inputs = torch.cat([hidden[at], before[at]])[: len(weight)]
        said = weight @ inputs + self.tensors.get("confidence_head.proj.bias", torch.zeros(1))
        return logits, float(said.sigmoid())

    def read(
        self, token: int | torch.Tensor, features: torch.Tensor, path: Sequence[int] | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of a block's rows, and what the Markov head has of the tokens before."""
        anchor = torch.as_tensor(token).reshape(1)
        before = torch.cat([anchor.repeat(self.first + 1), torch.as_tensor(path, dtype=torch.long)])
        hidden = self.hidden(token, self.fuse(features), self.config["block_size"])
        return hidden, self.tensors["markov_head.markov_w1.weight"][before]

    def after(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The logits of the last of some rows."""
        latent = self.latent(hidden, before)
        return self.lm_head @ hidden[-1] + self.tensors["markov_head.markov_w2.weight"] @ latent

    def latent(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """What the Markov head makes of the last of some rows."""
        kind = self.config.get("markov_head_type", "vanilla")
        if kind == "vanilla":
            return before[-1]
        names = markov_names("gate_proj" if kind == "gated" else "joint_proj")
        weight, bias = (self.tensors[name] for name in names)
        if kind == "gated":
            return (weight @ torch.cat([hidden[-1], before[-1]]) + bias).sigmoid() * before[-1]
        state = output = torch.zeros(RANK)
        for row, token in zip(hidden, before, strict=True):
            gate, new, output = (weight @ torch.cat([state, token, row]) + bias).chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
        return output.tanh()


class PlainDomino(PlainDSpark):
    """Domino as SpecForge has it, without any cache."""

    def read(
        self, token: int | torch.Tensor, features: torch.Tensor, path: Sequence[int] | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of a block's rows, and the embeddings of the tokens from the anchor on."""
        anchor = torch.as_tensor(token).reshape(1)
        before = torch.cat([anchor, torch.as_tensor(path, dtype=torch.long)])
        hidden = self.hidden(token, self.fuse(features), self.config["block_size"])
        return hidden[self.first :], self.embedding[before]

    def after(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        t, state, row = self.tensors, torch.zeros(GRU_WIDTH), hidden[len(before) - 1]
        for token in before:
            read = (t["prefix_gru.weight_ih_l0"] @ token).chunk(3)
            kept = (t["prefix_gru.weight_hh_l0"] @ state).chunk(3)
            reset, update = ((read[i] + kept[i]).sigmoid() for i in range(2))
            state = update * state + (1 - update) * (read[2] + reset * kept[2]).tanh()
        logits = self.lm_head @ row
        if len(before) <= self.config["domino"]["pure_draft_prefix_len"]:
            return logits
        inner = t["embed_proj.0.weight"] @ torch.cat([row, state])
        return logits + t["embed_proj.2.weight"] @ torch.nn.functional.silu(inner)

    def chain(self, tokens: Sequence[int], features: torch.Tensor, depth: int) -> list[int]:
        """The greedy draft below a request's tokens."""
        path = list[int]()
        for _ in range(depth):
            path.append(int(self.after(*self.read(tokens[-1], features, path)).argmax()))
        return path


class PlainDFlash2(PlainDSpark):
    """DFlash 2 as the speculators library has it, without any cache."""

    def row(
        self, tokens: Sequence[int], features: torch.Tensor, path: Sequence[int]
    ) -> tuple[torch.Tensor, float]:
        hidden = self.hidden(tokens[-1], self.fuse(features))[self.first + len(path)]
        unary = self.lm_head @ hidden
        names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        before, after, projection = (self.tensors[f"candidate_selector.{n}"] for n in names)
        context = before[[tokens[-1], *path][-1]] * (projection @ hidden)
        best = unary.topk(self.config["selector_top_k"]).indices
        logits = torch.full_like(unary, -torch.inf)
        return logits.index_put((best,), unary[best] + after[best] @ context), 1.0


def plain_of(config: dict[str, Any], tensors: Tensors) -> PlainPEagle | PlainDSpark:
    if config["speculators_model_type"] == "peagle":
        return PlainPEagle(tensors, config, toy_tensors())
    if config["speculators_model_type"] == "dflash2":
        return PlainDFlash2(tensors, {"sliding_window_non_causal": True} | config, toy_tensors())
    return PlainDSpark(tensors, {"sample_from_anchor": True} | config, toy_tensors())
