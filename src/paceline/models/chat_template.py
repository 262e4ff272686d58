"""Rendering of a model's chat template within limits of time, memory and output.

Owns the process that renders (see :mod:`paceline.models.template_worker`). A separate process,
because nothing inside this one bounds a template: a repeated string, a power or a padded number is
a single call that no deadline check or asynchronous exception interrupts. It is started at the
first rendering, serves all templates, and is replaced when it had to be killed. Knows no tokenizer.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import TemplateError
from paceline.models.worker_process import WorkerSlot

MAX_SECONDS = 2.0
MAX_OUTPUT_CHARS = 1 << 20
MAX_TEMPLATE_CHARS = 1 << 20


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


_SLOT = WorkerSlot(Path(__file__).with_name("template_worker.py"))
atexit.register(_SLOT.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SLOT.forget)
