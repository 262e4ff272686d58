"""The ways in which models mark their thoughts, and how to tell from a chat template which is used.

Owns the table of formats; supporting another pair of marks is another entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Thoughts stand between an opening and a closing mark, and the answer follows.

    Attributes:
        opening: strings that open thoughts.
        closing: strings that close them; whichever comes first counts.
        shown_by: words of a chat template that show that the model was taught this format.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    shown_by: tuple[str, ...]


THINK = ReasoningFormat(("<think>",), ("</think>",), ("think>",))
MISTRAL = ReasoningFormat(("[THINK]",), ("[/THINK]",), ("[THINK]",))
GRANITE = ReasoningFormat(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    ("Here is my thought process:", "Here's my thought process:"),
)
SEED_OSS = ReasoningFormat(("<seed:think>",), ("</seed:think>",), ("seed:think>",))
MINIMAX_M3 = ReasoningFormat(("<mm:think>",), ("</mm:think>",), ("mm:think>",))
FORMATS = {
    "granite": GRANITE,
    "mistral": MISTRAL,
    "seed_oss": SEED_OSS,
    "minimax_m3": MINIMAX_M3,
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "ernie45", "glm45", "holo2", "minimax_m2", "qwen3"), THINK
    ),
}
"""By vLLM's names. Where a template shows several of them, the first one counts."""


def reasoning_format(name: str, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """The format by its name; ``auto`` asks the chat template, and gets None if it knows none.

    Names are :data:`paceline.server.config.REASONING_PARSERS`.
    """
    if name == "none":
        return None
    if name in FORMATS:
        return FORMATS[name]
    for form in FORMATS.values():
        if any(tokenizer.template_mentions(word) for word in form.shown_by):
            return form
    return None
