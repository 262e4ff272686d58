"""The options of ``paceline verify``, those of its two halves beside those shared with run.

Knows no model and imports nothing slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.commands.options import (
    EngineOptions,
    PromptOptions,
    SamplingOptions,
    SpeculationOptions,
    option,
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class IdentityOptions:
    """What is compared, and what passes."""

    num_tokens: Annotated[
        int | None,
        option(
            "--num-tokens",
            min=1,
            help="Go on until so many tokens are compared: prompts cut anew, all ways of "
            "sampling, drafts of several shapes, mixed in each batch.",
        ),
    ] = None
    max_regret: Annotated[
        float | None,
        option(
            "--max-regret",
            min=0.0,
            help="Largest regret that passes where identity is not promised (default: 0.5).",
        ),
    ] = None
    json: Annotated[bool, option("--json", help="End stdout with a line of JSON.")] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QualityOptions:
    """What arithmetic is measured, and on what."""

    quality: Annotated[
        bool,
        option("--quality", help="Measure the arithmetic instead: KL from float32."),
    ] = False
    text: Annotated[
        str | None,
        option("--text", help="With --quality: a text file (default: the embedded prompts)."),
    ] = None
    dtypes: Annotated[
        str | None,
        option("--dtypes", help="With --quality: a list with commas (default: all there are)."),
    ] = None
    llama: Annotated[
        str | None,
        option(
            "--llama",
            help="With --quality: a Python with llama-cpp-python or xllamacpp. llama.cpp is then a "
            "row, on the same GGUF file, or on a folder's weights as Q8_0 and Q4_0.",
        ),
    ] = None
    llama_kv_type: Annotated[
        str | None,
        option(
            "--llama-kv-type",
            help="With --llama: what llama.cpp keeps keys and values in: f16, or f32 without its "
            "flash attention (default: f16).",
        ),
    ] = None
    text_tokens: Annotated[
        int | None,
        option("--text-tokens", min=1, help="With --quality: tokens to score (default: 8192)."),
    ] = None
    window: Annotated[
        int | None,
        option("--window", min=2, help="With --quality: tokens of a window (default: 512)."),
    ] = None
    stride: Annotated[
        int | None,
        option(
            "--stride",
            min=1,
            help="With --quality: tokens scored per window (default: half the window); the rest "
            "are context.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VerifyOptions(
    EngineOptions,
    QualityOptions,
    IdentityOptions,
    SpeculationOptions,
    SamplingOptions,
    PromptOptions,
):
    """Options of ``paceline verify``."""

    planner: Annotated[
        str,
        option(
            "--planner",
            help="What is verified: fixed takes every draft up to its caps, as many as there can "
            "be; auto only what pays.",
        ),
    ] = "fixed"
