"""The card of a distilled draft: from what, how, and how often it is accepted. Knows no tensors."""

from __future__ import annotations

from pathlib import Path

from paceline.training.card import optimiser_line, render_card, shape_line, sources_line
from paceline.training.draft_options import DraftTrainingConfig, DraftTrainingResult
from paceline.training.model_files import TrainableModel


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
