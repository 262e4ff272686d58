"""What the template is handed: roles, parts, tools, earlier calls, options, a last message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.server.chat.prompt import warm_up
from tests.server.chats import (
    ADD_TOOL,
    CHATML,
    LLAMA_CHAT,
    PHI4_CHAT,
    THINKING,
    USER,
    WEATHER_TOOL,
    ChatServer,
    chat_tokenizer,
)

END = "<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"


def prompt_of(messages: list[dict[str, Any]], template: str = CHATML, **fields: Any) -> str:
    server = ChatServer(template=template)
    status, body = server.post(messages, **fields)
    assert status == 200, body
    return server.prompt


def test_roles_names_and_parts() -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}]
    prompt = prompt_of(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": "Ann", "content": parts},
            {"role": "assistant", "content": parts, "reasoning_content": "Hm."},
            {"role": "user", "content": ""},
        ]
    )
    assert prompt == (
        f"<|im_start|>system\nBe brief.{END}<|im_start|>user name=Ann\nWhat is\nthis?{END}"
        f"<|im_start|>assistant\nWhat isthis?[Hm.]{END}<|im_start|>user\n{END}{OPEN}"
    )


@pytest.mark.parametrize(
    ("thoughts", "shown"),
    [
        ({"reasoning": "Hm."}, "[Hm.]"),
        ({"thinking": "Hm."}, "[Hm.]"),
        ({"reasoning_content": "Hm.", "reasoning": "Oh."}, "[Hm.]"),
        ({"thinking": {"type": "enabled"}, "reasoning": "Hm."}, "[Hm.]"),
        ({"reasoning": {"effort": "low"}}, ""),
    ],
)
def test_thoughts_have_three_names(thoughts: dict[str, Any], shown: str) -> None:
    message = {"role": "assistant", "content": "Yes.", **thoughts}
    told = prompt_of([USER, message, {**USER, "reasoning": "Mine."}])
    assert f"assistant\nYes.{shown}{END}" in told
    assert "Mine." not in told
    if shown:
        prompt_of([USER, {"role": "assistant", **thoughts}, USER])


def test_a_template_that_knows_developers_gets_them() -> None:
    template = CHATML + "{# developer #}"
    assert prompt_of([{"role": "developer", "content": "x"}], template).startswith(
        "<|im_start|>developer\nx"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [('{"city": "Rome"}', '{"city": "Rome"}'), ("", "{}"), ('{"cut', '"{\\"cut"'), ("3", '"3"')],
)
def test_earlier_calls(arguments: str, told: str) -> None:
    """Arguments are objects in templates; what is no object stays what the model wrote."""
    call = {
        "id": "call_1",
        "type": "function",
        "index": 0,
        "function": {"name": "weather", "arguments": arguments},
    }
    empty = {"refusal": None, "annotations": None, "audio": None, "function_call": None}
    prompt = prompt_of(
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call], **empty},
            {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "Sunny."},
        ]
    )
    assert f"assistant\n<tool_call>{told}</tool_call>{END}" in prompt
    assert f"<|im_start|>tool name=weather of=call_1\nSunny.{END}" in prompt


TALK = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_0123456789ab",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0123456789ab", "content": "Sunny."},
]
CALLED = "{% for m in messages %}{% for call in m.tool_calls or [] %}"
IDS = CALLED + "{{ call.id }};{% endfor %}{{ m.tool_call_id }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (IDS, "call_0123456789ab;call_0123456789ab"),
        # templates of Mistral refuse ids that have not nine letters and digits
        (IDS + "{# [TOOL_CALLS] #}", "3456789ab;3456789ab"),
        # those of Kimi write the id, which the model takes for the name and its number
        (IDS + "{# <|tool_call_argument_begin|> #}", "functions.weather:0;functions.weather:0"),
        # those of DeepSeek join arguments with text, and see a call only where there are no words
        (CALLED + "{{ '>' + call.function.arguments }}{% endfor %}{% endfor %}",
         '>{"city": "Rome"}'),
        ("{% for m in messages %}{{ m.content is none }} {% endfor %}", "False False False "),
        ("{% for message in messages %}{{ message['content'] is none }} {% endfor %}",
         "False False False "),
        ("{% for message in messages %}{{ message['content'] is none }} {% endfor %}"
         "{# <\uff5ctool\u2581calls\u2581begin\uff5c> #}", "False True False "),
    ],
)  # fmt: skip
def test_earlier_calls_as_single_templates_want_them(template: str, told: str) -> None:
    assert prompt_of(TALK, template) == told


def test_phi_reads_tools_calls_and_results_in_the_messages() -> None:
    functions = '[{"name": "add"}]'
    call = '[{"name": "weather", "arguments": {"city": "Rome"}}]'
    talk = (
        f"<|user|>How is it?<|end|><|assistant|><|tool_call|>{call}<|/tool_call|><|end|>"
        "<|tool_response|>Sunny.<|end|><|assistant|>"
    )
    first = "<|system|>You are a helpful assistant with some tools."
    assert prompt_of(TALK, PHI4_CHAT, tools=[ADD_TOOL]) == (
        f"{first}<|tool|>{functions}<|/tool|><|end|>{talk}"
    )
    own = [{"role": "developer", "content": "Be brief."}, *TALK]
    assert prompt_of(own, PHI4_CHAT, tools=[ADD_TOOL]) == (
        f"<|system|>Be brief.<|tool|>{functions}<|/tool|><|end|>{talk}"
    )
    assert prompt_of(TALK, PHI4_CHAT, tools=[ADD_TOOL], tool_choice="none") == talk


@pytest.mark.parametrize("marks", [("<|tool_call|>", "<|/tool_call|>"), ("functools", "")])
def test_calls_of_phi_are_read(marks: tuple[str, str]) -> None:
    answer = '[{"name": "weather", "arguments": {"city": "Rome"}}]'.join(marks)
    server = ChatServer(answer, PHI4_CHAT)
    choice = server.ask(tools=[WEATHER_TOOL]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')
    parts = [each.choices[0].delta for each in server.stream(tools=[WEATHER_TOOL])]
    calls = [call.function for part in parts for call in part.tool_calls or []]
    assert calls[0].name == "weather"
    assert "".join(each.arguments for each in calls) == '{"city": "Rome"}'
    assert not any(part.content for part in parts)


def test_a_template_that_refuses_calls_says_why() -> None:
    refuses = "{% if messages[1].tool_calls %}{{ raise_exception('no calls') }}{% endif %}"
    status, body = ChatServer(template=refuses).post(TALK)
    assert (status, "no calls" in body["error"]["message"]) == (400, True)


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    server = ChatServer(
        '<think>Hm.</think>Well.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        THINKING,
    )
    message = server.ask(tools=[ADD_TOOL]).choices[0].message
    server.ask([USER, message, {"role": "tool", "content": "2", "tool_call_id": "x"}])
    expected = f'assistant\nWell.[Hm.]<tool_call>{{"a": 1}}</tool_call>{END}'
    assert expected in server.prompt


def test_tools_reach_the_template_unless_none_may_be_called() -> None:
    tool = {"type": "function", "function": {**WEATHER_TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    prompt = prompt_of([USER], tools=[tool])
    assert '{"type": "function", "function": {"name": "weather", "description":' in prompt
    assert "strict" not in prompt
    assert "weather" not in prompt_of([USER], tools=[tool], tool_choice="none")


def test_the_effort_is_an_option_of_the_template() -> None:
    template = CHATML + "{{ reasoning_effort }}{{ enable_thinking }}"
    assert prompt_of([USER], template, reasoning_effort="high").endswith("high")
    assert prompt_of([USER], template, reasoning_effort="none").endswith("noneFalse")
    chosen = {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"}
    assert prompt_of([USER], template, **chosen).endswith("low")


def test_options_of_the_template() -> None:
    template = "{{ colour }}{% if messages %}!{% endif %}"
    assert prompt_of([USER], template, chat_template_kwargs={"colour": "red"}) == "red!"


@pytest.mark.parametrize("name", ["messages", "tools", "self", "bos_token", "chat_template"])
def test_options_cannot_replace_what_the_request_says(name: str) -> None:
    status, body = ChatServer().post(chat_template_kwargs={name: []})
    assert (status, name in body["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("template", "cuts"),
    [(CHATML, False), (CHATML.replace("message.content", "message.content|trim"), True)],
)
@pytest.mark.parametrize(
    "words", ["Once ", "", [{"type": "text", "text": "On"}, {"type": "text", "text": "ce "}]]
)
def test_a_last_message_that_goes_on(template: str, cuts: bool, words: Any) -> None:
    """Behind its blanks, unless the template cuts them off (transformers 5.23 and 5.24)."""
    last = {"role": "assistant", "content": words}
    text = words if isinstance(words, str) else "Once "
    text = text.rstrip() if cuts else text
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    prompt = prompt_of([USER, last], template, **fields)
    assert prompt == f"<|im_start|>user\nHow is it?{END}{OPEN}{text}"


def test_a_last_message_of_the_assistant_is_closed_by_default() -> None:
    """As with vLLM; only ``continue_final_message`` opens it."""
    last = {"role": "assistant", "content": "Once"}
    assert prompt_of([USER, last]).endswith(f"Once{END}{OPEN}")
    assert prompt_of([USER, last], add_generation_prompt=False).endswith(f"Once{END}")


def test_a_template_that_drops_the_last_message() -> None:
    last = {"role": "assistant", "content": "Once"}
    status, body = ChatServer(template="{{ messages[0].content }}").post(
        [USER, last], continue_final_message=True
    )
    assert (status, "last message" in body["error"]["message"]) == (400, True)


def test_the_prompt_is_encoded_without_another_bos() -> None:
    server = ChatServer()
    server.post()
    tokenizer = chat_tokenizer()
    assert server.engine.calls[-1].token_ids == tokenizer.encode(server.prompt, False)


@pytest.mark.parametrize("template", [CHATML, None, "{{ raise_exception('no') }}"])
def test_warming_up_raises_nothing(template: str | None) -> None:
    asyncio.run(warm_up(chat_tokenizer(template)))
    asyncio.run(warm_up(None))


def test_formats_are_told_by_the_template() -> None:
    llama = '{"name": "add", "parameters": {}}'
    hermes = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'

    def calls(answer: str, template: str, **config: str) -> bool:
        message = ChatServer(answer, template, **config).ask(tools=[ADD_TOOL]).choices[0].message
        return bool(message.tool_calls)

    assert calls(hermes, CHATML)
    assert not calls(llama, CHATML)
    assert calls(llama, LLAMA_CHAT)
    assert not calls(hermes, LLAMA_CHAT)
    assert calls(llama, CHATML, tool_call_parser="llama")
    assert calls(hermes, "{{ messages }}", tool_call_parser="hermes")


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ tools }}", CHATML + "<function="])
def test_tools_without_a_known_format_are_refused(template: str) -> None:
    status, body = ChatServer(template=template).post(tools=[ADD_TOOL])
    assert (status, body["error"]["param"]) == (400, "tools")
    assert "--tool-call-parser" in body["error"]["message"]
    assert ChatServer(template=template).post(tools=[ADD_TOOL], tool_choice="none")[0] == 200
