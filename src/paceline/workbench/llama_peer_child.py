"""Runs in an interpreter that has llama-cpp-python: quantises a GGUF file and writes logits.

    python llama_peer_child.py TASK.json

Knows nothing of Paceline, which that interpreter does not have. The task is
:func:`paceline.workbench.llama_peer.peer_logits`'.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from pathlib import Path
from typing import Any, BinaryIO

FLOAT_BYTES = 4


def main(path: str) -> None:
    """Do the task; any failure is a traceback and a non-zero exit code."""
    lib: Any = importlib.import_module("llama_cpp")
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(
        quantised(lib, task).encode(), lib.llama_model_default_params()
    )
    if not model:
        raise SystemExit("the model could not be loaded")
    longest = max(len(tokens) for tokens, _ in task["windows"])
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = longest
    params.n_threads = params.n_threads_batch = task["threads"]
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("the context could not be made")
    width = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    with Path(task["out"]).open("wb") as out:
        for tokens, first in task["windows"]:
            write_window(lib, context, tokens, first, width, out)


def quantised(lib: Any, task: Any) -> str:
    """Path of the model in the format asked for."""
    source, kind = str(task["source"]), str(task["kind"])
    if kind == "F32":
        return source
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = task["threads"]
    target = f"{source}.{kind}"
    if lib.llama_model_quantize(source.encode(), target.encode(), params):
        raise SystemExit(f"the model could not be quantised to {kind}")
    return target


def write_window(
    lib: Any, context: Any, tokens: list[int], first: int, width: int, out: BinaryIO
) -> None:
    """Read a window on its own and write the float32 logits that predict ``tokens[first:]``."""
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    wanted = range(first - 1, len(tokens) - 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = i in wanted
    if lib.llama_decode(context, batch):
        raise SystemExit("decoding failed")
    found = lib.llama_get_logits(context)  # rows that were asked for, one after another
    out.write(ctypes.string_at(found, len(wanted) * width * FLOAT_BYTES))
    lib.llama_batch_free(batch)


if __name__ == "__main__":
    main(sys.argv[1])
