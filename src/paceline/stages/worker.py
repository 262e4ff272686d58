"""The process of a stage: some layers of a model, which an engine elsewhere runs.

It knows no requests. What is in which slot says the engine, whose first layers have the same slots.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.backends.native.native import ISA_VARIABLE
from paceline.backends.resolve import resolve_ops
from paceline.core.errors import ConfigError, PacelineError, StageError
from paceline.loading.checkpoint import load_checkpoint, model_fingerprint
from paceline.models.backend import StateSpan, Taps
from paceline.models.decoder import Decoder
from paceline.models.threads import set_num_threads
from paceline.request.span import Span
from paceline.stages.link import Link, Message, shown_address
from paceline.tensors.arrays import Array, give_back_freed

log = logging.getLogger(__name__)
GREETING_SECONDS = 10.0
ACCEPT_SECONDS = 2.0
"""For which a new engine waits until the one before it is gone."""


class Stage:
    """The layers that a greeting names, until the connection ends."""

    def __init__(self, greeting: Message) -> None:
        if greeting["threads"]:
            set_num_threads(greeting["threads"])
        whole = load_checkpoint(greeting["model"], with_tokenizer=False)
        if model_fingerprint(whole) != greeting["fingerprint"]:
            raise ConfigError(f"{greeting['model']} is a different model here than at the engine")
        first, last = greeting["layers"]
        part = whole.stage(first, last)
        ops = resolve_ops(greeting["dtype"], "cpu", greeting["deterministic"], greeting["backend"])
        if ops.name != greeting["ops"]:
            raise ConfigError(
                f"this processor computes with {ops.name}, the engine's with {greeting['ops']}, "
                f"which rounds in other places: set {ISA_VARIABLE} to what both have"
            )
        decoder = Decoder(part.config, part.tensors, ops, greeting["max_model_len"])
        self._config, self._is_last = part.config, last == whole.config.num_layers
        memory = ops.kv_memory(part.config, greeting["num_blocks"], greeting["kv_cache_dtype"])
        states = None
        if part.config.recurrent is not None:
            states = ops.state_memory(part.config, *greeting["states"])
        self._forward = ops.forward(decoder, memory, states)
        self._takes: dict[str, Callable[..., Any]] = {
            "move": memory.move,
            "fill": memory.fill,
        }
        if states is not None:
            self._takes |= {
                f"state_{name}": getattr(states, name)
                for name in ("clear", "copy", "set_due", "fold", "fill")
            }
        self._has_states = states is not None
        self._batches: list[Any] = []

    def take(self, message: Message, arrays: Sequence[Array]) -> None:
        """Do what is not answered."""
        what = message["do"]
        if what == "pack":
            self._batches = [self._pack(*each) for each in message["with"]]
        elif what in self._takes or not what.startswith("state_"):  # of layers that are not here
            self._takes[what](*arrays, *message.get("with", ()))

    def _pack(self, spans: list[list[Any]], tables: list[list[int]], states: list[Any]) -> Any:
        where = [StateSpan(*each) for each in states] if self._has_states else []
        packed = [Span(*span) for span in spans]
        if not self._is_last:
            packed = [span._replace(sample_rows=()) for span in packed]
        return self._forward.pack(packed, tables, where)

    def run(self, message: Message, x: Array) -> tuple[Message, Sequence[Array]]:
        """A micro-batch that was packed on its rows, ``[rows, hidden_size]``."""
        c, batch = self._config, self._batches[message["index"]]
        taps = Taps.of(message["taps"], batch.num_rows, c.num_layers, c.hidden_size)
        found = list[Array]()
        if message["greedy"]:
            found.append(np.array(self._forward.greedy(batch, taps, x), np.int64))
        else:
            found.append(self._forward.logits(batch, taps, x))
        experts = self._forward.experts_read, self._forward.experts_fetched
        return {"experts": experts}, [*found, taps.features]


def serve(connection: socket.socket) -> None:
    """Be a stage of the engine at the other end until it is gone."""
    link, failed = Link(connection), ""
    try:
        link.wait(GREETING_SECONDS)
        greeting, _ = link.receive()
        link.wait(None)
        try:
            stage = Stage(greeting)
        except Exception as error:
            known = isinstance(error, PacelineError)
            link.send({"error": str(error) if known else f"{type(error).__name__}: {error}"})
            return
        link.send({"ready": True})
        log.info("layers %d to %d of %s", *greeting["layers"], greeting["model"])
        while True:
            message, arrays = link.receive()
            what = message.get("do")
            if what == "pack":
                failed = ""
            try:
                if what != "run":
                    stage.take(message, arrays)
                elif not failed:
                    reply, found = stage.run(message, *arrays)
                    link.send(reply, *found)
            except StageError:
                raise
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
                if what not in ("pack", "run"):  # what lies in memory is not what it should be
                    raise StageError(failed) from error
            if what == "run" and failed:  # of this step; the next may be well
                link.send({"error": failed})
    except StageError as error:
        log.info("the engine is gone: %s", error)
    finally:
        link.close()


def listen(address: tuple[str, int], ready: Callable[[int], None]) -> None:
    """Be a stage of one engine after another, for ever. Any other engine is refused meanwhile.

    Args:
        ready: gets the port.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        server = socket.create_server(address, family=found[0][0])
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"cannot listen at {shown_address(*address)}: {why}") from error
    with server:
        ready(server.getsockname()[1])
        busy = threading.Lock()
        while True:
            connection, _ = server.accept()
            if busy.acquire(timeout=ACCEPT_SECONDS):
                threading.Thread(target=_serve_alone, args=(connection, busy), daemon=True).start()
                continue
            with contextlib.suppress(StageError):
                Link(connection).send({"error": "it serves another engine"})
            connection.close()


def _serve_alone(connection: socket.socket, busy: threading.Lock) -> None:
    try:
        serve(connection)
    finally:
        gc.collect()  # before the next engine's layers take memory too
        give_back_freed()
        busy.release()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """A stage on this machine, which ends with the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is for the process that started it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    listen(("127.0.0.1", 0), lambda port: print(port, flush=True))


if __name__ == "__main__":
    main()
