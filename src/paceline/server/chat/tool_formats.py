"""The ways in which models write tool calls, and how to tell from a chat template which is used.

Owns the table of formats; supporting another one that wraps JSON is another entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes a call: ``before`` + ``{"name": ..., key: {...}}`` + ``after``.

    Attributes:
        name: as users choose it.
        key: of the arguments.
        separator: what stands between two calls.
        opening: strings that a call begins with, wherever they stand.
        closing: strings dropped directly after a call.
        bare: a brace begins a call too, at the start of the answer and directly after a call.
    """

    name: str
    key: str
    before: str
    after: str
    separator: str
    opening: tuple[str, ...]
    closing: tuple[str, ...]
    bare: bool


HERMES = ToolFormat(
    name="hermes",
    key="arguments",
    before="<tool_call>\n",
    after="\n</tool_call>",
    separator="\n",
    opening=("<tool_call>",),
    closing=("</tool_call>",),
    bare=False,
)
LLAMA = ToolFormat(
    name="llama",
    key="parameters",
    before="",
    after="",
    separator="; ",
    opening=("<|python_tag|>",),
    closing=(";",),
    bare=True,
)
FORMATS = {each.name: each for each in (HERMES, LLAMA)}


def tool_format(name: str, tokenizer: Tokenizer) -> ToolFormat | None:
    """The format by its name; ``auto`` asks the chat template, and gets None if it knows none.

    Names are :data:`paceline.server.config.TOOL_CALL_PARSERS`.
    """
    return FORMATS.get(name) or _shown(tokenizer)


def _shown(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that the chat template shows."""
    says = tokenizer.template_mentions
    if not says("tools") or says("<function="):  # calls as XML, which no format here reads
        return None
    if says("<tool_call>"):
        return HERMES
    return LLAMA if says("<|python_tag|>") or says("<|start_header_id|>") else None
