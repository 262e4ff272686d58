"""What passes between the two processes of a server, and what a server asks of an engine.

A message is a pickled tuple of plain values behind its length: one is sent with every step, and a
class of our own takes ten times as long to pickle. The engine's thread sends it itself: to wake a
thread that does so costs as much. Both ends are processes of one user, and one started the other:
nothing that strangers wrote is unpickled.

Knows no process, no engine and no request; importing it does not import torch.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from paceline.core.errors import PacelineError
from paceline.request.engine_stats import EngineInfo, EngineStats, SpeculationCounters
from paceline.request.request import Request, StepOutput, TokenLogprobs
from paceline.request.sampling_params import SamplingParams
from paceline.text.tokenizer import Tokenizer

EngineState = Literal["starting", "ready", "hung", "draining", "failed", "closed"]
"""``hung``: it was ready, and gives no sign of life. ``failed``: it is not started again."""


class Piece(NamedTuple):
    """What one step, or several in a short time, added to one sample.

    Attributes:
        sample: which one of all prompts'; those of the first prompt come first.
        token_ids, origins: for each token the proposer that drafted it, or ``target``.
        text: what became certain; empty where the model has no tokenizer.
        logprobs: one per token where they were asked for.
        finish_reason: ``stop``, ``length`` or ``abort`` with the last piece of a sample.
        stop_reason: the stop string or stop token id that matched.
        counters: what speculation did for the sample; with its last piece.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache; with the first piece
            of a prompt's first sample.
        prompt_logprobs: one per prompt token (None for the first) where they were asked for; with
            the same piece.
        error: why the sample failed, with its last piece.
        embedding: the prompt's vector as float32 values, the lowest byte first, where it was asked
            for; with the first piece of a prompt's first sample.
    """

    sample: int
    token_ids: Sequence[int]
    origins: Sequence[str]
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    counters: SpeculationCounters | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    error: Exception | None = None
    embedding: bytes = b""


class ServedModel(Protocol):
    """What a server reads of an engine's model."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...


class SubmittedPrompt(Protocol):
    """A prompt that an engine has taken on, with a request for each sample."""

    @property
    def requests(self) -> Sequence[Request]: ...


class ServedEngine(Protocol):
    """What a server asks of an engine, which :class:`~paceline.api.llm.LLM` can do."""

    @property
    def checkpoint(self) -> ServedModel: ...
    def info(self) -> EngineInfo: ...
    def stats(self) -> EngineStats: ...
    def submit(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        sink: Callable[[Sequence[StepOutput]], None],
        cache_salt: str = "",
        on_added: Callable[[Sequence[SubmittedPrompt]], None] | None = None,
        adapters: Sequence[str | None] = (),
    ) -> object: ...
    def abort(self, request_ids: Sequence[int]) -> None: ...
    def prepare_grammars(self) -> None: ...
    def flush_prefix_cache(self) -> None: ...
    def load_lora(self, name: str, folder: str, replaces: bool = False) -> None: ...
    def unload_lora(self, name: str) -> None: ...


EngineFactory = Callable[..., ServedEngine]
"""Makes the engine in its own process. It travels there pickled: a function that can be imported,
or a ``functools.partial`` of one. It gets ``lora``, folders of adapters by their names, where there
are some."""


Message = tuple[Any, ...]
LENGTH = struct.Struct("<Q")


def encoded(message: Message) -> bytes:
    """A message as it goes from one process to the other."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


class Channel:
    """The engine's end: blocking, read by one thread and written by several."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._writing = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises: OSError: the other end is gone."""
        data = encoded(message)
        with self._writing:
            self._socket.sendall(data)

    def is_spoken_to(self) -> bool:
        """Wait for a message, which stays to be read; False when the other end is gone."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except ConnectionError:
            return False

    def __iter__(self) -> Iterator[Message]:
        """Messages until the other end is closed, however it ended."""
        with self._socket.makefile("rb") as file:
            try:
                while head := file.read(LENGTH.size):
                    yield pickle.loads(file.read(*LENGTH.unpack(head)))
            except (ConnectionError, EOFError, struct.error, pickle.UnpicklingError):
                return


def portable(error: BaseException) -> Exception:
    """The error as it can travel: itself, or its description when pickling would change it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    if isinstance(error, Exception) and type(copy) is type(error) and str(copy) == str(error):
        return error
    return PacelineError(f"{type(error).__name__}: {error}")
