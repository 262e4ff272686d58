"""Chat templates: how one is rendered within limits, those for models that bring none, and choices.

Owns the process that renders (see :mod:`paceline.text.template_worker`). A separate process,
because nothing inside this one bounds a template: a repeated string, a power or a padded number is
a single call that no deadline check or asynchronous exception interrupts. It is started at the
first rendering, serves all templates, and is replaced when it had to be killed. Knows no tokenizer.

Each built-in template begins with ``text_begin``, which
:class:`~paceline.text.tokenizer.Tokenizer` hands to templates: the token that the model wants at
the beginning of any text, or nothing.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import BusyError, ConfigError, ModelLoadError, RequestError, TemplateError
from paceline.core.json_file import read_text
from paceline.core.worker_process import WorkerSlot

PLAIN = "plain"
_MAX_BYTES = 1 << 20
_TURNS = "{{ text_begin }}{% for message in messages %}"
_ANSWER = "{% endfor %}{% if add_generation_prompt %}"

BUILT_IN = {
    PLAIN: f"{_TURNS}{{{{ message.role | capitalize }}}}: {{{{ message.content }}}}\n\n"
    f"{_ANSWER}Assistant:{{% endif %}}",
    "alpaca": f"{_TURNS}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% elif message.role == 'assistant' %}### Response:\n{{ message.content }}\n\n"
    "{% else %}### Instruction:\n{{ message.content }}\n\n{% endif %}"
    f"{_ANSWER}### Response:\n{{% endif %}}",
    "chatml": f"{_TURNS}<|im_start|>{{{{ message.role }}}}\n{{{{ message.content }}}}<|im_end|>\n"
    f"{_ANSWER}<|im_start|>assistant\n{{% endif %}}",
    "gemma": f"{_TURNS}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else 'user' }}\n"
    "{{ message.content }}<end_of_turn>\n"
    f"{_ANSWER}<start_of_turn>model\n{{% endif %}}",
    "llama2": "{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message.role == 'system' %}"
    "{% set ns.system = '<<SYS>>\n' ~ message.content ~ '\n<</SYS>>\n\n' %}"
    "{% elif message.role == 'assistant' %} {{ message.content }} {{ eos_token }}"
    "{% else %}{{ bos_token }}[INST] {{ ns.system }}{{ message.content }} [/INST]"
    "{% set ns.system = '' %}{% endif %}{% endfor %}",
    "llama3": f"{_TURNS}<|start_header_id|>{{{{ message.role }}}}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>"
    f"{_ANSWER}<|start_header_id|>assistant<|end_header_id|>\n\n{{% endif %}}",
    "zephyr": f"{_TURNS}<|{{{{ message.role }}}}|>\n{{{{ message.content }}}}{{{{ eos_token }}}}\n"
    f"{_ANSWER}<|assistant|>\n{{% endif %}}",
}
"""Names of templates to their Jinja sources, which write words and no tools."""
_STOPS = {BUILT_IN[PLAIN]: ("\nUser:",)}


def stops_of(source: str) -> tuple[str, ...]:
    """Strings that end an answer under a template whose turns have no token for their end.

    >>> stops_of(BUILT_IN["plain"])
    ('\\nUser:',)
    """
    return _STOPS.get(source, ())


def chosen_template(choice: str) -> str:
    """The source of the built-in template of that name, or of the file at that path.

    Raises:
        ConfigError: there is neither, or what is there is no template.
    """
    if choice in BUILT_IN:
        return BUILT_IN[choice]
    path = Path(choice)
    if not path.is_file():
        raise ConfigError(
            f"chat_template is {choice!r}, which is not a file; built in: {', '.join(BUILT_IN)}"
        )
    try:
        source = read_text(path, _MAX_BYTES)
    except ModelLoadError as error:
        raise ConfigError(f"chat_template cannot be used: {error}") from error
    _check_syntax(source, path)
    return source


def _check_syntax(source: str, path: Path) -> None:
    """Let a template show that it can be read; it may still refuse so short a chat."""
    messages = [{"role": "user", "content": "Hello."}]
    try:
        render_chat_template(source, {"messages": messages, "add_generation_prompt": True})
    except RequestError as error:
        if "TemplateSyntaxError" in str(error):
            raise ConfigError(f"chat_template {path} is not a valid template: {error}") from error


MAX_SECONDS = 2.0
"""Of processor time."""
DEADLINE_SECONDS = 20.0
"""More than that, however busy the machine is."""
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
        BusyError: the machine had no time for it.
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
    reply = _SLOT.ask(line, max_seconds + DEADLINE_SECONDS)
    if reply.get("late"):
        raise BusyError(f"the chat template was not rendered: {reply['error']}; try again")
    if "text" not in reply:
        raise TemplateError(f"the chat template failed: {reply.get('error', 'no reason given')}")
    return str(reply["text"])


_SLOT = WorkerSlot(Path(__file__).with_name("template_worker.py"))
atexit.register(_SLOT.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SLOT.forget)
