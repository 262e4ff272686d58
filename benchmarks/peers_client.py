"""The benchmark's half of the talk with an engine's process; see ``peers_worker.py``.

Starts the worker programs under their interpreters and asks them for tasks, one at a time. Knows
which interpreter and which files each engine needs, nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers_models as models
from harness import ROOT
from peers_models import MissingPeerError

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
    return lambda name: {"model": str(models.gguf(name, "target", kind)), "dtype": "auto"}


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


def _joining(group: Path | None) -> list[str]:
    """The beginning of a command that joins a control group first."""
    if group is None:
        return []
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group)]


class WorkerError(Exception):
    """A task failed in its worker, or the worker died."""


class Worker:
    """A running engine; ``more`` are further options of its worker.

    Args:
        group: file of a control group that its process joins before it begins.

    Raises:
        MissingPeerError: it cannot be started here; the text says why.
    """

    def __init__(
        self, engine: Engine, model: str, threads: int, group: Path | None = None, **more: Any
    ) -> None:
        self.engine = engine
        self._process: subprocess.Popen[str] | None = None
        files = engine.files(model)
        python = models.PYTHONS[engine.python] if engine.python else Path(sys.executable)
        if not python.exists():
            where = f".peers/{engine.python}"
            raise MissingPeerError(f"the environment {where} is absent; {models.HELP}")
        logs = models.PEERS / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / (engine.name.replace(" ", "-") + ".log")
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [*_joining(group), str(python), str(WORKERS / engine.worker)],
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
    library = str(models.LLAMA_BIN)
    return {**os.environ, **fixed, "PYTHONPATH": path, "LLAMA_CPP_LIB_PATH": library}
