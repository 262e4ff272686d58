"""Writes a hybrid's Hugging Face folder as GGUF, so that llama.cpp can read it too.

The file is what llama.cpp's converter would make of it; the tests write their files in the same
way. It stands for a model that ``paceline train lm --layers`` made, or ``inflate.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from harness import ROOT
from safetensors.torch import load_file
from transformers import AutoConfig

sys.path.insert(0, str(ROOT))
from tests.models.gguf_writing import tokenizer_metadata, write_gguf


def write(folder: Path, out: Path, kind: str) -> None:
    """Write the file, with matrices of a type that the package gguf can quantise to."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    end = next(iter(sorted(token["id"] for token in tokenizer["added_tokens"])))
    ids = {"pre": "gpt-2", "bos_token_id": end, "eos_token_id": end, "add_bos_token": False}
    metadata = tokenizer_metadata(tokenizer, "gpt2", **ids)
    tensors = load_file(folder / "model.safetensors")
    write_gguf(out, AutoConfig.from_pretrained(folder), tensors, kind, metadata)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--type", default="Q8_0", help="of its matrices (default: Q8_0)")
    options = parser.parse_args()
    write(options.folder, options.output, options.type)
    return 0


if __name__ == "__main__":
    sys.exit(main())
