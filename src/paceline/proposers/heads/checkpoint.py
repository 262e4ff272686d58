"""A head's configuration and its weights, in the layouts in which heads come.

The `speculators` layout (``speculators_model_type``, the layers' own configuration inside
``transformer_layer_config``) and those of original checkpoints become one: EAGLE-3's and P-EAGLE's
(one configuration, of a Llama, whose first layer may be called ``midlayer``), DFlash's and DSpark's
(one configuration, of a Qwen 3; DFlash's has a ``dflash_config``). So do llama.cpp's GGUF files
(:mod:`paceline.loading.gguf.keys`). Builds no decoder.

An MTP layer is a head as well: out of the target's own checkpoint, another model's, or a head's
folder. It reads the target's output after the last norm, and at drafted nodes its own after its
last norm: vLLM and SGLang do so for every model that they have (vLLM since its pull request 45895),
llama.cpp for Qwen's, and DeepSeek's modelling code for the target's. Owns whose layer it is; what
it is like is the affair of :mod:`paceline.loading.checkpoint`.

A head's vocabulary is its target's, as it is or padded to another size. A model's embedding often
has more rows than its tokenizer has tokens, and two forms of one model, such as its folder and a
GGUF file, may have different numbers of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.backends.resolve import resolve_ops
from paceline.config.speculative import HeadConfig
from paceline.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from paceline.core.files import checked_path, read_json
from paceline.loading.checkpoint import Checkpoint, load_checkpoint, load_file, mtp_head
from paceline.loading.fetching import hub_place, is_hub_id
from paceline.loading.quantised.methods import QuantisedTensors, schemes_of, split_quantisation
from paceline.loading.safetensors_files import SafetensorsFolder
from paceline.models.config import RESIDUAL, EntryConfig, ModelConfig
from paceline.models.decoder_reader import EMBEDDING, HEAD, DecoderReader
from paceline.models.families.config_json import config_from_hf
from paceline.models.families.fields import Fields
from paceline.models.heads import (
    ASSISTANT,
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE3,
    MTP,
    PEAGLE,
    head_kind,
)
from paceline.models.layer_sizes import LocalConv
from paceline.models.tensor_reader import TensorReader
from paceline.models.weights import HEAD_TOKENS
from paceline.proposers.base import TargetInfo
from paceline.proposers.heads.known_keys import (
    BLOCKS,
    DOMINO,
    EAGLE,
    LAYER_CONFIG,
    check_keys,
    is_domino,
)
from paceline.tensors.stored import StoredTensors

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_PLACES = (
    ("", LAYER_IDS, 0),
    (EAGLE, LAYER_IDS, 0),
    ("", "aux_hidden_state_layer_ids", 0),
    (BLOCKS, "target_layer_ids", 1),
    ("", "target_layer_ids", 1),
)
"""Where configurations name the layers that a head reads, and how far their count is behind that of
:class:`~paceline.models.backend.Taps`: EAGLE-3 heads at the top or, NVIDIA's, in a part of their
own, DFlash heads of both layouts, DSpark heads of the original one."""
FUSION = re.compile(r"fc\.(weight|bias)|(input_norm|hidden_norm|fc_norm\.\d+)\.weight")
"""Tensors that make one vector of the hidden states of several layers."""
MASK_HIDDEN = "mask_hidden"
PRE, POST, CENTROIDS = "pre_projection", "post_projection", "masked_embedding.centroids"
TOKEN_ORDER = "masked_embedding.token_ordering"
ASSISTANT_PARTS = re.compile(r"(pre|post)_projection\.weight|masked_embedding\..*")
MARKOV, CONFIDENCE = "markov_head", "confidence_head"
GRU, PROJECTION = "prefix_gru", "embed_proj"
_MARKOV_TENSORS = {
    "vanilla": ("markov_w1.weight", "markov_w2.weight"),
    "gated": ("markov_w1.weight", "markov_w2.weight", "gate_proj.weight", "gate_proj.bias"),
    "rnn": ("markov_w1.weight", "markov_w2.weight", "joint_proj.weight", "joint_proj.bias"),
}
"""By ``markov_head_type``."""
_DOMINO_TENSORS = {
    *(f"{GRU}.{part}.weight" for part in ("ih", "hh")),
    *(f"{PROJECTION}.{place}.weight" for place in (0, 2)),
}
SELECTOR, SELECTS = "candidate_selector", "selector"
"""What DFlash 2's tensors begin with, and its ``markov_type``."""
_SELECTOR_TENSORS = {
    f"{SELECTOR}.{name}"
    for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
}
_CONFIDENCE_TENSORS = {f"{CONFIDENCE}.proj.weight", f"{CONFIDENCE}.proj.bias"}
_ENTRIES = {EAGLE3: EAGLE3, PEAGLE: EAGLE3, DFLASH: DFLASH, DSPARK: DFLASH, DFLASH2: DFLASH}
"""How hidden states come into the layers of each kind (:mod:`paceline.models.decoder_reader`)."""
_NAMES = (
    (re.compile(r"^midlayer\."), "model.layers.0."),
    (re.compile(r"^(?=(layers|norm|embed_tokens)\.)"), "model."),
    (re.compile(r"^logit_head\."), ""),  # around the parts of early Domino and DSpark heads
    (re.compile(r"^prefix_gru\.weight_(ih|hh)_l0$"), rf"{GRU}.\1.weight"),
)
_UNREAD = re.compile(r"^verifier_(norm|lm_head)\.")
"""The target's own, for training."""
MOST_TAPS = 64
MOST_OF_TARGET = 1 << 20
MOST_BLOCK_ROWS = 256
MOST_MARKOV_RANK = 1 << 16
_OTHER_BLOCKS = {
    **dict.fromkeys(("use_swa", "attention_sink_bias"), False),
    **dict.fromkeys(("selector_rank", "final_logit_softcapping"), 0),
    **dict.fromkeys(("input_embedding_scale", "output_multiplier"), 1),
}
"""Traits of DFlash's relatives, and the value at which a head has the trait not."""


@dataclass(frozen=True, slots=True)
class Block:
    """What a DFlash, DSpark or DFlash 2 head reads after the target's hidden states.

    Attributes:
        size: rows.
        mask_token: what all but the first one read.
        first_row: the row that predicts the first token.
        markov_rank: width of DSpark's Markov head, Domino's correction or DFlash 2's selector;
            0 is none.
        markov_type: one of :data:`~paceline.proposers.heads.markov.MARKOV_HEADS`, or ``domino``.
        has_confidence: a DSpark head has a confidence head, and its configuration says no other.
        confidence_reads_token: it reads the token before, too.
        gru_width: numbers in the state of Domino's GRU.
        first_corrected: drafted tokens before the first whose logits Domino corrects.
        top_k: tokens of a row among which a selector chooses; 0: there is none.
    """

    size: int
    mask_token: int
    first_row: int
    markov_rank: int = 0
    markov_type: str = "vanilla"
    has_confidence: bool = False
    confidence_reads_token: bool = False
    gru_width: int = 0
    first_corrected: int = 0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Assistant:
    """What a Gemma 4 assistant is beside its layers.

    Attributes:
        target_width: of the target's hidden states.
        num_clusters: groups that its tokens are in, all of one size; 0: it has none.
        top_clusters: of these, the ones whose tokens get logits.
    """

    target_width: int
    num_clusters: int = 0
    top_clusters: int = 0


@dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    """A head as it was found.

    Attributes:
        kind: one of :mod:`paceline.models.heads`.
        decoder: its layers, embedding and head under their Hugging Face names; the latter two may
            be missing.
        fusion: the tensors of :data:`FUSION`; None for a head that reads what the target puts out,
            after its last norm, as it is.
        layer_ids: taps of the target, as :mod:`paceline.models.backend` counts them; None where the
            configuration does not name them.
        norm_before_fc: one norm over the hidden states of all taps (``input_norm``).
        fc_norm: a norm for those of each tap (``fc_norm``).
        norm_output: a drafted node's children read its hidden state after the last norm.
        block: of a DFlash, DSpark or DFlash 2 head; None of the others.
        target_layers, target_width: of the target, where the head says what it was made for.
        further: what P-EAGLE, DSpark and DFlash 2 heads and assistants have beyond the others.
        assistant: of a Gemma 4 assistant; None of the others.
    """

    kind: str
    decoder: Checkpoint
    fusion: StoredTensors | None
    layer_ids: tuple[int, ...] | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    block: Block | None = None
    further: StoredTensors | None = None
    target_layers: int | None = None
    target_width: int | None = None
    assistant: Assistant | None = None

    @property
    def name(self) -> str:
        return self.decoder.name


def load_head(source: str) -> HeadCheckpoint:
    """Open a head of any kind but MTP.

    Args:
        source: its folder or GGUF file, or ``org/name`` on the hub.

    Raises:
        ModelLoadError: there is no such head, or what is there is incomplete or corrupt.
        UnsupportedModelError: it is no head, or of a kind that is not supported.
        ConfigError: fetching it needs an extra that is not installed.
    """
    place, name = place_of(source)
    raw, tensors, is_quantised = _from_file(place) if place.is_file() else _from_folder(place)
    kind = head_kind(raw)
    if kind == ASSISTANT:
        return _assistant(raw, tensors, name, is_quantised)
    if kind not in _ENTRIES:
        said = raw.get("speculators_model_type")
        what = f"a speculator of type {str(said)[:40]!r}" if said else "no head"
        raise UnsupportedModelError(
            f"{name} is {what}; heads say speculators_model_type = {', '.join(_ENTRIES)}, or have "
            f"an architecture of that name or of {ASSISTANT}"
        )
    if not place.is_file():  # of whose keys the reader of the format has chosen
        check_keys(raw, kind, name)
    fields = Fields({**raw, **Fields(raw).mapping(EAGLE)})
    shape = replace(config_from_hf(layer_config(raw)), entry=EntryConfig(_ENTRIES[kind]))
    block, further = None, {MASK_HIDDEN} if kind == PEAGLE else set[str]()
    if not shape.entry.reads_blocks:
        shape = _eagle_layers(fields, kind, shape)
    else:
        block, shape = _block(raw, kind, shape)
        if kind == DSPARK:
            block, further = _with_confidence(block, fields, tensors)
        elif is_domino(raw):
            block, further = _with_domino(block, raw), set(_DOMINO_TENSORS)
        elif kind == DFLASH2:
            block, shape, further = *_with_selector(block, raw, shape), _SELECTOR_TENSORS
    parts = {stored for stored in tensors if FUSION.fullmatch(stored)}
    further = further & set(tensors)
    others = parts | further | _left_out(tensors, shape, block)
    rest = tensors.only(stored for stored in tensors if stored not in others)
    return HeadCheckpoint(
        kind,
        Checkpoint(shape, rest, None, name, is_quantised=is_quantised),
        tensors.only(parts),
        _layer_ids(raw),
        fields.flag("norm_before_fc"),
        fields.flag("fc_norm"),
        fields.flag("norm_output"),
        block,
        tensors.only(further),
        _count(fields, "num_target_layers"),
        _count(fields, "target_hidden_size"),
    )


def _eagle_layers(fields: Fields, kind: str, shape: ModelConfig) -> ModelConfig:
    """The shape of an EAGLE-3 or P-EAGLE head's layers."""
    shape = shape.with_traits({"entry.norm_before_residual": fields.flag("norm_before_residual")})
    if kind == PEAGLE and shape.mask_token_id is None:
        mask_token = fields.integer("mask_token_id", 0, shape.vocab_size - 1)
        shape = replace(shape, mask_token_id=mask_token)
    return shape


def _left_out(tensors: StoredTensors, shape: ModelConfig, block: Block | None) -> set[str]:
    """Tensors that a head may have and that nothing reads."""
    left_out = {stored for stored in tensors if _UNREAD.match(stored)}
    if not shape.draft_vocab_size:
        left_out.add(HEAD_TOKENS)  # a map that changes nothing
    if block is not None and not block.has_confidence:
        left_out |= _CONFIDENCE_TENSORS
    return left_out


def _count(fields: Fields, key: str) -> int | None:
    return fields.integer(key, 1, MOST_OF_TARGET) if fields.says(key) else None


MOST_CLUSTERS = 1 << 20


def _assistant(
    raw: Mapping[str, Any], tensors: StoredTensors, name: str, is_quantised: bool
) -> HeadCheckpoint:
    fields = Fields(raw, {"tie_word_embeddings": True, "backbone_hidden_size": 1536})
    text = fields.mapping("text_config")
    # All layers read the target's keys and values, whatever number is said.
    own = {"num_kv_shared_layers": 0}
    shape = config_from_hf({**raw, **({"text_config": {**text, **own}} if text else own)})
    if shape.layer_inputs or shape.mlp.experts:
        raise UnsupportedModelError(
            f"{name} has mixtures or inputs of layers, which assistants of {ASSISTANT} have not"
        )
    attention = shape.attention
    traits: dict[str, Any] = {
        "entry.kind": RESIDUAL,
        "attention.reads_target": True,
        "positions.ahead": 1,
        "multipliers.logits_softcap": 0.0,
        "tie_embeddings": fields.flag("tie_word_embeddings"),
    }
    if attention.sliding_window:  # transformers: a key at this distance from the last one is seen
        traits["attention.sliding_window"] = attention.sliding_window + 1
    shape, clusters = shape.with_traits(traits), (0, 0)
    if fields.flag("use_ordered_embeddings"):
        most = min(MOST_CLUSTERS, shape.vocab_size)
        number = fields.integer("num_centroids", 1, most, 2048)
        if shape.vocab_size % number or not shape.tie_embeddings:
            raise ModelLoadError(
                f"{name} says num_centroids = {number} and tie_word_embeddings = "
                f"{shape.tie_embeddings}; the first must divide its {shape.vocab_size} tokens, and "
                "the second be true"
            )
        clusters = number, fields.integer("centroid_intermediate_top_k", 1, number, 32)
    further = {stored for stored in tensors if ASSISTANT_PARTS.fullmatch(stored)}
    ends = {f"{HEAD}.weight"} if shape.tie_embeddings else set()
    rest = tensors.only(stored for stored in tensors if stored not in further | ends)
    return HeadCheckpoint(
        ASSISTANT,
        Checkpoint(shape, rest, None, name, is_quantised=is_quantised),
        None,
        further=tensors.only(further),
        assistant=Assistant(fields.integer("backbone_hidden_size", 1, 1 << 17), *clusters),
    )


def _from_folder(folder: Path) -> tuple[Mapping[str, Any], StoredTensors, bool]:
    """The configuration, the tensors as a decoder calls them, and whether they are quantised."""
    raw, quantisation = split_quantisation(read_json(folder / "config.json"), folder)
    files = SafetensorsFolder(folder)
    for stored in list(files):
        plain = stored
        for pattern, prefix in _NAMES:
            plain = pattern.sub(prefix, plain)
        files.rename(stored, plain)
    if quantisation is None:
        return raw, files, False
    return raw, QuantisedTensors(files, schemes_of(quantisation)), True


def _from_file(path: Path) -> tuple[Mapping[str, Any], StoredTensors, bool]:
    checkpoint = load_file(path, path.name, in_memory=False, with_tokenizer=False)
    assert isinstance(checkpoint.tensors, StoredTensors)
    return checkpoint.hf_config, checkpoint.tensors, checkpoint.is_quantised


def place_of(source: str) -> tuple[Path, str]:
    """The folder or file that a source names, and its name; raises as :func:`load_head`."""
    place, is_there = checked_path(source, ModelLoadError)
    if is_there:
        return place, place.resolve().name
    if is_hub_id(source):
        return hub_place(source), source
    raise ModelLoadError(
        f"there is no head at {source}: give a folder with config.json and safetensors, a GGUF "
        "file, or org/name of a head on the hub"
    )


def layer_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the head's layers as that of a language model."""
    own = Fields(raw).mapping(LAYER_CONFIG) or raw
    shared = ("draft_vocab_size", "dtype", "torch_dtype")
    return {
        **{key: value for key, value in own.items() if key not in ("architectures", "is_causal")},
        **{key: raw[key] for key in shared if key in raw},
        "tie_word_embeddings": False,
    }


def _layer_ids(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    for inside, key, behind in _PLACES:
        place = Fields(raw).mapping(inside) if inside else raw
        ids = place.get(key)
        if isinstance(ids, list) and 0 < len(ids) <= MOST_TAPS:
            counted = Fields(place).integers(key, len(ids), -behind, 1 << 16)
            return tuple(layer + behind for layer in counted)
        if ids is not None:
            raise ModelLoadError(
                f"the model configuration says {key} = {str(ids)[:80]}; it must be a list of "
                f"1 to {MOST_TAPS} numbers"
            )
    return None


def _block(raw: Mapping[str, Any], kind: str, shape: ModelConfig) -> tuple[Block, ModelConfig]:
    """How a DFlash, DSpark or DFlash 2 head reads blocks, and the shape of its layers."""
    fields, is_dspark = Fields(raw), kind == DSPARK
    usually = {"sample_from_anchor": is_dspark, "sliding_window_non_causal": kind == DFLASH2}
    said = Fields({**raw, **fields.mapping(BLOCKS)}, usually)
    for trait, usual in _OTHER_BLOCKS.items():
        selects = kind == DFLASH2 and trait == "selector_rank"
        if said.get(trait) not in (None, usual) and not selects:
            raise UnsupportedModelError(
                f"{kind} heads with {trait} = {str(said.get(trait))[:40]} are not supported"
            )
    is_causal = next((k for k in ("is_causal", "causal") if said.get(k) is not None), None)
    ahead = (
        said.flag("sliding_window_non_causal") if is_causal is None else not said.flag(is_causal)
    )
    layers = range(shape.num_layers)
    if is_causal is not None and not ahead and not all(map(shape.attention.is_sliding, layers)):
        raise UnsupportedModelError(
            f"{kind} heads with {is_causal} = true are supported where all layers have a sliding "
            "window"
        )
    markov_type = said.get("markov_head_type") or "vanilla"
    if markov_type not in (_MARKOV_TENSORS if is_dspark else ("vanilla",)):
        allowed = ", ".join(_MARKOV_TENSORS)
        raise UnsupportedModelError(
            f"{kind} heads with markov_head_type = {str(markov_type)[:40]} are not supported; "
            f"dspark heads have one of: {allowed}"
        )
    has_anchor_row = said.flag("sample_from_anchor") and not said.flag("dspark_bonus_anchor")
    block = Block(
        said.integer("block_size", 2, MOST_BLOCK_ROWS),
        said.integer("mask_token_id", 0, shape.vocab_size - 1),
        0 if has_anchor_row else 1,
        said.integer("markov_rank", 0, MOST_MARKOV_RANK, 256) if is_dspark else 0,
        markov_type,
    )
    has_bias = Fields(fields.mapping(LAYER_CONFIG) or raw).flag("attention_bias")
    traits = {
        "attention.qk_norm": True,
        "attention.qkv_bias": has_bias,
        "attention.o_bias": has_bias,
        "entry.sliding_sees_ahead": ahead,
    }
    return block, shape.with_traits(traits)


def _with_domino(block: Block, raw: Mapping[str, Any]) -> Block:
    """A Domino head's block. With ``shift_label`` each row predicts the token that follows it."""
    said = Fields({**raw, **Fields(raw).mapping(BLOCKS)})
    return replace(
        block,
        first_row=0 if said.flag("shift_label") else 1,
        markov_rank=said.integer("emb_dim", 1, MOST_MARKOV_RANK),
        markov_type=DOMINO,
        gru_width=said.integer("gru_hidden_dim", 1, MOST_MARKOV_RANK),
        first_corrected=said.integer("pure_draft_prefix_len", 0, MOST_BLOCK_ROWS, 0),
    )


def _with_selector(
    block: Block, raw: Mapping[str, Any], shape: ModelConfig
) -> tuple[Block, ModelConfig]:
    """What a DFlash 2 head has beyond a DFlash head."""
    said = Fields({**raw, **Fields(raw).mapping(BLOCKS)})
    if shape.draft_vocab_size:
        raise UnsupportedModelError(
            f"{DFLASH2} heads with draft_vocab_size = {shape.draft_vocab_size} are not supported; "
            f"they draft all {shape.vocab_size} tokens of their target"
        )
    conv = LocalConv(
        said.integer("conv_kernel_size", 1, block.size),
        said.integer("conv_group_size", 1, shape.hidden_size),
    )
    if shape.hidden_size % conv.group:
        raise ModelLoadError(
            f"the model configuration says conv_group_size = {conv.group}; it must divide the "
            f"hidden_size, {shape.hidden_size}"
        )
    rank = said.integer("selector_rank", 1, MOST_MARKOV_RANK)
    top_k = said.integer("selector_top_k", 1, shape.vocab_size)
    block = replace(block, markov_rank=rank, markov_type=SELECTS, top_k=top_k)
    return block, replace(shape, local_conv=conv)


def _with_confidence(
    block: Block, fields: Fields, tensors: Mapping[str, Any]
) -> tuple[Block, set[str]]:
    """What a DSpark head has of a confidence head, and the tensors that no layer has."""
    stored = _MARKOV_TENSORS[block.markov_type] if block.markov_rank else ()
    names = {f"{MARKOV}.{name}" for name in stored}
    wanted = fields.get("enable_confidence_head") is not False
    if not wanted or f"{CONFIDENCE}.proj.weight" not in tensors:
        return block, names
    reads_token = fields.get("confidence_head_with_markov") is not False
    block = replace(block, has_confidence=True, confidence_reads_token=reads_token)
    return block, names | _CONFIDENCE_TENSORS


def load_mtp(config: HeadConfig, target: TargetInfo) -> HeadCheckpoint:
    """The MTP layer of the model that a configuration names, or else of the target.

    Raises:
        ModelLoadError: that model cannot be read.
        ConfigError: it has no MTP layer.
        UnsupportedModelError: the layer is of a kind that does not run here.
    """
    model = target.checkpoint if config.model is None else _opened(config.model)
    if model is None:
        raise ConfigError('method "mtp" drafts with a layer of the target, and none is loaded here')
    head = mtp_head(model)
    if head is None:
        raise ConfigError(
            f"{model.name} has no MTP layer: none of its tensors is called mtp.fc, mtp_layers.0 or "
            "nextn, nor eh_proj behind its last layer. Conversions often leave it out: name a form "
            'of the model that has it by "model", or choose another method'
        )
    layers = None if config.model is None else model.config.num_layers
    return HeadCheckpoint(MTP, head, None, norm_output=True, target_layers=layers)


def _opened(source: str) -> Checkpoint:
    """A whole model, or a head in the `speculators` layout."""
    try:
        folder, name = place_of(source)
    except ModelLoadError:  # a name of the catalogue, or nothing
        return load_checkpoint(source, with_tokenizer=False)
    if folder.is_file():
        return load_checkpoint(source, with_tokenizer=False)
    raw, quantisation = split_quantisation(read_json(folder / "config.json"), folder)
    if head_kind(raw) != MTP:
        return load_checkpoint(source, with_tokenizer=False)
    tensors: StoredTensors = SafetensorsFolder(folder)
    if quantisation is not None:
        tensors = QuantisedTensors(tensors, schemes_of(quantisation))
    shape = config_from_hf(layer_config(raw))
    return Checkpoint(shape, tensors, None, name, is_quantised=quantisation is not None)


MOST_PADDING = 1024
"""Rows by which forms of one model differ; more than that is another vocabulary."""


def check_vocabulary(head: HeadCheckpoint, target: TargetInfo) -> None:
    """Raise :class:`ConfigError` where the vocabularies differ in more than padding at the end."""
    size = head.decoder.config.vocab_size
    reason = "" if size == target.vocab_size else _difference(head, target)
    if reason:
        raise ConfigError(
            f"{head.name} was made for another target: it reads {size} tokens, and the target has "
            f"{target.vocab_size}. They may differ in padding at the end alone, but {reason}"
        )


def _difference(head: HeadCheckpoint, target: TargetInfo) -> str:
    """Why a vocabulary of another size is not the target's; empty where padding is all."""
    tensors, shape = head.decoder.tensors, head.decoder.config
    if abs(shape.vocab_size - target.vocab_size) > MOST_PADDING:
        return f"that is at most {MOST_PADDING} rows"
    used = target.vocab_size if target.tokenizer is None else target.tokenizer.vocab_size
    if shape.vocab_size < used:
        return f"{used} tokens of the target are in use"
    ops = resolve_ops("float32", target.device, None, target.backend)
    pruned = DecoderReader(TensorReader(tensors, shape, ops)).pruned_head()
    for name in (EMBEDDING, HEAD) if pruned is None else (EMBEDDING,):
        if f"{name}.weight" in tensors:
            return f"the head has {name} of its own"
    last = -1 if pruned is None else int(pruned.token_ids[-1])
    if last >= target.vocab_size:
        return f"the head drafts token {last}"
    if head.block is not None and head.block.mask_token >= target.vocab_size:
        return f"the head reads token {head.block.mask_token} for what it drafts"
    return ""
