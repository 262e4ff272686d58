"""Chat templates: how a chat is rendered within limits, and templates for models that bring none.

Owns the messages in the form in which templates read them, and the marks of thoughts and of tool
calls that templates teach. Messages follow what transformers hands to templates (5.23 and 5.24,
``utils/chat_template_utils.py``), but for two things: a call without words keeps an empty content,
which many templates read without asking whether it is there, and thoughts have all of their names
instead of two. Knows no tokenizer.

Templates are rendered in a process of their own (:mod:`paceline.text.template_worker`), because no
deadline check or exception interrupts a repeated string, a power or a padded number. It is started
at the first rendering, and replaced when it had to be killed.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import BusyError, ConfigError, ModelLoadError, RequestError, TemplateError
from paceline.core.files import read_text
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
    """The source of the built-in template of that name, or of the file at that path;
    ``ConfigError`` where there is neither, or what is there is no template.
    """
    if choice in BUILT_IN:
        return BUILT_IN[choice]
    path = Path(choice)
    if not path.is_file():
        raise ConfigError.of(
            "chat_template", f"is {choice!r}, which is not a file; built in: {', '.join(BUILT_IN)}"
        )
    try:
        source = read_text(path, _MAX_BYTES)
    except ModelLoadError as error:
        raise ConfigError.of("chat_template", f"cannot be used: {error}") from error
    _check_syntax(source, path)
    return source


def _check_syntax(source: str, path: Path) -> None:
    """Let a template show that it can be read; it may still refuse so short a chat."""
    messages = [{"role": "user", "content": "Hello."}]
    try:
        render_chat_template(source, {"messages": messages, "add_generation_prompt": True})
    except RequestError as error:
        if "TemplateSyntaxError" in str(error):
            raise ConfigError.of(
                "chat_template", f"{path} is not a valid template: {error}"
            ) from error


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


_THOUGHTS = (
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>"),
    *("<mm:think>", "</mm:think>", "<thought>", "</thought>"),
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    *("<|channel>", "<channel|>", "<|inner_prefix|>", "<|inner_suffix|>"),
    *("<answer>", "</answer>", "<response>", "</response>"),
    *("<think:opensource>", "</think:opensource>"),
)
_CALLS = (
    *("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "<longcat_tool_call>", "</longcat_tool_call>"),
    *("<tool_calls>", "</tool_calls>", "<function_calls>", "</function_calls>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<tool_sep>", "<TOOLCALL>", "</TOOLCALL>", "<|function_call|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>", "<|/tool_call|>"),
    *("<|START_ACTION|>", "<|END_ACTION|>", "<|tools_prefix|>", "<|tools_suffix|>"),
    *("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>"),
    *("<|python_start|>", "<|python_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<function", "</function>", "<param", "</param>"),
    *("<start_function_call>", "<end_function_call>", "<escape>"),
)
_HUNYUAN = ("tool_calls", "tool_call", "arg_key", "arg_value")
_DEEPSEEK = ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep")


def _of_deepseek(words: str) -> str:
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


DEEPSEEK_CALLS = _of_deepseek(_DEEPSEEK[0])
"""What begins calls of DeepSeek V3, R1 and V3.1."""
SHOWN_MARKS = frozenset(
    {
        *_THOUGHTS,
        *_CALLS,
        "<tool_sep:opensource>",
        *(f"{begin}{word}:opensource>" for begin in ("<", "</") for word in _HUNYUAN),
        "\uff5cDSML\uff5c",
        *map(_of_deepseek, _DEEPSEEK),
    }
)
HARMONY = frozenset({"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"})
"""Marks of gpt-oss's messages."""
XTML = frozenset({"<|open|>", "<|close|>", "<|sep|>"})
"""Marks of Kimi K3's messages."""
ROLES = frozenset({"<|message_sep|>\n\n", "<|role_sep|>\n"})
"""Marks of GigaChat 3's messages; their tokens have the line breaks in them."""
MARK_FAMILIES = (HARMONY, XTML, ROLES)
"""Marks that are shown where a vocabulary has all of one family: alone they mean something else."""


THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates and clients have an earlier answer's thoughts."""
_CALL_WITHOUT_WORDS = ("message['content'] is none", DEEPSEEK_CALLS)
"""What the templates of DeepSeek V3 and R1 know a call by."""


def with_opening(
    opening: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """The messages behind those that a model's owner put before each chat.

    A chat that begins with a system message of its own goes without theirs. As in Ollama (its
    ``ChatHandler``), but for the place of the chat's own: it stays the first.
    """
    if not opening or not messages:
        return messages
    own = int(begins_with_system(messages))
    theirs = [each for each in opening if not (own and _is_system(each))]
    return [*messages[:own], *theirs, *messages[own:]]


def begins_with_system(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a chat has a system message of its own."""
    return bool(messages) and _is_system(messages[0])


def _is_system(message: Mapping[str, Any]) -> bool:
    return isinstance(message, Mapping) and message.get("role") in ("system", "developer")


def read_by_templates(
    messages: Sequence[Mapping[str, Any]], mentions: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """The messages as a template reads them that ``mentions`` says has these words;
    ``TemplateError`` where one is no mapping.
    """
    wordless = None if all(map(mentions, _CALL_WITHOUT_WORDS)) else ""
    return [_with_all_thoughts(_with_content(message, wordless)) for message in messages]


def _with_content(message: Mapping[str, Any], wordless: str | None) -> dict[str, Any]:
    """The message without keys that are None; ``wordless`` is the content of a mere call."""
    if not isinstance(message, Mapping):
        raise TemplateError(
            f"a message of a chat has a role and a content; {str(message)[:40]!r} has not"
        )
    told = {key: value for key, value in message.items() if value is not None}
    if told.get("tool_calls"):
        return {**told, "content": told.get("content") or wordless}
    return {**told, "content": told.get("content", "")} if "content" in message else told


def _with_all_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in THOUGHTS if name in message]
    if not names:
        return message
    thoughts = message[names[0]]
    return {**dict.fromkeys(THOUGHTS, thoughts), **message, THOUGHTS[0]: thoughts}
