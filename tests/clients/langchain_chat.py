"""langchain-openai against a server: chat, stream, tools, structured answers. Prints one JSON line.

Runs in an environment of its own: ``python langchain_chat.py URL KEY MODEL``.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

MESSAGES = [SystemMessage("You tell stories."), HumanMessage("Once upon a time")]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    kind: Literal["reader", "writer"]


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tells the weather."""
    return f"rain in {city}"


def main(url: str, key: str, model: str) -> None:
    chat = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        model=model,
        temperature=0.7,
        seed=3,
        max_tokens=24,
        max_retries=0,
        stream_usage=True,
    )
    answer = chat.invoke(MESSAGES)
    pieces = list(chat.stream(MESSAGES))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    batch = chat.batch([MESSAGES, MESSAGES, [HumanMessage("def add(a, b):")]])
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES)
    longer = chat.model_copy(update={"max_tokens": 64})
    caller = longer.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    called = caller.invoke(MESSAGES)
    # Ids are drawn anew each time, and the prompt of the embedded model's template shows them.
    call = called.tool_calls[0] | {"id": "call_1"}
    called = AIMessage("", tool_calls=[call])
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    rest = chat.bind_tools([weather]).invoke([*MESSAGES, called, result])
    streamed_calls = caller.stream(MESSAGES)
    gathered = next(streamed_calls)
    for piece in streamed_calls:
        gathered += piece
    person = {
        method: longer.with_structured_output(Person, method=method).invoke(MESSAGES).model_dump()
        for method in ("json_schema", "function_calling")
    }
    report = {
        "answer": answer.content,
        "usage": answer.usage_metadata,
        "finish": answer.response_metadata["finish_reason"],
        "streamed": whole.content,
        "streamed_usage": whole.usage_metadata,
        "batch": [each.content for each in batch],
        "num_logprobs": len(scored.response_metadata["logprobs"]["content"]),
        "call": [call["name"], call["args"]],
        "streamed_call": [gathered.tool_calls[0]["name"], gathered.tool_calls[0]["args"]],
        "after_the_call": rest.content,
        "person": person,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
