"""What every client asks for: the same words, the same seed, one tool."""

from __future__ import annotations

from typing import Any

WORDS = "Once upon a time"
MESSAGES: list[Any] = [{"role": "user", "content": WORDS}]
ASKED: dict[str, Any] = {"max_tokens": 60, "temperature": 0.7, "seed": 3}
CITIES = ["Rome", "Oslo"]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": CITIES}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
