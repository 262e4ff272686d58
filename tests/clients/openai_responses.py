"""openai's own package against ``/v1/responses``: whole, streamed, parsed, continued, with tools.
Prints one JSON line.

Runs in an environment of its own: ``python openai_responses.py URL KEY MODEL``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
import pydantic

INPUT = "Once upon a time"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Person(pydantic.BaseModel):
    kind: Literal["reader", "writer"]


def story(client: openai.OpenAI, asked: dict[str, Any]) -> dict[str, Any]:
    """The same words in every form, the chat's among them."""
    whole = client.responses.create(**asked, input=INPUT)
    events = list(client.responses.create(**asked, input=INPUT, stream=True))
    with client.responses.stream(**asked, input=INPUT) as stream:
        texts = [each.delta for each in stream if each.type == "response.output_text.delta"]
    chat = client.chat.completions.create(
        model=asked["model"],
        max_tokens=asked["max_output_tokens"],
        temperature=asked["temperature"],
        messages=[
            {"role": "system", "content": asked["instructions"]},
            {"role": "user", "content": INPUT},
        ],
        **asked["extra_body"],
    )
    last: Any = events[-1]
    return {
        "text": whole.output_text,
        "events": [events[0].type, last.type],
        "numbers_count_up": [each.sequence_number for each in events] == [*range(len(events))],
        "texts": [last.response.output_text, "".join(texts), chat.choices[0].message.content],
        "reason": whole.incomplete_details and whole.incomplete_details.reason,
        "usage_is_the_same": whole.usage
        and whole.usage.output_tokens == last.response.usage.output_tokens,
    }


def conversation(client: openai.OpenAI, asked: dict[str, Any]) -> dict[str, Any]:
    """A call, its result, and what follows: by the items, and by the name of the response."""
    forced = {**asked, "tools": [TOOL], "max_output_tokens": 60, "parallel_tool_calls": False}
    called = client.responses.create(**forced, input=INPUT, tool_choice="required")
    call: Any = called.output[-1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    history: Any = [{"role": "user", "content": INPUT}, *called.output, result]
    by_items = client.responses.create(**forced, input=history)
    by_name = client.responses.create(**forced, input=[result], previous_response_id=called.id)
    kept = client.responses.retrieve(called.id)
    listed = [item.type for item in client.responses.input_items.list(by_name.id)]
    client.responses.delete(called.id)
    return {
        "arguments": json.loads(call.arguments),
        "called": [call.type, call.name, called.status],
        # The words themselves depend on the call's random name, which the prompt contains.
        "after_is_the_same": by_items.output_text == by_name.output_text != "",
        "kept": kept.output == called.output,
        "listed": listed,
    }


def refusals(client: openai.OpenAI, asked: dict[str, Any]) -> list[Any]:
    found = []
    gone = client.responses.create(**asked, input=INPUT, store=False).id
    for change in ({"model": "gpt"}, {"previous_response_id": gone}, {"max_output_tokens": 0}):
        try:
            client.responses.create(**{**asked, "input": INPUT, **change})
        except openai.APIStatusError as error:
            found.append([type(error).__name__, error.param])
    return found


def main(url: str, key: str, model: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    asked: dict[str, Any] = {"model": model, "max_output_tokens": 24, "temperature": 0.7}
    asked |= {"instructions": "You tell stories.", "extra_body": {"seed": 3}}
    person = {**asked, "input": INPUT, "text_format": Person, "max_output_tokens": 60}
    parsed = client.responses.parse(**person)
    with client.responses.stream(**person) as stream:
        streamed = stream.get_final_response()

    async def later() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as other:
            return (await other.responses.create(**asked, input=INPUT)).output_text

    print(
        json.dumps(
            {
                **story(client, asked),
                **conversation(client, asked),
                "persons": [each.output_parsed.kind for each in (parsed, streamed)],
                "refusals": refusals(client, asked),
                "later": asyncio.run(later()),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
