"""Rendering of a model's chat template within limits of time, memory and output.

Owns the process that renders (see :mod:`paceline.models.template_worker`). A separate process,
because nothing inside this one bounds a template: a repeated string, a power or a padded number is
a single call that no deadline check or asynchronous exception interrupts. It is started at the
first rendering, serves all templates, and is replaced when it had to be killed. Knows no tokenizer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import TemplateError

MAX_SECONDS = 2.0
MAX_OUTPUT_CHARS = 1 << 20
MAX_TEMPLATE_CHARS = 1 << 20
_START_SECONDS = 60.0  # a cold disk on a busy machine
_MAX_REPLY_BYTES = 16 << 20  # the output with every character escaped


def render_chat_template(
    template: str,
    variables: Mapping[str, Any],
    *,
    max_seconds: float = MAX_SECONDS,
    max_chars: int = MAX_OUTPUT_CHARS,
) -> str:
    """Render ``template`` with ``variables``, which must be JSON values.

    Safe to call from several threads; they take turns.

    Raises:
        TemplateError: the template is wrong, refuses the conversation, or passes a limit.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters")
    request = {
        "template": template,
        "variables": dict(variables),
        "max_chars": max_chars,
        "seconds": max_seconds,
    }
    try:
        line = json.dumps(request) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"messages and template variables must be JSON: {error}") from error
    reply = _SLOT.ask(line, max_seconds)
    if "text" not in reply:
        raise TemplateError(f"the chat template failed: {reply.get('error', 'no reason given')}")
    return str(reply["text"])


class _Worker:
    """One rendering process and the deadline of what it is asked."""

    def __init__(self) -> None:
        # By path and without its folder on the import path: it needs jinja2 and nothing of ours.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("template_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.expired = False
        if not self._exchange(b"", _START_SECONDS).get("ready"):
            self.stop()
            raise TemplateError("the process that renders chat templates did not start")

    @property
    def is_usable(self) -> bool:
        return self._process.poll() is None and not self.expired

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        """Send a request and wait for the answer; :attr:`is_usable` says if another may follow."""
        reply = self._exchange(line.encode(), seconds)
        if reply:
            return reply
        reason = f"it took longer than {seconds:g} s" if self.expired else "its process ended"
        self.stop()
        return {"error": reason}

    def _exchange(self, data: bytes, seconds: float) -> dict[str, Any]:
        """One round trip; empty when the process was killed or broke the protocol."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._expire)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
            reply = json.loads(self._process.stdout.readline(_MAX_REPLY_BYTES))
        except (OSError, ValueError):
            return {}
        finally:
            timer.cancel()
        return reply if isinstance(reply, dict) else {}

    def _expire(self) -> None:
        self.expired = True
        self._process.kill()

    def stop(self) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # unsent data has nowhere to go
                    stream.close()
        self._process.wait()


class _WorkerSlot:
    """The worker of this process, started when first needed and replaced when it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        with self._lock:
            if self._worker is not None and not self._worker.is_usable:
                self._worker.stop()
                self._worker = None
            if self._worker is None:
                self._worker = _Worker()
            return self._worker.ask(line, seconds)

    def close(self) -> None:
        with self._lock:
            if self._worker is not None:
                self._worker.stop()
                self._worker = None

    def forget(self) -> None:
        """Leave worker and lock, which may be held, to the process that this was forked off."""
        self._lock = threading.Lock()
        self._worker = None


_SLOT = _WorkerSlot()
atexit.register(_SLOT.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SLOT.forget)
