"""Engines as processes of their own: their interpreters, their files, and the talk with them.

Makes the models that peers are compared on where they are absent, starts the worker programs
(``peers_worker.py``) and asks them for tasks, one at a time. Knows nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT, note
from inflate import PAIRS, embedded_folder, write_inflated

PEERS = ROOT / ".peers"
LLAMA_BIN = PEERS / "src" / "build" / "bin"
PYTHONS = {"llama": PEERS / "llama" / "bin" / "python"}
ROLES = ("target", "draft")
LONGEST_CONTEXT = 32_768
HELP = "run `make peers` to install it"


class MissingPeerError(Exception):
    """Something that a peer needs is not there, or could not be made."""


def made(path: Path, make: Callable[[Path], None]) -> Path:
    """``path``, which ``make`` writes under another name first, so that it is whole or absent."""
    if not path.exists():
        note(f"making {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".unfinished")
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        make(unfinished)
        os.replace(unfinished, path)
    return path


def run_tool(*command: object) -> None:
    """Raises :class:`MissingPeerError` with the end of what the tool said."""
    words = [str(word) for word in command]
    if not Path(words[0]).exists():
        raise MissingPeerError(f"{Path(words[0]).name} is not there; {HELP}")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = (done.stderr or done.stdout)[-400:]
        raise MissingPeerError(f"{Path(words[0]).name} failed ({done.returncode}): {tail}")


def is_file(name: str) -> bool:
    """Whether a model is a GGUF file and not one of the inflated ones."""
    return name not in PAIRS


def label(name: str) -> str:
    """What a model is called in tables and folders."""
    return Path(name).stem if is_file(name) else name


def tokenizer_source(name: str) -> Path:
    """What the tokenizer of a model is read from."""
    return Path(name) if is_file(name) else hugging_face(name, "target")


def hugging_face(name: str, role: str) -> Path:
    """Folder of the inflated model."""
    if is_file(name):
        raise MissingPeerError(f"{label(name)} is a GGUF file alone")
    shape = getattr(PAIRS[name], role)
    source = embedded_folder(role == "draft")
    return made(
        PEERS / "models" / name / role, lambda path: void(write_inflated(path, source, shape))
    )


def void(_: object) -> None:
    """For a maker whose result is not wanted."""


def gguf(name: str, role: str, kind: str) -> Path:
    """GGUF file in ``BF16``, or quantised from that by llama.cpp's own tool; a file's own numbers
    are quantised again."""
    path = PEERS / "models" / label(name) / f"{role}-{kind}.gguf"
    if kind == "BF16":
        return made(path, lambda out: write_gguf(hugging_face(name, role), out))
    if is_file(name) and role != "target":
        raise MissingPeerError(f"{label(name)} has no draft model")
    source = Path(name) if is_file(name) else gguf(name, role, "BF16")
    words = (LLAMA_BIN / "llama-quantize", "--allow-requantize", source)
    return made(path, lambda out: run_tool(*words, out, kind, os.cpu_count() or 1))


# --- GGUF -----------------------------------------------------------------------------------------


def write_gguf(folder: Path, out: Path) -> None:
    """Write a Qwen3 folder as GGUF: matrices in bfloat16, vectors in float32."""
    try:
        import gguf as format_
    except ImportError as error:
        raise MissingPeerError("the package gguf is not installed") from error
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = format_.GGUFWriter(out, "qwen3")
    _write_sizes(writer, config)
    _write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
    names = format_.get_tensor_name_map(format_.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    types = format_.GGMLQuantizationType
    for name, tensor in load_file(folder / "model.safetensors").items():
        kind = types.BF16 if tensor.ndim == 2 else types.F32
        data = format_.quants.quantize(tensor.float().numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("inflated")
    writer.add_block_count(config["num_hidden_layers"])
    # Long contexts are measured for what they cost; the weights say nothing sensible in them.
    writer.add_context_length(max(config["max_position_embeddings"], LONGEST_CONTEXT))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def _write_tokenizer(writer: Any, tokenizer: dict[str, Any]) -> None:
    """The byte-level BPE of the embedded models, which splits text as GPT-2 does."""
    control = {token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    end = next(iter(sorted(control)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([3 if index in control else 1 for _, index in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


WORKERS = ROOT / "benchmarks"
Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Engine:
    """One column of the comparison.

    Attributes:
        kind: the type of the GGUF file that it reads, by which engines are compared.
        modes: how it generates beside ``plain``.
        python: the interpreter's environment, None for Paceline's own.
        files: the worker's options for a model's name; makes the file where it is absent.
    """

    name: str
    worker: str
    kind: str
    modes: tuple[str, ...]
    python: str | None
    files: Callable[[str], Options]


def _gguf(kind: str) -> Callable[[str], Options]:
    """The very file that the other engine reads."""
    return lambda name: {"model": str(gguf(name, "target", kind)), "dtype": "auto"}


KINDS = ("Q8_0", "Q6_K", "Q4_K_M", "Q4_0")
OURS, LLAMA = "paceline", "llama.cpp"
ENGINES = {
    engine.name: engine
    for kind in KINDS
    for engine in (
        Engine(f"{OURS} {kind}", "peers_paceline.py", kind, ("default",), None, _gguf(kind)),
        Engine(f"{LLAMA} {kind}", "peers_llama.py", kind, (), "llama", _gguf(kind)),
    )
}


class WorkerError(Exception):
    """A task failed in its worker, or the worker died."""


class Worker:
    """A running engine; ``more`` are further options of its worker.

    Raises:
        MissingPeerError: it cannot be started here; the text says why.
    """

    def __init__(self, engine: Engine, model: str, threads: int, **more: Any) -> None:
        self.engine = engine
        self._process: subprocess.Popen[str] | None = None
        files = engine.files(model)
        python = PYTHONS[engine.python] if engine.python else Path(sys.executable)
        if not python.exists():
            where = f".peers/{engine.python}"
            raise MissingPeerError(f"the environment {where} is absent; {HELP}")
        logs = PEERS / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / (engine.name.replace(" ", "-") + ".log")
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [str(python), str(WORKERS / engine.worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(threads),
            )
        try:
            self.facts: dict[str, Any] = self.ask("open", **files, threads=threads, **more)
        except (WorkerError, MissingPeerError) as error:
            self.close()
            raise MissingPeerError(str(error)) from error

    def ask(self, task: str, **args: Any) -> Any:
        """Run a task and return its result.

        Raises:
            MissingPeerError: the engine has no such mode.
            WorkerError: it failed, or the worker is gone.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"task": task, "args": args}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-300:]
            raise WorkerError(f"the worker ended: {tail}")
        answer = json.loads(line)
        if "unsupported" in answer:
            raise MissingPeerError(answer["unsupported"])
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """End the process, which ends by itself when its pipe closes."""
        process = self._process
        if process is None or process.stdin is None:
            return
        self._process = None
        with suppress(OSError):  # it is gone already
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        process.kill()
        process.wait()


def environment(threads: int) -> dict[str, str]:
    """The worker's variables: one thread count for every library, and no network."""
    fixed = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    library = str(LLAMA_BIN)
    return {**os.environ, **fixed, "PYTHONPATH": path, "LLAMA_CPP_LIB_PATH": library}
