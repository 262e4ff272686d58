"""Runs in an interpreter that has llama.cpp: quantises a GGUF file and writes logits.

    python llama_peer_child.py TASK.json

Finds llama.cpp's shared library among the files of llama-cpp-python or xllamacpp, and calls its C
interface, of which it knows the few functions and the beginnings of structures that it needs. Knows
nothing of Paceline, which that interpreter does not have. The task is
:func:`paceline.workbench.llama_peer.peer_logits`'.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from ctypes import c_bool, c_char_p, c_float, c_int8, c_int32, c_ubyte, c_uint32, c_void_p
from pathlib import Path
from typing import Any, BinaryIO

FLOAT_BYTES = 4
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7}
"""``LLAMA_FTYPE_MOSTLY_...`` of ``llama.h``."""
PACKAGES = ("llama_cpp", "xllamacpp")
PATTERNS = ("libllama.so", "libllama.dylib", "llama.dll", "xllamacpp*.so", "xllamacpp*.pyd")
LIBRARY_VARIABLE = "LLAMA_CPP_LIB_PATH"
"""With which llama-cpp-python is told the folder of another library than its own."""


class Params(ctypes.Structure):
    """Any structure of parameters: its first numbers, and room for whatever a version has after.

    llama.cpp takes and returns them by value, and never touches more than it knows of.
    """

    _fields_ = (("first", c_int32 * 4), ("rest", c_ubyte * 2048))


class Batch(ctypes.Structure):
    """``llama_batch``, with the same room."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", ctypes.POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", ctypes.POINTER(c_int32)),
        ("n_seq_id", ctypes.POINTER(c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(c_int32))),
        ("logits", ctypes.POINTER(c_int8)),
        ("rest", c_ubyte * 256),
    )


FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_model_default_params": (Params, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, Params]),
    "llama_context_default_params": (Params, []),
    "llama_init_from_model": (c_void_p, [c_void_p, Params]),
    "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
    "llama_n_ubatch": (c_uint32, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_batch_init": (Batch, [c_int32, c_int32, c_int32]),
    "llama_batch_free": (None, [Batch]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_get_logits": (ctypes.POINTER(c_float), [c_void_p]),
}
QUANTISING: dict[str, tuple[Any, list[Any]]] = {
    "llama_model_quantize_default_params": (Params, []),
    "llama_model_quantize": (c_uint32, [c_char_p, c_char_p, ctypes.POINTER(Params)]),
}


def main(path: str) -> None:
    """Do the task; any failure is a message or a traceback, and a non-zero exit code."""
    lib = opened(list(libraries()))
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(
        quantised(lib, task).encode(), lib.llama_model_default_params()
    )
    if not model:
        raise SystemExit("the model could not be loaded")
    context = new_context(lib, model, max(len(tokens) for tokens, _ in task["windows"]))
    lib.llama_set_n_threads(context, task["threads"], task["threads"])
    width = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    with Path(task["out"]).open("wb") as out:
        for tokens, first in task["windows"]:
            write_window(lib, context, tokens, first, width, out)


# --- the library ----------------------------------------------------------------------------------


def libraries() -> Iterator[Path]:
    """Files of this environment that may be llama.cpp's library, the surest first."""
    for folder in folders():
        for pattern in PATTERNS:
            yield from sorted(folder.glob(pattern))


def folders() -> list[Path]:
    """Where this environment may have the library."""
    named = os.environ.get(LIBRARY_VARIABLE)
    found = [Path(named)] if named else []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)  # imports nothing
        for place in (spec and spec.submodule_search_locations) or ():
            found += [Path(place) / "lib", Path(place) / "lib64", Path(place)]
    return [*found, Path(sys.prefix) / "lib", Path(sys.prefix) / "bin"]


def opened(paths: list[Path]) -> Any:
    """The first of these libraries that is llama.cpp's, with the types of its functions."""
    problems = []
    for path in paths:
        try:
            lib = ctypes.CDLL(str(path))
            declare(lib, FUNCTIONS)
        except (OSError, AttributeError) as error:
            problems.append(f"{path}: {error}")
        else:
            return lib
    places = ", ".join(map(str, folders()))
    raise SystemExit(
        f"{sys.executable} has no library of llama.cpp: install llama-cpp-python or xllamacpp "
        f"there; looked in {places}" + "".join(f"; {each}" for each in problems)
    )


def declare(lib: Any, functions: dict[str, tuple[Any, list[Any]]]) -> None:
    """Say what functions take and return; AttributeError where one is not in the library."""
    for name, (returned, taken) in functions.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = returned, taken


# --- the model ------------------------------------------------------------------------------------


def quantised(lib: Any, task: Any) -> str:
    """Path of the model in the format asked for."""
    source, kind = str(task["source"]), str(task["kind"])
    if kind == "F32":
        return source
    try:
        declare(lib, QUANTISING)
    except AttributeError:
        raise SystemExit(
            f"{lib._name} cannot quantise, only decode; llama-cpp-python's library can"
        ) from None
    params = lib.llama_model_quantize_default_params()
    params.first[0], params.first[1] = task["threads"], FILE_TYPES[kind]
    target = f"{source}.{kind}"
    if lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"the model could not be quantised to {kind}")
    return target


def new_context(lib: Any, model: Any, longest: int) -> Any:
    """A context that reads windows of so many tokens at once."""
    params = lib.llama_context_default_params()
    for place in range(3):  # n_ctx, n_batch, n_ubatch
        params.first[place] = longest
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("the context could not be made")
    if lib.llama_n_ubatch(context) != longest:
        raise SystemExit("this version of llama.cpp has other parameters than those known here")
    return context


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
