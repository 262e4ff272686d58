"""Public chat templates with the kinds of conversations that clients send, against transformers.

The templates lie in the source archive of llama-cpp-python, which ``make peers`` downloads; these
are models' own, as llama.cpp tests them. Where the text differs from transformers', the reason is a
decision of :data:`DECISIONS`.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from paceline.core.errors import TemplateError
from paceline.server.chat.answer import ToolCallReader
from paceline.server.chat.answer_formats import tool_format
from paceline.server.chat.answer_parts import PlacedText
from tests.conftest import REPOSITORY
from tests.server.answer_parts import added_up
from tests.server.chats import chat_tokenizer
from tests.templates import Chat, by_paceline, by_transformers, call

pytestmark = [pytest.mark.real, pytest.mark.slow]

FOLDER = REPOSITORY / ".peers/src/llama-cpp-python/vendor/llama.cpp/models/templates"
SOURCES = sorted(FOLDER.glob("*.jinja"))


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    shape = {"type": "object", "properties": properties, "required": [*properties][:1]}
    function = {"name": name, "description": f"It is called {name}.", "parameters": shape}
    return {"type": "function", "function": function}


WEATHER = _tool("weather", city={"type": "string", "description": "A city."}, days={})
ADD = _tool("add", a={"type": "number"}, b={"type": "number"})
RULE = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "How is it in Rome?"}
TOLD = {"role": "assistant", "content": "It is sunny."}
AGAIN = {"role": "user", "content": "And in Oslo?"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": '{"sky": "blue"}'}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call("weather", "call_1", city="Rome")],
}
TWICE = [*CALLED["tool_calls"], call("add", "call_2", a=1, b=2.5)]
DEEP = {"a": [1, None, True, {"é": "<x>"}], "b": 1.5}
THOUGHT = {"reasoning_content": "I look it up."}
CHATS: dict[str, Chat] = {
    "system": {"messages": [RULE, ASKED]},
    "turns": {"messages": [ASKED, TOLD, AGAIN]},
    "closed": {"messages": [ASKED, TOLD], "add_generation_prompt": False},
    "blanks": {
        "messages": [
            {"role": "user", "content": "\n Hi. \n\n"},
            {"role": "assistant", "content": " Yes. \n"},
            {"role": "user", "content": " So? <b>&amp; é 日本</b> "},
        ]
    },
    "tools": {"messages": [RULE, ASKED], "tools": [WEATHER, ADD]},
    "call": {"messages": [ASKED, CALLED, RESULT], "tools": [WEATHER]},
    "null": {"messages": [ASKED, CALLED | {"content": None}, RESULT], "tools": [WEATHER]},
    "words": {
        "messages": [ASKED, CALLED | {"content": "I look."}, RESULT, TOLD, AGAIN],
        "tools": [WEATHER],
    },
    "calls": {
        "messages": [
            ASKED,
            CALLED | {"tool_calls": TWICE},
            RESULT,
            RESULT | {"tool_call_id": "call_2", "name": "add", "content": "3.5"},
        ],
        "tools": [WEATHER, ADD],
    },
    "deep": {
        "messages": [ASKED, CALLED | {"tool_calls": [call("weather", "call_1", **DEEP)]}, RESULT],
        "tools": [WEATHER],
    },
    "thoughts": {"messages": [ASKED, TOLD | THOUGHT], "add_generation_prompt": False},
    "thought and called": {"messages": [ASKED, CALLED | THOUGHT, RESULT], "tools": [WEATHER]},
    "thoughts within": {
        "messages": [ASKED, {**TOLD, "content": "<think>\nHm.\n</think>\n\nSunny."}, AGAIN]
    },
    "goes on": {"messages": [ASKED, TOLD], "continue_final_message": True},
    "goes on behind blanks": {
        "messages": [ASKED, TOLD, AGAIN, {**TOLD, "content": "  It is\n\n cold. \n"}],
        "continue_final_message": True,
    },
    "goes on behind thoughts": {
        "messages": [ASKED, {**TOLD, "content": "It is "} | THOUGHT],
        "continue_final_message": True,
    },
    "does not think": {
        "messages": [ASKED],
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
    },
}
WITH_CALLS = {"call", "null", "words", "calls", "deep", "thought and called"}
KIMI_IDS = "Kimi reads the function and the call's number out of an id"
MARK = "DeepSeek's template sees a call without words only where the content is None"
ALL_NAMES = "thoughts have all of their names, and Solar's template knows the third one"
DECISIONS = {
    ("moonshotai-Kimi-K2", KIMI_IDS): WITH_CALLS,
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", MARK): WITH_CALLS - {"words"},
    ("upstage-Solar-Open-100B", ALL_NAMES): {
        "thoughts",
        "thought and called",
        "goes on behind thoughts",
    },
}
"""Where the texts may differ: template and reason -> chats."""


@pytest.mark.skipif(not SOURCES, reason=f"no templates at {FOLDER}; `make peers` fetches them")
@pytest.mark.parametrize("name", CHATS)
def test_chats_are_written_as_transformers_writes_them(name: str) -> None:
    """What transformers refuses may be written: calls without words, ids of Mistral's."""
    differing = {title for (title, _), chats in DECISIONS.items() if name in chats}
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        try:
            wanted = by_transformers(source, CHATS[name])
        except TemplateError:
            continue
        is_equal = by_paceline(source, CHATS[name]) == wanted
        assert is_equal is (path.stem not in differing), path.stem


NO_CALLS = {"LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct"}
"""Templates that leave earlier calls out of the prompt."""
NOT_READ = {
    *("MiniMax-M3", "openbmb-MiniCPM5-1B", "muse-glimmer", "upstage-Solar-Open-100B"),
    *("meetkai-functionary-medium-v3.1", "meetkai-functionary-medium-v3.2"),
    "openai-gpt-oss-120b",  # Harmony is found by its tokens
}


@pytest.mark.skipif(not SOURCES, reason=f"no templates at {FOLDER}; `make peers` fetches them")
def test_the_format_found_reads_the_call_that_the_template_writes() -> None:
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        form = tool_format("auto", chat_tokenizer(source))
        if "tools" not in source or path.stem in NOT_READ:
            assert form is None, path.stem
            continue
        chat = {"tools": [WEATHER], "add_generation_prompt": False}
        try:
            asked = by_paceline(source, chat | {"messages": [ASKED]})
            text = by_paceline(source, chat | {"messages": [ASKED, CALLED]})
        except TemplateError:  # it wants something else than tools
            continue
        assert form is not None, path.stem
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(asked, text, strict=False))
        answer = text[sum(1 for _ in same) :]
        reader = ToolCallReader(form, {"weather": WEATHER["function"]["parameters"]})
        answer = answer.rpartition("<|end_header_id|>\n\n")[2]
        parts = [*reader.push(PlacedText(answer), final=False)]
        _, _, calls = added_up([*parts, *reader.push(PlacedText(), final=True)])
        wanted = json.loads(CALLED["tool_calls"][0]["function"]["arguments"])
        found = [(name, json.loads(arguments)) for name, arguments in calls]
        assert found == ([] if path.stem in NO_CALLS else [("weather", wanted)]), path.stem
