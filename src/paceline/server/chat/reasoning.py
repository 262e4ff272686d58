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
FORMATS = {"think": THINK}


def reasoning_format(name: str, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """The format by its name; ``auto`` asks the chat template, and gets None if it knows none.

    Names are :data:`paceline.server.config.REASONING_PARSERS`.
    """
    if name == "none":
        return None
    for form in FORMATS.values():
        if any(tokenizer.template_mentions(word) for word in form.shown_by):
            return form
    return None
