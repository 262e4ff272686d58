"""Models made of other models: smaller ones, mixtures of experts, and hybrids.

Weights alone decide what goes, so that the same model is always cut the same way; training mends
what is lost. A small head makes a draft faster. A token that it lacks can never be drafted: where
the target emits one, the draft is rejected there.

In a hybrid some layers of a dense model become gated delta nets (arXiv 2412.06464). It has the
tensors of Qwen3.5's form, and its decoder with gradients is that of transformers, whose delta rule
goes through a text in chunks. Knows no training loop and no files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.func import functional_call

from paceline.core.errors import ConfigError, TrainingError
from paceline.core.installation import pip_install
from paceline.models.config import ModelConfig
from paceline.models.weights import HEAD_TOKENS, PrunedHead
from paceline_lab.train.configs import ModelShape
from paceline_lab.train.data import TokenArray
from paceline_lab.train.model_files import EMBEDDING, HYBRID, ROUTER, TrainableModel
from paceline_lab.train.ops import COMPUTE_DTYPES, PackedTexts

Tensor = torch.Tensor
ROUTER_DEVIATION = 0.02
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")


def cut_model(model: TrainableModel, drop_layers: int = 0, mlp_width: int = 0) -> TrainableModel:
    """Drop layers and feed-forward channels of a model.

    Args:
        model: is left as it is.
        drop_layers: how many layers go. Those that stay are spread evenly, first and last included.
        mlp_width: feed-forward channels of each layer that stay; 0 keeps all.

    Raises:
        TrainingError: nothing would be left, the width exceeds the model's, or it has experts.
    """
    config = model.config
    _check(config, drop_layers, mlp_width)
    check_flat(model)
    kept = kept_layers(config.num_layers, config.num_layers - drop_layers)
    params = _keep_layers(model.params, kept)
    raw = {**model.raw, "num_hidden_layers": len(kept)} | _layer_types(model, kept)
    if mlp_width:
        raw["intermediate_size"] = mlp_width
        for index in range(len(kept)):
            params |= _narrow_mlp(params, f"model.layers.{index}.mlp.", mlp_width)
    return TrainableModel(raw, {name: p.clone() for name, p in params.items()}, model.fixed)


def upcycle(model: TrainableModel, shape: ModelShape, seed: int) -> TrainableModel:
    """A mixture of experts that are copies of a dense model's feed-forward layers.

    It says what the dense model says, until training makes its experts differ: sparse upcycling
    (Komatsuzaki et al., 2022), with router weights of a normal distribution and the weights of a
    token's experts adding up to 1.

    Args:
        shape: of it count the number of experts and how many a token chooses.

    Raises:
        TrainingError: the model is not one of Qwen3's form.
    """
    check_dense(model, "mixture", "num_experts")
    generator = torch.Generator().manual_seed(seed)
    params: dict[str, Tensor] = {}
    for name, param in model.params.items():
        layer, is_inside, part = name.partition(".mlp.")
        if not is_inside:
            params[name] = param
            continue
        if layer + ROUTER not in params:
            router = torch.empty(shape.num_experts, model.config.hidden_size)
            params[layer + ROUTER] = router.normal_(0.0, ROUTER_DEVIATION, generator=generator)
        for expert in range(shape.num_experts):
            params[f"{layer}.mlp.experts.{expert}.{part}"] = param.clone()
    raw = {**model.raw, **shape.mixture_keys(model.config.intermediate_size)}
    return TrainableModel(raw, params, model.fixed)


def check_dense(model: TrainableModel, becomes: str, option: str) -> None:
    """
    Args:
        becomes: what it is to be made, by an option.

    Raises:
        TrainingError: the model is not one of Qwen3's form.
    """
    kind = model.raw.get("model_type")
    if kind != "qwen3":
        raise TrainingError(
            f"a model of type {kind} cannot be turned into a {becomes}; one of type "
            f"qwen3 can, such as paceline train lm writes without {option}"
        )


def check_flat(model: TrainableModel) -> None:
    """Raise :class:`TrainingError` where sizes are not at the top of the configuration."""
    if "num_hidden_layers" not in model.raw:
        raise TrainingError("this model's configuration is nested; it cannot be cut")


def _check(config: ModelConfig, drop_layers: int, mlp_width: int) -> None:
    if config.mlp.experts is not None and (drop_layers or mlp_width):
        raise TrainingError("a mixture of experts cannot be cut; begin from a dense model")
    if not 0 <= drop_layers < config.num_layers:
        raise TrainingError.of(
            "drop_layers",
            f"is {drop_layers}; the model has {config.num_layers} layers; allowed: 0 to "
            f"{config.num_layers - 1}",
        )
    most = config.intermediate_size
    if not 0 <= mlp_width <= most:
        raise TrainingError.of("mlp_width", f"is {mlp_width}; allowed: 1 to {most} (0: unchanged)")


def kept_layers(total: int, keep: int) -> list[int]:
    """``keep`` of ``total`` layer numbers, evenly spread, the first and (if two) the last too."""
    if keep == 1:
        return [0]
    return [round(i * (total - 1) / (keep - 1)) for i in range(keep)]


def _keep_layers(params: Mapping[str, Tensor], kept: list[int]) -> dict[str, Tensor]:
    number = {old: new for new, old in enumerate(kept)}
    out: dict[str, Tensor] = {}
    for name, p in params.items():
        match = _LAYER.match(name)
        if match is None:
            out[name] = p
        elif int(match[1]) in number:
            out[f"model.layers.{number[int(match[1])]}.{match[2]}"] = p
    return out


def _narrow_mlp(params: Mapping[str, Tensor], prefix: str, width: int) -> dict[str, Tensor]:
    """Keep the feed-forward channels with the largest product of input and output norms."""
    down = params[prefix + "down_proj.weight"]  # [hidden, channels]
    fused = prefix + "gate_up_proj.weight"
    if fused in params:
        halves = params[fused].chunk(2)
    else:
        halves = (params[prefix + "gate_proj.weight"], params[prefix + "up_proj.weight"])
    weight = down.norm(dim=0) * halves[0].norm(dim=1) * halves[1].norm(dim=1)
    best = weight.topk(width).indices.sort().values
    out = {prefix + "down_proj.weight": down[:, best]}
    if fused in params:
        out[fused] = torch.cat([half[best] for half in halves])
    else:
        out[prefix + "gate_proj.weight"] = halves[0][best]
        out[prefix + "up_proj.weight"] = halves[1][best]
    for part in ("gate_proj.bias", "up_proj.bias"):
        if prefix + part in params:
            out[prefix + part] = params[prefix + part][best]
    return out


def _layer_types(model: TrainableModel, kept: list[int]) -> dict[str, Any]:
    """Which of the kept layers have a sliding window, written out where layers differ."""
    config = model.config
    if "layer_types" in model.raw:
        return {"layer_types": [model.raw["layer_types"][i] for i in kept]}
    if config.attention.sliding_layers:
        kinds = ("full_attention", "sliding_attention")
        return {"layer_types": [kinds[config.attention.sliding_layers[i]] for i in kept]}
    return {}


def special_tokens(tokenizer: Any, config: ModelConfig) -> set[int]:
    """What ends or shapes a text, by the tokenizer's word and by the model's."""
    added = tokenizer.get_added_tokens_decoder()
    return {*config.eos_token_ids, *(i for i, token in added.items() if token.special)}


def frequent_tokens(
    tokens: TokenArray, vocab_size: int, count: int, always: Iterable[int]
) -> npt.NDArray[np.int64]:
    """The ``count`` tokens most frequent in ``tokens``, ascending; of equal ones the lower ids.

    Args:
        always: ids that are among them however rare they are, such as the end of a text.

    Raises:
        TrainingError: more than the vocabulary, or fewer than ``always``, are wanted.
    """
    occurrences = np.bincount(tokens, minlength=vocab_size)
    kept = sorted({token for token in always if 0 <= token < vocab_size})
    occurrences[kept] = len(tokens) + 1
    if not max(1, len(kept)) <= count <= vocab_size:
        raise TrainingError.of(
            "draft_vocab_size",
            f"is {count}; the vocabulary has {vocab_size} tokens, {len(kept)} of them special; "
            f"allowed: {max(1, len(kept))} to {vocab_size} (0: all)",
        )
    return np.sort(np.argsort(-occurrences, kind="stable")[:count])


def prune_head(model: TrainableModel, token_ids: npt.NDArray[np.int64]) -> TrainableModel:
    """The model with a head of these tokens, ascending. Its embedding stays whole and of its own.

    Raises:
        TrainingError: the head is pruned already, or the configuration is nested.
    """
    check_flat(model)
    if model.config.draft_vocab_size:
        raise TrainingError(
            f"the head has {model.config.draft_vocab_size} of {model.config.vocab_size} tokens "
            "already; begin from the model that it was cut from, or leave draft_vocab_size out",
            "draft_vocab_size",
        )
    ids = torch.from_numpy(token_ids)
    if len(ids) == model.config.vocab_size:
        return model
    tied = model.params["model.embed_tokens.weight"]
    rows = model.params.get("lm_head.weight", tied)[ids].clone()
    offsets = torch.from_numpy(PrunedHead(token_ids, model.config.vocab_size).offsets)
    return TrainableModel(
        {**model.raw, "tie_word_embeddings": False, "draft_vocab_size": len(ids)},
        {**model.params, "lm_head.weight": rows},
        {**model.fixed, HEAD_TOKENS: offsets},
    )


KERNEL = 4
DEVIATION = 0.02
TIME_STEPS = (0.001, 0.1)
"""Bounds of the heads' first time steps, and of the rates that multiply them, as of Mamba."""
RATES = (1.0, 16.0)
VALUE_HEADS = 2  # of a key
HEAD = "lm_head.weight"
KINDS = {"d": "linear_attention", "a": "full_attention"}


def hybridise(model: TrainableModel, layers: str, seed: int) -> TrainableModel:
    """A hybrid of Qwen3.5's form with the layers of a dense model.

    A layer that keeps its attention says what it said: its gates begin at one half, for which its
    output matrix makes up. A delta net begins with queries, keys, values and output matrix of the
    attention whose place it takes, and has to learn.

    Args:
        layers: kinds of the layers, which are repeated as often as there are layers.

    Raises:
        TrainingError: the model is not one of Qwen3's form.
    """
    check_dense(model, "hybrid", "layers")
    generator = torch.Generator().manual_seed(seed)
    kinds = [layers[index % len(layers)] for index in range(model.config.num_layers)]
    # Norms are stored less one.
    params = {n: p - 1.0 if n.endswith("norm.weight") else p for n, p in model.params.items()}
    for index, kind in enumerate(kinds):
        p = f"model.layers.{index}."
        if kind == "d":
            params |= _delta_net(p, params, model, generator)
            params = {n: t for n, t in params.items() if not n.startswith(p + "self_attn.")}
        else:
            params |= _with_gates(p + "self_attn.", params, model.config.head_dim)
    return TrainableModel(_config(model, kinds), params, model.fixed)


def _config(model: TrainableModel, kinds: list[str]) -> dict[str, Any]:
    """The ``config.json`` of a hybrid whose delta nets have the heads of its attention."""
    c, raw = model.config, {**model.raw}
    rope = {"rope_type": "default", "rope_theta": raw.pop("rope_theta", None)}
    rope |= raw.pop("rope_parameters", None) or {}
    return {
        **raw,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": HYBRID,
        "layer_types": [KINDS[kind] for kind in kinds],
        "linear_num_key_heads": c.num_heads,
        "linear_num_value_heads": VALUE_HEADS * c.num_heads,
        "linear_key_head_dim": c.head_dim,
        "linear_value_head_dim": c.head_dim,
        "linear_conv_kernel_dim": KERNEL,
        "rope_parameters": {**rope, "partial_rotary_factor": 1.0},
    }


def _with_gates(prefix: str, params: Mapping[str, Tensor], dim: int) -> dict[str, Tensor]:
    """An attention whose heads have gates of zeros behind their queries."""
    q, o = params[prefix + "q_proj.weight"], params[prefix + "o_proj.weight"]
    heads = q.unflatten(0, (-1, dim))
    gated = torch.cat((heads, torch.zeros_like(heads)), dim=1).flatten(0, 1)
    return {prefix + "q_proj.weight": gated, prefix + "o_proj.weight": 2.0 * o}


def _delta_net(
    layer: str, params: Mapping[str, Tensor], model: TrainableModel, generator: torch.Generator
) -> dict[str, Tensor]:
    c = model.config
    dim, hidden, keys, heads = c.head_dim, c.hidden_size, c.num_heads, VALUE_HEADS * c.num_heads

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape).normal_(0.0, DEVIATION, generator=generator)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(heads).uniform_(low, high, generator=generator)

    q, k, v, o = (params[f"{layer}self_attn.{each}_proj.weight"] for each in "qkvo")
    k, v = (
        x.unflatten(0, (-1, dim)).repeat_interleave(n // c.num_kv_heads, dim=0).flatten(0, 1)
        for x, n in ((k, keys), (v, heads))
    )
    qkv, inner = torch.cat((q, k, v)), heads * dim
    out = o.unflatten(1, (keys, dim)).repeat_interleave(VALUE_HEADS, dim=1).flatten(1)
    conv = normal(len(qkv), 1, KERNEL)
    conv[..., -1] += 1.0
    low, high = (torch.tensor(each).log().item() for each in TIME_STEPS)
    step = uniform(low, high).exp()
    tensors = {
        "in_proj_qkv.weight": qkv,
        "in_proj_z.weight": normal(inner, hidden),
        "in_proj_b.weight": normal(heads, hidden),
        "in_proj_a.weight": normal(heads, hidden),
        "conv1d.weight": conv,
        "A_log": uniform(*RATES).log(),
        "dt_bias": step + torch.log(-torch.expm1(-step)),  # of which softplus makes the step
        "norm.weight": torch.ones(dim),
        "out_proj.weight": out / VALUE_HEADS,
    }
    return {f"{layer}linear_attn.{name}": tensor for name, tensor in tensors.items()}


class HybridRows:
    """A hybrid over dense windows, in the place of :class:`~paceline.backends.rows.rows.Rows`.

    Args:
        dtype: of matrix products.
        device: where the model is.

    Raises:
        ConfigError: transformers is not installed.
    """

    routed = ()
    head_tokens = None

    def __init__(self, model: TrainableModel, dtype: str, device: str = "cpu") -> None:
        self.config, self._params = model.config, model.params
        self._layers = _layers(json.dumps(dict(model.raw), sort_keys=True))
        self._dtype, self._device = COMPUTE_DTYPES[dtype], device.partition(":")[0]

    def hidden(self, input_ids: Tensor, positions: Tensor, batch: PackedTexts) -> Tensor:
        params = {n.removeprefix("model."): p for n, p in self._params.items() if n != HEAD}
        tokens = {"input_ids": input_ids.view(batch.size, batch.time), "use_cache": False}
        with self._precision():
            out = functional_call(self._layers, params, (), tokens)
        rows: Tensor = out.last_hidden_state.float().flatten(0, 1)
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        with self._precision():
            return F.linear(hidden, self._params.get(HEAD, self._params[EMBEDDING]))

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device, self._dtype, enabled=self._dtype != torch.float32)


@lru_cache(maxsize=1)
def _layers(raw: str) -> torch.nn.Module:
    """The layers of a ``config.json``; what their weights are does not matter."""
    try:
        from transformers.models.qwen3_5 import Qwen3_5TextConfig, Qwen3_5TextModel
    except ImportError as error:
        raise ConfigError(
            f"hybrids are trained with transformers 5 ({error}): {pip_install('transformers>=5')}"
        ) from error
    return Qwen3_5TextModel(Qwen3_5TextConfig(**json.loads(raw)))
