"""instructor: a model of pydantic's filled in, by a tool call and by a JSON schema. Prints one JSON
line.

Runs in an environment of its own: ``python instructor_person.py URL KEY MODEL``.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import instructor
import openai
import pydantic
from asking import ASKED, MESSAGES


class Person(pydantic.BaseModel):
    kind: Literal["reader", "writer"]
    age: int = pydantic.Field(ge=0, le=99)


def main(url: str, key: str, model: str) -> None:
    kinds = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        plain = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        client = instructor.from_openai(plain, mode=mode)
        person = client.chat.completions.create(
            model=model, response_model=Person, messages=MESSAGES, max_retries=0, **ASKED
        )
        kinds.append([person.kind, person.age])
    print(json.dumps({"kind": kinds[0][0], "persons": kinds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
