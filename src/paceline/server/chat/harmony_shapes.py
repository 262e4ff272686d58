"""What an answer in Harmony must match: forced and strict calls, and response formats.

Thoughts and words that announce a call come first, as many messages as the model likes. Then come
one call, which ends the answer, or the final message, for which the format of the response holds.
Compiles nothing.
"""

from __future__ import annotations

from typing import Any

from paceline.request.structured_outputs import StructuredOutputs
from paceline.server.chat.calls.forms import Form
from paceline.server.chat.constraints import ANY_OBJECT, shape_form
from paceline.server.chat.harmony import (
    ASSISTANT,
    CHANNEL,
    END,
    FUNCTIONS,
    MESSAGE,
    Harmony,
    HarmonyParser,
    Place,
)
from paceline.server.chat.tool_calls import OfferedTool, ToolUse

_ANYTHING: Form = {"type": "any_text"}


def harmony_constraint(
    harmony: Harmony, use: ToolUse | None, response: StructuredOutputs | None
) -> StructuredOutputs | None:
    """What holds for an answer; None where anything may be said.

    Raises:
        RequestError: what it is composed of is too large.
    """
    must_call = use is not None and use.must_call
    is_strict = use is not None and any(tool.strict for tool in use.tools)
    begun = HarmonyParser(harmony)
    if not must_call and begun.place is Place.WORDS:  # the final message goes on
        return response
    if not must_call and response is None and not is_strict:
        return None
    shape = _ANYTHING if response is None else shape_form(response)
    endings = [_call(tool, must_call) for tool in use.tools] if use else []
    if not must_call:
        endings.append(_sequence(_text(f"{CHANNEL}final{MESSAGE}"), shape))
    before = {"type": "star", "content": _one_of(_message("analysis"), _message("commentary"))}
    form = _sequence(*_rest_of(begun), before, _one_of(*endings))
    return StructuredOutputs(structural_tag={"format": form}, composed=True)


def _rest_of(begun: HarmonyParser) -> list[Form]:
    """What comes before the head of the next message."""
    if begun.place is Place.HEAD:
        return [] if begun.has_start else [_text(ASSISTANT)]
    return [_ANYTHING, _text(END + ASSISTANT)]


def _message(channel: str) -> Form:
    begin, end = f"{CHANNEL}{channel}{MESSAGE}", END + ASSISTANT
    return {"type": "tag", "begin": begin, "content": _ANYTHING, "end": end}


def _call(tool: OfferedTool, must_call: bool) -> Form:
    """Models name the recipient behind the channel, and templates before it."""
    to, kind = f" to={FUNCTIONS}{tool.name}", f" <|constrain|>json{MESSAGE}"
    heads = f"{CHANNEL}commentary{to}{kind}", f"{to}{CHANNEL}commentary{kind}"
    schema = tool.schema if must_call or tool.strict else ANY_OBJECT
    arguments = {"type": "json_schema", "json_schema": schema}
    return _sequence(_one_of(*map(_text, heads)), arguments)


def _text(value: str) -> Form:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Any) -> Form:
    return {"type": "sequence", "elements": [*elements]}


def _one_of(*elements: Form) -> Form:
    return {"type": "or", "elements": [*elements]}
