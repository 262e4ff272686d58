"""The same chat by the same template: as Paceline writes it, and as transformers does."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from paceline.core.errors import TemplateError
from paceline.server.chat.prompt import prompt_text
from paceline.server.protocol.chat import ChatCompletionRequest
from paceline.text.tokenizer import Tokenizer

Chat = Mapping[str, Any]
"""The body of a request, without its model."""
MARKS = {"bos_token": "<s>", "eos_token": "</s>"}


def _backend() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, []))


def by_paceline(template: str, chat: Chat) -> str:
    """Raises ``TemplateError`` where the template refuses the chat."""
    tokenizer = Tokenizer(_backend(), special_tokens=MARKS, chat_templates={"default": template})
    return prompt_text(tokenizer, ChatCompletionRequest.model_validate(chat))


def by_transformers(template: str, chat: Chat) -> str:
    """With arguments as objects or, where the template refuses these, as text."""
    for with_objects in (True, False):
        try:
            return _rendered(template, chat, with_objects)
        except Exception as error:  # whatever a template's expressions raise
            refusal = error
    raise TemplateError(str(refusal))


def _rendered(template: str, chat: Chat, with_objects: bool) -> str:
    messages = copy.deepcopy(chat["messages"])
    for message in messages:
        for call in (message.get("tool_calls") or ()) if with_objects else ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    goes_on = chat.get("continue_final_message", False)
    text: str = _writer().apply_chat_template(
        messages,
        tools=chat.get("tools"),
        chat_template=template,
        tokenize=False,
        continue_final_message=goes_on,
        add_generation_prompt=chat.get("add_generation_prompt", not goes_on),
        **chat.get("chat_template_kwargs", {}),
    )
    return text


@functools.cache
def _writer() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=_backend(), **MARKS)


def call(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    """A call of a tool, as OpenAI's clients send it back."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}
