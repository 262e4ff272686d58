"""What one request of a benchmark asks. Knows no server and no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with its lengths in tokens.

    Attributes:
        prompt: a text, or a chat as messages.
        prompt_len: as counted when the sample was made; the server's own count is what is reported.
        output_len: most tokens of the answer.
    """

    prompt: str | tuple[Mapping[str, Any], ...]
    prompt_len: int
    output_len: int

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The prompt as a chat."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return list(self.prompt)
