"""The options of ``peers.py``, and what they are when nothing is said. Measures nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import peers_models as models
from harness import arguments, names, numbers
from peers_client import ENGINES, KINDS
from prompt_sets import SOURCES

WIDTHS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 512)
LONG_CONTEXTS = (8_000, 32_000)
PREFILL = 512
SEQUENCES = (1, 4, 8, 16)
SLOW = "transformers bf16"
"""Where the processor has no bfloat16 arithmetic this one alone would fill a quick run."""


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(
        "Paceline beside its peers: the same weights and prompts in every engine, in turns."
    )
    parser.add_argument(
        "--models",
        type=names,
        default=["0.5b"],
        help=f"some of {', '.join(models.PAIRS)}, and GGUF files (default: 0.5b)",
    )
    parser.add_argument("--formats", type=names, help=f"of the files: {', '.join(KINDS)}")
    parser.add_argument("--engines", type=names, help=f"some of: {', '.join(ENGINES)}")
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: 2)")
    parser.add_argument("--widths", type=numbers, help="new tokens of one forward")
    parser.add_argument("--contexts", type=numbers, help="tokens before those")
    parser.add_argument(
        "--long-contexts", type=numbers, help=f"of plain steps (default: {LONG_CONTEXTS})"
    )
    parser.add_argument("--num-prompts", type=int, help="default: 6, quick: 1")
    parser.add_argument("--max-tokens", type=int, help="per prompt (default: 80, quick: 24)")
    parser.add_argument("--repeat", type=int, help="turns of everything (default: 3, quick: 1)")
    options = parser.parse_args(argv)
    quick = options.quick
    everyone = [name for name in ENGINES if not (quick and name == SLOW)]
    options.engines = options.engines or everyone
    if unknown := [name for name in options.engines if name not in ENGINES]:
        parser.error(f"unknown engine {unknown[0]!r}; allowed are {', '.join(ENGINES)}")
    options.formats = options.formats or list(KINDS)
    if unknown := [kind for kind in options.formats if kind not in KINDS]:
        parser.error(f"unknown format {unknown[0]!r}; allowed are {', '.join(KINDS)}")
    for model in options.models:
        if models.is_file(model) and not Path(model).is_file():
            allowed = ", ".join(models.PAIRS)
            parser.error(f"there is no model {model!r}; allowed are {allowed} and GGUF files")
    if options.long_contexts is None:
        options.long_contexts = [] if quick else list(LONG_CONTEXTS)
    options.widths = options.widths or ([1, 8, 32] if quick else list(WIDTHS))
    options.contexts = options.contexts or ([64] if quick else list(CONTEXTS))
    options.sequences = [1, 16] if quick else list(SEQUENCES)
    options.num_prompts = options.num_prompts or (1 if quick else 6)
    options.max_tokens = options.max_tokens or (24 if quick else 80)
    options.repeat = options.repeat or (1 if quick else 3)
    options.widths = sorted({1, *options.widths})  # the width that all costs are relative to
    options.inner = 2 if quick else 3
    options.steps = 8 if quick else 24
    return options
