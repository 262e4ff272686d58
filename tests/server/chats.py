"""A chat model without a model: the fake engine behind the application, and what asks it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import openai
from starlette.testclient import TestClient

from paceline.server.app import create_app
from paceline.server.http.config import ServerConfig
from paceline.text.tokenizer import Tokenizer
from paceline.text.tokenizer_files import read_tokenizer_folder
from tests.server.fakes import FakeEngine

# Roles, names, tools and calls written out, so that a prompt shows what the template was handed.
CHATML = r"""{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.name %} name={{ message.name }}{% endif %}
{%- if message.tool_call_id %} of={{ message.tool_call_id }}{% endif %}
{{ "\n" ~ message.content }}
{%- if message.reasoning_content %}[{{ message.reasoning_content }}]{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINKING = CHATML.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif open_thoughts %}<think>\n{% endif %}{% endif %}"
)
LLAMA_CHAT = CHATML.replace("<tool_call>", "<|python_tag|>").replace("</tool_call>", "")
# As Phi-4-mini's own: tools are a text in the system's message, and calls are passed over.
PHI4_CHAT = """{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}
{%- if message['role'] == 'system' and 'tools' in message %}
{{- '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# As gpt-oss's own, in short.
HARMONY_CHAT = r"""<|start|>system<|message|>Reasoning: {{ reasoning_effort or "medium" }}<|end|>
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|start|>functions.tool to=assistant<|channel|>commentary<|message|>
{{- message.content }}<|end|>
{%- elif message.role != "assistant" %}<|start|>{{ message.role }}<|message|>{{ message.content }}
{{- "<|end|>" }}
{%- else %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}
{{- "<|end|>" }}{% endif %}
{%- for call in message.tool_calls or [] %}<|start|>assistant to=functions.{{ call.function.name }}
{{- "<|channel|>commentary json<|message|>" }}{{ call.function.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- endfor %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ADD_TOOL = {"type": "function", "function": {"name": "add"}}
TOOLS = [WEATHER_TOOL, ADD_TOOL]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
USER = {"role": "user", "content": "How is it?"}


@functools.cache
def chat_tokenizer(template: str | None = CHATML) -> Tokenizer:
    """The embedded tokenizer, with a chat template."""
    parts = read_tokenizer_folder(Path(str(files("paceline") / "embedded" / "target")))
    return Tokenizer(
        parts.backend,
        special_tokens=parts.special_tokens,
        chat_templates={} if template is None else {"default": template},
    )


class ChatServer:
    """An application over a fake engine that answers as told.

    Attributes:
        engine: what was asked lies in its ``calls``.
        http: a client without manners.
        openai: OpenAI's client, which validates every answer.
    """

    def __init__(
        self, answer: Any = "It rains.", template: str | None = CHATML, **config: Any
    ) -> None:
        self.engine = FakeEngine(answer, chat_tokenizer(template), max_model_len=2048)
        self.engine.state = "ready"
        app = create_app(self.engine, ServerConfig(**config))
        self.http = TestClient(app, "http://localhost", raise_server_exceptions=False)
        self.openai = openai.OpenAI(
            base_url="http://localhost/v1",
            api_key="none",
            http_client=self.http,
            max_retries=0,
            _strict_response_validation=True,
        )

    def post(self, messages: Any = (USER,), **fields: Any) -> tuple[int, dict[str, Any]]:
        """Status and body."""
        body = {"messages": list(messages) if isinstance(messages, tuple) else messages, **fields}
        response = self.http.post("/v1/chat/completions", json=body)
        return response.status_code, response.json()

    def ask(self, messages: Sequence[Any] = (USER,), **fields: Any) -> Any:
        """An answer in one body, read by OpenAI's client."""
        return self.openai.chat.completions.create(
            model=self.engine.info.model, messages=list(messages), **_split(fields)
        )

    def stream(self, messages: Sequence[Any] = (USER,), **fields: Any) -> list[Any]:
        """The chunks of a stream, read by OpenAI's client."""
        return list(self.ask(messages, stream=True, **fields))

    @property
    def prompt(self) -> str:
        """Of the last request that the engine was handed."""
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        return tokenizer.decode(self.engine.calls[-1].token_ids, skip_special_tokens=False)

    @property
    def grammar(self) -> Any:
        """That the last answer had to match."""
        return self.engine.calls[-1].params.structured_outputs


_OURS = ("chat_template_kwargs", "continue_final_message", "add_generation_prompt")
_OURS += ("structured_outputs", "return_origins", "include_metrics", "prompt_logprobs")


def _split(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that OpenAI's client does not know go around it."""
    ours = {name: value for name, value in fields.items() if name in _OURS}
    theirs = {name: value for name, value in fields.items() if name not in _OURS}
    return {**theirs, "extra_body": ours}
