"""``paceline verify --quality``: what each arithmetic costs in accuracy, against float32.

Owns the text, the order of things and the table; the figures are
:mod:`paceline.workbench.quality`'s.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.commands.display import Screen, table
from paceline.commands.prompts import read_prompts
from paceline.commands.resolve import engine_options
from paceline.commands.verify_options import VerifyOptions
from paceline.config import DTYPES
from paceline.errors import ConfigError, PacelineError, RequestError
from paceline.llm import LLM, embedded_model
from paceline.models.checkpoint import Checkpoint, load_checkpoint
from paceline.models.tokenizer import Tokenizer
from paceline.workbench.llama_peer import FORMATS, peer_logits, write_gguf
from paceline.workbench.quality import (
    Logits,
    Quality,
    Window,
    engine_logits,
    measure,
    record,
    windows,
)

REFERENCE = "float32"
DEFAULT_TEXT_TOKENS = 8192
DEFAULT_WINDOW = 512
HEADERS = ("arithmetic", "tokens", "perplexity", "ratio", "mean KL", "max KL", "top-1 agreement")


@dataclass(slots=True)
class Task:
    """What is scored, and what was found; ``skipped`` says of an arithmetic why it has no row."""

    source: Checkpoint
    pieces: list[Window]
    rows: dict[str, Quality] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def targets(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.targets]


def quality_command(options: VerifyOptions) -> int:
    """Run the command; returns its exit code.

    Raises:
        PacelineError: the options, the text or the model cannot be used.
    """
    dtypes = _dtypes(options)
    _check(options)
    source = load_checkpoint(
        options.model or embedded_model("target"), load_format=options.load_format
    )
    task = Task(source, _pieces(options, source))
    screen = Screen()
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        reference = _reference(options, task, Path(folder))
        for dtype in dtypes:
            screen.note(f"measuring {dtype}")
            _measure_dtype(options, task, dtype, reference)
        if options.llama is not None:
            _measure_peer(options, task, Path(folder), reference, screen)
    _report(options, task, screen)
    return 0


def _dtypes(options: VerifyOptions) -> list[str]:
    known = [dtype for dtype in DTYPES if dtype != "auto"]
    if options.dtypes is None:
        return known
    wanted = [name.strip() for name in options.dtypes.split(",")]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--dtypes names {name!r}; allowed are {', '.join(known)}")
    return [REFERENCE, *(name for name in dict.fromkeys(wanted) if name != REFERENCE)]


def _check(options: VerifyOptions) -> None:
    """Refuse options that would be without effect."""
    given = {
        "--num-tokens": options.num_tokens,
        "--max-regret": options.max_regret,
        "--speculative-config": options.speculative_config,
        "--method": options.method,
        "--draft": options.draft,
        "-p": options.prompt,
        "--prompts": options.prompts,
    }
    for name in (name for name, value in given.items() if value is not None):
        raise ConfigError(f"{name} has no meaning with --quality: drop one of them")
    if options.dtype != "auto":
        raise ConfigError("--quality measures several: say --dtypes instead of --dtype")


def _pieces(options: VerifyOptions, source: Checkpoint) -> list[Window]:
    length = min(options.window or DEFAULT_WINDOW, source.config.max_position)
    length = min(length, options.max_model_len or length)
    stride = options.stride or length // 2
    if stride >= length:
        raise ConfigError(f"--stride is {stride}; allowed are 1 to {length - 1}, below the window")
    if source.tokenizer is None:
        raise ConfigError(f"{source.name} has no tokenizer, so it can read no text")
    left, found = options.text_tokens or DEFAULT_TEXT_TOKENS, []
    for text in _texts(options):
        token_ids = _encoded(source.tokenizer, text, left + 1)
        found += windows(token_ids, length, stride)
        left -= max(0, len(token_ids) - 1)
        if left <= 0:
            break
    if not found:
        raise RequestError("the text has fewer than two tokens; there is nothing to predict")
    return found


def _texts(options: VerifyOptions) -> Iterator[str]:
    """The file as one text; without one, each embedded prompt is a text."""
    if options.text is None:
        prompts = read_prompts(str(files("paceline") / "embedded" / "prompts.jsonl"))
        yield from (str(prompt.content) for prompt in prompts)
        return
    try:
        yield Path(options.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read a text from {options.text}: {error}") from error


def _encoded(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    # A token is seldom more than a dozen characters: no need to encode a whole book for its start.
    for characters in (count * 12, len(text)):
        token_ids = tokenizer.encode(text[:characters])
        if len(token_ids) > count:
            break
    return token_ids[:count]


def _open(options: VerifyOptions, task: Task, dtype: str) -> LLM:
    settings = engine_options(replace(options, dtype=dtype, max_num_seqs=1))
    return LLM(task.source, **settings)


def _reference(options: VerifyOptions, task: Task, folder: Path) -> Logits:
    count, width = len(task.targets), task.source.config.vocab_size
    with _open(options, task, REFERENCE) as llm:
        return llm.call(
            lambda engine: record(
                engine_logits(engine, task.pieces), count, width, folder / "reference.logits"
            )
        )


def _measure_dtype(options: VerifyOptions, task: Task, dtype: str, reference: Logits) -> None:
    targets = task.targets
    if dtype == REFERENCE:
        task.rows[dtype] = measure(targets, _blocks(reference), reference)
        return
    try:
        with _open(options, task, dtype) as llm:
            task.rows[dtype] = llm.call(
                lambda engine: measure(targets, engine_logits(engine, task.pieces), reference)
            )
    except (PacelineError, RuntimeError) as error:  # this machine, or this model, cannot
        task.skipped[dtype] = str(error)


def _measure_peer(
    options: VerifyOptions, task: Task, folder: Path, reference: Logits, screen: Screen
) -> None:
    assert options.llama is not None
    path, width = folder / "model.gguf", task.source.config.vocab_size
    threads = options.threads or os.cpu_count() or 1
    for kind in FORMATS:
        name = f"llama.cpp {kind}"
        screen.note(f"measuring {name}")
        try:
            if not path.exists():
                write_gguf(task.source, path)
            found = peer_logits(options.llama, path, kind, task.pieces, width, folder, threads)
            task.rows[name] = measure(task.targets, _blocks(found), reference)
        except PacelineError as error:
            task.skipped[name] = str(error)


def _blocks(logits: Logits) -> Iterator[Logits]:
    for start in range(0, len(logits), 64):
        yield logits[start : start + 64]


def _report(options: VerifyOptions, task: Task, screen: Screen) -> None:
    screen.say(table(HEADERS, [_cells(name, row) for name, row in task.rows.items()]))
    for name, reason in task.skipped.items():
        screen.say(f"{name}: not measured: {reason}")
    if options.json:
        document = {
            "device": options.device,
            "model": task.source.name,
            "text": options.text,
            "window": max(len(piece.token_ids) for piece in task.pieces),
            "num_windows": len(task.pieces),
            "reference": REFERENCE,
            "rows": [_row(name, row) for name, row in task.rows.items()],
            "skipped": task.skipped,
        }
        screen.say(json.dumps(document))


def _cells(name: str, row: Quality) -> Sequence[str]:
    return [
        name,
        str(row.num_tokens),
        f"{row.perplexity:.4f}",
        f"{row.ratio:.5f}",
        f"{row.mean_kl:.3e}",
        f"{row.max_kl:.3e}",
        f"{row.top1_agreement:.2%}",
    ]


def _row(name: str, row: Quality) -> dict[str, Any]:
    return {
        "arithmetic": name,
        "num_tokens": row.num_tokens,
        "perplexity": row.perplexity,
        "ratio": row.ratio,
        "mean_kl": row.mean_kl,
        "max_kl": row.max_kl,
        "top1_agreement": row.top1_agreement,
    }
