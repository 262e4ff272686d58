"""Model cards: what a trained model is, from what, and how to make it again. Knows no tensors."""

from __future__ import annotations

from pathlib import Path

from paceline.models.config import ModelConfig
from paceline.training.options import TrainingConfig


def shape_line(config: ModelConfig, num_params: int) -> str:
    tied = "tied" if config.tie_embeddings else "separate"
    return (
        f"{num_params / 1e6:.2f} M ({config.num_layers} layers, d {config.hidden_size}, "
        f"{config.num_heads} heads / {config.num_kv_heads} KV heads of {config.head_dim}, "
        f"feed-forward {config.intermediate_size}, vocabulary {config.vocab_size}, "
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
