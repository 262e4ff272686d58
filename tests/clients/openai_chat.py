"""openai's own package: a chat whole and streamed, parsed, with a call that is sent back as it
came, and embeddings. Prints one JSON line.

Runs in an environment of its own: ``python openai_chat.py URL KEY MODEL``.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import openai
import pydantic
from asking import ASKED, MESSAGES, WEATHER


class Person(pydantic.BaseModel):
    kind: Literal["reader", "writer"]


def main(url: str, key: str, model: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    asked: dict[str, Any] = {"model": model, **ASKED}
    whole = client.chat.completions.create(messages=MESSAGES, **asked)
    with client.chat.completions.stream(messages=MESSAGES, **asked) as stream:
        pieces = [each.delta for each in stream if each.type == "content.delta"]
    parsed = client.chat.completions.parse(messages=MESSAGES, response_format=Person, **asked)
    forced = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    called = client.chat.completions.create(messages=MESSAGES, **asked, **forced).choices[0].message
    (call,) = called.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    again: list[Any] = [*MESSAGES, called, result]
    after = client.chat.completions.create(messages=again, tools=[WEATHER], **asked)
    one, other = (
        client.embeddings.create(model=model, input=text).data[0].embedding
        for text in ("a girl", ["a girl"])
    )
    person = parsed.choices[0].message.parsed
    told = {
        "text": whole.choices[0].message.content,
        "streamed": "".join(pieces),
        "kind": person and person.kind,
        "city": json.loads(call.function.arguments)["city"],  # type: ignore[union-attr]
        # Its words depend on the call's id, which is drawn anew each time.
        "has_after": bool(after.choices[0].message.content),
        "embeddings_are_equal": one == other and len(one) > 1,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
