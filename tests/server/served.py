"""A server as a user starts it, over the embedded models, whose target knows chats.

Owns the options under which drafts come often, from everybody who can draft.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.loading.catalogue import embedded_model
from tests.server.chats import CHATML
from tests.server.llama_cpp.gaps import with_marks
from tests.server.test_serve import KEY, started

NAME = "embedded"
LOOKUP = {"method": "prompt_lookup", "num_speculative_tokens": 4, "min_accept_prob": 0.0}
SUFFIX = {
    "method": "suffix",
    "num_speculative_tokens": 4,
    "max_tree_nodes": 6,
    "min_accept_prob": 0.0,
}


def _mark(kind: str, folder: Path) -> None:
    """An embedded model whose vocabulary has marks for gaps."""
    source = Path(embedded_model(kind))
    for file in source.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    marked = with_marks((source / "tokenizer.json").read_text("utf-8"))
    (folder / "tokenizer.json").write_text(marked, encoding="utf-8")


_drafts = tempfile.TemporaryDirectory()
_mark("draft", Path(_drafts.name))  # drafts are of the target's vocabulary
DRAFT = {
    "method": "draft_model",
    "model": _drafts.name,
    "num_speculative_tokens": 2,
    "max_branching": 2,
    "max_tree_nodes": 4,
    "min_accept_prob": 0.0,
}
SPECULATION = ("--speculative-config", json.dumps([LOOKUP, SUFFIX, DRAFT]))
LIMITS = ("--max-model-len", "512", "--max-num-seqs", "16", "--kv-cache-memory", "64M")

__all__ = ["KEY", "LIMITS", "NAME", "SPECULATION", "chat_model", "served"]


def chat_model(folder: Path) -> Path:
    """The embedded target with a chat template beside it, and marks for gaps."""
    _mark("target", folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@contextmanager
def served(
    folder: Path, *options: str, speculation: tuple[str, ...] = SPECULATION, planner: str = "fixed"
) -> Iterator[str]:
    """The address of a server of the model in a folder."""
    fixed = ("--served-model-name", NAME, "--threads", "1", "--planner", planner)
    with started(str(folder), *fixed, *LIMITS, *speculation, *options) as (_, url):
        yield url
