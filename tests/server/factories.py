"""Engines for the process of an engine: what is pickled is the name of a function in this module.

Nothing here imports torch before it is called, so that :func:`paper` starts quickly.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from paceline.core.errors import (
    ConfigError,
    ModelLoadError,
    NoAdapterError,
    RequestError,
    UnknownAdapterError,
)
from paceline.request.engine_stats import EngineInfo, EngineStats
from paceline.request.request import FinishReason, Request, StepOutput
from paceline.request.sampling_params import SamplingParams
from paceline.server.engine_process.messages import ServedEngine, SubmittedPrompt

if TYPE_CHECKING:
    from paceline.api.llm import LLM

OPTIONS: dict[str, Any] = {
    "speculative_config": {"method": "prompt_lookup", "min_accept_prob": 0.0},
    "planner": "fixed",
    "num_threads": 1,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "kv_cache_memory": 1 << 25,
}
PHASES = ("schedule", "propose", "plan", "pack", "forward", "verify", "commit", "observe")
FATAL = ("schedule", "commit", "observe")
"""Phases outside the transaction: what goes wrong there ends the engine."""


def embedded() -> LLM:
    from paceline.api.llm import LLM

    return LLM("embedded", **OPTIONS)


def fragile() -> LLM:
    """The embedded engine; the salt ``break PHASE`` makes that phase raise once.

    With ``poison PHASE`` it raises whenever it is given that request. Salts may be those of
    requests over HTTP. That a phase raised is a key of the statistics' ``seconds``:
    ``broken PHASE``.
    """
    from paceline.server.http.security import partition

    llm = embedded()
    done: set[int] = set()

    def patch(engine: Any) -> None:
        for phase in PHASES:
            once, always = (
                (salt, partition({}, salt)) for salt in (f"break {phase}", f"poison {phase}")
            )
            setattr(engine, f"_{phase}", _fragile(engine, phase, once, always, done))

    llm.call(patch)
    return llm


def _fragile(
    engine: Any, phase: str, once: Sequence[str], always: Sequence[str], done: set[int]
) -> Callable[..., Any]:
    original = getattr(engine, f"_{phase}")

    def is_due(request: Request, given: Sequence[Request]) -> bool:
        if request.num_output_tokens < 3:
            return False
        if request.cache_salt in once and request.request_id not in done:
            done.add(request.request_id)
            return True
        return request.cache_salt in always and request in given

    def wrapper(*arguments: Any, **options: Any) -> Any:
        given = [item.request for step in arguments[:1] for item in step.items]
        if any(is_due(request, given) for request in list(engine.requests.values())):
            engine._stats.seconds[f"broken {phase}"] = 0.0
            raise ArithmeticError(f"broken in {phase}")
        return original(*arguments, **options)

    return wrapper


def log_to(path: str) -> None:
    layout = "%(levelname)s %(trace_id)s %(message)s"
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(layout, defaults={"trace_id": "-"}))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def unreadable() -> ServedEngine:
    raise ModelLoadError("there is no such model")


def stillborn() -> ServedEngine:
    os._exit(3)


def once(marker: str) -> ServedEngine:
    """Built the first time only."""
    if Path(marker).exists():
        raise ModelLoadError("the model's folder is gone")
    Path(marker).touch()
    return paper()


def again(folder: str) -> ServedEngine:
    """Built at once the first time; whoever comes later waits for a file called ``go``."""
    place = Path(folder)
    if (place / "built").exists():
        (place / "waits").touch()
    while (place / "built").exists() and not (place / "go").exists():
        time.sleep(0.005)
    (place / "built").touch()
    return paper()


Sink = Callable[[Sequence[StepOutput]], None]


class Paper:
    """What the engine's process needs of an engine: the prompt's first token again and again."""

    checkpoint = SimpleNamespace(tokenizer=None)

    def __init__(self, seconds_per_step: float) -> None:
        self._seconds = seconds_per_step
        self._requests: dict[int, tuple[Request, Sink]] = {}
        self._lock = threading.Lock()
        self._next_id = 0
        threading.Thread(target=self._run, daemon=True).start()

    def prepare_grammars(self) -> None:
        """There are none."""

    def info(self) -> EngineInfo:
        return EngineInfo(
            model="paper",
            max_model_len=1 << 20,
            vocab_size=48,
            dtype="float32",
            backend="paper",
            promises_identity=True,
            proposers=("prompt_lookup",),
            max_num_seqs=4,
            kv_blocks_total=1 << 16,
            block_size=16,
            architecture="paper",
            num_bytes=64,
            kv_bytes=1 << 10,
        )

    def flush_prefix_cache(self) -> None:
        """There is none."""

    def load_lora(self, name: str, folder: str, replaces: bool = False) -> None:
        raise ModelLoadError("paper has no adapters")

    def unload_lora(self, name: str) -> None:
        raise UnknownAdapterError("paper has no adapters")

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        sink: Sink,
        cache_salt: str = "",
        on_added: Callable[[Sequence[SubmittedPrompt]], None] | None = None,
        adapters: Sequence[str | None] = (),
    ) -> None:
        if not all(prompts):
            raise RequestError("the prompt is empty")
        with self._lock:
            jobs = []
            for token_ids, wish in zip(prompts, params, strict=True):
                request = Request(self._next_id, token_ids, 1, wish, 0, 1 << 20)
                self._next_id += 1
                self._requests[request.request_id] = request, sink
                jobs.append(SimpleNamespace(requests=[request]))
            if on_added is not None:
                on_added(jobs)

    def abort(self, ids: Sequence[int]) -> None:
        for request_id in ids:
            self._requests.pop(request_id, None)

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._requests))

    def _run(self) -> None:
        while True:
            time.sleep(self._seconds)
            with self._lock:
                for request, sink in list(self._requests.values()):
                    self._step(request, sink)

    def _step(self, request: Request, sink: Sink) -> None:
        request.token_ids.append(request.token_ids[0])
        ended = request.num_output_tokens == request.params.max_tokens
        reason = FinishReason.LENGTH if ended else None
        token = request.token_ids[-1:]
        sink([StepOutput(request.request_id, token, ["target"], "x", (), reason)])
        if ended:
            del self._requests[request.request_id]


def paper(seconds_per_step: float = 0.002) -> ServedEngine:
    return Paper(seconds_per_step)


class Adapted(Paper):
    """With adapters, which are folders and no more."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        super().__init__(0.002)
        self._folders: dict[str, str] = {}
        for name, folder in folders.items():
            self.load_lora(name, folder)

    def load_lora(self, name: str, folder: str, replaces: bool = False) -> None:
        if not Path(folder).is_dir():
            raise NoAdapterError(f"there is no adapter at {folder}")
        if name in self._folders:
            raise ConfigError(f"an adapter named {name!r} is loaded already")
        self._folders[name] = folder

    def unload_lora(self, name: str) -> None:
        if self._folders.pop(name, None) is None:
            raise UnknownAdapterError(f"no adapter {name!r} is loaded")


def adapted(folder: str, lora: Mapping[str, str] | None = None) -> ServedEngine:
    """Built when :func:`again` is."""
    again(folder)
    return Adapted(lora or {})


class Stuck(Paper):
    """In a step that does not end."""

    def stats(self) -> EngineStats:
        while True:
            time.sleep(3600)


def stuck_once(marker: str) -> ServedEngine:
    """Stuck the first time only."""
    if Path(marker).exists():
        return paper()
    Path(marker).touch()
    return Stuck(0.002)


class PaperWithGrammars(Paper):
    """Its compiler of grammars never gets done with one."""

    def submit(self, prompts: Any, params: Any, *rest: Any) -> None:
        if params[0].structured_outputs is not None:
            time.sleep(3600)
        super().submit(prompts, params, *rest)


def paper_with_grammars() -> ServedEngine:
    return PaperWithGrammars(0.002)


class Prepared(Paper):
    """Refuses requests that come before the tables of grammars are made."""

    is_prepared = False

    def prepare_grammars(self) -> None:
        self.is_prepared = True

    def submit(self, *arguments: Any) -> None:
        if not self.is_prepared:
            raise RequestError("it is too early")
        super().submit(*arguments)


def prepared() -> ServedEngine:
    return Prepared(0.002)
