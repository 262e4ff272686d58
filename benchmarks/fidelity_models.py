"""The GGUF files that the fidelity benchmarks read, and their texts.

A model is a GGUF file that is there already. Its other types are made of it by ``llama-quantize``
and kept. Knows no engine.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import peers_models as models
from prompt_sets import load_prompts

FORMATS = ("file", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ4_XS", "MXFP4")
"""``file`` is the file as it is."""
FORCED = {"MXFP4": ("Q8_0", "mxfp4")}
"""Format -> the type that ``llama-quantize`` is asked for, and what all linears become instead."""
LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
KINDS = {
    "public": {"prose": ("prose",), "code": ("edits", "humaneval"), "chat": ("spec_bench",)},
    "embedded": {"prose": ("prose",), "code": ("code",), "chat": ("edit",)},
}


@dataclass(frozen=True, slots=True)
class Tools:
    """Where llama.cpp is, and where files that are made are kept."""

    python: Path
    binaries: Path
    folder: Path


def made_model(name: str, source: Path, tools: Tools) -> Path:
    """A file made of another: ``wide`` or ``outliers`` (see ``inflate_gguf.py``).

    Raises:
        MissingPeerError: there is no such kind of file.
    """
    from inflate_gguf import write_outliers, write_widened

    makers: dict[str, Callable[[Path, Path], object]]
    makers = {"wide": write_widened, "outliers": write_outliers}
    if name not in makers:
        raise models.MissingPeerError(f"no model is called {name!r}; allowed: {', '.join(makers)}")
    path = tools.folder / f"{source.stem}-{name}.gguf"
    return models.made(path, lambda out: models.void(makers[name](source, out)))


def quantised(source: Path, kind: str, tools: Tools) -> Path:
    """The file in another type.

    Raises:
        MissingPeerError: ``llama-quantize`` is absent, or refuses.
    """
    if kind == "file":
        return source
    asked, forced = FORCED.get(kind, (kind, None))
    words = [word for name in LINEARS if forced for word in ("--tensor-type", f"{name}={forced}")]
    tool = tools.binaries / "llama-quantize"
    path = tools.folder / f"{source.stem}-{kind}.gguf"
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
