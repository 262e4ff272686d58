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
from tests.proposers.dflash import MASK, PlainDFlash, dflash_config, dflash_tensors
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
from tests.toy import USUAL, VOCAB, toy_runner, toy_tensors

RANK = 8
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


def markov_names(linear: str) -> tuple[str, str]:
    """What a linear of the Markov head and its bias are called."""
    return f"markov_head.{linear}.weight", f"markov_head.{linear}.bias"


def dspark_config(own_ends: bool = True, **fields: Any) -> dict[str, Any]:
    """In the speculators layout."""
    kind = {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"}
    return dflash_config(own_ends, **(kind | {"markov_rank": RANK} | fields))


def built(
    runner: ModelRunner, config: dict[str, Any], tensors: Tensors, **options: Any
) -> FeatureDrafter:
    """A proposer by a head for a toy target."""
    with tempfile.TemporaryDirectory() as folder:
        write_head(Path(folder), config, tensors)
        method = config["speculators_model_type"]
        options = CHAIN | options
        return build(head_options(method, model=folder, **options), target_info(runner))


def toy_peagle(runner: ModelRunner, **options: Any) -> FeatureDrafter:
    return built(runner, peagle_config(), peagle_tensors(), **options)


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
        mask = self.fuse_exactly(self.tensors["mask_hidden"].view(1, len(TAPS), HIDDEN))
        hidden = torch.cat([self.fuse(features), mask.expand(len(path), -1)])
        logits, _ = self.forward([*tokens[1:], *[MASK] * len(path)], hidden)
        best = logits.topk(count).indices
        return (best if self.ids is None else self.ids[best]).tolist()


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
        hidden = self.hidden(tokens[-1], self.fuse(features))
        read = [tokens[-1]] * self.first + [tokens[-1], *path]
        before = self.tensors["markov_head.markov_w1.weight"][read]
        at = len(read) - 1
        latent = self.latent(hidden[: at + 1], before)
        logits = self.lm_head @ hidden[at] + self.tensors["markov_head.markov_w2.weight"] @ latent
        weight = self.tensors["confidence_head.proj.weight"][0]
        inputs = torch.cat([hidden[at], before[at]])[: len(weight)]
        said = weight @ inputs + self.tensors.get("confidence_head.proj.bias", torch.zeros(1))
        return logits, float(said.sigmoid())

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


def plain_of(config: dict[str, Any], tensors: Tensors) -> PlainPEagle | PlainDSpark:
    if config["speculators_model_type"] == "peagle":
        return PlainPEagle(tensors, config, toy_tensors())
    return PlainDSpark(tensors, {"sample_from_anchor": True} | config, toy_tensors())
