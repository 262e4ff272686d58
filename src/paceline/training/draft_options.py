"""Options and report of :func:`paceline.training.draft.train_draft`. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigError
from paceline.training.acceptance import Acceptance
from paceline.training.losses import DISTILLATION
from paceline.training.model_files import ModelShape
from paceline.training.options import TrainingConfig, check_choice, check_range
from paceline.training.parallel import ChainAcceptance

CUTS = ("drop_layers", "mlp_width", "drop_heads", "hidden_width")
DRAFT_SHAPE = ModelShape(
    num_layers=2, hidden_size=128, num_heads=2, num_kv_heads=1, intermediate_size=352
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrainingConfig(TrainingConfig):
    """Options of :func:`train_draft`, on top of those of every training.

    Attributes:
        target: folder of the model that the draft will draft for.
        init: folder of a model to begin from, with the target's vocabulary (the target itself
            too); None begins from random weights in ``shape``.
        drop_layers, mlp_width, drop_heads, hidden_width: what is cut out of ``init`` first; see
            :func:`~paceline.training.surgery.cut_model`.
        draft_vocab_size: tokens of the draft's head: the special ones, and the most frequent in
            what it is trained on; 0 means all.
        shape: sizes of a draft from scratch.
        loss: ``kl`` (to the target's distribution), ``tv`` (the share that rejection sampling would
            refuse) or ``ce`` (of the target's greedy choice).
        parallel: train a draft that drafts all its tokens in one forward, by mask tokens.
        num_speculative_tokens: how many these are.
        mask_token_id: the mask token; None keeps that of ``init`` or chooses one that no text
            contains.
        text_tokens: train on at most this many tokens of the texts and traces, whole documents
            chosen by ``seed``; 0 means all. Prompts for ``generate_tokens`` come from all.
        traces: folders that ``paceline trace`` wrote with this target.
        generate_tokens: tokens that the target itself writes to train on, after pieces of the
            training texts; 0 writes none.
        generate_prompt_tokens, generate_new_tokens: lengths of such a piece and of what follows.
        generate_temperatures: take turns.
        generate_batch: sequences that are written at once.
        eval_prompts, eval_prompt_tokens, eval_new_tokens: held-out texts whose beginnings the
            target continues to measure acceptance, and the lengths.
    """

    target: str
    init: str | None = None
    drop_layers: int = 0
    mlp_width: int = 0
    drop_heads: int = 0
    hidden_width: int = 0
    draft_vocab_size: int = 0
    shape: ModelShape = field(default_factory=lambda: DRAFT_SHAPE)
    loss: str = "kl"
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

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        check_choice("loss", self.loss, tuple(DISTILLATION))
        for name in (*CUTS, "draft_vocab_size", "text_tokens", "generate_tokens", "eval_prompts"):
            check_range(name, getattr(self, name), 0, 1 << 32)
        for name in ("generate_prompt_tokens", "generate_new_tokens", "generate_batch"):
            check_range(name, getattr(self, name), 1, 1 << 20)
        for name in ("eval_prompt_tokens", "eval_new_tokens"):
            check_range(name, getattr(self, name), 1, 1 << 20)
        check_range("num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        if not self.generate_temperatures:
            raise ConfigError("generate_temperatures is empty; 0 alone means greedy")
        for temperature in self.generate_temperatures:
            check_range("generate_temperatures", temperature, 0.0, 100.0)
        if any(self.cuts.values()) and not self.init:
            raise ConfigError(f"{', '.join(CUTS)} cut a model; name it with init")

    @property
    def cuts(self) -> dict[str, int]:
        """Arguments of :func:`~paceline.training.surgery.cut_model`."""
        return {name: getattr(self, name) for name in CUTS}


@dataclass(frozen=True, slots=True)
class DraftTrainingResult:
    """What a finished distillation reports; acceptances are None without held-out texts.

    ``chains`` is that of a parallel draft, None for others.
    """

    folder: Path
    num_params: int
    steps: int
    seconds: float
    train_tokens: int
    before: Acceptance | None
    after: Acceptance | None
    chains: ChainAcceptance | None = None
