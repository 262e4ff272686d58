"""What chat templates are built of, each in a short template, against transformers 5.23."""

from __future__ import annotations

import pytest

from tests.templates import Chat, by_paceline, by_transformers, call

ASKED = {"role": "user", "content": "How is it?"}
TOLD = {"role": "assistant", "content": "It is\n ", "reasoning_content": "Hm."}
CALLED = {"role": "assistant", "content": "", "tool_calls": [call("sky", "call_1", city="é")]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Blue."}
TALK: Chat = {"messages": [ASKED, TOLD, ASKED]}
WITH_CALL: Chat = {"messages": [ASKED, CALLED, RESULT]}
GOES_ON: Chat = {"messages": [ASKED, TOLD], "continue_final_message": True}
EACH = "{% for message in messages %}"
# As Ministral 3's: a message has words or calls, and the length of the words is asked for.
WORDS_OR_CALLS = (
    EACH + "{% if message['content'] is none or message['content']|length == 0 %}"
    "{% if not message['tool_calls'] %}{{ raise_exception('nothing') }}{% endif %}{% endif %}"
    "{% if message['content']|length > 0 %}{{ message['content'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "chat", "written"),
    [
        (EACH + "<{{ message.content }}>{% endfor %}", GOES_ON, "<How is it?><It is\n "),
        (EACH + "<{{ message.content | trim }}>{% endfor %}", GOES_ON, "<How is it?><It is"),
        (EACH + "<{{ message['content'].strip() }}>{% endfor %}", GOES_ON, "<How is it?><It is"),
        (EACH + "{{ message.reasoning_content }}{% endfor %}", TALK, "Hm."),
        (EACH + "{{ message.thinking }}{% endfor %}", TALK, "Hm."),
        (EACH + "{{ message['thinking'] or '-' }}{% endfor %}", TALK, "-Hm.-"),
        (EACH + "{{ message.tool_calls is defined }} {% endfor %}", WITH_CALL, "False True False "),
        (EACH + "{{ 'name' in message }} {% endfor %}", WITH_CALL, "False False False "),
        (EACH + "{{ message.content is none }} {% endfor %}", WITH_CALL, "False False False "),
        (WORDS_OR_CALLS, WITH_CALL, "How is it?Blue."),
        (
            EACH + "{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}"
            "{% endfor %}{% endfor %}",
            WITH_CALL,
            '{"city": "é"}',
        ),
        (
            EACH + "{% for call in message.tool_calls %}{{ '>' + call.function.arguments }}"
            "{% endfor %}{% endfor %}",
            WITH_CALL,
            '>{"city": "\\u00e9"}',
        ),
        ("{{ documents is defined }} {{ documents is none }}", TALK, "True True"),
        ("{{ tools is none }} {{ bos_token }}", TALK, "True <s>"),
        (
            "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
            TALK,
            "21",
        ),
        (
            EACH + "{% generation %}{{ loop.index }}{% endgeneration %}{% endfor %}",
            TALK,
            "123",
        ),
        ("{{ [1, 'é'] | tojson(true, 1) }}", TALK, '[\n 1,\n "\\u00e9"\n]'),
    ],
)
def test_structures(template: str, chat: Chat, written: str) -> None:
    template = template + "{# content #}"  # transformers goes on with fields that are named
    assert by_paceline(template, chat) == by_transformers(template, chat) == written


def test_where_transformers_is_not_followed() -> None:
    """It hands no content over where there is none, and the third name of thoughts to nobody."""
    empty: Chat = {"messages": [ASKED, CALLED | {"content": None}, RESULT]}
    content = EACH + "<{{ '' + message.content }}>{% endfor %}"
    assert by_paceline(content, empty) == "<How is it?><><Blue.>"
    assert by_paceline(EACH + "{{ message.reasoning }}{% endfor %}", TALK) == "Hm."
    opened: Chat = {
        "messages": [ASKED, {"role": "assistant", "content": ""}],
        "continue_final_message": True,
    }
    header = EACH + "{{ message.role }}\n{{ message.content | trim }}{% endfor %}"
    assert by_paceline(header, opened) == "user\nHow is it?assistant\n"
