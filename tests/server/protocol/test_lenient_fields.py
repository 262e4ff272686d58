"""What clients send as a matter of course: keys of their own in messages, fields that ask for
nothing.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import pydantic
import pytest
from fastapi import FastAPI

from paceline.server.protocol.foreign import ASKS_FOR_NOTHING
from paceline.server.protocol.generation import GUIDED, UNENFORCED
from tests.server.asgi import application, engine_of, events, post, refused
from tests.server.chats import USER, WEATHER, WEATHER_TOOL, ChatServer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


class City(pydantic.BaseModel):
    city: str


class weather(pydantic.BaseModel):  # noqa: N801
    city: str


def test_a_parsed_message_of_the_openai_package_can_be_sent_back() -> None:
    import openai

    server = ChatServer('{"city": "Rome"}')
    parse = server.openai.chat.completions.parse
    message = parse(model="fake", messages=[USER], response_format=City).choices[0].message
    assert message.parsed == City(city="Rome")
    server.ask([USER, message.model_dump(), USER])
    assert '{"city": "Rome"}<|im_end|>' in server.prompt

    server.engine.answer = WEATHER
    tool = openai.pydantic_function_tool(weather)
    called = parse(model="fake", messages=[USER], tools=[tool]).choices[0].message
    assert called.tool_calls[0].function.parsed_arguments == weather(city="Rome")  # type: ignore[index]
    told = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "rain"}  # type: ignore[index]
    server.ask([USER, called.model_dump(), told], tools=[tool])
    assert '<tool_call>{"city": "Rome"}</tool_call>' in server.prompt


REPLAYED: dict[str, Any] = {
    "role": "assistant",
    "content": [{"type": "text", "text": "Sunny.", "cache_control": {"type": "ephemeral"}}],
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "parsed": {"a": 1},
    "reasoning": "thoughts",
    "provider_specific_fields": {"x": None},
    "cache_control": {"type": "ephemeral"},
    "tool_calls": [
        {
            "id": "call_1",
            "index": 0,
            "type": "function",
            "provider_specific_fields": None,
            "function": {"name": "weather", "arguments": "{}", "parsed_arguments": {}},
        }
    ],
}


def test_keys_of_others_are_ignored_and_noted_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = ChatServer()
    tool = {**WEATHER_TOOL, "cache_control": {"type": "ephemeral"}, "strict": True}
    tool["function"] = {**WEATHER_TOOL["function"], "returns": {"type": "string"}}  # type: ignore[dict-item]
    messages = [{**USER, "cache_control": {}}, REPLAYED, {**USER, "timestamp": 7}]
    with caplog.at_level(logging.DEBUG, "paceline.server.http.body"):
        status, body = server.post(messages, tools=[tool])
    assert status == 200, body
    assert "Sunny." in server.prompt
    [record] = [each for each in caplog.records if each.name == "paceline.server.http.body"]
    for name in ("parsed", "parsed_arguments", "cache_control", "returns", "timestamp"):
        assert name in record.getMessage()


def test_many_unknown_keys_make_no_long_line(caplog: pytest.LogCaptureFixture) -> None:
    messages = [{**USER, **{f"{i}" + "x" * 500: 1 for i in range(2000)}}]
    with caplog.at_level(logging.DEBUG, "paceline.server.http.body"):
        assert ChatServer().post(messages)[0] == 200
    assert len(caplog.text) < 2000


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return application()


@pytest.fixture(scope="module")
def chats() -> ChatServer:
    return ChatServer()


@pytest.mark.parametrize(("name", "values"), ASKS_FOR_NOTHING.items())
def test_what_asks_for_nothing_is_accepted_and_anything_else_refused(
    name: str, values: tuple[Any, ...], app: FastAPI, chats: ChatServer
) -> None:
    for value in (*values, None):
        fields = {name: value}
        if name != "add_special_tokens":  # which completions have themselves
            assert post(app, COMPLETION, {"prompt": "a", "max_tokens": 2, **fields}).is_success
        status, body = chats.post(**fields)
        assert status == 200, body
    asking = {name: {"asks": "for something"}}
    if name in ("echo", "add_special_tokens"):
        error = chats.post(**asking)[1]["error"]
    else:
        error = refused(app, COMPLETION, {"prompt": "a", **asking})
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_beam_search": True}, "use_beam_search is true; only what asks for nothing"),
        ({"use_beam_search": 0}, "(false, null)"),
        ({"priority": 3}, "priority is 3; only what asks for nothing is accepted (0, null)"),
        ({"priority": False}, "priority is false"),
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "guided_regex, guided_choice are given together",
        ),
        (
            {"guided_regex": "a", "structured_outputs": {"regex": "a"}},
            "guided_regex, structured_outputs are given",
        ),
        ({"rid": "x"}, "rid is not supported: send the header x-request-id instead"),
        ({"length_penalty": 1.5}, "length_penalty is 1.5"),
        ({"unheard_of": None}, "unknown field 'unheard_of'"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids is only allowed with logprobs"),
        ({"logprobs": 1, "logprob_token_ids": []}, "at least 1"),
        ({"logprobs": -2}, "logprobs is -2; it should be greater than or equal to 0"),
    ],
)
def test_refusals_say_what_is_accepted(fields: dict[str, Any], message: str, app: FastAPI) -> None:
    assert message in refused(app, COMPLETION, {"prompt": "a", **fields})["message"]


def test_minus_one_asks_for_no_logprobs() -> None:
    answer = post(application(), COMPLETION, {"prompt": "a", "logprobs": -1}).json()
    assert answer["choices"][0]["logprobs"] is None


def test_a_number_may_be_written_as_json_allows() -> None:
    assert ChatServer().post(length_penalty=1.0, priority=0)[0] == 200


def test_the_usage_so_far_is_in_every_event() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    wish = {"stream": True, "stream_options": options, "max_tokens": 4}
    texts = post(application(), COMPLETION, {"prompt": "Once", **wish}).text
    *pieces, last = events(texts)
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == [1, 2, 3, 4]
    assert last["choices"] == []
    assert last["usage"] == pieces[-1]["usage"]
    chunks = ChatServer().stream(stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert counts[-1] == chunks[-2].usage.completion_tokens


def test_usage_so_far_is_asked_for_together_with_usage() -> None:
    wish = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    text = post(application(), COMPLETION, {"prompt": "Once", **wish}).text
    assert all("usage" not in event for event in events(text))


def test_options_without_effect_are_taken() -> None:
    server = ChatServer()
    options = {"include_usage": True, "include_obfuscation": False}
    assert server.stream(stream_options=options)[-1].usage is not None
    status, body = server.post(prompt_cache_retention="24h", prompt_cache_key="k")
    assert status == 200, body
    status, body = server.post(stream=True, stream_options={"include_colour": True})
    assert body["error"]["param"] == "stream_options.include_colour"


def test_the_description_names_what_is_accepted() -> None:
    document = json.loads(ChatServer().http.get("/openapi.json").text)
    schemas = document["components"]["schemas"]
    chat, completion = schemas["ChatCompletionRequest"], schemas["CompletionRequest"]
    assert chat["properties"]["best_of"] == {"enum": [1, None]}
    assert chat["properties"]["echo"] == {"enum": [False, None]}
    assert "anyOf" in completion["properties"]["echo"]
    assert schemas["ChatMessage"].get("additionalProperties") is not False


SHAPES: dict[str, Any] = {
    "json": {"type": "object"},
    "regex": "a+",
    "choice": ["a"],
    "grammar": 'start: "a"',
    "structural_tag": {"format": {"type": "const_string", "value": "a"}},
}


@pytest.mark.parametrize(("name", "field"), GUIDED.items())
def test_other_names_of_structured_outputs_mean_the_same(name: str, field: str) -> None:
    app, server = application(), ChatServer()
    post(app, COMPLETION, {"prompt": "a", name: SHAPES[field]})
    post(app, COMPLETION, {"prompt": "a", "structured_outputs": {field: SHAPES[field]}})
    other, own = engine_of(app).calls
    assert other.params.structured_outputs == own.params.structured_outputs is not None
    assert server.post(**{name: SHAPES[field]})[0] == 200
    assert server.grammar == own.params.structured_outputs


@pytest.mark.parametrize("name", ["json_schema", "guided_json", "structural_tag"])
def test_an_error_names_the_field_that_was_sent(name: str) -> None:
    own = refused(application(), COMPLETION, {"prompt": "a", name: "{"})
    _, body = ChatServer().post(**{name: "{"})
    for error in (own, body["error"]):
        assert error["param"] == name, error
        assert error["message"].startswith(f"{name} cannot be served: ")


def test_completions_take_response_formats() -> None:
    app = application()
    schema = {"type": "object", "not": {}}
    forms: list[Any] = [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": schema}},
        {"type": "structural_tag", **SHAPES["structural_tag"]},
    ]
    answers = [post(app, COMPLETION, {"prompt": "a", "response_format": form}) for form in forms]
    shapes = [call.params.structured_outputs for call in engine_of(app).calls]
    assert [shape and shape.kind for shape in shapes] == [
        *(None, "json_object", "json", "structural_tag")
    ]
    assert answers[2].headers[UNENFORCED] == "not"
    strict = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
    for form, message in [
        (strict, "not cannot be enforced"),
        ({"type": "structural_tag"}, "needed there"),
        ({"type": "json_object", "format": {}}, "are for response_format.type structural_tag"),
        ({"type": "structural_tag", "format": {"type": "x"}}, "Input tag 'x'"),
    ]:
        error = refused(app, COMPLETION, {"prompt": "a", "response_format": form})
        assert message in error["message"]
        assert error["param"] == "response_format"


def test_prompts_are_truncated_to_their_last_tokens() -> None:
    app, ids = application(), list(range(5, 600))
    post(app, COMPLETION, {"prompt": ids, "truncate_prompt_tokens": 7, "max_tokens": 2})
    for limit in (None, 100, 600):
        post(app, COMPLETION, {"prompt": ids, "truncate_prompt_tokens": -1, "max_tokens": limit})
    few, *most = engine_of(app).calls
    assert few.token_ids == ids[-7:]
    room = [1, 100]
    assert [call.token_ids for call in most] == [ids[-(512 - each) :] for each in room]
    assert [call.params.max_tokens for call in most] == room
    echoed = post(
        app, COMPLETION, {"prompt": "one two three", "truncate_prompt_tokens": 1, "echo": True}
    ).json()
    assert echoed["choices"][0]["text"].strip().startswith("three")


def test_token_ids_are_returned() -> None:
    app = application()
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True, "n": 2}
    for choice in post(app, COMPLETION, body).json()["choices"]:
        assert choice["prompt_token_ids"] == [5, 6, 7]
        assert len(choice["token_ids"]) == 4
    chats = ChatServer()
    answer = chats.post(max_tokens=4, return_token_ids=True)[1]
    assert answer["prompt_token_ids"] == chats.engine.calls[-1].token_ids
    assert len(answer["choices"][0]["token_ids"]) == 4
    stream = {"stream": True, "return_token_ids": True, "max_tokens": 4}
    text = chats.http.post(CHAT, json={"messages": [USER], **stream}).text
    first, *others = events(text)
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    assert all("prompt_token_ids" not in each for each in others)
    choices = [each["choices"][0] for each in others]
    told = [token for choice in choices for token in choice.get("token_ids", ())]
    assert told == answer["choices"][0]["token_ids"]


def test_a_prompt_is_not_truncated_to_nothing() -> None:
    error = refused(application(), COMPLETION, {"prompt": "a", "truncate_prompt_tokens": 0})
    assert error["param"] == "truncate_prompt_tokens"
