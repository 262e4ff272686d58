"""Renders chat templates for another process, by ``core/worker_program.py``.

A template comes with the model, so it is untrusted code. The immutable sandbox keeps it from the
interpreter's internals; the limits of the process keep it from holding up or exhausting the engine.
Imports nothing of Paceline.

A question is ``{"template", "variables", "max_chars", "seconds"}``, answered with ``{"text"}`` or
``{"error"}``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_LIMIT = 512 << 20


class _GenerationTag(jinja2.ext.Extension):
    """Some templates mark the assistant's words with a ``generation`` block; it renders as is.

    Variables that are set in it end with it, as in a block of ``call``: in transformers 5.24 it is
    one.
    """

    tags = {"generation"}  # noqa: RUF012 (the base class has it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        words = self.call_method("_words", lineno=line)
        return jinja2.nodes.CallBlock(words, [], [], body, lineno=line)

    def _words(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    return environment


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def render(template: str, variables: dict[str, Any], max_chars: int) -> str:
    """The rendered text; ``ValueError`` beyond ``max_chars``, where rendering stops."""
    pieces, size = [], 0
    for piece in _compiled(template).generate(**variables):
        size += len(piece)
        if size > max_chars:
            raise ValueError(f"its output is longer than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """What to reply; whatever a template does wrong becomes a message."""
    try:
        return {"text": render(request["template"], request["variables"], request["max_chars"])}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def begin(greeting: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, str]]:
    """Return what renders a template; nothing has to be known before."""
    return answer
