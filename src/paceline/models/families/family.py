"""What sets a model family apart: in ``config.json``, in checkpoints and in GGUF files.

Knows no file and builds no configuration; :mod:`paceline.models.families.config_json` reads such
records. The families themselves lie by clan in the modules beside this one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """How a family says what its mixtures are.

    Attributes:
        width: key of an expert's width.
        renormalise: what ``norm_topk_prob`` is where the key is absent, or None where the family
            has no such key and its weights add up to 1.
        shared: key of the shared expert's width; empty where the family has none.
        shared_count: whether that key counts experts of the others' width, which are one wide one.
        shared_gate: whether a sigmoid weighs the shared expert.
        some_dense: whether the keys are heeded that make some layers dense.
        per_token: key of the number of experts that a row chooses.
        sigmoid: whether scores are sigmoids where no ``scoring_func`` says so.
        group_best: experts that a group is judged by where ``n_group`` limits the choice; 0: such
            keys are not heeded.
        switch: a key, a flag or the number of experts, without which all layers are dense.
        jitter: key of what SparseMixer weighs with; empty where the family does not.
        traits: fields of :class:`~paceline.models.layer_sizes.Experts` that hold for every member.
        scaled_or_one: whether weights may either be scaled or add up to 1, but not both.
    """

    width: str = "intermediate_size"
    renormalise: bool | None = None
    shared: str = ""
    shared_count: bool = False
    shared_gate: bool = False
    some_dense: bool = False
    per_token: str = "num_experts_per_tok"
    sigmoid: bool = False
    group_best: int = 0
    switch: str = ""
    jitter: str = ""
    scaled_or_one: bool = False
    traits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layout:
    """What sets a family's checkpoints apart; by default nothing.

    Attributes:
        renames: patterns and what stands for each of their matches, one after another.
        ignored: names of tensors that are no weights, as a pattern.
        interleaved: pairs of rows that are rotated together follow one another.
        turned_whole: they do in whole heads, even where only a part of each is rotated.
        by_head: the fused queries, keys and values go head by head.
        transposed: linears are ``[inputs, outputs]``.
        in_turn: stacks of experts have the outputs of gates and of ups in turn.
        inputs_first: stacks of experts' floats are ``[experts, inputs, outputs]``.
    """

    renames: tuple[tuple[str, str], ...] = ()
    ignored: str = ""
    interleaved: bool = False
    turned_whole: bool = False
    by_head: bool = False
    transposed: bool = False
    in_turn: bool = False
    inputs_first: bool = False

    def plain(self, stored: str) -> str:
        """What others call a tensor that the family's checkpoints call so."""
        for pattern, replacement in self.renames:
            stored = re.sub(pattern, replacement, stored)
        return stored


PLAIN = Layout()


@dataclass(frozen=True, slots=True)
class Gguf:
    """How GGUF files have a family.

    Attributes:
        architectures: values of ``general.architecture`` whose files are of this family.
        interleaved: the rotary pairs of rows of queries and keys follow one another, because
            converters make it so, or because the family's own checkpoints are so.
        turned_whole: they do in whole heads, even where only a part of each is rotated.
        fused_up: what is called a feed-forward's way up has its gate too.
        tiled_heads: the first value head of every key comes first, then the second of every key,
            and so on; in the family's own checkpoints heads that share a key follow one another.
        whole_ramps: YaRN does not round the ends of its ramp, which no key says.
        renormalises: the weights of experts add up to 1 where no key says so.
    """

    architectures: tuple[str, ...] = ()
    interleaved: bool = False
    turned_whole: bool = False
    fused_up: bool = False
    tiled_heads: bool = False
    whole_ramps: bool = False
    renormalises: bool = False


NO_GGUF = Gguf()


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one family apart.

    Attributes:
        defaults: values of keys that its configurations may leave out.
        flags: fields of the model configuration that hold for every member, those of its parts as
            ``part.field``; so are fields everywhere below.
        biases: fields that the key ``attention_bias`` switches on.
        mlp_bias: whether the key of that name is heeded.
        slides: ``never``, ``always`` (where a window is given), ``listed`` (where a window is given
            and ``layer_types`` does not say otherwise), ``late`` (layers from
            ``max_window_layers`` on, if ``use_sliding_window``), ``if_asked`` (every layer, if
            ``use_sliding_window``), ``alternately`` (every layer but each
            ``sliding_window_pattern``-th) or ``rotated`` (those with rotary, in chunks).
        multipliers: configuration key -> model field, for Granite's scalars.
        gemma: scaled embeddings, ``query_pre_attn_scalar`` and the logits' soft-capping are heeded.
        caps_scores: whether the soft-capping of attention's scores is heeded.
        partial_rotary: whether a head may be rotated in part.
        unscaled_windows: whether a rotary scaling is that of layers without a window alone.
        grows: whether queries grow with the position where the rotary entries say so.
        clamped: whether its activation is gpt-oss's clamped SwiGLU, whatever ``hidden_act`` says.
        experts: how it describes mixtures of experts; None where it has none.
        keys: a key as most families call it -> as this one does.
        switches: a key -> the fields that it switches on.
        refused: keys that ask for what is not supported.
        only: a key, also one among the rotary entries -> its one value that is supported, which is
            that of a key that is absent.
        rotates: which layers rotate heads: ``all``, ``none``, ``if_asked`` (all where
            ``position_embedding_type`` is ``rope``, else none), ``with_theta`` (all where there is
            a base frequency), ``listed`` (``no_rope_layers`` or
            ``no_rope_layer_interval`` say which do not) or ``sliding`` (where a window is given).
        widening: ``intermediate_size`` where there is none, in hidden sizes; 0: it must be there.
        logit_scale: whether logits are multiplied with the key of that name.
        depth_scaled: whether MiniCPM's ``scale_emb``, ``scale_depth`` and ``dim_model_base`` count.
        dense_width: key of the width of feed-forwards that are no mixtures.
        layout: of its checkpoints.
        gguf: how GGUF files have it.
        latent: whether its attention keeps one latent per token.
        per_layer: whether layers differ as Gemma 4's do: see
            :mod:`paceline.models.families.layers_json`.
        last_full: whether the last layer never slides, whatever the list says.
        recurrent: kind of its recurrent layers; empty where it has none.
        beside: whether all layers are recurrent and have attention too, with Falcon-H1's scalars.
        single_parts: whether a layer is a recurrence, attention or a feed-forward alone.
    """

    defaults: Mapping[str, Any]
    flags: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    mlp_bias: bool = False
    slides: str = "never"
    multipliers: Mapping[str, str] = field(default_factory=dict)
    gemma: bool = False
    caps_scores: bool = False
    partial_rotary: bool = False
    unscaled_windows: bool = False
    grows: bool = False
    clamped: bool = False
    experts: ExpertKeys | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    only: Mapping[str, Any] = field(default_factory=dict)
    rotates: str = "all"
    widening: int = 0
    logit_scale: bool = False
    depth_scaled: bool = False
    dense_width: str = "intermediate_size"
    layout: Layout = PLAIN
    gguf: Gguf = NO_GGUF
    latent: bool = False
    per_layer: bool = False
    last_full: bool = False
    recurrent: str = ""
    beside: bool = False
    single_parts: bool = False

    def called(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration whose keys are called as most families call them.

        The family's own name counts where both are there, as transformers reads no other.
        """
        own = {key: raw[name] for key, name in self.keys.items() if raw.get(name) is not None}
        return {**raw, **own}


ATTENTION_BIASES = ("attention.qkv_bias", "attention.o_bias")
GRANITE_SCALARS = {
    "embedding_multiplier": "multipliers.embedding",
    "residual_multiplier": "multipliers.residual",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "multipliers.logits_divisor",
}


def usual(
    *,
    eps: float = 1e-6,
    context: int = 2048,
    bos: int | None = 1,
    eos: int | list[int] | None = 2,
    **others: Any,
) -> dict[str, Any]:
    """Defaults of a family, which are Llama's but for what is said here.

    Args:
        eps, context, bos, eos: what a configuration calls ``rms_norm_eps``,
            ``max_position_embeddings``, ``bos_token_id`` and ``eos_token_id``.
        others: by the configuration's own names.
    """
    return {
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "max_position_embeddings": context,
        "bos_token_id": bos,
        "eos_token_id": eos,
        **others,
    }


BIASED_EXPERTS = ExpertKeys(
    "moe_intermediate_size",
    renormalise=True,
    shared="n_shared_experts",
    shared_count=True,
    some_dense=True,
    sigmoid=True,
    group_best=2,
    traits={"choice_bias": True},
)
"""As DeepSeek-V3 has them, and those that follow it."""
