"""The report and the card of a distilled draft: from what, how, and how often it is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.training.acceptance import Acceptance
from paceline.training.card import optimiser_line, render_card, shape_line, sources_line
from paceline.training.configs import DraftTrainingConfig
from paceline.training.model_files import TrainableModel
from paceline.training.parallel import ChainAcceptance


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
    """A finished distillation's card.

    Args:
        text_tokens, generated_tokens: trained on, of texts and traces and of the target's own.
    """
    cut = f", {config.drop_layers} layers dropped" if config.drop_layers else ""
    cut += f", feed-forward cut to {config.mlp_width}" if config.mlp_width else ""
    cut += f", {config.drop_heads} heads dropped" if config.drop_heads else ""
    cut += f", width cut to {config.hidden_width}" if config.hidden_width else ""
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
        ("training", f"{config.loss} against the target; {optimiser_line(config)}"),
        ("steps", f"{result.steps:,} in {result.seconds / 60:.0f} minutes"),
        ("held-out acceptance before", str(result.before)),
        ("held-out acceptance after", str(result.after)),
        *([("held-out greedy drafts", str(result.chains))] if result.chains else []),
        ("licence", config.licence),
    ]
    return render_card(Path(config.output).name, config.licence, rows, config.command)
