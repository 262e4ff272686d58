"""How far Paceline and llama.cpp are from a GGUF file's own weights in float32, on the same file.

Every model is read as it is and in other types. Both engines read the same windows of prose, code
and chat, and both are compared with float32 in weights, activations, keys and values. The tables
say by how much Paceline's KL divergence is larger than llama.cpp's, and by how much at most, with
95 % confidence.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import peers_client as models
from harness import Report, Row, Target, among, arguments, chosen, grid, note, table
from peers_client import MissingPeerError
from prompt_sets import load_prompts

from paceline.config import DTYPES
from paceline.core.errors import PacelineError
from paceline.loading.checkpoint import load_checkpoint
from paceline.text.tokenizer import Tokenizer
from paceline_lab.quality.llama_peer import KV_TYPES
from paceline_lab.quality.quality import REFERENCE, Quality, Window, measure, windows
from paceline_lab.verify.quality_command import (
    PEER,
    QualityArms,
    begins_with,
    encoded,
    longest,
    pairs,
)

FORMATS = ("file", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ4_XS", "MXFP4")
"""``file`` is the file as it is."""
FORCED = {"MXFP4": ("Q8_0", "mxfp4")}
"""Format -> the type that ``llama-quantize`` is asked for, and what all linears become instead."""
MADE = ("wide", "outliers")
LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
KINDS = {
    "public": {"prose": ("prose",), "code": ("edits", "humaneval"), "chat": ("spec_bench",)},
    "embedded": {"prose": ("prose",), "code": ("code",), "chat": ("edit",)},
}


def made_model(name: str, source: Path, options: argparse.Namespace) -> Path:
    """A file made of another, of a kind of :data:`MADE` (see ``inflate_gguf.py``)."""
    from research.inflate_gguf import write_outliers, write_widened

    makers: dict[str, Callable[[Path, Path], object]]
    makers = dict(zip(MADE, (write_widened, write_outliers), strict=True))
    path = options.folder / f"{source.stem}-{name}.gguf"
    return models.made(path, lambda out: models.void(makers[name](source, out)))


def quantised(source: Path, kind: str, options: argparse.Namespace) -> Path:
    """The file in another type.

    Raises:
        MissingPeerError: ``llama-quantize`` is absent, or refuses.
    """
    if kind == "file":
        return source
    asked, forced = FORCED.get(kind, (kind, None))
    words = [word for name in LINEARS if forced for word in ("--tensor-type", f"{name}={forced}")]
    tool = options.llama_bin / "llama-quantize"
    path = options.folder / f"{source.stem}-{kind}.gguf"
    return models.made(
        path, lambda out: models.run_tool(tool, "--allow-requantize", *words, source, out, asked)
    )


def tensor_types(path: Path) -> dict[str, int]:
    """Type -> number of matrices of it. A file's name does not tell: rows that cannot be cut into a
    type's blocks get another one."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return dict(Counter(t.tensor_type.name for t in tensors if len(t.shape) > 1).most_common())


def texts(source: str = "auto") -> dict[str, str]:
    """One long text of each kind, whose pieces come in a shuffled but fixed order."""
    prompts = load_prompts(source)
    found = {}
    for kind, sets in KINDS[prompts.source].items():
        pieces = [piece for name in sets for piece in prompts.sets[name]]
        random.Random(0).shuffle(pieces)
        found[kind] = "\n\n".join(pieces)
    return found


def named_files(words: Sequence[str]) -> dict[str, Path]:
    """``NAME=PATH`` or ``PATH`` -> file by name.

    Raises:
        ValueError: a file is not there.
    """
    found = {}
    for word in words:
        name, _, path = word.rpartition("=")
        found[name or Path(path).stem] = Path(path)
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path}")
    return found


TOKENS, QUICK_TOKENS = 16_128, 192
WINDOW, QUICK_WINDOW = 512, 64
MOST_EXCESS = 0.02
"""Of llama.cpp's mean KL divergence: what the targets allow Paceline's to exceed it by."""


# --- the program ----------------------------------------------------------------------------------


def add_tool_options(parser: argparse.ArgumentParser) -> None:
    """Where the files are and where llama.cpp is."""
    parser.add_argument("models", nargs="+", help="GGUF files, as PATH or NAME=PATH")
    parser.add_argument("--formats", type=among(FORMATS))
    parser.add_argument("--llama", type=Path, default=models.PYTHONS["llama"])
    parser.add_argument("--llama-bin", type=Path, default=models.LLAMA_BIN)
    parser.add_argument("--folder", type=Path, default=models.PEERS / "models" / "fidelity")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    add_tool_options(parser)
    parser.add_argument("--made", type=among(MADE), default=[], help="of the first model")
    parser.add_argument(
        "--dtypes", type=among(DTYPES), default=["auto"], help="rows (default: auto)"
    )
    parser.sized("--tokens", TOKENS, QUICK_TOKENS, "to score")
    parser.sized("--window", WINDOW, QUICK_WINDOW)
    parser.add_argument("--llama-kv-type", choices=KV_TYPES, default=KV_TYPES[0])
    options = parser.parse_args(argv)
    options.formats = options.formats or list(FORMATS)
    return options


def files_of(options: argparse.Namespace) -> dict[str, Path]:
    """The models by name, those that are made included."""
    found = named_files(options.models)
    first, source = next(iter(found.items()))
    for kind in options.made:
        found[f"{first} {kind}"] = made_model(kind, source, options)
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
) -> tuple[list[tuple[str, Window]], dict[str, Quality], QualityArms]:
    """Both engines on one file."""
    source = load_checkpoint(path)
    assert source.tokenizer is not None
    pieces = pieces_of(options, source.tokenizer)
    most = longest([piece for _, piece in pieces])
    settings = {"num_threads": options.threads, "max_num_seqs": 1, "max_model_len": most}
    with ExitStack() as stack:
        arms = QualityArms(stack, source, settings)
        reference = arms.reference()
        for dtype in options.dtypes:
            arms.add_dtype(dtype)
        arms.add_peer(
            path,
            python=str(options.llama),
            longest=most,
            threads=options.threads,
            kv_type=options.llama_kv_type,
        )
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
            file = quantised(path, kind, options)
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


def add_rows(report: Report, at: Row, rows: dict[str, Quality], arms: QualityArms) -> None:
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
    def name(row: Row) -> str:
        return f"{row['model']} {row['format']}"

    def share(row: Row, key: str) -> str:
        found = (row["excess"] or {}).get(key)
        return "-" if found is None else f"{found:+.1%}"

    seen: dict[str, str] = {}
    for row in results:
        seen.setdefault(name(row), types_text(row["tensor_types"]))
    columns = (
        ("file", name),
        ("arithmetic", "arithmetic"),
        ("perplexity", "perplexity", 3),
        ("ratio", "ratio", 4),
        ("mean KL", lambda row: f"{row['mean_kl']:.2e}"),
        ("99 % KL", lambda row: f"{row['kl_99']:.2e}"),
        ("top-1", lambda row: f"{row['top1_agreement']:.1%}"),
        (f"over {PEER}", lambda row: share(row, "relative")),
        ("at most", lambda row: share(row, "relative_upper")),
    )
    shown = [result for result in results if result["arithmetic"] != REFERENCE]
    return [
        table(["file", "matrices of each type"], list(seen.items())),
        table(*grid(shown, *columns)),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    keys = ("quick", "formats", "dtypes", "tokens", "window", "threads", "prompts", "llama_kv_type")
    report = Report("fidelity", chosen(options, *keys))
    for model, path in files_of(options).items():
        measure_file(options, report, model, path)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
