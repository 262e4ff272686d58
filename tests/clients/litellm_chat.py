"""litellm against a server: chats, texts, streams, tools, errors. Prints one JSON line.

Runs in an environment of its own: ``python litellm_chat.py URL KEY MODEL``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network for prices

import litellm

MESSAGES = [{"role": "user", "content": "Once upon a time"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main(url: str, key: str, model: str) -> None:
    common: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": key, "num_retries": 0}
    common |= {"seed": 3, "temperature": 0.7, "max_tokens": 24}
    chat = {"model": f"openai/{model}", "messages": MESSAGES, **common}
    answer = litellm.completion(**chat, logprobs=True, top_logprobs=2)
    pieces = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(pieces, messages=MESSAGES)
    wishes = {
        **chat,
        "max_tokens": 64,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    called = litellm.completion(**wishes)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**wishes, stream=True)))
    message = called.choices[0].message
    told = {"role": "tool", "tool_call_id": "call", "content": "rain"}
    again = litellm.completion(**chat | {"messages": [*MESSAGES, message.model_dump(), told]})
    text = {"model": f"text-completion-openai/{model}", "prompt": "def add(a, b):", **common}
    written = litellm.text_completion(**text)
    written_pieces = list(litellm.text_completion(**text, stream=True))
    report = {
        "answer": answer.choices[0].message.content,
        "usage": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
        "finish": answer.choices[0].finish_reason,
        "num_logprobs": len(answer.choices[0].logprobs.content),
        "streamed": whole.choices[0].message.content,
        "streamed_usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "call": _call(called),
        "streamed_call": _call(streamed),
        "again": again.choices[0].message.content,
        "call_finish": called.choices[0].finish_reason,
        "text": written.choices[0].text,
        "streamed_text": "".join(piece.choices[0].text or "" for piece in written_pieces),
        "errors": [
            _error(**chat | {"temperature": -1}),
            _error(**chat | {"max_tokens": 10**6}),
            _error(**chat | {"api_key": "wrong"}),
            _error(**chat | {"model": "openai/other"}),
        ],
    }
    print(json.dumps(report))


def _call(answer: Any) -> list[Any]:
    [call] = answer.choices[0].message.tool_calls
    return [call.function.name, json.loads(call.function.arguments)]


def _error(**wishes: Any) -> str:
    try:
        litellm.completion(**wishes)
    except Exception as error:
        return type(error).__name__
    return "none"


if __name__ == "__main__":
    main(*sys.argv[1:])
