"""What a fidelity report measures: a model in several arithmetics, and llama.cpp on its weights.

Opens them; knows no text and no figures. All of them stay open, since they read each window in
turn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.api.llm import LLM
from paceline.core.errors import PacelineError
from paceline.loading.checkpoint import Checkpoint
from paceline.workbench.llama_peer import FORMATS, LlamaPeer, write_gguf
from paceline.workbench.quality import REFERENCE, Arm, Logits, Window, engine_arm

PEER = "llama.cpp"
CONTROL = f"{PEER} F32"


@dataclass(slots=True)
class Arms:
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
