"""Templates that write chats with tools for models that know none: named, and SmolLM2's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ModelLoadError
from paceline.loading.catalogue import catalogue, embedded_model
from paceline.loading.checkpoint import load_checkpoint
from paceline.server.chat.answer_formats import tool_format
from paceline.server.chat.tool_calls.json_calls import HERMES
from paceline.text.chat_templates import BUILT_IN
from paceline.text.tokenizer import Tokenizer
from tests.loading.catalogues import isolate, name_models

QUESTION = {"role": "user", "content": "Rain?"}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **parameters}}


WEATHER = tool(
    "weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "place": {"type": ["string", "null"]},
        },
        "required": ["city", "days", "unit", "place"],
    },
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose template writes no tools, called ``mine`` with another one that does."""
    isolate(monkeypatch, tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(embedded_model("target")).iterdir():
        os.symlink(file, folder / file.name)
    (folder / "chat_template.jinja").write_text(BUILT_IN["chatml"])
    (tmp_path / "tools.jinja").write_text("{{ tools | length }} tools: {{ messages[0].content }}")
    name_models(f'[mine]\npath = "{folder}"\ntool_template = "{tmp_path}/tools.jinja"')
    return folder


def test_a_name_may_bring_a_template_for_chats_with_tools(model: Path) -> None:
    named, plain = (load_checkpoint(each).tokenizer for each in ("mine", str(model)))
    assert named is not None
    assert plain is not None
    written = plain.apply_chat_template([QUESTION], tools=[WEATHER])
    assert named.apply_chat_template([QUESTION]) == written
    assert named.apply_chat_template([QUESTION], tools=[WEATHER]) == "1 tools: Rain?"
    named.set_chat_template(BUILT_IN["chatml"])
    assert named.apply_chat_template([QUESTION], tools=[WEATHER]) == written


def test_a_template_that_is_not_there_is_named(model: Path) -> None:
    (model.parent / "tools.jinja").unlink()
    with pytest.raises(ModelLoadError, match=r"tools\.jinja"):
        load_checkpoint("mine")


@pytest.fixture
def smollm2(model: Path) -> Tokenizer:
    """A tokenizer with the template that ``smollm2`` has for tools."""
    tokenizer = load_checkpoint(str(model)).tokenizer
    assert tokenizer is not None
    source = Path(catalogue()["smollm2"].tool_template).read_text(encoding="utf-8")
    tokenizer.set_tool_template(source)
    return tokenizer


def test_smollm2_is_shown_calls_in_a_format_that_is_read(smollm2: Tokenizer) -> None:
    assert tool_format("auto", smollm2) is HERMES
    system = {"role": "system", "content": "Be brief."}
    written = smollm2.apply_chat_template([system, QUESTION], tools=[WEATHER, tool("now")])
    assert written.startswith("<|im_start|>system\nBe brief.\n\nYou can call these functions:\n{")
    assert written.endswith(
        """VALUE"}}
</tool_call><|im_end|>
<|im_start|>user
Use weather with the city red and the days 2 and the unit C and the place red.<|im_end|>
<|im_start|>assistant
I call one of weather, now:
<tool_call>
{"name": "weather", "arguments": {"city": "red", "days": 2, "unit": "C", "place": "red"}}
</tool_call><|im_end|>
<|im_start|>user
Use now.<|im_end|>
<|im_start|>assistant
I call one of weather, now:
<tool_call>
{"name": "now", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>user
Rain?<|im_end|>
<|im_start|>assistant
I call one of weather, now:
"""
    )


def test_smollm2_answers_results_in_words(smollm2: Tokenizer) -> None:
    calls = [
        {"function": {"name": "now", "arguments": arguments}} for arguments in ({"a": 1}, "{}")
    ]
    chat = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "sunny"},
    ]
    written = smollm2.apply_chat_template(chat, tools=[tool("now")])
    assert written.endswith(
        """Rain?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "now", "arguments": {"a": 1}}
</tool_call>
<tool_call>
{"name": "now", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
sunny
</tool_response><|im_end|>
<|im_start|>assistant
"""
    )
