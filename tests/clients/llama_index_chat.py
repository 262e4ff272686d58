"""llama-index: a chat whole and streamed, a call of a tool, embeddings. Prints one JSON line.

Runs in an environment of its own: ``python llama_index_chat.py URL KEY MODEL``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from asking import ASKED, WEATHER, WORDS
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike


def main(url: str, key: str, model: str) -> None:
    where: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": key}
    llm = OpenAILike(
        model=model,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=ASKED["max_tokens"],
        temperature=ASKED["temperature"],
        additional_kwargs={"seed": ASKED["seed"]},
        max_retries=0,
        **where,
    )
    messages = [ChatMessage(role="user", content=WORDS)]
    whole = llm.chat(messages)
    streamed = [piece.delta or "" for piece in llm.stream_chat(messages)]
    called = llm.chat(messages, tools=[WEATHER], tool_choice="required")
    (call, *_) = llm.get_tool_calls_from_response(called)
    vectors = OpenAILikeEmbedding(model_name=model, **where).get_text_embedding_batch(["a", "b"])
    told = {
        "text": whole.message.content,
        "streamed": "".join(streamed),
        "city": call.tool_kwargs["city"],
        "num_vectors": len(vectors),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
