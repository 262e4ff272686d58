"""``paceline verify --quality``: each arithmetic's distance from the model's weights in float32.

Owns the text, the arms (the model in several arithmetics, and llama.cpp on its weights) and the
order of things. All arms stay open, since they read each window in turn. The figures are
:mod:`paceline_lab.quality.quality`'s.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.api.llm import LLM
from paceline.cli.prompts import read_prompts
from paceline.cli.settings import engine_options
from paceline.cli.terminal import Screen, table
from paceline.config import DTYPES
from paceline.core.checks import check_choice
from paceline.core.errors import ConfigError, PacelineError, RequestError
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.text.tokenizer import Tokenizer
from paceline_lab.quality.llama_peer import FORMATS, KV_TYPES, LlamaPeer, write_gguf
from paceline_lab.quality.quality import (
    REFERENCE,
    Arm,
    Excess,
    Logits,
    Quality,
    Window,
    engine_arm,
    excess,
    measure,
    windows,
)
from paceline_lab.verify.options import VerifyOptions

PEER = "llama.cpp"
CONTROL = f"{PEER} F32"


@dataclass(slots=True)
class QualityArms:
    """The arithmetics that could be opened, and those that could not.

    Attributes:
        stack: closes what is opened.
        settings: options of every :class:`~paceline.api.llm.LLM` but its dtype.
        found: row name -> how it reads a window.
        resolved: row name -> dtype that runs, of Paceline's own rows.
        peers: row name -> llama.cpp's facts, of its rows.
        skipped: row name -> why there is no such row.
    """

    stack: ExitStack
    source: Checkpoint
    settings: Mapping[str, Any]
    found: dict[str, Arm] = field(default_factory=dict)
    resolved: dict[str, str] = field(default_factory=dict)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def reference(self) -> Arm:
        """The weights in float32, and keys and values too."""
        return _arm(self._open(dtype=REFERENCE, kv_cache_dtype=REFERENCE))

    def add_dtype(self, dtype: str) -> None:
        """A row, unless ``auto`` is this dtype already."""
        if dtype in self.resolved.values():
            return
        try:
            llm = self._open(dtype=dtype)
        except (PacelineError, RuntimeError) as error:  # this machine, or this model, cannot
            self.skipped[dtype] = str(error)
            return
        name = dtype if dtype == llm.config.dtype else f"{dtype} ({llm.config.dtype})"
        self.found[name], self.resolved[name] = _arm(llm), llm.config.dtype

    def add_peer(self, path: Path, kind: str | None = None, **settings: Any) -> None:
        """llama.cpp on a GGUF file as it is, or on a float32 one that it quantises to ``kind``."""
        name = f"{PEER} {kind}" if kind else PEER
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        size = self.source.config.vocab_size
        try:
            peer = LlamaPeer(source=path, folder=folder, vocab_size=size, kind=kind, **settings)
        except PacelineError as error:
            self.skipped[name] = str(error)
            return
        self.stack.callback(peer.close)
        self.found[name], self.peers[name] = peer.logits, peer.facts

    def add_converted_peers(self, **settings: Any) -> None:
        """llama.cpp on the weights of a folder, in each of its :data:`FORMATS`."""
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
        path = Path(folder) / "model.gguf"
        try:
            write_gguf(self.source, path)
        except PacelineError as error:
            self.skipped[PEER] = str(error)
            return
        for kind in FORMATS:
            self.add_peer(path, kind, **settings)

    def _open(self, **settings: Any) -> LLM:
        return self.stack.enter_context(
            LLM(self.source, speculative_config=[], **{**self.settings, **settings})
        )


def _arm(llm: LLM) -> Arm:
    def read(piece: Window, out: Logits) -> None:
        llm.call(partial(engine_arm, piece=piece, out=out))

    return read


DEFAULT_TEXT_TOKENS = 8192
DEFAULT_WINDOW = 512


def quality_command(options: VerifyOptions) -> int:
    """The work of ``paceline verify --quality``."""
    dtypes = _dtypes(options)
    _check(options)
    source = load_checkpoint(options.model, load_format=options.load_format)
    pieces, screen = _pieces(options, source), Screen(json=options.json)
    with ExitStack() as stack:
        arms = QualityArms(stack, source, engine_options(replace(options, max_num_seqs=1)))
        reference = arms.reference()
        for dtype in dtypes:
            arms.add_dtype(dtype)
        if options.llama is not None:
            _add_peers(arms, options, longest(pieces))
        screen.note(f"measuring {', '.join(arms.found)}")
        rows = measure(_told(pieces, screen), source.config.vocab_size, reference, arms.found)
    _report(options, pieces, arms, rows, screen)
    return 0


def _add_peers(arms: QualityArms, options: VerifyOptions, longest: int) -> None:
    settings: dict[str, Any] = {
        "python": options.llama,
        "longest": longest,
        "threads": options.threads or os.cpu_count() or 1,
        "kv_type": options.llama_kv_type or KV_TYPES[0],
    }
    own = Path(os.path.expanduser(options.model))
    if own.is_file():
        arms.add_peer(own, **settings)
    else:
        arms.add_converted_peers(**settings)


def _dtypes(options: VerifyOptions) -> list[str]:
    """Those beside the reference."""
    known = [name for name in DTYPES if name != REFERENCE]
    if options.dtypes is None:
        return known
    wanted = [name.strip() for name in options.dtypes.split(",")]
    for name in wanted:
        if name not in DTYPES:
            raise ConfigError(f"--dtypes names {name!r}; allowed: {', '.join(DTYPES)}")
    return [name for name in dict.fromkeys(wanted) if name != REFERENCE]


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
    if options.llama_kv_type is not None:
        if options.llama is None:
            raise ConfigError("--llama-kv-type belongs to --llama; add that, or drop it")
        check_choice("--llama-kv-type", options.llama_kv_type, KV_TYPES)
    if options.dtype != "auto":
        raise ConfigError("--quality measures several dtypes: use --dtypes instead of --dtype")


def _pieces(options: VerifyOptions, source: Checkpoint) -> list[Window]:
    length = min(options.window or DEFAULT_WINDOW, source.config.max_position)
    length = min(length, options.max_model_len or length)
    stride = options.stride or length // 2
    if stride >= length:
        raise ConfigError(f"--stride is {stride}; allowed: 1 to {length - 1}, below the window")
    if source.tokenizer is None:
        raise ConfigError(f"{source.name} has no tokenizer, so it cannot read text")
    left, all_pieces = options.text_tokens or DEFAULT_TEXT_TOKENS, list[Window]()
    bos = begins_with(source.tokenizer)
    for text in _texts(options):
        token_ids = encoded(source.tokenizer, text, left + (bos is None))
        pieces = windows(token_ids, length, stride, bos)
        all_pieces += pieces
        left -= sum(len(piece.targets) for piece in pieces)
        if left <= 0:
            break
    if not all_pieces:
        raise RequestError("the text has fewer than two tokens; there is nothing to predict")
    return all_pieces


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


def begins_with(tokenizer: Tokenizer) -> int | None:
    """The BOS token if texts of this model begin with it."""
    return tokenizer.bos_token_id if tokenizer.begins_with_bos else None


def encoded(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """The first ``count`` tokens of a text, without a BOS token."""
    # A token is seldom more than a dozen characters: no need to encode a whole book for its start.
    for characters in (count * 12, len(text)):
        token_ids = tokenizer.encode(text[:characters], add_special_tokens=False)
        if len(token_ids) > count:
            break
    return token_ids[:count]


def longest(pieces: Sequence[Window]) -> int:
    """Tokens of the longest window."""
    return max(len(piece.token_ids) for piece in pieces)


def _told(pieces: Sequence[Window], screen: Screen) -> Iterator[Window]:
    for number, piece in enumerate(pieces, start=1):
        screen.note(f"reading window {number} of {len(pieces)}")
        yield piece


def _report(
    options: VerifyOptions,
    pieces: Sequence[Window],
    arms: QualityArms,
    rows: Mapping[str, Quality],
    screen: Screen,
) -> None:
    screen.say(quality_table(rows))
    for name, reason in arms.skipped.items():
        screen.say(f"{name}: not measured: {reason}")
    compared = list(pairs(rows))
    for own, other, gap in compared:
        screen.say(pair_line(own, other, gap))
    if options.json:
        document = {
            "device": options.device,
            "model": arms.source.name,
            "text": options.text,
            "window": longest(pieces),
            "num_windows": len(pieces),
            "reference": REFERENCE,
            "rows": [{"arithmetic": name, **row.to_json()} for name, row in rows.items()],
            "pairs": [{"own": a, "other": b, **gap.to_json()} for a, b, gap in compared],
            "peers": arms.peers,
            "skipped": arms.skipped,
        }
        screen.document(document)


def quality_table(rows: Mapping[str, Quality]) -> str:
    return table(
        [
            {
                "arithmetic": name,
                "tokens": str(row.num_tokens),
                "perplexity": f"{row.perplexity:.4f}",
                "ratio": f"{row.ratio:.5f}",
                "mean KL": f"{row.mean_kl:.3e}",
                "99 % KL": f"{row.kl_99:.3e}",
                "top-1 agreement": f"{row.top1_agreement:.2%}",
            }
            for name, row in rows.items()
        ]
    )


def pairs(rows: Mapping[str, Quality]) -> Iterator[tuple[str, str, Excess]]:
    """Each arithmetic of Paceline's against each of llama.cpp's that rounds, and by how much it
    diverges more."""
    others = [name for name in rows if name.startswith(PEER) and name != CONTROL]
    for name, row in rows.items():
        if name != REFERENCE and not name.startswith(PEER):
            yield from ((name, other, excess(row, rows[other])) for other in others)


def pair_line(own: str, other: str, gap: Excess) -> str:
    line = (
        f"{own} against {other}: mean KL {gap.difference:+.3e}, with 95 % confidence at most "
        f"{gap.upper:+.3e}"
    )
    if gap.relative is None or gap.relative_upper is None:
        return line
    return f"{line}; that is {gap.relative:+.1%}, at most {gap.relative_upper:+.1%}"
