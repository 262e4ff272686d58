"""Texts to token ids without holding up other requests.

Owns when that moves to a thread, and the refusal of texts that cannot fit before they are encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline.errors import ContextLengthError
from paceline.models.tokenizer import LONG_TEXT
from paceline.server.serving import Serving


async def encode(serving: Serving, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text.

    Raises:
        ContextLengthError: it is so long that no encoding of it fits into the context.
        RequestError: it cannot be encoded.
    """
    return (await encode_all(serving, [text], add_special_tokens))[0]


async def encode_all(
    serving: Serving, texts: Sequence[str], add_special_tokens: bool = True
) -> list[list[int]]:
    """Token ids of several texts; raises as :func:`encode`."""
    tokenizer, context = serving.tokenizer, serving.client.info.max_model_len
    most = context * serving.longest_token
    longest = max(map(len, texts), default=0)
    if longest > most:
        raise ContextLengthError(
            f"this model's maximum context length is {context} tokens, at most {most} characters; "
            f"the prompt has {longest} characters: shorten the prompt"
        )
    if len(texts) == 1 and longest < LONG_TEXT:  # sooner done than a thread is woken
        return [tokenizer.encode(texts[0], add_special_tokens)]
    return await asyncio.to_thread(tokenizer.encode_batch, texts, add_special_tokens)
