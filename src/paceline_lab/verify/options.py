"""The options of ``paceline verify``."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cli.options import (
    JSON_HELP,
    ChatOptions,
    EngineOptions,
    PromptOptions,
    SamplingOptions,
    SpeculationOptions,
    option,
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class IdentityOptions:
    """What is compared, and what passes."""

    num_tokens: int | None = option(
        None,
        "Continue until this many tokens are compared, with prompts cut in new places and all "
        "sampling methods and several draft shapes mixed in each batch.",
        min=1,
    )
    max_regret: float | None = option(
        None, "Largest regret that passes where identity is not promised (default: 0.5).", min=0.0
    )
    json: bool = option(False, JSON_HELP)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QualityOptions:
    """What arithmetic is measured, and on what."""

    quality: bool = option(False, "Measure the arithmetic instead, as KL divergence from float32.")
    text: str | None = option(
        None, "With --quality: text file to score (default: the embedded prompts)."
    )
    dtypes: str | None = option(
        None, "With --quality: precisions to measure, separated by commas (default: all)."
    )
    llama: str | None = option(
        None,
        "With --quality: a Python interpreter that has llama-cpp-python or xllamacpp. Adds rows "
        "for llama.cpp, on the same GGUF file or on the folder's weights as Q8_0 and Q4_0.",
    )
    llama_kv_type: str | None = option(
        None,
        "With --llama: precision of llama.cpp's KV cache, f16 or f32; f32 turns its flash "
        "attention off (default: f16).",
    )
    text_tokens: int | None = option(
        None, "With --quality: number of tokens to score (default: 8192).", min=1
    )
    window: int | None = option(None, "With --quality: tokens per window (default: 512).", min=2)
    stride: int | None = option(
        None,
        "With --quality: tokens scored per window; the rest is context (default: half the window).",
        min=1,
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VerifyOptions(
    EngineOptions,
    QualityOptions,
    IdentityOptions,
    SpeculationOptions,
    SamplingOptions,
    ChatOptions,
    PromptOptions,
):
    """Options of ``paceline verify``."""

    planner: str = option(
        "fixed",
        "Which drafted tokens are checked: fixed checks as many as the limits allow, auto only "
        "those that pay.",
    )
