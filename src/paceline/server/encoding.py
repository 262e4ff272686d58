"""Texts to token ids without holding up other requests.

Owns when that moves to a thread, and the refusal of texts that cannot fit before they are encoded.
"""

from __future__ import annotations

import asyncio

from paceline.errors import ContextLengthError
from paceline.server.serving import Serving

_LONG_TEXT = 4096
"""Characters; shorter ones are encoded sooner than a thread is woken."""


async def encode(serving: Serving, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text.

    Raises:
        ContextLengthError: it is so long that no encoding of it fits into the context.
        RequestError: it cannot be encoded.
    """
    tokenizer, context = serving.tokenizer, serving.client.info.max_model_len
    most = context * serving.longest_token
    if len(text) > most:
        raise ContextLengthError(
            f"the prompt has {len(text)} characters; the context holds {context} tokens, which "
            f"are at most {most} characters: shorten the prompt"
        )
    if len(text) <= _LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
