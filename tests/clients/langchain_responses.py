"""langchain-openai over ``/v1/responses``: whole, streamed, structured, with a tool. Prints one
JSON line.

Runs in an environment of its own: ``python langchain_responses.py URL KEY MODEL``.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import pydantic
from asking import ASKED, WEATHER, WORDS
from langchain_openai import ChatOpenAI
from pydantic import SecretStr


class Person(pydantic.BaseModel):
    kind: Literal["reader", "writer"]


def main(url: str, key: str, model: str) -> None:
    llm = ChatOpenAI(
        model=model,
        base_url=f"{url}/v1",
        api_key=SecretStr(key),
        use_responses_api=True,
        max_completion_tokens=ASKED["max_tokens"],
        temperature=ASKED["temperature"],
        extra_body={"seed": ASKED["seed"]},
        max_retries=0,
    )
    person = llm.with_structured_output(Person).invoke(WORDS)
    (call,) = llm.bind_tools([WEATHER], tool_choice="weather").invoke(WORDS).tool_calls
    told = {
        "text": llm.invoke(WORDS).text,
        "streamed": "".join(chunk.text for chunk in llm.stream(WORDS)),
        "kind": person.kind if isinstance(person, Person) else None,
        "city": call["args"]["city"],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
