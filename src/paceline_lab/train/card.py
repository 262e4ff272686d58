"""Model cards: what a trained model is, from what, and how to make it again. Knows no tensors.

Of a distilled draft also its report, and how often it is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.models.config import ModelConfig
from paceline_lab.train.acceptance import Acceptance, DepthAcceptance
from paceline_lab.train.configs import DraftTrainingConfig, HeadTrainingConfig, TrainingConfig
from paceline_lab.train.model_files import TrainableModel
from paceline_lab.train.parallel import ChainAcceptance


def shape_line(config: ModelConfig, num_params: int) -> str:
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


def optimiser_line(config: TrainingConfig) -> str:
    return (
        f"AdamW ({config.beta1}, {config.beta2}), weight decay {config.weight_decay}, peak "
        f"{config.learning_rate:g}, {config.warmup_steps} steps of warm-up, constant to "
        f"{config.decay_start:.0%}, then linear to {config.final_lr_fraction:.0%} of the peak; "
        f"{config.windows_per_step} x {config.seq_len} tokens a step"
    )


def sources_line(config: TrainingConfig) -> str:
    if config.data_note:
        return config.data_note
    names = [Path(text).name for text in config.text]
    parts = [*names, *(["Python's standard library, without tests"] if config.stdlib else [])]
    return ", ".join(parts)


def render_card(title: str, licence: str, rows: list[tuple[str, str]], command: str) -> str:
    """A card with a front matter, a table of facts and the command that made the model."""
    lines = ["---", f"license: {licence.lower()}", "pipeline_tag: text-generation", "---", ""]
    lines += [f"# {title}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value.replace('|', '/')} |" for name, value in rows]
    if command:
        lines += ["", "Made by:", "", "```", command, "```"]
    return "\n".join(lines) + "\n"


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


def draft_card(
    config: DraftTrainingConfig,
    result: DraftTrainingResult,
    model: TrainableModel,
    text_tokens: int,
    generated_tokens: int,
) -> str:
    """A finished distillation's card; both counts are of tokens that were trained on."""
    cut = f", {config.drop_layers} layers dropped" if config.drop_layers else ""
    cut += f", feed-forward cut to {config.mlp_width}" if config.mlp_width else ""
    cut += f", head cut to {config.draft_vocab_size} tokens" if config.draft_vocab_size else ""
    rows = [
        ("drafts for", Path(config.target).name),
        ("parameters", shape_line(model.config, model.num_params)),
        ("trained on", sources_line(config)),
        (
            "tokens",
            f"{text_tokens:,} of text and traces, {generated_tokens:,} written by the target; "
            f"{result.train_tokens:,} read with repetitions",
        ),
        ("begun from", (Path(config.init).name if config.init else "random weights") + cut),
        ("training", f"KL divergence from the target; {optimiser_line(config)}"),
        ("steps", f"{result.steps:,} in {result.seconds / 60:.0f} minutes"),
        ("held-out acceptance before", str(result.before)),
        ("held-out acceptance after", str(result.after)),
        *([("held-out greedy drafts", str(result.chains))] if result.chains else []),
        ("licence", config.licence),
    ]
    return render_card(Path(config.output).name, config.licence, rows, config.command)


BEGUN_FROM_TARGET = "the target's last layers and output matrix"


@dataclass(frozen=True, slots=True)
class HeadTrainingResult:
    """What a finished head's training reports; acceptances are None where nothing is held out."""

    folder: Path
    num_params: int
    steps: int
    seconds: float
    train_tokens: int
    before: DepthAcceptance | None
    after: DepthAcceptance | None


def head_card(
    config: HeadTrainingConfig,
    result: HeadTrainingResult,
    layers: ModelConfig,
    recipe: str,
    answer_tokens: int,
) -> str:
    """A finished head's card."""
    most = f"{config.num_columns:,} tokens at most, the most frequent of the answers"
    rows = [
        ("drafts for", Path(config.target).name),
        ("kind", config.kind),
        ("parameters", shape_line(layers, result.num_params)),
        ("output", most if config.num_columns else "the target's"),
        ("trained on", config.data_note or ", ".join(Path(t).name for t in config.traces)),
        (
            "tokens",
            f"{answer_tokens:,} of the target's answers; at most {result.train_tokens:,} read with "
            "prompts and repetitions",
        ),
        ("begun from", Path(config.init).name if config.init else BEGUN_FROM_TARGET),
        (
            "training",
            f"cross-entropy with the target's distribution, {recipe}; {optimiser_line(config)}",
        ),
        ("seed", str(config.seed)),
        ("steps", f"{result.steps:,} in {result.seconds / 60:.0f} minutes"),
        ("held-out acceptance by depth, before", str(result.before)),
        ("held-out acceptance by depth, after", str(result.after)),
        ("licence", config.licence),
    ]
    return render_card(Path(config.output).name, config.licence, rows, config.command)
