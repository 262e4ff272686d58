"""The settings of each kind of training, checked on construction. Knows no model, data or tensors.

The command line reads its options and their help texts off these classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Any

from paceline.config import MAX_THREADS
from paceline.config.speculative import MAX_CONTINUATIONS, NGRAM_ORDERS
from paceline.core.checks import (
    check_number,
    check_settings,
    number,
    one_of,
    optional,
    setting,
    whole,
)
from paceline.core.errors import ConfigError, TrainingError
from paceline.models.heads import DFLASH, EAGLE3, MTP

DTYPES = ("auto", "float32", "bfloat16")
PACKED_BITS = {"int8": 8, "int4": 4}
WEIGHT_DTYPES = ("float32", "bfloat16", *PACKED_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsConfig:
    """Texts to learn from."""

    text: tuple[str, ...] = setting((), "Files and folders of training text.")
    exclude: tuple[str, ...] = setting(
        (), "Glob patterns of files to leave out, relative to their folder."
    )
    stdlib: bool = setting(
        False, "Also train on Python's standard library, as found on this machine."
    )


TEXTS = tuple(field.name for field in fields(TextsConfig))
"""Where texts come from, which the training of heads does not read."""


def _precision(default: str) -> Any:
    return setting(
        default,
        "Precision of matrix products; auto is bfloat16 on a GPU and on processors with "
        "instructions for it, and float32 elsewhere.",
        one_of(DTYPES),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig(TextsConfig):
    """Options that a language model's training and a draft's distillation share."""

    output: str = setting(
        MISSING, "Folder for the finished model and, during training, for the state to resume from."
    )
    held_out_tokens: int = setting(
        65_536,
        "Tokens of whole documents that are held out and never trained on.",
        whole(0, 1 << 32),
    )
    seq_len: int = setting(512, "Number of predictions per window.", whole(2, 1 << 20))
    batch_size: int = setting(12, "Windows per forward pass.", whole(1, 1 << 16))
    grad_accumulation: int = setting(1, "Forward passes per optimiser step.", whole(1, 1 << 16))
    steps: int = setting(
        0, "Number of optimiser steps; 0 leaves the end to `max_minutes`.", whole(0, 1 << 32)
    )
    max_minutes: float = setting(
        0.0,
        "Training time in minutes; 0 leaves the end to `steps`. With both, the schedule follows "
        "whichever is further along, so that it always completes.",
        number(0.0, 1e6),
    )
    learning_rate: float = setting(1e-3, "Peak learning rate.", number(0.0, 10.0))
    warmup_steps: int = setting(40, "Steps of linear warm-up.", whole(0, 1 << 32))
    decay_start: float = setting(
        0.5, "Fraction of the run after which the learning rate falls linearly.", number(0.0, 1.0)
    )
    final_lr_fraction: float = setting(
        0.03, "Fraction of the peak learning rate at the end.", number(0.0, 1.0)
    )
    weight_decay: float = setting(
        0.1, "Weight decay of matrices; vectors have none.", number(0.0, 10.0)
    )
    beta1: float = setting(0.9, "Parameter of AdamW.", number(0.0, 1.0))
    beta2: float = setting(0.95, "Parameter of AdamW.", number(0.0, 1.0))
    grad_clip: float = setting(1.0, "Maximum norm of the gradient.", number(1e-9, 1e9))
    dtype: str = _precision("auto")
    weights_dtype: str = setting(
        "bfloat16",
        "Precision of the written weights; int8 and int4 apply only to linear layers.",
        one_of(WEIGHT_DTYPES),
    )
    seed: int = setting(
        0,
        "Seed of the initialisation, the order of documents and the held-out split.",
        whole(0, (1 << 63) - 1),
    )
    threads: int = setting(
        0, "Number of torch threads; 0 keeps torch's default.", whole(0, MAX_THREADS)
    )
    device: str = setting(
        "cpu", "Device to train on, such as cuda; the finished files are the same everywhere."
    )
    save_minutes: float = setting(
        5.0, "Minutes between saved states; 0 saves after every step.", number(0.0, 1e6)
    )
    eval_every: int = setting(
        200,
        "Steps between held-out losses; 0 measures only at the beginning and the end.",
        whole(0, 1 << 32),
    )
    eval_windows: int = setting(
        32,
        "Number of windows for the intermediate held-out losses; the last one uses all.",
        whole(1, 1 << 32),
    )
    overwrite: bool = setting(False, "Replace a finished model in `output`.")
    show_progress: bool = setting(True, "Show a progress bar on a terminal, and lines elsewhere.")
    command: str = setting("", "The exact command, for the model card.")
    data_note: str = setting("", "Source and licence of the texts, for the model card.")
    licence: str = setting(
        "unknown", "Licence of the weights as an SPDX identifier, for the model card."
    )

    def __post_init__(self) -> None:
        if not self.output:
            raise ConfigError("output is empty; name the folder of the trained model")
        check_settings(self)
        if not self.steps and not self.max_minutes:
            raise ConfigError(
                "nothing says when the training ends: give a number of steps (--steps), a time "
                "(--max-minutes), or both"
            )

    @property
    def windows_per_step(self) -> int:
        return self.batch_size * self.grad_accumulation

    @property
    def tokens_per_step(self) -> int:
        return self.windows_per_step * self.seq_len

    def fixed_options(self) -> dict[str, Any]:
        """The options that a continued run must share with the one it continues."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _FREE}


_REPORTING = ("overwrite", "show_progress", "command", "data_note", "licence")
_FREE = frozenset(
    (
        "output",
        "continue_from",
        "features",
        "verifier",
        "with_embedding",
        "threads",
        "device",
        "save_minutes",
        *_REPORTING,
        *TEXTS,
    )
)


def check_unused(config: Any, names: Iterable[str], reason: str) -> None:
    """Raises ConfigError, which begins with ``reason``, if options that it makes void are given.

    Args:
        config: a dataclass; of a value that is the default nobody can tell whether it was given.
    """
    defaults = {field.name: field.default for field in fields(config)}
    given = [name for name in names if getattr(config, name) != defaults[name]]
    if given:
        raise ConfigError(f"{reason}; leave {', '.join(given)} out", given[0])


def learning_rate(config: TrainingConfig, step: int, seconds: float) -> float:
    """The rate of step ``step`` (from 0), ``seconds`` into the run: warm up, hold, fall linearly.

    Progress is the larger of the shares of steps and of time that are used, so that a run bounded
    by time ends at the final rate whatever the machine's speed.
    """
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    done = run_progress(config, step, seconds)
    if done <= config.decay_start or config.decay_start >= 1.0:
        return config.learning_rate * warm
    fallen = min(1.0, (done - config.decay_start) / (1.0 - config.decay_start))
    low = config.final_lr_fraction
    return config.learning_rate * warm * (1.0 - fallen * (1.0 - low))


def run_progress(config: TrainingConfig, step: int, seconds: float) -> float:
    """Share of the run that is done, 0 to 1 and beyond; 1 ends it."""
    by_steps = step / config.steps if config.steps else 0.0
    by_time = seconds / (config.max_minutes * 60.0) if config.max_minutes else 0.0
    return max(by_steps, by_time)


CUTS = ("drop_layers", "mlp_width")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder trained from scratch, of the form of Qwen3, Qwen3 MoE or Qwen3.5."""

    num_layers: int = setting(8, "Number of decoder layers, for a model from scratch.")
    hidden_size: int = setting(320, "Hidden size, for a model from scratch.")
    num_heads: int = setting(5, "Number of query heads.")
    num_kv_heads: int = setting(1, "Number of key and value heads.")
    head_dim: int = setting(64, "Width of each head.")
    intermediate_size: int = setting(
        864, "Width of the feed-forward layers, or of each expert in a mixture."
    )
    num_experts: int = setting(
        0, "Experts per feed-forward layer, which makes it a mixture; 0 keeps it dense."
    )
    experts_per_token: int = setting(2, "Experts that each token uses.")
    layers: str = setting(
        "",
        "Kinds of layers as letters, repeated to the number of layers: d is a gated delta "
        "net, a is attention; ddda is the order of Qwen3.5. Empty means attention only.",
    )
    max_position: int = setting(2048, "Maximum context length in tokens.")
    rope_theta: float = setting(10000.0, "Base of the rotary embedding.")
    tie_embeddings: bool = setting(True, "Use the same matrix for input and output tokens.")

    def __post_init__(self) -> None:
        counts = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
        for name in (*counts, "intermediate_size"):
            if getattr(self, name) < 1:
                raise TrainingError.of(name, f"is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise TrainingError.of(
                "num_heads",
                f"is {self.num_heads}, not a multiple of num_kv_heads ({self.num_kv_heads})",
            )
        if self.head_dim % 2:
            raise TrainingError.of(
                "head_dim", f"is {self.head_dim}; rotary embedding needs an even one"
            )
        if self.max_position < 2:
            raise TrainingError.of("max_position", f"is {self.max_position}; it must be at least 2")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise TrainingError.of(
                "experts_per_token",
                f"is {self.experts_per_token}; it must be from 1 to num_experts "
                f"({self.num_experts})",
            )
        if self.layers and set(self.layers[: self.num_layers]) != {"d", "a"}:
            raise TrainingError.of(
                "layers",
                f"is {self.layers!r}; it must be letters d and a, and both must occur in the "
                f"first {self.num_layers}, as in ddda",
            )
        if self.layers and self.num_experts:
            raise TrainingError.of(
                "layers", "and num_experts cannot be used together; leave one of them out"
            )

    def mixture_keys(self, width: int) -> dict[str, Any]:
        """What a ``config.json`` says of experts of this width."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": width,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def hf_config(self, vocab_size: int, eos_token_id: int) -> dict[str, Any]:
        """The ``config.json`` of such a model."""
        kind: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        if self.num_experts:
            kind = self.mixture_keys(self.intermediate_size)
        return {
            **kind,
            "vocab_size": vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "bos_token_id": eos_token_id,
            "eos_token_id": eos_token_id,
            "use_cache": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LMTrainingConfig(TrainingConfig):
    """Options of :func:`~paceline_lab.train.lm.train_lm`, on top of those of every training."""

    init: str | None = setting(
        None,
        "Folder of a model to continue training, whose shape is kept. With `num_experts` its "
        "dense layers first become mixtures of copies; with `layers` some first become gated "
        "delta nets.",
    )
    tokenizer: str | None = setting(None, "Folder of a tokenizer; default: train one on the text.")
    vocab_size: int = setting(
        4096, "Vocabulary size of a tokenizer that is trained.", whole(260, 1 << 20)
    )
    chat_tokens: bool = setting(True, "Give that tokenizer the special tokens of a chat.")
    shape: ModelShape = setting(
        MISSING, "Sizes of a model from scratch.", default_factory=ModelShape
    )


DRAFT_SHAPE = ModelShape(
    num_layers=2, hidden_size=128, num_heads=2, num_kv_heads=1, intermediate_size=352
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrainingConfig(TrainingConfig):
    """Options of :func:`~paceline_lab.train.draft.train_draft`, on top of those of every training.

    A model to begin from has the target's vocabulary; it may be the target itself. Texts and traces
    are trained on in whole documents chosen by ``seed``, but what the target writes continues
    pieces of all.
    """

    target: str = setting(MISSING, "Folder of the target model.")
    init: str | None = setting(None, "Folder of a model to start from; default: random weights.")
    drop_layers: int = setting(
        0, "Number of layers to remove from that model first.", whole(0, 1 << 32)
    )
    mlp_width: int = setting(
        0, "Feed-forward width to cut that model to first; 0 keeps it.", whole(0, 1 << 32)
    )
    draft_vocab_size: int = setting(
        0,
        "Size of the output vocabulary, made of the most frequent tokens; 0 means all.",
        whole(0, 1 << 32),
    )
    parallel: bool = setting(
        False, "Train it to draft all tokens in one forward pass, using mask tokens."
    )
    num_speculative_tokens: int = setting(
        8, "Number of tokens that such a parallel draft drafts.", whole(1, 64)
    )
    mask_token_id: int | None = setting(
        None, "Id of its mask token; default: one that occurs in no text."
    )
    text_tokens: int = setting(
        0, "Maximum number of text tokens to train on; 0 means all.", whole(0, 1 << 32)
    )
    traces: tuple[str, ...] = setting((), "Folders written by paceline trace with this target.")
    generate_tokens: int = setting(
        0, "Number of tokens that the target writes to train on.", whole(0, 1 << 32)
    )
    generate_prompt_tokens: int = setting(
        64, "Length of the text that the target continues.", whole(1, 1 << 20)
    )
    generate_new_tokens: int = setting(192, "Length of each continuation.", whole(1, 1 << 20))
    generate_temperatures: tuple[float, ...] = setting(
        (0.0, 0.8, 1.0), "Temperatures of the continuations, in turns."
    )
    generate_batch: int = setting(64, "Number of continuations written at once.", whole(1, 1 << 20))
    eval_prompts: int = setting(
        64, "Number of held-out texts to measure acceptance on.", whole(0, 1 << 32)
    )
    eval_prompt_tokens: int = setting(
        32, "Length of the beginning of each that the target continues.", whole(1, 1 << 20)
    )
    eval_new_tokens: int = setting(96, "Length of each of these continuations.", whole(1, 1 << 20))
    shape: ModelShape = setting(
        MISSING, "Sizes of a draft from scratch.", default_factory=lambda: DRAFT_SHAPE
    )

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        if not self.parallel:
            names = ("num_speculative_tokens", "mask_token_id")
            check_unused(self, names, "a draft has mask tokens only with parallel")
        if not self.generate_temperatures:
            raise ConfigError.of("generate_temperatures", "is empty; 0 alone means greedy")
        for temperature in self.generate_temperatures:
            check_number("generate_temperatures", temperature, 0.0, 100.0, float)
        if self.shape.layers:
            raise ConfigError("hybrids are not trained as drafts; leave layers out", "layers")
        if any(self.cuts.values()) and not self.init:
            raise ConfigError(f"{', '.join(CUTS)} cut a model; name it with init", "init")

    @property
    def cuts(self) -> dict[str, int]:
        """Arguments of :func:`~paceline_lab.train.surgery.cut_model`."""
        return {name: getattr(self, name) for name in CUTS}


HEAD_KINDS = (EAGLE3, MTP, DFLASH)
TARGETS_OWN = ("taps", "draft_vocab_size", "with_embedding")
"""Options about what an MTP head takes of its target as it is."""
HEAD_FORMATS = ("speculators",)
SAID_BY_HEAD = (
    *("init", "kind", "taps", "draft_vocab_size", "num_layers", "block_size", "verifier"),
    *("with_embedding", "weights_dtype"),
)
"""Options that the files of a head answer that is trained further."""
CONTINUED_MINUTES = 10.0
"""Of such a training, where no option says when it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTrainingConfig(TrainingConfig):
    """Options of :func:`~paceline_lab.train.heads.train.train_head`, on top of every training's.

    A window is a pack of whole traces with ``seq_len`` tokens at most. With ``continue_from`` they
    are those of :func:`~paceline_lab.train.heads.continuation.continue_head`, and the head's files
    say what kind of head it is.
    """

    target: str = setting(MISSING, "Target model: folder, GGUF file or name.")
    output: str = setting(
        "",
        "Folder for the finished head and, during training, for the state to resume from; with "
        "`continue_from` it is the head's own.",
    )
    continue_from: str | None = setting(
        None,
        "Folder of a head to train further on the traces, at low priority. It is replaced only if "
        "the new head is proven better on held-out requests; the old one is kept beside it.",
    )
    traces: tuple[str, ...] = setting(
        MISSING, "Folders written by paceline trace with this target."
    )
    kind: str = setting(
        EAGLE3,
        "Kind of head: eagle3 and mtp draft one token after another, dflash drafts a block of "
        "tokens in one pass.",
        one_of(HEAD_KINDS),
    )
    taps: tuple[int, ...] = setting(
        (),
        "Layers whose inputs the head reads, in ascending order; default: the third, the "
        "middle one and the third from the end. An mtp head reads the output of the target "
        "instead.",
    )
    draft_vocab_size: int | None = setting(
        None,
        "Size of the output vocabulary, made of the most frequent tokens of the answers; "
        "default: 8192. An mtp head uses the output matrix of the target.",
        optional(whole(1, 1 << 20)),
    )
    init: str | None = setting(
        None,
        "Folder of a head to continue training, of the same kind and shape, in any precision "
        "(default: start from the last layers and the output matrix of the target).",
    )
    num_layers: int = setting(1, "Number of layers of a dflash head; the others have one.")
    block_size: int = setting(
        8, "Block size of a dflash head: the last known token and the drafted ones.", whole(2, 64)
    )
    num_steps: int = setting(
        3,
        "Depth to which chains of eagle3 and mtp are unrolled in training, each step reading "
        "the one before.",
        whole(1, 16),
    )
    step_decay: float = setting(
        0.8, "Weight of each depth relative to the one before it.", number(0.0, 1.0)
    )
    deep_share: float = setting(
        0.5,
        "Fraction of the positions whose chains continue after the first step.",
        number(0.0, 1.0),
    )
    eval_steps: int = setting(
        5,
        "Depth to which held-out acceptance is measured; for dflash within a block.",
        whole(1, 16),
    )
    features: str | None = setting(
        None,
        "Folder for the hidden states of the target, which are computed where they are "
        "missing (default: in the output folder). On a GPU the target runs alongside by "
        "default instead.",
    )
    format: str = setting(
        "speculators",
        "Format of the written folder; speculators is the only one.",
        one_of(HEAD_FORMATS),
    )
    verifier: str = setting(
        "",
        "Name under which engines that read this format find the target, such as org/name on "
        "the hub (default: as it is named here).",
    )
    with_embedding: bool = setting(
        False,
        "Also write the embedding of the target, which the speculators package reads; not for "
        "mtp heads. Other engines share the target's.",
    )
    seq_len: int = setting(1024, "Number of predictions per window.", whole(2, 1 << 20))
    batch_size: int = setting(1, "Windows per forward pass.", whole(1, 1 << 16))
    dtype: str = _precision("float32")

    def __post_init__(self) -> None:
        if self.continue_from is not None:
            self._check_continuation(self.continue_from)
        TrainingConfig.__post_init__(self)
        check_unused(self, TEXTS, "a head learns from traces alone")
        if self.kind == MTP:
            shared = "reads the target's output and shares its embedding and its output matrix"
            check_unused(self, TARGETS_OWN, f"an mtp head {shared}")
        if self.kind == DFLASH:
            check_unused(self, ("num_steps", "deep_share"), "a dflash head has no chains to unroll")
        else:
            check_unused(self, ("block_size",), f"an {self.kind} head does not draft blocks")
        check_number("num_layers", self.num_layers, 1, 16 if self.kind == DFLASH else 1)
        if not self.traces:
            raise ConfigError("traces is empty; name a folder that paceline trace wrote")

    def _check_continuation(self, head: str) -> None:
        """Raise :class:`ConfigError` for what the head says itself; say when its training ends."""
        if not head:
            raise ConfigError.of("continue_from", "is empty; name the folder of a head")
        check_unused(self, ("output", "overwrite"), "the new head takes the old one's place")
        check_unused(self, SAID_BY_HEAD, f"the files of {head} say it")
        object.__setattr__(self, "output", head)
        if not self.steps and not self.max_minutes:
            object.__setattr__(self, "max_minutes", CONTINUED_MINUTES)

    @property
    def num_columns(self) -> int:
        """Most rows of the head's own output matrix; 0 where it uses the target's."""
        return 0 if self.kind == MTP else self.draft_vocab_size or 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramTrainingConfig(TextsConfig):
    """Options of an n-gram model's training."""

    output: str = setting(MISSING, "File to write.")
    traces: tuple[str, ...] = setting(
        (), "Folders written by paceline trace, whose answers are learnt, not their prompts."
    )
    target: str | None = setting(
        None,
        "Target model, whose tokenizer reads the texts (default: with traces only, the model "
        "of the traces).",
    )
    order: int = setting(4, "Length of the longest n-grams, 2 to 5 tokens.", whole(*NGRAM_ORDERS))
    soft_labels: bool = setting(
        False, "Learn the traced probabilities of the likeliest tokens instead of only the tokens."
    )
    top_k: int = setting(
        8, "Maximum number of continuations kept per context.", whole(1, MAX_CONTINUATIONS)
    )
    max_bytes: int = setting(
        64 << 20,
        "Maximum size of the file. The least useful entries are dropped.",
        whole(1, 1 << 40),
    )
    import_uzu: str | None = setting(
        None, "Convert a model.bin of uzu or lalamo instead of training."
    )
    import_llama: str | None = setting(None, "Start from the counts of a llama.cpp lookup cache.")
    export_llama: str | None = setting(None, "Also write the counts as a llama.cpp lookup cache.")
    held_out_tokens: int = setting(
        16_384,
        "Tokens of whole texts that are held out and never learnt, a fifth of all at most.",
        whole(0, 1 << 32),
    )
    seed: int = setting(0, "Seed of the held-out split.", whole(0, (1 << 63) - 1))

    def __post_init__(self) -> None:
        if not self.output:
            raise ConfigError("output is empty; name the file of the trained model")
        check_settings(self)
        learns = bool(self.traces or self.text or self.stdlib)
        sources = [learns, self.import_uzu is not None, self.import_llama is not None]
        if sum(sources) != 1:
            raise ConfigError(
                "what is learnt comes from traces and texts, or from import_uzu, or from "
                f"import_llama; {sum(sources)} of them are given, one is needed",
                "import_uzu",
            )
        if not learns and self.target is None:
            raise ConfigError("an imported file does not name its vocabulary; name the target")
        if self.soft_labels and not self.traces:
            raise ConfigError.of("soft_labels", "are the probabilities in traces; name some")
        if self.import_uzu is not None:
            names = ("order", "top_k", "max_bytes", "held_out_tokens")
            check_unused(self, names, "import_uzu takes over a whole model")
        if self.export_llama is not None and self.import_uzu is not None:
            raise ConfigError(
                "a model.bin has no counts that export_llama could write", "export_llama"
            )
