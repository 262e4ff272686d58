"""pydantic-ai: an agent's words whole and streamed, its typed output, over both of OpenAI's APIs.
Prints one JSON line.

Runs in an environment of its own: ``python pydantic_ai_agent.py URL KEY MODEL``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import pydantic
from asking import ASKED, WORDS
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(pydantic.BaseModel):
    kind: Literal["reader", "writer"]


async def asked(url: str, key: str, name: str) -> dict[str, Any]:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    chat: Any = OpenAIChatModel(name, provider=provider)
    responses: Any = OpenAIResponsesModel(name, provider=provider)
    settings: Any = {"max_tokens": 60, "temperature": 0.7, "extra_body": {"seed": ASKED["seed"]}}
    agent = Agent(chat, model_settings=settings)
    whole = await agent.run(WORDS)
    async with agent.run_stream(WORDS) as stream:
        streamed = [piece async for piece in stream.stream_text(delta=True)]
    person = await Agent(chat, output_type=Person, model_settings=settings).run(WORDS)
    other = await Agent(responses, model_settings=settings).run(WORDS)
    return {
        "text": whole.output,
        "streamed": "".join(streamed),
        "by_responses": other.output,
        "kind": person.output.kind,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(asked(*sys.argv[1:]))))
