"""How far Paceline and llama.cpp are from a GGUF file's own weights in float32, on the same file.

Every model is read as it is and in other types. Both engines read the same windows of prose, code
and chat, and both are compared with float32 in weights, activations, keys and values. The tables
say by how much Paceline's KL divergence is larger than llama.cpp's, and by how much at most, with
95 % confidence.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import peers_models
from fidelity_models import FORMATS, Tools, made_model, named_files, quantised, tensor_types, texts
from harness import arguments, names, note
from peers_models import MissingPeerError
from prompt_sets import SOURCES
from report import Report, Target, table

from paceline.commands.quality import begins_with, encoded, longest, pairs
from paceline.commands.quality_arms import PEER, Arms, PeerSettings
from paceline.errors import PacelineError
from paceline.models.checkpoint import load_checkpoint
from paceline.models.tokenizer import Tokenizer
from paceline.workbench.llama_peer import KV_TYPES
from paceline.workbench.quality import REFERENCE, Quality, Window, measure, windows

TOKENS, QUICK_TOKENS = 16_128, 192
WINDOW, QUICK_WINDOW = 512, 64
MOST_EXCESS = 0.02
"""Of llama.cpp's mean KL divergence: what the targets allow Paceline's to exceed it by."""
Row = dict[str, Any]


def add_tool_options(parser: argparse.ArgumentParser) -> None:
    """Where the files are and where llama.cpp is."""
    parser.add_argument("models", nargs="+", help="GGUF files, as PATH or NAME=PATH")
    parser.add_argument("--formats", type=names, help=f"some of: {', '.join(FORMATS)}")
    parser.add_argument("--llama", type=Path, default=peers_models.PYTHONS["llama"])
    parser.add_argument("--llama-bin", type=Path, default=peers_models.LLAMA_BIN)
    parser.add_argument("--folder", type=Path, default=peers_models.PEERS / "models" / "fidelity")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompts", choices=SOURCES, default="auto")


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    add_tool_options(parser)
    parser.add_argument("--made", type=names, default=[], help="of the first model: wide, outliers")
    parser.add_argument("--dtypes", type=names, default=["auto"], help="rows (default: auto)")
    parser.add_argument("--tokens", type=int, help=f"to score (default: {TOKENS}, in three kinds)")
    parser.add_argument("--window", type=int, help=f"(default: {WINDOW})")
    parser.add_argument("--llama-kv-type", choices=KV_TYPES, default=KV_TYPES[0])
    options = parser.parse_args(argv)
    options.formats = options.formats or list(FORMATS)
    options.tokens = options.tokens or (QUICK_TOKENS if options.quick else TOKENS)
    options.window = options.window or (QUICK_WINDOW if options.quick else WINDOW)
    return options


def tools_of(options: argparse.Namespace) -> Tools:
    return Tools(options.llama, options.llama_bin, options.folder)


def files_of(options: argparse.Namespace) -> dict[str, Path]:
    """The models by name, those that are made included."""
    found = named_files(options.models)
    first, source = next(iter(found.items()))
    for kind in options.made:
        found[f"{first} {kind}"] = made_model(kind, source, tools_of(options))
    return found


def pieces_of(options: argparse.Namespace, tokenizer: Tokenizer) -> list[tuple[str, Window]]:
    """Windows that do not overlap, with their kinds of text in equal parts."""
    bos, found = begins_with(tokenizer), []
    found_texts = texts(options.prompts)
    for kind, text in found_texts.items():
        token_ids = encoded(tokenizer, text, options.tokens // len(found_texts) + (bos is None))
        pieces = windows(token_ids, options.window, options.window - 1, bos)
        found += [(kind, piece) for piece in pieces]
    return found


def compared(
    options: argparse.Namespace, path: Path, label: str
) -> tuple[list[tuple[str, Window]], dict[str, Quality], Arms]:
    """Both engines on one file."""
    source = load_checkpoint(path)
    assert source.tokenizer is not None
    pieces = pieces_of(options, source.tokenizer)
    most = longest([piece for _, piece in pieces])
    settings = {"num_threads": options.threads, "max_num_seqs": 1, "max_model_len": most}
    with ExitStack() as stack:
        arms = Arms(stack, source, settings)
        reference = arms.reference()
        for dtype in options.dtypes:
            arms.add_dtype(dtype)
        peer = PeerSettings(str(options.llama), most, options.threads, options.llama_kv_type)
        arms.add_peer(peer, path)
        vocab = source.config.vocab_size
        return pieces, measure(noted(pieces, label), vocab, reference, arms.found), arms


def noted(pieces: Sequence[tuple[str, Window]], label: str) -> Iterator[Window]:
    for number, (kind, piece) in enumerate(pieces, start=1):
        note(f"{label}: window {number} of {len(pieces)}, {kind}")
        yield piece


def measure_file(options: argparse.Namespace, report: Report, model: str, path: Path) -> None:
    """Every format of one model; one that cannot be made or opened is a failed sample."""
    for kind in options.formats:
        at = {"model": model, "format": kind}
        try:
            file = quantised(path, kind, tools_of(options))
            note(f"{model} {kind}: {types_text(tensor_types(file))}")
            pieces, rows, arms = compared(options, file, f"{model} {kind}")
        except (PacelineError, MissingPeerError) as error:
            report.samples.append({**at, "error": str(error)})
            continue
        at_file = {**at, "tensor_types": tensor_types(file)}
        add_rows(report, at_file, rows, arms)
        report.samples += [{**at, "arithmetic": a, "error": why} for a, why in arms.skipped.items()]
        report.samples += [
            {**at, "arithmetic": name, "text": text, "window": i, **scored.to_json(), "error": None}
            for name, row in rows.items()
            for i, ((text, _), scored) in enumerate(zip(pieces, row.windows, strict=True))
        ]
        for facts in arms.peers.values():
            report.config["llama.cpp"] = facts


def add_rows(report: Report, at: Row, rows: dict[str, Quality], arms: Arms) -> None:
    """A row of results per arithmetic, Paceline's with their excess over llama.cpp's."""
    excesses = {own: gap.to_json() for own, other, gap in pairs(rows) if other == PEER}
    for name, row in rows.items():
        figures = {key: value for key, value in row.to_json().items() if key != "windows"}
        found = {**at, "arithmetic": name, **figures, "excess": excesses.get(name)}
        report.results.append(found)
        if name in arms.resolved:
            over = (excesses.get(name) or {}).get("relative_upper")
            what = f"{at['model']} {at['format']}, {name}: mean KL beyond {PEER}'s, share of that"
            report.targets.append(Target(what, over, MOST_EXCESS))


def types_text(types: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in types.items())


def tables(results: Sequence[Row]) -> list[str]:
    seen: dict[str, str] = {}
    for row in results:
        seen.setdefault(f"{row['model']} {row['format']}", types_text(row["tensor_types"]))
    shown = [result for result in results if result["arithmetic"] != REFERENCE]
    headers = ["file", "arithmetic", "perplexity", "ratio", "mean KL", "99 % KL", "top-1"]
    return [
        table(["file", "matrices of each type"], list(seen.items())),
        table([*headers, f"over {PEER}", "at most"], [cells(row) for row in shown]),
    ]


def cells(row: Row) -> list[str]:
    over = row["excess"] or {}
    shares = [over.get(key) for key in ("relative", "relative_upper")]
    return [
        f"{row['model']} {row['format']}",
        row["arithmetic"],
        f"{row['perplexity']:.3f}",
        f"{row['ratio']:.4f}",
        f"{row['mean_kl']:.2e}",
        f"{row['kl_99']:.2e}",
        f"{row['top1_agreement']:.1%}",
        *("-" if share is None else f"{share:+.1%}" for share in shares),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    keys = ("quick", "formats", "dtypes", "tokens", "window", "threads", "prompts", "llama_kv_type")
    report = Report("fidelity", {key: getattr(options, key) for key in keys})
    for model, path in files_of(options).items():
        measure_file(options, report, model, path)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
