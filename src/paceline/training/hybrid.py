"""Hybrids grown out of dense models: some layers become gated delta nets (arXiv 2412.06464).

Owns the tensors of Qwen3.5's form, and their decoder with gradients, which is that of transformers:
its delta rule goes through a text in chunks. Knows no training loop and no files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import functional_call

from paceline.core.errors import ConfigError
from paceline.core.installation import pip_install
from paceline.training.model_files import EMBEDDING, HYBRID, TrainableModel
from paceline.training.ops import COMPUTE_DTYPES, PackedBatch
from paceline.training.surgery import check_dense

Tensor = torch.Tensor
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

    def hidden(self, input_ids: Tensor, positions: Tensor, batch: PackedBatch) -> Tensor:
        params = {n.removeprefix("model."): p for n, p in self._params.items() if n != HEAD}
        tokens = {"input_ids": input_ids.view(batch.size, batch.time), "use_cache": False}
        with self._precision():
            out = functional_call(self._layers, params, (), tokens)
        found: Tensor = out.last_hidden_state.float().flatten(0, 1)
        return found

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
