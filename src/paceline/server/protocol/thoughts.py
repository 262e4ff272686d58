"""The thoughts of an earlier answer, which clients send back under one of several names."""

from __future__ import annotations

from typing import Any

from paceline.server.protocol.common import LenientModel


class MayHaveThoughts(LenientModel):
    """A message that may carry its thoughts.

    ``reasoning_content`` is DeepSeek's name and that of most templates, ``thinking`` Ollama's and
    gpt-oss's, ``reasoning`` vLLM's later one. The latter two also have other meanings elsewhere:
    what is no text is ignored.
    """

    reasoning_content: str | None = None
    thinking: Any = None
    reasoning: Any = None

    @property
    def thoughts(self) -> str | None:
        """Where several are given, those under the name that comes first above."""
        named = (self.reasoning_content, self.thinking, self.reasoning)
        return next((text for text in named if isinstance(text, str)), None)
