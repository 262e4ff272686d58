"""Which keys of a head's configuration are known, and what a head of each kind may say in them.

A key that is not known may be the one by which a head differs from its predecessors (EAGLE-3.1 is
EAGLE-3 with three of them). Read without it, such a head drafts tokens that are hardly ever
accepted, and no error says why. So a key outside of these lists is refused by its name, unless its
value says that there is nothing: null, false, or an empty list or object.

Sources: the configurations that speculators 0.9, SpecForge 0.2 and NVIDIA's Model Optimizer write,
those that vLLM's ``llama_eagle3.py`` reads, and transformers 5.24 for layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.core.errors import UnsupportedModelError
from paceline.models.config import MASK_TOKEN_KEYS
from paceline.models.heads import DFLASH, DFLASH2, DSPARK, EAGLE3, PEAGLE

EAGLE, BLOCKS, LAYER_CONFIG = "eagle_config", "dflash_config", "transformer_layer_config"
"""Parts of a configuration: of EAGLE-3 heads, of block heads, and of the layers of both."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_HARMLESS = _words(
    """
    _name_or_path architectures auto_map base_model_ep_plan chunk_size_feed_forward dtype id2label
    initializer_range is_decoder is_encoder_decoder label2id license modal_type model_type name
    output_attentions output_hidden_states output_router_logits problem_type return_dict
    speculators_config speculators_model_type speculators_version target_model_type torch_dtype
    transformers_version use_cache

    attention_dropout classifier_dropout embd_pdrop hidden_dropout resid_pdrop
    aux_loss_alpha confidence_head_alpha embed_requires_grad ep_size num_anchors
    router_aux_loss_coef router_jitter_noise seq_aux

    begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences repetition_penalty temperature top_k top_p typical_p
    """
)
"""Who made a head and with what, how it was trained, and how a language model would be sampled."""
_LAYERS = _words(
    """
    attention_bias bos_token_id draft_vocab_size eos_token_id head_dim hidden_act hidden_activation
    hidden_size intermediate_size layer_types max_position_embeddings max_window_layers mlp_bias
    num_attention_heads num_hidden_layers num_key_value_heads pad_token_id partial_rotary_factor
    position_embedding_type pretraining_tp rms_norm_eps rope_parameters rope_scaling rope_theta
    sliding_window tie_word_embeddings use_sliding_window vocab_size is_causal
    original_max_position_embeddings sep_token_id unk_token_id

    attention_chunk_size attn_logit_softcapping attn_scale attn_temperature_tuning
    decoder_sparse_step final_logit_softcapping first_k_dense_replace floor_scale
    interleave_moe_layer_step intermediate_size_mlp kv_lora_rank mlp_only_layers moe_layer_freq
    moe_intermediate_size moe_layers n_group n_routed_experts n_shared_experts norm_topk_prob
    no_rope_layer_interval no_rope_layers num_experts num_experts_per_tok num_local_experts
    num_nextn_predict_layers q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim qkv_bias
    query_pre_attn_scalar rope_interleave routed_scaling_factor scoring_func swiglu_alpha
    swiglu_limit topk_group topk_method use_bidirectional_attention use_qk_norm v_head_dim

    quantization_config compression_config
    """
)
"""What configurations of layers say; :mod:`paceline.models.families` reads and checks these."""
_EAGLE_KEYS = _words(
    """
    aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids fc_norm logit_scale
    mask_token_id norm_before_fc norm_before_residual norm_output num_target_layers
    target_hidden_size target_layer_ids use_aux_hidden_state use_input_layernorm_in_first_layer
    use_last_layernorm use_mtp_layernorm next_layer_regular parallel_draft_step
    parallel_draft_heads_num_layers
    has_lm_head num_aux_hidden_states num_aux_layers
    """
)
_BLOCK_KEYS = _words(
    """
    attention_mode attention_sink_bias aux_hidden_state_layer_ids block_size causal
    confidence_head_with_markov dspark_bonus_anchor enable_confidence_head input_embedding_scale
    is_causal markov_head_type markov_rank mask_token_id num_target_layers output_multiplier
    projector_type sample_from_anchor selector_rank sliding_window_non_causal target_hidden_size
    target_layer_ids use_swa
    """
)
DOMINO = "domino"
_DOMINO_KEYS = _words("emb_dim gru_hidden_dim pure_draft_prefix_len shift_label")
_DFLASH2_KEYS = _BLOCK_KEYS - _words(
    """
    confidence_head_with_markov dspark_bonus_anchor enable_confidence_head markov_head_type
    markov_rank
    """
) | _words("conv_group_size conv_kernel_size selector_top_k")
_KINDS = {
    EAGLE3: _EAGLE_KEYS,
    PEAGLE: _EAGLE_KEYS,
    DFLASH: _BLOCK_KEYS,
    DSPARK: _BLOCK_KEYS,
    DFLASH2: _DFLASH2_KEYS,
}
_PARTS = {EAGLE3: EAGLE, PEAGLE: EAGLE, DFLASH: BLOCKS, DSPARK: BLOCKS, DFLASH2: BLOCKS}
_ONLY: dict[str, Mapping[str, Any]] = {
    EAGLE: {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 0,
        "logit_scale": 1,
        "is_causal": True,
    },
    BLOCKS: {"projector_type": ("dflash", "dspark", DOMINO), "attention_mode": "gqa"},
}
"""Keys whose other values mean a head that computes otherwise."""


def check_keys(raw: Mapping[str, Any], kind: str, name: str) -> None:
    """Refuse a configuration that says of a head what is not known.

    Args:
        raw: the whole of it.
        kind: the head's, one of :mod:`paceline.models.heads`.
        name: the head's, for errors.

    Raises:
        UnsupportedModelError: a key is not known, or its value is one that does not run here; the
            message names the key.
    """
    own, part = _KINDS[kind] | {*MASK_TOKEN_KEYS}, _PARTS[kind]
    if is_domino(raw):
        own |= _DOMINO_KEYS
    layers = raw.get(LAYER_CONFIG)
    _check(name, kind, "", raw, own | _LAYERS | _HARMLESS | {part, LAYER_CONFIG})
    _check(name, kind, f"{part}.", _mapping(raw.get(part)), own | _HARMLESS)
    _check(name, kind, f"{LAYER_CONFIG}.", _mapping(layers), _LAYERS | _HARMLESS)
    said = {**raw, **_mapping(raw.get(part))}
    for key, allowed in _ONLY[part].items():
        values = allowed if isinstance(allowed, tuple) else (allowed,)
        values = tuple(value for value in values if value != DOMINO or kind == DFLASH)
        if said.get(key) is not None and said[key] not in values:
            raise UnsupportedModelError(
                f"{name} is a head of kind {kind} with {key} = {str(said[key])[:40]}, which does "
                f"not run here; supported: {', '.join(map(str, values))}"
            )


def is_domino(raw: Mapping[str, Any]) -> bool:
    """Whether a block head's configuration says that it is a Domino head.

    SpecForge (0.2) takes one of that architecture without ``projector_type`` for one, too.
    """
    said = {**raw, **_mapping(raw.get(BLOCKS))}.get("projector_type")
    return said == DOMINO or (
        said is None and "DominoDraftModel" in (raw.get("architectures") or ())
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _check(name: str, kind: str, where: str, said: Mapping[str, Any], known: Iterable[str]) -> None:
    known = frozenset(known)
    for key, value in said.items():
        if key not in known and value not in (None, False, [], {}):
            raise UnsupportedModelError(
                f"{name} says {where}{str(key)[:60]} = {str(value)[:40]}, which is not known of "
                f"heads of kind {kind}: it may be another form, whose drafts would hardly ever be "
                "accepted if it were read as this one"
            )
