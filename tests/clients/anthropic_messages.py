"""anthropic's own package against a server: messages, streams, tools, counts, errors. Prints one
JSON line.

Runs in an environment of its own: ``python anthropic_messages.py URL KEY MODEL``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import anthropic

MESSAGES: list[Any] = [{"role": "user", "content": "Once upon a time"}]
TOOL: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    },
}


def main(url: str, key: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    asked: dict[str, Any] = {"model": model, "max_tokens": 24, "messages": MESSAGES}
    asked |= {"system": "You tell stories.", "extra_body": {"seed": 3, "temperature": 0.7}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = "".join(stream.text_stream)
        last = stream.get_final_message()
    forced = {**asked, "tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 60}
    called = client.messages.create(**forced)
    # Of several calls the last may be cut short.
    call = next(block for block in called.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": getattr(call, "id", ""), "content": "Rain."}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": [block.model_dump() for block in called.content]},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(**{**asked, "messages": history, "tools": [TOOL]})
    count = client.messages.count_tokens(model=model, messages=MESSAGES, system=asked["system"])
    refusals = []
    stranger = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
    large = {"messages": [{"role": "user", "content": "a" * (9 << 20)}]}
    wrong: list[Any] = [(client, {"model": "claude"}), (client, {"max_tokens": 0})]
    for caller, change in (*wrong, (stranger, {}), (client, large)):
        try:
            caller.messages.create(**{**asked, **change})
        except anthropic.APIStatusError as error:
            refusals.append([type(error).__name__, error.status_code, error.body["error"]["type"]])  # type: ignore[index]

    async def later() -> str:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as other:
            message = await other.messages.create(**asked)
            return "".join(getattr(block, "text", "") for block in message.content)

    print(
        json.dumps(
            {
                "text": whole.content[0].text,  # type: ignore[union-attr]
                "streamed": streamed,
                "usage_is_the_same": last.usage.output_tokens == whole.usage.output_tokens,
                "stop_reason": whole.stop_reason,
                "input": getattr(call, "input", None),
                "called": called.stop_reason,
                "after": after.type,
                "count": count.input_tokens,
                "input_tokens": whole.usage.input_tokens
                + (whole.usage.cache_read_input_tokens or 0),
                "refusals": refusals,
                "later": asyncio.run(later()),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
