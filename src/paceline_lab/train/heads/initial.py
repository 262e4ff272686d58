"""What a head's training begins with: the target's own weights, or a head that was trained before.

From random weights a head of this size needs many hours to learn what the target's last layer and
its output matrix know already. Where a training goes on from another head, this owns which of its
files' statements have to agree. Also the target itself, asked for its features where on a GPU a
forward takes less time than reading them from a disk would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.backends.rows.rows import Rows as Decoder
from paceline.core.errors import TrainingError
from paceline.core.files import read_json
from paceline.loading.checkpoint import Checkpoint
from paceline.loading.quantised.methods import QuantisedTensors, schemes_of, split_quantisation
from paceline.loading.safetensors_files import SafetensorsFolder
from paceline.models.config import ModelConfig
from paceline.models.families.config_json import config_from_hf
from paceline.models.families.fields import Fields
from paceline.models.heads import MTP
from paceline.models.tensor_reader import check_floats
from paceline.models.weights import HEAD_TOKENS, PrunedHead
from paceline.proposers.heads.known_keys import LAYER_CONFIG
from paceline.request.traces import Trace
from paceline.tensors.arrays import floats
from paceline.tensors.stored import StoredTensors, renamed
from paceline.tensors.torch_arrays import to_numpy, to_torch
from paceline_lab.train.heads.features import FeatureRows, join_rows, likeliest
from paceline_lab.train.heads.modules import (
    ATTENTION,
    EAGLE3_LAYER,
    FUSED_NORM,
    FUSION,
    LAST_NORM,
    MTP_LAYER,
)
from paceline_lab.train.model_files import EMBEDDING, TrainableModel
from paceline_lab.train.ops import PackedTexts, TrainingOps, differentiable_decoder

Tensor = torch.Tensor
HEAD = "lm_head.weight"
TOKEN_FLAGS = "t2d"
FRESH_DEVIATION = 0.02  # of weights that the target has no counterpart of
JOINED = 3.0  # how large the two halves of what an MTP layer reads begin
FAST_SHARE = 5  # one in so many of a head's dimensions turns with the position where one attends
SHARPNESS = 1.5  # of that attention


def default_taps(kind: str, num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer's input, as EAGLE-3 chooses them; of MTP the output."""
    if kind == MTP:
        return (num_layers + 1,)
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(0, num_layers - 3)}))


def rarest_token(traces: Iterable[Trace], embedding: Tensor) -> int:
    """The token that prompts and answers have least often, usually never; of equals the last one.

    One whose embedding is zeros is left out: attention could not tell positions apart by it.
    """
    tokens = np.concatenate([trace.token_ids for trace in traces])
    seen = np.bincount(tokens, minlength=len(embedding)).astype(float)
    seen[~embedding.any(dim=1).numpy()] = np.inf
    return len(seen) - 1 - int(seen[::-1].argmin())


class TargetWeights:
    """A target's weights as floats, by their names; ``TrainingError`` where no head fits them."""

    def __init__(self, target: Checkpoint) -> None:
        if target.packed is not None:
            raise TrainingError(
                f"{target.name} has packed weights; name the model that it was converted from"
            )
        if target.config.mlp.experts:
            raise TrainingError(
                f"{target.name} is a mixture of experts, of whose layers no head can be made yet"
            )
        c = target.config
        if not c.is_like_llama or 0 < c.positions.rope.dim < c.head_dim:
            raise TrainingError(
                f"{target.name} is of the family {c.architecture}, of whose layers no head can be "
                "made: they are unlike Llama's"
            )
        self._tensors, self.config = target.tensors, target.config

    def __call__(self, name: str) -> Tensor:
        return to_torch(floats(self._tensors[name]))

    def all(self) -> dict[str, Tensor]:
        """Every tensor as it is in the checkpoint, which may be fused."""
        return {name: self(name) for name in self._tensors}

    def stacked(self, prefix: str, sizes: Mapping[str, int], fused: str) -> dict[str, Tensor]:
        """Matrices by their short names, of so many rows each, which may be fused in the file."""
        whole = f"{prefix}{fused}_proj.weight"
        if whole in self._tensors:
            return dict(zip(sizes, self(whole).split(list(sizes.values())), strict=True))
        return {name: self(f"{prefix}{name}_proj.weight") for name in sizes}

    def norm(self, name: str) -> Tensor:
        return self(name) + (1.0 if self.config.norms.plus_one else 0.0)

    @property
    def last_layer(self) -> int:
        return self.config.num_layers - 1

    @property
    def embedding(self) -> Tensor:
        return self(EMBEDDING)

    @property
    def head(self) -> Tensor:
        return self.embedding if self.config.tie_embeddings else self(HEAD)


def eagle3_params(
    weights: TargetWeights, num_taps: int, token_ids: Tensor, seed: int
) -> dict[str, Tensor]:
    """The tensors of an EAGLE-3 head that are trained, float32, under their names in a checkpoint.

    Its layer is the target's last one. What reads the embedding begins with small random numbers.
    """
    width, generator = weights.config.hidden_size, torch.Generator().manual_seed(seed)
    params = _layer_params(weights, weights.last_layer, EAGLE3_LAYER)
    params[EAGLE3_LAYER + "hidden_norm.weight"] = params[EAGLE3_LAYER + "input_layernorm.weight"]
    params[EAGLE3_LAYER + "input_layernorm.weight"] = torch.ones(width)
    for name in "qkv":
        known = params[f"{ATTENTION}{name}_proj.weight"]
        fresh = torch.empty(known.shape).normal_(0.0, FRESH_DEVIATION, generator=generator)
        params[f"{ATTENTION}{name}_proj.weight"] = torch.cat((fresh, known), dim=1)
    return _copies({**_end_params(weights, num_taps, token_ids), **params})


def mtp_params(weights: TargetWeights, seed: int) -> dict[str, Tensor]:
    """As :func:`eagle3_params` of an MTP head, whose output matrix is the target's.

    Its linear passes on the hidden state, with random numbers of the token that are as large.
    """
    c, generator = weights.config, torch.Generator().manual_seed(seed)
    width, ones = c.hidden_size, torch.ones(c.hidden_size)
    fresh = torch.randn(width, width, generator=generator) / width**0.5
    params = _layer_params(weights, weights.last_layer, MTP_LAYER)
    own = {
        "input_proj": torch.cat((fresh, torch.eye(width)), dim=1) * JOINED,
        "token_layernorm": ones,
        "hidden_layernorm": ones,
        "final_layernorm": weights.norm("model.norm.weight") / c.multipliers.logits_divisor,
    }
    return _copies(params | {f"{MTP_LAYER}{name}.weight": p for name, p in own.items()})


def dflash_params(
    weights: TargetWeights,
    layers: ModelConfig,
    token_ids: Tensor,
    sample: Tensor,
    mask_token: int,
    seed: int,
) -> dict[str, Tensor]:
    """As :func:`eagle3_params` of a DFlash head: feed-forward layers are the target's last ones.

    Attention alone brings features to a block's rows, and the target's would make little of mask
    tokens. It begins as one that passes on the last tap's features of the latest positions.

    Args:
        layers: the shape of the head's layers.
        sample: features of some texts, ``[rows, taps * hidden_size]``.

    Raises:
        TrainingError: the target has fewer layers.
    """
    width, first = layers.hidden_size, weights.last_layer + 1 - layers.num_layers
    if first < 0:
        raise TrainingError.of(
            "num_layers",
            f"is {layers.num_layers}; allowed: 1 to {weights.last_layer + 1}, the layers of the "
            "target, of which the head is made",
        )
    last = sample[:, -width:]
    sizes = last.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-9)
    attention = _passing_on(layers, (last / sizes).mean(0), weights.embedding[mask_token], seed)
    attention["o_proj"] = attention["o_proj"] * (sizes.mean() / layers.num_layers)
    params = _end_params(weights, sample.shape[1] // width, token_ids)
    params[FUSED_NORM] = torch.ones(width)
    for layer in range(layers.num_layers):
        prefix = f"layers.{layer}."
        params |= _layer_params(weights, first + layer, prefix)
        params[prefix + "input_layernorm.weight"] = torch.ones(width)
        params |= {f"{prefix}self_attn.{name}.weight": p for name, p in attention.items()}
    return _copies(params)


def _passing_on(c: ModelConfig, mean: Tensor, mask: Tensor, seed: int) -> dict[str, Tensor]:
    """Attention by which mask tokens get the vectors of the latest positions as they are.

    Queries of masks and keys of vectors are one and the same vector, but for some noise, so that
    their product says by its rotary turn alone how far apart they are.

    Args:
        mean: of the vectors: hidden states have much in common.
        mask: the mask token's embedding.
    """
    generator, width, dim = torch.Generator().manual_seed(seed), c.hidden_size, c.head_dim
    mask = mask / mask.square().mean().sqrt()
    known = mean - mask * (mean @ mask) / (mask @ mask)  # keys of masks are other than theirs
    turned = torch.zeros(dim)
    turned[: max(1, dim // FAST_SHARE)] = 1.0  # of each pair that turns fast, its first number
    heads = {"q": (c.num_heads, mask), "k": (c.num_kv_heads, known)}
    params = {}
    for name, (count, read) in heads.items():
        fixed = torch.outer(turned * (dim**0.5 / turned.norm()), read / (read @ read))
        noise = torch.empty(count * dim, width).normal_(
            0.0, FRESH_DEVIATION / 2, generator=generator
        )
        params[name + "_proj"] = fixed.repeat(count, 1) + noise
        params[name + "_norm"] = torch.full((dim,), SHARPNESS)
    params["v_proj"] = torch.eye(c.num_kv_heads * dim, width)
    params["o_proj"] = torch.eye(width, c.num_heads * dim)
    return params


def _copies(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.clone().contiguous() for name, p in params.items()}


def _end_params(weights: TargetWeights, num_taps: int, token_ids: Tensor) -> dict[str, Tensor]:
    """What comes before and after the layers: fc passes on the last tap."""
    c, width = weights.config, weights.config.hidden_size
    return {
        FUSION: torch.cat((torch.zeros(width, (num_taps - 1) * width), torch.eye(width)), 1),
        LAST_NORM: weights.norm("model.norm.weight"),
        HEAD: weights.head[token_ids] / c.multipliers.logits_divisor,
    }


def _layer_params(weights: TargetWeights, index: int, prefix: str) -> dict[str, Tensor]:
    """The target's layer of that number, under a prefix; its multipliers are in the weights."""
    c, source = weights.config, f"model.layers.{index}."
    mlp_norm = "pre_feedforward_layernorm" if c.norms.after else "post_attention_layernorm"
    heads = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
    rows = {name: count * c.head_dim for name, count in heads.items()}
    inner = dict.fromkeys(("gate", "up"), c.intermediate_size)
    out = {"self_attn.o": "self_attn.o_proj.weight", "mlp.down": "mlp.down_proj.weight"}
    params = {
        "input_layernorm": weights.norm(source + "input_layernorm.weight"),
        "post_attention_layernorm": weights.norm(f"{source}{mlp_norm}.weight"),
    }
    for part, sizes, fused in (("self_attn.", rows, "qkv"), ("mlp.", inner, "gate_up")):
        stacked = weights.stacked(source + part, sizes, fused)
        params |= {f"{part}{name}_proj": matrix for name, matrix in stacked.items()}
    for part, stored in out.items():
        params[part + "_proj"] = weights(source + stored) * c.multipliers.residual
    for name in ("q_norm", "k_norm") if c.attention.qk_norm else ():
        params["self_attn." + name] = weights.norm(f"{source}self_attn.{name}.weight")
    scaled = "self_attn." + ("q_norm" if c.attention.qk_norm else "q_proj")
    params[scaled] = params[scaled] * (c.attention_scale * c.head_dim**0.5)
    return {f"{prefix}{name}.weight": p for name, p in params.items()}


def vocabulary_maps(token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """What a checkpoint says of the head's tokens: ``d2t`` and ``t2d``."""
    flags = torch.zeros(vocab_size, dtype=torch.bool)
    flags[token_ids] = True
    return {
        HEAD_TOKENS: to_torch(PrunedHead(to_numpy(token_ids), vocab_size).offsets),
        TOKEN_FLAGS: flags,
    }


_FREE = ("speculators_config", "speculators_version", "dtype")
"""What ``config.json`` says of a head without saying how it computes."""
_OWN = "head."
"""Without it an MTP head's tensors would be passed over, as a model does without them."""


def continued(folder: Path, fresh: TrainableModel) -> TrainableModel:
    """A head with the tensors of an earlier one, quantised ones as the floats they stand for.

    Args:
        folder: of the earlier head, in the speculators format.
        fresh: what training would begin with otherwise; the earlier head's output matrix may have
            other tokens.

    Raises:
        TrainingError: the earlier head is of another kind or shape.
        ModelLoadError: it cannot be read.
    """
    raw, quantisation = split_quantisation(read_json(folder / "config.json"), folder)
    _check_same(folder, raw, fresh.raw)
    tensors = _tensors(folder, quantisation)
    for name, wanted in fresh.tensors.items():
        shape = tensors.shape_of(_OWN + name) if _OWN + name in tensors else None
        if shape != tuple(wanted.shape):
            raise TrainingError(
                f"{folder}: {name} is {'missing' if shape is None else shape}; a head that "
                f"this training can go on from has {tuple(wanted.shape)}"
            )
    params = {}
    for name in fresh.params:
        stored = tensors[_OWN + name]
        check_floats(name, stored, tensors.type_of(_OWN + name))
        params[name] = to_torch(floats(stored).copy())
    # Copies, because a file that is mapped here may be replaced, and training writes to these.
    fixed = {name: to_torch(tensors[_OWN + name].copy()) for name in fresh.fixed}
    return TrainableModel(fresh.raw, params, fixed)


def known_mask_token(folder: Path, vocab_size: int) -> int | None:
    """The mask token with which an earlier head was trained; None where it names none.

    Raises:
        ModelLoadError: its configuration cannot be read, or the token is not in the vocabulary.
    """
    said = Fields(read_json(folder / "config.json"))
    if said.get("mask_token_id") is None:
        return None
    return said.integer("mask_token_id", 0, vocab_size - 1)


def _tensors(folder: Path, quantisation: Mapping[str, Any] | None) -> StoredTensors:
    """What the folder holds, under its names behind :data:`_OWN`."""
    files = SafetensorsFolder(folder)
    tensors = renamed(files, {_OWN + name: name for name in files})
    return QuantisedTensors(tensors, schemes_of(quantisation)) if quantisation else tensors


def _check_same(folder: Path, raw: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        said = raw.get(key)
        if key == LAYER_CONFIG and isinstance(said, dict):  # which can say the same in other words
            is_same = config_from_hf(said) == config_from_hf(value)
        else:
            is_same = said == value
        if key not in _FREE and not is_same:
            raise TrainingError(
                f"{folder} says {key} = {str(said)[:80]}; this training makes a head with "
                f"{str(value)[:80]}: name a head of the same kind, taps and sizes"
            )


FORWARD_TOKENS = 1 << 16
LOGITS = 1 << 28  # that exist at once


class LiveFeatures:
    """Reads traces' rows by number, as :class:`~paceline_lab.train.heads.features.FeatureFiles`."""

    def __init__(
        self,
        weights: TargetWeights,
        traces: Sequence[Trace],
        taps: tuple[int, ...],
        dtype: str,
        device: str,
    ) -> None:
        self._traces, self._taps = traces, taps
        tensors = {name: tensor.to(device) for name, tensor in weights.all().items()}
        longest = max(len(trace.token_ids) for trace in traces)
        with torch.no_grad():
            self._decoder: Decoder = differentiable_decoder(
                weights.config, tensors, TrainingOps(dtype), longest
            )

    def __call__(self, numbers: Sequence[int]) -> FeatureRows:
        return join_rows([self._forward(part) for part in self._parts(numbers)])

    def _parts(self, numbers: Sequence[int]) -> Iterator[list[Trace]]:
        """Consecutive traces, padded together to at most so many tokens."""
        part, widest = list[Trace](), 0
        for trace in (self._traces[number] for number in numbers):
            widest = max(widest, len(trace.token_ids))
            if part and widest * (len(part) + 1) > FORWARD_TOKENS:
                yield part
                part, widest = [], len(trace.token_ids)
            part.append(trace)
        yield part

    @torch.no_grad()
    def _forward(self, traces: Sequence[Trace]) -> FeatureRows:
        count, width = len(traces), max(len(trace.token_ids) for trace in traces) - 1
        tokens = np.zeros((count, width), np.int64)
        known, wanted = (np.zeros((count, width), bool) for _ in range(2))
        for row, trace in enumerate(traces):
            length = len(trace.token_ids) - 1  # nothing is drafted after the last token
            tokens[row, :length] = trace.token_ids[:-1]
            known[row, : length - 1] = True
            wanted[row, trace.prompt_len : length] = True
        ids = torch.as_tensor(tokens).flatten()
        features = list[Tensor]()
        keep = torch.as_tensor(known).flatten().nonzero().squeeze(1)

        def take(layer: int, x: Tensor) -> None:
            if layer in self._taps:
                features.append(x[keep].float())

        batch = PackedTexts(count, width)
        hidden = self._decoder.hidden(ids, torch.arange(width).repeat(count), batch, take=take)
        hidden = hidden[torch.as_tensor(wanted).flatten()]
        parts = hidden.split(LOGITS // self._decoder.config.vocab_size)
        best = [likeliest(self._decoder.logits(part).float()) for part in parts]
        top_ids, logprobs = (torch.cat(each) for each in zip(*best, strict=True))
        return FeatureRows(torch.cat(features, dim=1), top_ids, logprobs.exp())
