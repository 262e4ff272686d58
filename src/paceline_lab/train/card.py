"""Model cards: what a trained model is, from what, and how to make it again. Knows no tensors.

Of drafts and heads also what a finished training reports: how often they would be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.models.config import ModelConfig
from paceline_lab.train.acceptance import Acceptance, DepthAcceptance
from paceline_lab.train.configs import DraftTrainingConfig, HeadTrainingConfig, TrainingConfig
from paceline_lab.train.parallel import ChainAcceptance

Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What every finished training reports.

    Attributes:
        folder: the written model.
        steps, seconds: what was spent, over all starts.
        train_tokens: tokens read, repetitions counted.
    """

    folder: Path
    num_params: int
    steps: int
    seconds: float
    train_tokens: int

    @property
    def figures(self) -> Rows:
        """What was measured on held-out data, by name."""
        return ()


@dataclass(frozen=True, slots=True)
class DraftTrainingResult(TrainingResult):
    """Of a distillation; acceptances are None without held-out texts.

    ``chains`` is that of a parallel draft, None for others.
    """

    before: Acceptance | None
    after: Acceptance | None
    chains: ChainAcceptance | None = None

    @property
    def figures(self) -> Rows:
        named = {
            "acceptance before": self.before,
            "acceptance after": self.after,
            "greedy drafts": self.chains,
        }
        return [(f"held-out {name}", str(x)) for name, x in named.items() if x is not None]


@dataclass(frozen=True, slots=True)
class ReplayedGain:
    """What a new head gains over an old one on held-out requests that the engine answered.

    Attributes:
        prompts, requests, tokens: that were compared; answers are the same with both heads.
        old_steps, new_steps: of the engine, which verified chains of the head in each.
        low, high: the middle 95 % of ``old_steps / new_steps``, bootstrapped over prompts.
    """

    prompts: int
    requests: int
    tokens: int
    old_steps: int
    new_steps: int
    low: float
    high: float

    @property
    def gain(self) -> float:
        """Tokens per step with the new head over those with the old one."""
        return self.old_steps / self.new_steps

    @property
    def is_proven(self) -> bool:
        return self.low > 1.0

    def __str__(self) -> str:
        return (
            f"{self.tokens / self.new_steps:.3f} tokens per step, "
            f"{self.tokens / self.old_steps:.3f} with the old head: {self.gain:.3f} times as many "
            f"(95 %: {self.low:.3f} to {self.high:.3f}); {self.requests} held-out requests, "
            f"{self.tokens} tokens"
        )


@dataclass(frozen=True, slots=True)
class HeadTrainingResult(TrainingResult):
    """Of a head's training; acceptances are None where nothing is held out.

    ``gain`` is that over the head that was trained further, None of others.
    """

    before: DepthAcceptance | None
    after: DepthAcceptance | None
    gain: ReplayedGain | None = None

    @property
    def figures(self) -> Rows:
        named = {"before": self.before, "after": self.after}
        name = "held-out acceptance by depth,"
        rows = [(f"{name} {when}", str(x)) for when, x in named.items() if x is not None]
        return rows + ([("replayed", str(self.gain))] if self.gain is not None else [])


def training_card(
    config: TrainingConfig,
    result: TrainingResult,
    shape: ModelConfig,
    *,
    trained_on: str,
    tokens: str,
    begun_from: str,
    training: str,
    more: Rows = (),
) -> str:
    """A front matter, a table of facts and the command that made the model.

    Args:
        shape: of the model, or of a head's layers.
        tokens: how many were trained on.
        training: what is minimised, before how.
        more: facts that come first.
    """
    rows = [
        *more,
        ("parameters", _shape_line(shape, result.num_params)),
        ("trained on", config.data_note or trained_on),
        ("tokens", tokens),
        ("begun from", begun_from),
        ("training", f"{training}; {_optimiser_line(config)}"),
        ("seed", str(config.seed)),
        ("steps", f"{result.steps:,} in {result.seconds / 60:.0f} minutes"),
        *result.figures,
        ("licence", config.licence),
    ]
    lines = ["---", f"license: {config.licence.lower()}", "pipeline_tag: text-generation", "---"]
    lines += ["", f"# {Path(config.output).name}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value.replace('|', '/')} |" for name, value in rows]
    if config.command:
        lines += ["", "Made by:", "", "```", config.command, "```"]
    return "\n".join(lines) + "\n"


def _shape_line(config: ModelConfig, num_params: int) -> str:
    tied = "tied" if config.tie_embeddings else "separate"
    mixture = ""
    experts = config.mlp.experts
    if experts:
        mixture = f" in each of {experts.number} experts, {experts.per_token} a token"
    return (
        f"{num_params / 1e6:.2f} M ({config.num_layers} layers, d {config.hidden_size}, "
        f"{config.num_heads} heads / {config.num_kv_heads} KV heads of {config.head_dim}, "
        f"feed-forward {config.intermediate_size}{mixture}, vocabulary {config.vocab_size}, "
        f"{tied} embeddings)"
    )


def _optimiser_line(config: TrainingConfig) -> str:
    return (
        f"AdamW ({config.beta1}, {config.beta2}), weight decay {config.weight_decay}, peak "
        f"{config.learning_rate:g}, {config.warmup_steps} steps of warm-up, constant to "
        f"{config.decay_start:.0%}, then linear to {config.final_lr_fraction:.0%} of the peak; "
        f"{config.windows_per_step} x {config.seq_len} tokens a step"
    )


def texts_of(config: TrainingConfig) -> str:
    """The names of what was read."""
    library = ["Python's standard library, without tests"] if config.stdlib else []
    return ", ".join([*(Path(text).name for text in config.text), *library])


def draft_card(
    config: DraftTrainingConfig,
    result: DraftTrainingResult,
    shape: ModelConfig,
    text_tokens: int,
    generated_tokens: int,
) -> str:
    """A finished distillation's card; both counts are of tokens that were trained on."""
    cut = f", {config.drop_layers} layers dropped" if config.drop_layers else ""
    cut += f", feed-forward cut to {config.mlp_width}" if config.mlp_width else ""
    cut += f", head cut to {config.draft_vocab_size} tokens" if config.draft_vocab_size else ""
    return training_card(
        config,
        result,
        shape,
        trained_on=texts_of(config),
        tokens=f"{text_tokens:,} of text and traces, {generated_tokens:,} written by the target; "
        f"{result.train_tokens:,} read with repetitions",
        begun_from=(Path(config.init).name if config.init else "random weights") + cut,
        training="KL divergence from the target",
        more=[("drafts for", Path(config.target).name)],
    )


def head_card(
    config: HeadTrainingConfig,
    result: HeadTrainingResult,
    layers: ModelConfig,
    recipe: str,
    answer_tokens: int,
) -> str:
    """A finished head's card."""
    most = f"{config.num_columns:,} tokens at most, the most frequent of the answers"
    return training_card(
        config,
        result,
        layers,
        trained_on=", ".join(Path(folder).name for folder in config.traces),
        tokens=f"{answer_tokens:,} of the target's answers; at most {result.train_tokens:,} read "
        "with prompts and repetitions",
        begun_from=Path(config.init).name if config.init else BEGUN_FROM_TARGET,
        training=f"cross-entropy with the target's distribution, {recipe}",
        more=[
            ("drafts for", Path(config.target).name),
            ("kind", config.kind),
            ("output", most if config.num_columns else "the target's"),
        ],
    )


BEGUN_FROM_TARGET = "the target's last layers and output matrix"
