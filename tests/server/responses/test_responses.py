"""OpenAI's Responses API by the ``openai`` package: items, events, what is kept and refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from paceline.server.protocol.generation import GUIDED
from paceline.server.responses.answer import Kept, ResponseStore
from paceline.server.responses.request import decoded, encoded
from tests.server.chats import THINKING, USER, ChatServer

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
CHAT_TOOL = {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}


def ask(server: ChatServer, input: Any = USER["content"], **fields: Any) -> Any:
    return server.openai.responses.create(model=server.engine.info.model, input=input, **fields)


def refused(server: ChatServer, status: int = 400, **fields: Any) -> Any:
    body = {"model": server.engine.info.model, "input": "Hello.", **fields}
    response = server.http.post("/v1/responses", json=body)
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_a_response_has_the_words_of_the_chat() -> None:
    server = ChatServer("It rains.")
    told = ask(
        server, instructions="Be brief.", temperature=0.5, max_output_tokens=50, top_logprobs=2
    )
    assert told.output_text == "It rains."
    assert (told.status, told.object, told.error) == ("completed", "response", None)
    assert told.usage.input_tokens == len(server.engine.calls[-1].token_ids)
    assert told.usage.output_tokens > 0
    (message,) = told.output
    tokens = "".join(each.token for each in message.content[0].logprobs)
    assert tokens == told.output_text, "the token that ends it is none of them"
    assert len(message.content[0].logprobs[0].top_logprobs) == 2
    params = server.engine.calls[-1].params
    assert (params.temperature, params.max_tokens) == (0.5, 50)
    assert (told.temperature, told.top_p) == (0.5, params.top_p)
    assert told.text.format.type == "text"
    chat = ChatServer()
    chat.post([{"role": "system", "content": "Be brief."}, USER])
    assert server.prompt == chat.prompt
    cut = ask(server, max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


ORDER = [
    "response.created",
    "response.in_progress",
    *(f"response.{name}" for name in ("output_item.added", "content_part.added")),
    *(f"response.reasoning_text.{name}" for name in ("delta", "done")),
    *(f"response.{name}" for name in ("content_part.done", "output_item.done")),
    *(f"response.{name}" for name in ("output_item.added", "content_part.added")),
    *(f"response.output_text.{name}" for name in ("delta", "done")),
    *(f"response.{name}" for name in ("content_part.done", "output_item.done")),
    "response.output_item.added",
    *(f"response.function_call_arguments.{name}" for name in ("delta", "done")),
    "response.output_item.done",
    "response.completed",
]


def test_a_stream_tells_the_response_in_order() -> None:
    server = ChatServer(f"<think>Where?</think>In Rome.{CALL}", THINKING)
    events = list(ask(server, tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == ORDER
    whole, last = ask(server, tools=[TOOL]), events[-1].response
    for response in (whole, last):
        for item in response.output:
            item.id = ""
        response.output[-1].call_id = ""
    assert last.output == whole.output
    assert last.usage == whole.usage
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert json.loads(whole.output[-1].arguments) == {"city": "Rome"}
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == "In Rome."


def test_words_behind_a_call_come_back_as_one_message_with_it() -> None:
    server = ChatServer(f"I look.{CALL}Now wait.")
    first = ask(server, tools=[TOOL])
    assert [item.type for item in first.output] == ["message", "function_call", "message"]
    call = first.output[1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    ask(server, [USER, *(item.model_dump() for item in first.output), result], tools=[TOOL])
    chat = ChatServer()
    answer = chat_message("I look.Now wait.", call)
    outcome = {"role": "tool", "tool_call_id": call.call_id, "content": "Sunny."}
    chat.post([USER, answer, outcome], tools=[CHAT_TOOL])
    assert server.prompt == chat.prompt


def chat_message(words: str, call: Any) -> dict[str, Any]:
    """The answer of a chat that a response with one call is."""
    called = {"name": "weather", "arguments": call.arguments}
    calls = [{"id": call.call_id, "type": "function", "function": called}]
    return {"role": "assistant", "content": words, "tool_calls": calls}


@pytest.mark.parametrize("way", ["items", "references", "previous", "encoded"])
def test_an_earlier_answer_is_what_the_chat_would_be_sent(way: str) -> None:
    server = ChatServer(f"<think>Where?</think>In Rome.{CALL}", THINKING)
    include = ["reasoning.encrypted_content"] if way == "encoded" else []
    first = ask(server, tools=[TOOL], include=include)
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    if way == "previous":
        ask(server, [result], tools=[TOOL], previous_response_id=first.id)
    else:
        items = [item.model_dump() for item in first.output]
        if way == "encoded":
            assert decoded(items[0]["encrypted_content"]) == "Where?"
            items[0]["content"] = None
        if way == "references":
            items = [{"type": "item_reference", "id": item["id"]} for item in items]
        ask(server, [USER, *items, result], tools=[TOOL])
    chat = ChatServer("It rains.", THINKING)
    answer = {**chat_message("In Rome.", call), "reasoning_content": "Where?"}
    outcome = {"role": "tool", "tool_call_id": call.call_id, "content": "Sunny."}
    chat.post([USER, answer, outcome], tools=[CHAT_TOOL])
    assert server.prompt == chat.prompt


class City(pydantic.BaseModel):
    city: str


def test_answers_are_parsed() -> None:
    server = ChatServer('{"city": "Rome"}')
    model = server.engine.info.model
    parsed = server.openai.responses.parse(model=model, input="Hello.", text_format=City)
    assert parsed.output_parsed == City(city="Rome")
    assert server.engine.calls[-1].params.structured_outputs is not None
    with server.openai.responses.stream(model=model, input="Hello.", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(city="Rome")
    server.engine.answer = CALL
    tool: Any = openai.pydantic_function_tool(City, name="weather")
    flat = {"type": "function", **tool["function"]}
    called = server.openai.responses.parse(model=model, input="Hello.", tools=[flat])
    assert called.output[0].parsed_arguments == {"city": "Rome"}  # type: ignore[union-attr]


OTHER: Any = {**TOOL, "name": "other"}
CHAT_OTHER = {**CHAT_TOOL, "function": {**CHAT_TOOL["function"], "name": "other"}}
NAMED = {"type": "function", "name": "weather"}


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"tool_choice": NAMED}, {"tool_choice": {"type": "function", "function": NAMED}}),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tool_choice": "none"}, {"tool_choice": "none"}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}},
            {"tool_choice": "required", "tools": [CHAT_TOOL]},
        ),
    ],
)
def test_tools_are_chosen_as_in_chats(fields: dict[str, Any], chat: dict[str, Any]) -> None:
    ours, theirs = ChatServer(CALL), ChatServer(CALL)
    told = ask(ours, tools=[TOOL, OTHER], **fields)
    assert len(told.tools) == 2
    wish = json.loads(json.dumps(chat).replace('"type": "function", "name"', '"name"'))
    status, body = theirs.post([USER], **{"tools": [CHAT_TOOL, CHAT_OTHER], **wish})
    assert status == 200, body
    assert ours.engine.calls[-1].params == theirs.engine.calls[-1].params
    assert ours.prompt == theirs.prompt


SHAPES: dict[str, Any] = {
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "json_schema": {"type": "object"},
    "regex": "a+",
    "ebnf": 'start: "a"',
    "grammar": 'start: "a"',
    "structural_tag": {"format": {"type": "const_string", "value": "a"}},
    "structured_outputs": {"regex": "a+"},
}


@pytest.mark.parametrize("name", [*GUIDED, "structured_outputs"])
def test_shapes_are_asked_for_as_in_chats(name: str) -> None:
    ours, theirs = ChatServer("a"), ChatServer("a")
    shape = {name: SHAPES[name]}
    ask(ours, extra_body=shape)
    assert theirs.post([USER], **shape)[0] == 200
    params = ours.engine.calls[-1].params
    assert params.structured_outputs is not None
    assert params == theirs.engine.calls[-1].params
    assert refused(ours, **{name: 5})["param"].partition(".")[0] == name


def test_an_error_names_the_shape_that_was_sent() -> None:
    assert refused(ChatServer(), json_schema="{")["param"] == "json_schema"


def test_fields_that_change_no_answer_are_taken() -> None:
    server = ChatServer("")
    told = ask(
        server,
        prompt_cache_key="k",
        max_tool_calls=3,
        service_tier="flex",
        user="u",
        safety_identifier="s",
        metadata={"a": "b"},
        truncation="auto",
        reasoning={"summary": "auto"},
        text={"verbosity": "low"},
        include=["file_search_call.results"],
    )
    assert (told.metadata, told.user, told.max_tool_calls) == ({"a": "b"}, "u", 3)
    assert (told.prompt_cache_key, told.text.verbosity) == ("k", "low")
    (message,) = told.output  # also where nothing is said
    assert told.output_text == message.content[0].text == ""


def test_log_probabilities_are_those_of_the_words() -> None:
    server = ChatServer(f"<think>Where?</think>2 < 3.{CALL}", THINKING)
    for stream in (False, True):
        told = ask(server, tools=[TOOL], top_logprobs=0, stream=stream)
        response = list(told)[-1].response if stream else told
        (part,) = response.output[1].content
        tokens = "".join(each.token for each in part.logprobs)
        assert part.text == "2 < 3."
        assert part.text in tokens
        assert "Where" not in tokens
        assert "weather" not in tokens


def test_what_is_kept_is_found_by_its_key_alone() -> None:
    server = ChatServer(api_keys=("one", "two"))
    one = server.openai.with_options(api_key="one")
    two = server.openai.with_options(api_key="two")
    model = server.engine.info.model
    first = one.responses.create(model=model, input="Hello.")
    assert one.responses.retrieve(first.id).output_text == first.output_text
    (item,) = one.responses.input_items.list(first.id).data
    assert item.content[0].text == "Hello."  # type: ignore[union-attr]
    for gone in (first.id, one.responses.create(model=model, input="x", store=False).id):
        with pytest.raises(openai.NotFoundError):
            two.responses.retrieve(gone)
    with pytest.raises(openai.BadRequestError) as error:
        two.responses.create(model=model, input="x", previous_response_id=first.id)
    assert error.value.code == "previous_response_not_found"
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    assert one.responses.create(model=model, input=[reference, USER]).output_text
    with pytest.raises(openai.NotFoundError) as missing:
        two.responses.create(model=model, input=[reference, USER])
    assert missing.value.param == "input.0.id"
    num_kept = len(server.http.app.state.responses)  # type: ignore[attr-defined]
    one.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        one.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        one.responses.create(model=model, input=[reference, USER])
    assert len(server.http.app.state.responses) == num_kept - 1  # type: ignore[attr-defined]
    for method, path in [("POST", ""), ("GET", "/x"), ("DELETE", "/x"), ("GET", "/x/input_items")]:
        assert server.http.request(method, f"/v1/responses{path}").status_code == 401


def test_pages_of_allowed_origins_may_delete() -> None:
    server = ChatServer(allowed_origins=("https://here.example",))
    headers = {"origin": "https://here.example", "access-control-request-method": "DELETE"}
    assert server.http.options("/v1/responses/x", headers=headers).status_code == 200


def test_input_items_are_listed_page_by_page() -> None:
    server = ChatServer()
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "Sunny."}
    answer = {"role": "assistant", "content": "It rains."}
    thoughts = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": encoded("?")}
    told = ask(server, [USER, thoughts, call, result, answer, USER])
    items = server.openai.responses.input_items
    first = items.list(told.id, limit=4)
    assert first.has_more
    every = list(first)  # asks for the second page
    kinds = ["message", "reasoning", "function_call", "function_call_output", "message", "message"]
    assert [item.type for item in every] == kinds[::-1]
    forth = list(items.list(told.id, order="asc"))
    assert [item.id for item in forth] == [item.id for item in every[::-1]]
    for query in ("order=up", "limit=0", "limit=00005", "after=x"):
        path = f"/v1/responses/{told.id}/input_items?{query}"
        error = server.http.get(path).json()["error"]
        assert error["param"] == query.partition("=")[0]
    assert server.http.get(f"/v1/responses/{told.id}?stream=true").status_code == 400


def test_the_store_is_bounded_in_bytes_and_time() -> None:
    now = [0.0]
    store = ResponseStore(max_bytes=1000, max_seconds=10, clock=lambda: now[0])

    def put(name: str, size: int = 300) -> None:
        store.put("", name, Kept(b"x" * (size - 4), b"[]", b"[]"))

    def found(names: str) -> list[str]:
        return [name for name in names if store.find("", name)]

    for name in "abc":
        put(name)
    assert found("a") == ["a"]
    put("d")  # b was used longest ago
    assert found("abcd") == ["a", "c", "d"]
    assert store.num_bytes == 900
    put("large", 2000)
    assert found("acd") == ["a", "c", "d"]
    assert store.find("", "large") is None
    put("a", 100)
    assert store.num_bytes == 700
    now[0] = 9
    assert found("c") == ["c"]
    now[0] = 11
    assert found("acd") == ["c"]
    assert (len(store), store.num_bytes) == (1, 300)
    assert store.drop("", "c")
    assert not store.drop("", "c")
    assert store.num_bytes == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"background": True}, "background is true"),
        ({"conversation": "c"}, "conversation is not supported: send previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools of type 'web_search' are not supported"),
        ({"input": [{"type": "computer_call"}]}, "items of type 'computer_call' are not"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "content parts of type 'input_image' are not supported",
        ),
        ({"input": []}, "input"),
        ({"input": [5]}, "input.0 is 5; it should be a valid object"),
        (
            {"input": [{"type": 5}]},
            "items of type 5 are not supported; allowed: message, function_",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": 5}]}]},
            "content parts of type 5 are not supported; allowed: input_text, output_text",
        ),
        ({"tools": [{"type": None}]}, "tools of type null are not supported; allowed: function"),
        ({"tool_choice": {"type": 5}}, "choices of type 5 are not supported; allowed: function, a"),
        ({"tool_choice": {"name": "a"}}, "tool_choice.type is missing"),
        ({"n": 2}, "a response is one answer"),
        ({"max_tokens": 5}, "send max_output_tokens"),
        ({"max_output_tokens": 10**9}, "and max_output_tokens is 1000000000: shorten the prompt"),
        ({"temprature": 1}, "unknown field 'temprature'"),
        ({"return_origins": True}, "return_origins is only allowed in /v1/chat/completions"),
        ({"input": [{"role": "user"}]}, "input.0.content is missing"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "has no text"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}, "input holds no words"),
        ({"tool_choice": {"type": "web_search"}}, "tool choices of type 'web_search' are not"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}},
            "tool_choice names 'weather'; the functions in tools are none",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema is for text.format"),
    ],
)
def test_refusals_say_why(fields: dict[str, Any], words: str) -> None:
    assert words in refused(ChatServer(), **fields)["message"]


def test_errors_name_the_fields_of_the_body() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    strict = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    error = refused(ChatServer(), text={"format": strict})
    assert error["param"] == "text.format"
    assert "text.format is strict" in error["message"]
    error = refused(ChatServer(), tools=[{**TOOL, "parameters": schema}], tool_choice="required")
    assert error["param"] == "tools.0.parameters"
    assert refused(ChatServer(), 404, model="gpt")["code"] == "model_not_found"


def test_a_stream_that_fails_says_so() -> None:
    server = ChatServer()
    server.engine.error_at = (1, RuntimeError("out of luck"))
    body = {"model": server.engine.info.model, "input": "Hello.", "stream": True}
    text = server.http.post("/v1/responses", json=body).text
    events = [json.loads(each.partition("data: ")[2]) for each in text.strip().split("\n\n")]
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["code"] == "internal_error"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    *_, last = ask(server, stream=True)
    assert last.type == "response.failed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_thoughts_that_others_encoded_are_left_out() -> None:
    assert decoded(encoded("Where? \u00fc")) == "Where? \u00fc"
    assert decoded("gAAA") == decoded("no base64") == decoded("") == ""
    thoughts = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAA"}
    server, plain = ChatServer(template=THINKING), ChatServer(template=THINKING)
    answer = {"role": "assistant", "content": "In Rome."}
    ask(server, [USER, thoughts, answer, USER])
    plain.post([USER, answer, USER])
    assert server.prompt == plain.prompt


def test_input_tokens_are_those_of_the_response() -> None:
    server = ChatServer()
    body = {"input": "How is it?", "instructions": "Be brief.", "tools": []}
    answer = server.http.post("/v1/responses", json=body).json()
    counted = server.http.post("/v1/responses/input_tokens", json=body)
    count = answer["usage"]["input_tokens"]
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": count}
    more = {"input": "And?", "previous_response_id": answer["id"]}
    assert server.http.post("/v1/responses/input_tokens", json=more).json()["input_tokens"] > count
    assert len(server.engine.calls) == 1
    openai = server.openai.responses.input_tokens.count(model="fake", input="How is it?")
    assert openai.input_tokens < count
    error = server.http.post("/v1/responses/input_tokens", json={"input": "a", "x": 1}).json()
    assert error["error"]["param"] == "x"


def test_only_responses_in_the_background_could_be_cancelled() -> None:
    server = ChatServer()
    kept = server.http.post("/v1/responses", json={"input": "Hi"}).json()["id"]
    answer = server.http.post(f"/v1/responses/{kept}/cancel")
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "background" in answer.json()["error"]["message"]
    assert server.http.post("/v1/responses/resp_0/cancel").status_code == 404
    assert server.http.get(f"/v1/responses/{kept}").json()["status"] == "completed"


def test_conversations_are_not_compacted() -> None:
    answer = ChatServer().http.post("/v1/responses/compact", json={"input": "Hi"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "compaction_not_supported"
