"""The settings of each kind of training, checked on construction. Knows no model, data or tensors.

The command line reads its options and their help texts off these classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.config import MAX_THREADS
from paceline.config.speculative import MAX_CONTINUATIONS, NGRAM_ORDERS
from paceline.core.checks import check_choice, check_number
from paceline.core.errors import ConfigError, TrainingError
from paceline.models.heads import DFLASH, EAGLE3, MTP

DTYPES = ("auto", "float32", "bfloat16")
WEIGHT_DTYPES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Options that a language model's training and a draft's distillation share.

    Attributes:
        output: folder for the finished model and, during training, for the state to resume from.
        text: files and folders of training text.
        exclude: glob patterns of files to leave out, relative to their folder.
        stdlib: also train on Python's standard library, as found on this machine.
        held_out_tokens: tokens of whole documents that are held out and never trained on.
        seq_len: number of predictions per window.
        batch_size: windows per forward pass.
        grad_accumulation: forward passes per optimiser step.
        steps: number of optimiser steps; 0 leaves the end to ``max_minutes``.
        max_minutes: training time in minutes; 0 leaves the end to ``steps``. With both, the
            schedule follows whichever is further along, so that it always completes.
        learning_rate: peak learning rate.
        warmup_steps: steps of linear warm-up.
        decay_start: fraction of the run after which the learning rate falls linearly.
        final_lr_fraction: fraction of the peak learning rate at the end.
        weight_decay: weight decay of matrices; vectors have none.
        beta1, beta2: parameter of AdamW.
        grad_clip: maximum norm of the gradient.
        dtype: precision of matrix products; ``auto`` is bfloat16 on a GPU and on processors with
            instructions for it, and float32 elsewhere.
        weights_dtype: precision of the written weights; int8 applies only to linear layers.
        seed: seed of the initialisation, the order of documents and the held-out split.
        threads: number of torch threads; 0 keeps torch's default.
        device: device to train on, such as cuda; the finished files are the same everywhere.
        save_minutes: minutes between saved states; 0 saves after every step.
        eval_every: steps between held-out losses; 0 measures only at the beginning and the end.
        eval_windows: number of windows for the intermediate held-out losses; the last one uses all.
        overwrite: replace a finished model in ``output``.
        show_progress: show a progress bar on a terminal, and lines elsewhere.
        command: the exact command, for the model card.
        data_note: source and licence of the texts, for the model card.
        licence: licence of the weights as an SPDX identifier, for the model card.
    """

    output: str
    text: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    stdlib: bool = False
    held_out_tokens: int = 65_536
    seq_len: int = 512
    batch_size: int = 12
    grad_accumulation: int = 1
    steps: int = 0
    max_minutes: float = 0.0
    learning_rate: float = 1e-3
    warmup_steps: int = 40
    decay_start: float = 0.5
    final_lr_fraction: float = 0.03
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    dtype: str = "auto"
    weights_dtype: str = "bfloat16"
    seed: int = 0
    threads: int = 0
    device: str = "cpu"
    save_minutes: float = 5.0
    eval_every: int = 200
    eval_windows: int = 32
    overwrite: bool = False
    show_progress: bool = True
    command: str = ""
    data_note: str = ""
    licence: str = "unknown"

    def __post_init__(self) -> None:
        if not self.output:
            raise ConfigError("output is empty; name the folder of the trained model")
        for name, low, high in _RANGES:
            check_range(name, getattr(self, name), low, high)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("weights_dtype", self.weights_dtype, WEIGHT_DTYPES)
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


TEXTS = ("text", "exclude", "stdlib")
"""Where texts come from, which the training of heads does not read."""
_REPORTING = ("overwrite", "show_progress", "command", "data_note", "licence")
_FREE = frozenset(
    (
        "output",
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

_RANGES = (
    ("held_out_tokens", 0, 1 << 32),
    ("seq_len", 2, 1 << 20),
    ("batch_size", 1, 1 << 16),
    ("grad_accumulation", 1, 1 << 16),
    ("steps", 0, 1 << 32),
    ("max_minutes", 0.0, 1e6),
    ("learning_rate", 0.0, 10.0),
    ("warmup_steps", 0, 1 << 32),
    ("decay_start", 0.0, 1.0),
    ("final_lr_fraction", 0.0, 1.0),
    ("weight_decay", 0.0, 10.0),
    ("beta1", 0.0, 1.0),
    ("beta2", 0.0, 1.0),
    ("grad_clip", 1e-9, 1e9),
    ("seed", 0, (1 << 63) - 1),
    ("threads", 0, MAX_THREADS),
    ("save_minutes", 0.0, 1e6),
    ("eval_every", 0, 1 << 32),
    ("eval_windows", 1, 1 << 32),
)


def check_range(name: str, value: Any, low: float, high: float) -> None:
    """Raises ConfigError unless ``value`` is a number in ``[low, high]``, whole where they are."""
    check_number(name, value, low, high, int if isinstance(low, int) else float)


def check_unused(config: Any, names: Iterable[str], reason: str) -> None:
    """Raises ConfigError, which begins with ``reason``, if options that it makes void are given.

    Args:
        config: a dataclass; of a value that is the default nobody can tell whether it was given.
    """
    defaults = {field.name: field.default for field in fields(config)}
    given = [name for name in names if getattr(config, name) != defaults[name]]
    if given:
        raise ConfigError(f"{reason}; leave {', '.join(given)} out")


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
    """Sizes of a decoder that is trained from scratch, of Qwen3's form, Qwen3 MoE's or Qwen3.5's.

    Attributes:
        num_layers: number of decoder layers, for a model from scratch.
        hidden_size: hidden size, for a model from scratch.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads.
        head_dim: width of each head.
        intermediate_size: width of the feed-forward layers, or of each expert in a mixture.
        num_experts: experts per feed-forward layer, which makes it a mixture; 0 keeps it dense.
        experts_per_token: experts that each token uses.
        layers: kinds of layers as letters, repeated to the number of layers: d is a gated delta
            net, a is attention; ddda is the order of Qwen3.5. Empty means attention only.
        max_position: maximum context length in tokens.
        rope_theta: base of the rotary embedding.
        tie_embeddings: use the same matrix for input and output tokens.
    """

    num_layers: int = 8
    hidden_size: int = 320
    num_heads: int = 5
    num_kv_heads: int = 1
    head_dim: int = 64
    intermediate_size: int = 864
    num_experts: int = 0
    experts_per_token: int = 2
    layers: str = ""
    max_position: int = 2048
    rope_theta: float = 10000.0
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise TrainingError(
                f"num_heads is {self.num_heads}, not a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise TrainingError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        if self.intermediate_size < 1 or self.max_position < 2:
            raise TrainingError("intermediate_size must be at least 1, max_position at least 2")

        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise TrainingError(
                f"experts_per_token is {self.experts_per_token}; it must be from 1 to num_experts "
                f"({self.num_experts})"
            )
        if self.layers and set(self.layers[: self.num_layers]) != {"d", "a"}:
            raise TrainingError(
                f"layers is {self.layers!r}; it must be letters d and a, and both must occur in "
                f"the first {self.num_layers}, as in ddda"
            )
        if self.layers and self.num_experts:
            raise TrainingError(
                "layers and num_experts cannot be used together; leave one of them out"
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
    """Options of :func:`~paceline_lab.train.lm.train_lm`, on top of those of every training.

    Attributes:
        init: folder of a model to continue training, whose shape is kept. With num_experts its
            dense layers first become mixtures of copies; with layers some first become gated delta
            nets.
        tokenizer: folder of a tokenizer; default: train one on the text.
        vocab_size: vocabulary size of a tokenizer that is trained.
        chat_tokens: give that tokenizer the special tokens of a chat.
        shape: sizes of a model from scratch.
    """

    init: str | None = None
    tokenizer: str | None = None
    vocab_size: int = 4096
    chat_tokens: bool = True
    shape: ModelShape = field(default_factory=ModelShape)

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        check_range("vocab_size", self.vocab_size, 260, 1 << 20)


DRAFT_SHAPE = ModelShape(
    num_layers=2, hidden_size=128, num_heads=2, num_kv_heads=1, intermediate_size=352
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrainingConfig(TrainingConfig):
    """Options of :func:`~paceline_lab.train.draft.train_draft`, on top of those of every training.

    A model to begin from has the target's vocabulary; it may be the target itself. Texts and traces
    are trained on in whole documents chosen by ``seed``, but what the target writes continues
    pieces of all.

    Attributes:
        target: folder of the target model.
        init: folder of a model to start from; default: random weights.
        drop_layers: number of layers to remove from that model first.
        mlp_width: feed-forward width to cut that model to first; 0 keeps it.
        draft_vocab_size: size of the output vocabulary, made of the most frequent tokens; 0 means
            all.
        parallel: train it to draft all tokens in one forward pass, using mask tokens.
        num_speculative_tokens: number of tokens that such a parallel draft drafts.
        mask_token_id: id of its mask token; default: one that occurs in no text.
        text_tokens: maximum number of text tokens to train on; 0 means all.
        traces: folders written by paceline trace with this target.
        generate_tokens: number of tokens that the target writes to train on.
        generate_prompt_tokens: length of the text that the target continues.
        generate_new_tokens: length of each continuation.
        generate_temperatures: temperatures of the continuations, in turns.
        generate_batch: number of continuations written at once.
        eval_prompts: number of held-out texts to measure acceptance on.
        eval_prompt_tokens: length of the beginning of each that the target continues.
        eval_new_tokens: length of each of these continuations.
        shape: sizes of a draft from scratch.
    """

    target: str
    init: str | None = None
    drop_layers: int = 0
    mlp_width: int = 0
    draft_vocab_size: int = 0
    parallel: bool = False
    num_speculative_tokens: int = 8
    mask_token_id: int | None = None
    text_tokens: int = 0
    traces: tuple[str, ...] = ()
    generate_tokens: int = 0
    generate_prompt_tokens: int = 64
    generate_new_tokens: int = 192
    generate_temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    generate_batch: int = 64
    eval_prompts: int = 64
    eval_prompt_tokens: int = 32
    eval_new_tokens: int = 96
    shape: ModelShape = field(default_factory=lambda: DRAFT_SHAPE)

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        for name in (*CUTS, "draft_vocab_size", "text_tokens", "generate_tokens", "eval_prompts"):
            check_range(name, getattr(self, name), 0, 1 << 32)
        for name in ("generate_prompt_tokens", "generate_new_tokens", "generate_batch"):
            check_range(name, getattr(self, name), 1, 1 << 20)
        for name in ("eval_prompt_tokens", "eval_new_tokens"):
            check_range(name, getattr(self, name), 1, 1 << 20)
        check_range("num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        if not self.parallel:
            names = ("num_speculative_tokens", "mask_token_id")
            check_unused(self, names, "a draft has mask tokens only with parallel")
        if not self.generate_temperatures:
            raise ConfigError("generate_temperatures is empty; 0 alone means greedy")
        for temperature in self.generate_temperatures:
            check_range("generate_temperatures", temperature, 0.0, 100.0)
        if self.shape.layers:
            raise ConfigError("hybrids are not trained as drafts; leave layers out")
        if any(self.cuts.values()) and not self.init:
            raise ConfigError(f"{', '.join(CUTS)} cut a model; name it with init")

    @property
    def cuts(self) -> dict[str, int]:
        """Arguments of :func:`~paceline_lab.train.surgery.cut_model`."""
        return {name: getattr(self, name) for name in CUTS}


HEAD_KINDS = (EAGLE3, MTP, DFLASH)
TARGETS_OWN = ("taps", "draft_vocab_size", "with_embedding")
"""Options about what an MTP head takes of its target as it is."""
HEAD_FORMATS = ("speculators",)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTrainingConfig(TrainingConfig):
    """Options of :func:`~paceline_lab.train.heads.train.train_head`, on top of every training's.

    A window is a pack of whole traces with ``seq_len`` tokens at most.

    Attributes:
        kind: kind of head: eagle3 and mtp draft one token after another, dflash drafts a block of
            tokens in one pass.
        target: target model: folder, GGUF file or name.
        traces: folders written by paceline trace with this target.
        taps: layers whose inputs the head reads, in ascending order; default: the third, the middle
            one and the third from the end. An mtp head reads the output of the target instead.
        draft_vocab_size: size of the output vocabulary, made of the most frequent tokens of the
            answers; default: 8192. An mtp head uses the output matrix of the target.
        init: folder of a head to continue training, of the same kind and shape, in any precision
            (default: start from the last layers and the output matrix of the target).
        num_layers: number of layers of a dflash head; the others have one.
        block_size: block size of a dflash head: the last known token and the drafted ones.
        num_steps: depth to which chains of eagle3 and mtp are unrolled in training, each step
            reading the one before.
        step_decay: weight of each depth relative to the one before it.
        deep_share: fraction of the positions whose chains continue after the first step.
        eval_steps: depth to which held-out acceptance is measured; for dflash within a block.
        features: folder for the hidden states of the target, which are computed where they are
            missing (default: in the output folder). On a GPU the target runs alongside by default
            instead.
        format: format of the written folder; speculators is the only one.
        verifier: name under which engines that read this format find the target, such as org/name
            on the hub (default: as it is named here).
        with_embedding: also write the embedding of the target, which the speculators package reads;
            not for mtp heads. Other engines share the target's.
    """

    target: str
    traces: tuple[str, ...]
    kind: str = EAGLE3
    taps: tuple[int, ...] = ()
    draft_vocab_size: int | None = None
    init: str | None = None
    num_layers: int = 1
    block_size: int = 8
    num_steps: int = 3
    step_decay: float = 0.8
    deep_share: float = 0.5
    eval_steps: int = 5
    features: str | None = None
    format: str = "speculators"
    verifier: str = ""
    with_embedding: bool = False
    seq_len: int = 1024
    batch_size: int = 1
    dtype: str = "float32"
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        check_choice("kind", self.kind, HEAD_KINDS)
        check_choice("format", self.format, HEAD_FORMATS)
        if self.draft_vocab_size is not None:
            check_range("draft_vocab_size", self.draft_vocab_size, 1, 1 << 20)
        check_unused(self, TEXTS, "a head learns from traces alone")
        if self.kind == MTP:
            shared = "reads the target's output and shares its embedding and its output matrix"
            check_unused(self, TARGETS_OWN, f"an mtp head {shared}")
        if self.kind == DFLASH:
            check_unused(self, ("num_steps", "deep_share"), "a dflash head has no chains to unroll")
        else:
            check_unused(self, ("block_size",), f"an {self.kind} head does not draft blocks")
        for name in ("num_steps", "eval_steps"):
            check_range(name, getattr(self, name), 1, 16)
        check_range("block_size", self.block_size, 2, 64)
        check_range("num_layers", self.num_layers, 1, 16 if self.kind == DFLASH else 1)
        for name in ("step_decay", "deep_share"):
            check_range(name, getattr(self, name), 0.0, 1.0)
        if not self.traces:
            raise ConfigError("traces is empty; name a folder that paceline trace wrote")

    @property
    def num_columns(self) -> int:
        """Most rows of the head's own output matrix; 0 where it uses the target's."""
        return 0 if self.kind == MTP else self.draft_vocab_size or 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramTrainingConfig:
    """Options of an n-gram model's training.

    Attributes:
        output: file to write.
        traces: folders written by paceline trace, whose answers are learnt, not their prompts.
        text: files or folders of text to learn.
        exclude: glob patterns of files to leave out, relative to their folder.
        stdlib: also learn Python's standard library, as found on this machine.
        target: target model, whose tokenizer reads the texts (default: with traces only, the model
            of the traces).
        order: length of the longest n-grams, 2 to 5 tokens.
        soft_labels: learn the traced probabilities of the likeliest tokens instead of only the
            tokens.
        top_k: maximum number of continuations kept per context.
        max_bytes: maximum size of the file. The least useful entries are dropped.
        import_uzu: convert a model.bin of uzu or lalamo instead of training.
        import_llama: start from the counts of a llama.cpp lookup cache.
        export_llama: also write the counts as a llama.cpp lookup cache.
        held_out_tokens: tokens of whole texts that are held out and never learnt, a fifth of all at
            most.
        seed: seed of the held-out split.
    """

    output: str
    traces: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    stdlib: bool = False
    target: str | None = None
    order: int = 4
    soft_labels: bool = False
    top_k: int = 8
    max_bytes: int = 64 << 20
    import_uzu: str | None = None
    import_llama: str | None = None
    export_llama: str | None = None
    held_out_tokens: int = 16_384
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.output:
            raise ConfigError("output is empty; name the file of the trained model")
        check_range("order", self.order, *NGRAM_ORDERS)
        check_range("top_k", self.top_k, 1, MAX_CONTINUATIONS)
        check_range("max_bytes", self.max_bytes, 1, 1 << 40)
        check_range("held_out_tokens", self.held_out_tokens, 0, 1 << 32)
        check_range("seed", self.seed, 0, (1 << 63) - 1)
        learns = bool(self.traces or self.text or self.stdlib)
        sources = [learns, self.import_uzu is not None, self.import_llama is not None]
        if sum(sources) != 1:
            raise ConfigError(
                "what is learnt comes from traces and texts, or from import_uzu, or from "
                f"import_llama; {sum(sources)} of them are given, one is needed"
            )
        if not learns and self.target is None:
            raise ConfigError("an imported file does not name its vocabulary; name the target")
        if self.soft_labels and not self.traces:
            raise ConfigError("soft_labels are the probabilities in traces; name some")
        if self.import_uzu is not None:
            names = ("order", "top_k", "max_bytes", "held_out_tokens")
            check_unused(self, names, "import_uzu takes over a whole model")
        if self.export_llama is not None and self.import_uzu is not None:
            raise ConfigError("a model.bin has no counts that export_llama could write")
