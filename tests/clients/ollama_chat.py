"""ollama's own package against a server: chats, prompts, streams, schemas, tools, errors.
Prints one JSON line.

Runs in an environment of its own: ``python ollama_chat.py URL KEY MODEL``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from typing import Any

import ollama

MESSAGES: list[Any] = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Once upon a time"},
]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": CITY},
}
OPTIONS = {"seed": 3, "temperature": 0.7, "num_predict": 24}


def main(url: str, key: str, model: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    client = ollama.Client(host=url, headers=headers)
    asked: dict[str, Any] = {"model": f"{model}:latest", "messages": MESSAGES, "options": OPTIONS}
    prompt: dict[str, Any] = {"model": model, "prompt": "Once", "raw": True, "options": OPTIONS}
    whole, raw = client.chat(**asked), client.generate(**prompt)
    pieces = list(client.chat(**asked, stream=True, keep_alive="5m"))
    held = client.chat(**asked | {"format": CITY, "options": {**OPTIONS, "num_predict": 60}})
    call = {"function": {"name": "weather", "arguments": json.loads(held.message.content or "")}}
    after = client.chat(
        **asked
        | {"tools": [TOOL]}
        | {
            "messages": [
                *MESSAGES,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_name": "weather", "content": "Rain."},
            ]
        }
    )

    async def later() -> str | None:
        answer = await ollama.AsyncClient(host=url, headers=headers).chat(**asked)
        return answer.message.content

    def openai(path: str, **body: Any) -> Any:
        """OpenAI's form of the same."""
        body["model"] = model
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(url + path, json.dumps(body).encode(), headers | kind)
        return json.load(urllib.request.urlopen(request))

    same = {"seed": 3, "temperature": 0.7, "max_tokens": 24}
    chat = openai("/v1/chat/completions", messages=MESSAGES, **same)
    report = {
        "text": whole.message.content,
        "streamed": "".join(piece.message.content or "" for piece in pieces),
        "done": [pieces[-1].done, pieces[-1].done_reason, pieces[-1].eval_count],
        "prompt_tokens": whole.prompt_eval_count,
        "chat": chat["choices"][0]["message"]["content"],
        "chat_prompt_tokens": chat["usage"]["prompt_tokens"],
        "raw": raw.response,
        "raw_streamed": "".join(
            piece.response or "" for piece in client.generate(**prompt, stream=True)
        ),
        "completion": openai("/v1/completions", prompt="Once", **same)["choices"][0]["text"],
        "embeddings": client.embed(model=model, input=["Once", "upon"]).embeddings,
        "vectors": [
            each["embedding"] for each in openai("/v1/embeddings", input=["Once", "upon"])["data"]
        ],
        "city": call["function"]["arguments"]["city"],
        "after": after.message.role,
        "listed": [each.model for each in client.list().models],
        "running": [each.model for each in client.ps().models],
        "shown": client.show(model).capabilities,
        "refusals": [
            *(_status(client, asked | change) for change in _WRONG),
            _status(ollama.Client(host=url), asked),
        ],
        "later": asyncio.run(later()),
    }
    print(json.dumps(report))


_WRONG: tuple[dict[str, Any], ...] = (
    {"model": "llama3"},
    {"options": {"num_predict": 10**6}},
    {"messages": [{"role": "user", "content": "a" * (9 << 20)}]},
)


def _status(client: ollama.Client, asked: dict[str, Any]) -> int:
    try:
        client.chat(**asked)
    except ollama.ResponseError as error:
        return error.status_code if isinstance(error.error, str) else 0
    return 200


if __name__ == "__main__":
    main(*sys.argv[1:])
