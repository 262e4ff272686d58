"""The options of ``paceline train ngram``. Imports nothing slow: its ``--help`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.commands.options import option


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TrainNgramOptions:
    """Options of ``paceline train ngram``."""

    output: Annotated[str, option("-o", "--output", help="The file.")]
    traces: Annotated[
        list[str] | None,
        option(
            "--traces",
            help="Folder that paceline trace wrote; its answers are learnt. May be given several "
            "times.",
        ),
    ] = None
    text: Annotated[
        list[str] | None,
        option("--text", help="File or folder of text to learn. May be given several times."),
    ] = None
    exclude: Annotated[
        list[str] | None,
        option(
            "--exclude",
            help="Glob pattern of files to leave out, relative to their folder. May be given "
            "several times.",
        ),
    ] = None
    stdlib: Annotated[
        bool,
        option("--stdlib/--no-stdlib", help="Also learn Python's own standard library."),
    ] = False
    target: Annotated[
        str | None,
        option(
            "--target",
            help="Folder of the model that is to be drafted for, whose tokenizer reads the texts "
            "(default: the embedded model; with traces alone, theirs).",
        ),
    ] = None
    order: Annotated[int, option("--order", help="Longest n-grams, 2 to 5 tokens.")] = 4
    smoothing: Annotated[
        str,
        option("--smoothing", help="modified-kneser-ney, absolute or stupid-backoff."),
    ] = "modified-kneser-ney"
    soft_labels: Annotated[
        bool,
        option(
            "--soft-labels/--no-soft-labels",
            help="Learn the traced probabilities of the likeliest tokens, not the tokens alone.",
        ),
    ] = False
    top_k: Annotated[
        int, option("--top-k", help="Most continuations that are kept of one context.")
    ] = 8
    max_size: Annotated[
        str,
        option("--max-size", help="Size of the file, e.g. 512K or 64M; what matters least goes."),
    ] = "64M"
    import_uzu: Annotated[
        str | None,
        option("--import-uzu", help="Take over a model.bin of uzu or lalamo, learning nothing."),
    ] = None
    import_llama: Annotated[
        str | None,
        option("--import-llama", help="Take the counts of a lookup cache of llama.cpp."),
    ] = None
    export_llama: Annotated[
        str | None,
        option("--export-llama", help="Also write the counts as a lookup cache of llama.cpp."),
    ] = None
    held_out_tokens: Annotated[
        int, option("--held-out-tokens", help="Tokens of whole texts that are never learnt.")
    ] = 16_384
    seed: Annotated[int, option("--seed", help="Seed of the held-out split.")] = 0
    table: Annotated[
        bool,
        option("--table/--no-table", help="Also measure orders 2 to 4 with every smoothing."),
    ] = False
    json: Annotated[bool, option("--json", help="End with one JSON line of all figures.")] = False
