"""Runs in an interpreter that has llama.cpp: logits and greedy text of a GGUF file.

    python llama_peer_child.py

Tasks are lines of JSON on standard input, answers lines on standard output. Finds llama.cpp's
shared library among the files of llama-cpp-python or xllamacpp, and calls its C interface, of which
it knows the few functions and the beginnings of structures that it needs. Knows nothing of
Paceline, which that interpreter does not have. The tasks are those of
:class:`paceline_lab.quality.llama_peer.LlamaPeer`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import re
import sys
from array import array
from collections.abc import Iterator
from ctypes import c_bool, c_char_p, c_float, c_int8, c_int32, c_ubyte, c_uint32, c_void_p
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

FLOAT_BYTES = 4
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7}
"""``LLAMA_FTYPE_MOSTLY_...`` of ``llama.h``."""
UBATCH = 512
"""Tokens that are computed together: llama.cpp's default."""
PACKAGES = ("llama_cpp", "xllamacpp")
DISTRIBUTIONS = ("llama_cpp_python", "xllamacpp")
PATTERNS = ("libllama.so", "libllama.dylib", "llama.dll", "xllamacpp*.so", "xllamacpp*.pyd")
LIBRARY_VARIABLE = "LLAMA_CPP_LIB_PATH"
"""With which llama-cpp-python is told the folder of another library than its own."""


class Params(ctypes.Structure):
    """Any structure of parameters: its first numbers, and room for whatever a version has after.

    llama.cpp takes and returns them by value, and never touches more than it knows of.
    """

    _fields_ = (("first", c_int32 * 4), ("rest", c_ubyte * 2048))


class LlamaBatch(ctypes.Structure):
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


LOG = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_log_set": (None, [LOG, c_void_p]),
    "llama_print_system_info": (c_char_p, []),
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
    "llama_batch_init": (LlamaBatch, [c_int32, c_int32, c_int32]),
    "llama_decode": (c_int32, [c_void_p, LlamaBatch]),
    "llama_get_logits": (ctypes.POINTER(c_float), [c_void_p]),
}
QUANTISING: dict[str, tuple[Any, list[Any]]] = {
    "llama_model_quantize_default_params": (Params, []),
    "llama_model_quantize": (c_uint32, [c_char_p, c_char_p, ctypes.POINTER(Params)]),
}


def main() -> None:
    """Answer tasks until the pipe closes; any failure is a message and a non-zero exit code.

    The first task opens the model. One with ``tokens`` is a window, whose logits go to a file; one
    with ``prompt`` asks for greedy text.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what native code prints is no answer
    model: Model | None = None
    for line in sys.stdin:
        task = json.loads(line)
        if model is None:
            model = Model(opened(list(libraries())), task)
            answer = model.facts()
        elif "tokens" in task:
            answer = {"rows": model.write_window(task["tokens"], task["first"])}
        else:
            answer = {"token_ids": model.greedy(task["prompt"], task["max_tokens"])}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


# --- the library ----------------------------------------------------------------------------------


def libraries() -> Iterator[Path]:
    """Files of this environment that may be llama.cpp's library, the surest first."""
    for folder in folders():
        for pattern in PATTERNS:
            yield from sorted(folder.glob(pattern))


def folders() -> list[Path]:
    """Where this environment may have the library."""
    named = os.environ.get(LIBRARY_VARIABLE)
    places = [Path(named)] if named else []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)  # imports nothing
        for place in (spec and spec.submodule_search_locations) or ():
            places += [Path(place) / "lib", Path(place) / "lib64", Path(place)]
    return [*places, Path(sys.prefix) / "lib", Path(sys.prefix) / "bin"]


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


class Model:
    """A model and a context for one sequence, by the task that opens it."""

    def __init__(self, lib: Any, task: Any) -> None:
        self.lib, self.task, self.said = lib, task, list[str]()
        # Importing the package that knows the offsets takes the logs for itself, so that is first.
        changes = float32_kv(lib) if task["kv_type"] == "f32" else {}
        self._keep_log = LOG(lambda _, text, __: self.said.append(text.decode(errors="replace")))
        lib.llama_log_set(self._keep_log, None)
        lib.llama_backend_init()
        path = quantised(lib, task)
        self.model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self.model:
            self.fail("the model could not be loaded")
        self.context = self.new_context(task["longest"], changes)
        lib.llama_set_n_threads(self.context, task["threads"], task["threads"])
        self.width = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(task["longest"], 0, 1)

    def fail(self, what: str) -> NoReturn:
        raise SystemExit("".join([*self.said[-20:], what]))

    def new_context(self, longest: int, changes: dict[int, int]) -> Any:
        """A context that reads so many tokens in one call; all else by llama.cpp's defaults."""
        params = self.lib.llama_context_default_params()
        ubatch = min(longest, UBATCH)
        params.first[:3] = longest, longest, ubatch  # n_ctx, n_batch, n_ubatch
        for offset, value in changes.items():
            c_int32.from_buffer(params, offset).value = value
        context = self.lib.llama_init_from_model(self.model, params)
        if not context:
            self.fail("the context could not be made")
        if self.lib.llama_n_ubatch(context) != ubatch:
            self.fail("this version of llama.cpp has other parameters than those known here")
        return context

    def facts(self) -> dict[str, Any]:
        """What ran, as llama.cpp says it."""
        said = "".join(self.said)
        flash = re.search(r"Flash Attention (?:was auto, set to )?(\w+abled)", said)
        flash = flash or re.search(r"flash_attn +=? *(\w+)", said)
        kept = re.search(r"K \((\w+)\).*?V \((\w+)\)", said)
        return {
            "library": str(Path(self.lib._name).resolve()),
            "version": version_of(self.lib),
            "system_info": self.lib.llama_print_system_info().decode(),
            "flash_attention": flash[1] if flash else "as by default",
            "kv_type": "/".join(kept.groups()) if kept else self.task["kv_type"],
            "vocab_size": self.width,
        }

    def decode(self, tokens: list[int], start: int, wanted: range) -> Any:
        """Read tokens at their positions; the logits of those in ``wanted``, row after row."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i in wanted
        if self.lib.llama_decode(self.context, batch):
            self.fail("decoding failed")
        return self.lib.llama_get_logits(self.context)

    def forget(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def write_window(self, tokens: list[int], first: int) -> int:
        """Read a window on its own and write the float32 logits that predict ``tokens[first:]``."""
        self.forget()
        wanted = range(first - 1, len(tokens) - 1)
        logits = self.decode(tokens, 0, wanted)
        size = len(wanted) * self.width * FLOAT_BYTES
        Path(self.task["out"]).write_bytes((c_ubyte * size).from_address(address(logits)))
        return len(wanted)

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The prompt as one batch, then one token after another."""
        self.forget()
        written: list[int] = []
        rows = prompt
        while len(written) < max_tokens:
            start = len(prompt) + len(written) - len(rows)
            logits = self.decode(rows, start, range(len(rows) - 1, len(rows)))
            row = (c_float * self.width).from_address(address(logits))
            values = array("f", bytes(row))
            rows = [values.index(max(values))]
            written += rows
        return written


def address(pointer: Any) -> int:
    return ctypes.cast(pointer, c_void_p).value or 0


def version_of(lib: Any) -> str:
    """Of the package that the library came with, and of the library where it says it."""
    versions = []
    for package in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    for name in ("ggml_version", "ggml_commit"):
        function = getattr(lib, name, None)
        if function is not None:
            function.restype = c_char_p
            versions.append(f"{name.replace('_', ' ')} {function().decode()}")
    return ", ".join(versions)


def float32_kv(lib: Any) -> dict[int, int]:
    """Offsets and values of the parameters that keep keys and values in float32.

    Flash attention is among them: with it llama.cpp rounds them to float16 whatever they are kept
    in. llama-cpp-python knows the offsets, which versions change.
    """
    os.environ[LIBRARY_VARIABLE] = str(Path(lib._name).parent)
    try:
        known = importlib.import_module("llama_cpp").llama_context_params
    except Exception as error:
        raise SystemExit(f"only with llama-cpp-python is there a KV type f32: {error}") from error
    return {known.type_k.offset: 0, known.type_v.offset: 0, known.flash_attn_type.offset: 0}


def quantised(lib: Any, task: Any) -> str:
    """Path of the model in the format asked for."""
    source, kind = str(task["source"]), task["kind"]
    if kind in (None, "F32"):
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


if __name__ == "__main__":
    main()
