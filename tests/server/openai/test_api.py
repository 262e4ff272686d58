"""The smaller endpoints, and the document that describes all of them."""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

import pytest
import tokenizers

import paceline
from paceline.loading.catalogue import embedded_model
from paceline.request.engine_stats import EngineStats
from paceline.server.engine_process.tokens import TokenTexts
from paceline.server.http.config import OPEN_PATHS
from paceline.text.tokenizer import Tokenizer
from tests.server.asgi import application, call, complete, engine_of, post, refused
from tests.server.chats import USER
from tests.server.fakes import FakeEngine, embedded_tokenizer
from tests.text.vocabularies import begin_texts


def get(app: Any, path: str) -> Any:
    response = call(app, "GET", path)
    assert response.status_code == 200, response.text
    return response.json()


def test_models_say_what_is_promised() -> None:
    app = application(served_model_names=("one", "org/two"))
    listed = get(app, "/v1/models")
    assert [card["id"] for card in listed["data"]] == ["one", "org/two"]
    card = get(app, "/v1/models/org/two")
    assert get(app, "/models/org/two") == card
    assert card == listed["data"][1]
    assert card["max_model_len"] == 512
    assert card["promise"] == "identical"
    meta = {"n_vocab": 4096, "n_embd": 8, "n_params": 1_234_567, "size": 1 << 20}
    assert (card["architecture"], card["meta"]) == ("llama", meta)
    assert card["sampling"]["source"] == "the model's files"
    missing = call(app, "GET", "/v1/models/three")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_version_and_health() -> None:
    app = application()
    assert get(app, "/version") == {"version": paceline.__version__}
    assert get(app, "/health") == {"status": "ready"}
    engine_of(app).state = "failed"
    assert call(app, "GET", "/health").status_code == 503


@pytest.mark.parametrize(
    ("state", "live", "ready"),
    [
        *(("ready", 200, 200), ("starting", 200, 503), ("hung", 200, 503)),
        *(("draining", 200, 503), ("failed", 503, 503)),
    ],
)
def test_probes_tell_whether_to_wait_or_to_start_anew(state: Any, live: int, ready: int) -> None:
    app = application(api_keys=("key",))  # which probes do not bring
    engine_of(app).state = state
    assert call(app, "GET", "/livez").status_code == live
    assert call(app, "GET", "/readyz").status_code == ready


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v2/models", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405)],
)
def test_unknown_paths_and_methods_have_the_same_bodies(
    method: str, path: str, status: int
) -> None:
    response = call(application(), method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_wrong_path_is_told_the_right_ones() -> None:
    error = call(application(), "POST", "/chat/complete").json()["error"]
    assert error["message"] == (
        "there is no /chat/complete here; did you mean POST /v1/chat/completions? GET "
        "/openapi.json describes all endpoints"
    )
    error = call(application(), "POST", "/a/proxy/of/ours/v1/chat/completions").json()["error"]
    assert "did you mean POST /v1/chat/completions?" in error["message"]
    error = call(application(), "POST", "/v1/chat").json()["error"]
    assert "did you mean POST /v1/chat/completions?" in error["message"]
    error = call(application(), "GET", "/zzz").json()["error"]
    assert error["message"] == "there is no /zzz here; GET /openapi.json describes all endpoints"
    error = call(application(), "GET", "/v1/completions").json()["error"]
    assert error["message"] == "GET is not for /v1/completions, which takes POST"
    wrong = call(application(), "PUT", "/v1/responses/resp_1")  # whose methods have endpoints each
    assert wrong.headers["allow"] == "DELETE, GET"
    assert wrong.json()["error"]["message"].endswith("which takes DELETE, GET")
    wrong = call(application(), "PUT", "/v1/responses/compact")  # not an id
    assert wrong.headers["allow"] == "POST"


def test_a_wrong_path_is_told_as_it_was_meant() -> None:
    error = call(application(), "GET", "/v2/caf%C3%A9").json()["error"]
    assert error["message"].startswith("there is no /v2/caf\u00e9 here")


def test_tokenize_and_back() -> None:
    app, tokenizer = application(), embedded_tokenizer()
    text = "Hello wörld"
    answer = post(app, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 512
    assert answer["token_strs"] == [tokenizer.id_to_token(i) for i in answer["tokens"]]
    told = post(app, "/detokenize", {"tokens": answer["tokens"]}).json()
    assert told == {"prompt": text, "content": text}
    bare = post(app, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert bare["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    assert bare["token_strs"] is None


def test_llama_cpps_content() -> None:
    """Its server's answers have these shapes (b11549); the ids are those of this vocabulary."""
    app = application()

    def tokens(content: Any, **options: Any) -> Any:
        answer = post(app, "/tokenize", {"content": content, **options}).json()
        assert list(answer) == ["tokens"]
        return answer["tokens"]

    assert tokens("<|im_start|>user") == [1, 2038]
    assert tokens("<|im_start|>user", parse_special=False) == [31, 95, 363, 66, 1094, 95, 33, 2038]
    assert tokens(["user", 5, "user"], add_special=None) == [2038, 5, 2038]
    assert tokens("") == tokens([]) == []
    pieces = [{"id": 1, "piece": "<|im_start|>"}, {"id": 76, "piece": "i"}]
    assert tokens("<|im_start|>i", with_pieces=True) == pieces
    emoji = [(224, " "), (176, [240]), (257, [159]), (250, [152]), (226, [128])]
    told = tokens(" 😀", with_pieces=True)
    assert [(each["id"], each["piece"]) for each in told] == emoji


def test_llama_cpps_content_begins_as_texts_do() -> None:
    backend = tokenizers.Tokenizer.from_str(embedded_tokenizer().to_json())
    begin_texts(backend, "<|endoftext|>")
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<|endoftext|>"})
    app = application(FakeEngine(tokenizer=tokenizer))
    for content, options, wanted in (
        ("user", {}, [2038]),
        ("user", {"add_special": True}, [0, 2038]),
        ("user", {"add_special": True, "parse_special": False}, [0, 2038]),
        (["user", "user"], {"add_special": True}, [0, 2038, 2038]),
        ([5, "user"], {"add_special": True}, [5, 2038]),  # as llama.cpp, where ids come first
    ):
        asked = {"content": content, **options}
        assert post(app, "/tokenize", asked).json()["tokens"] == wanted, asked


def test_detokenize_tells_incomplete_characters_as_llama_cpp_does() -> None:
    answer = post(application(), "/detokenize", {"tokens": [43, 176, 257, 250]}).json()
    assert answer["content"] == "H\ufffd"


def chat_tokenizer() -> Tokenizer:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% if quiet %}...{% endif %}{% endif %}"
    )
    backend = tokenizers.Tokenizer.from_file(f"{embedded_model('target')}/tokenizer.json")
    return Tokenizer(backend, chat_templates={"default": template})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "<user>hi\n<assistant>"),
        ({"add_generation_prompt": False}, "<user>hi\n"),
        ({"chat_template_kwargs": {"quiet": True}}, "<user>hi\n<assistant>..."),
    ],
)
def test_a_chat_is_tokenized_as_it_would_be_answered(options: Any, text: str) -> None:
    tokenizer = chat_tokenizer()
    app = application(FakeEngine(tokenizer=tokenizer))
    messages = [{"role": "user", "content": "hi"}]
    answer = post(app, "/tokenize", {"messages": messages, **options}).json()
    assert answer["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    post(app, "/v1/chat/completions", {"messages": messages, **options})
    assert [call.token_ids for call in engine_of(app).calls] == [answer["tokens"]]


def test_long_texts_are_encoded_too() -> None:
    text = "word " * 1200  # in a thread
    answer = post(application(), "/tokenize", {"prompt": text}).json()
    assert answer["tokens"] == embedded_tokenizer().encode(text)


class Watched(Tokenizer):
    """Notes which of its methods are called in another thread than the event loop's."""

    def __init__(self, loop: list[int]) -> None:
        super().__init__(tokenizers.Tokenizer.from_str(embedded_tokenizer().to_json()))
        self.aside: list[str] = []
        self.inline: list[str] = []
        self._loop = loop

    def _note(self, name: str) -> None:
        is_inline = threading.get_ident() in self._loop
        (self.inline if is_inline else self.aside).append(name)

    def encode_batch(self, texts: Any, add_special_tokens: bool = True) -> Any:
        self._note("encode")
        return super().encode_batch(texts, add_special_tokens)

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        self._note("decode")
        return super().decode(ids, skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        if self._loop:
            self._note("spell")
        return super().id_to_token(token_id)


def test_the_process_that_streams_looks_through_no_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine()

    def look(tokenizer: Tokenizer) -> int:
        raise AssertionError("streams of other models wait meanwhile")

    monkeypatch.setattr(Tokenizer, "longest_token", property(look))
    app = application(engine)
    assert complete(app, "a" * 20)["choices"][0]["text"]
    longest = engine.info.longest_token * engine.info.max_model_len
    error = refused(app, "/v1/completions", {"prompt": "a" * (longest + 1)})
    assert f"at most {longest} characters" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "aside"),
    [
        ("/tokenize", {"prompt": "word " * 60}, {"encode": 1}),
        ("/v1/completions", {"prompt": ["word " * 60, "a", "b"]}, {"encode": 1}),
        ("/v1/completions", {"prompt": [[5, 6], [7]], "echo": True}, {"decode": 2}),
        ("/tokenize", {"prompt": "a b", "return_token_strs": True}, {"spell": 2}),
        ("/tokenize", {"content": ["a", 5, "b"]}, {"encode": 2}),
        ("/detokenize", {"tokens": [5, 6]}, {"spell": 4}),
    ],
)
def test_what_takes_time_is_done_beside_the_event_loop(path: str, body: Any, aside: Any) -> None:
    loop: list[int] = []
    watched = Watched(loop)
    app = application(FakeEngine([5, 6], watched))
    watched.aside.clear()
    watched.inline.clear()
    loop.append(threading.get_ident())
    assert post(app, path, body).status_code == 200
    assert {name: watched.aside.count(name) for name in aside} == aside
    assert not set(aside) & set(watched.inline) - {"decode"}  # which the engine does here


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt_logprobs": 20}),
        ("/v1/completions", {"echo": True, "logprobs": 20, "max_tokens": 0}),
        ("/v1/chat/completions", {"prompt_logprobs": 20}),
    ],
)
def test_log_probs_of_prompts_are_told_beside_the_event_loop(
    path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, begin = set[int](), TokenTexts.__init__

    def watched(texts: TokenTexts, tokenizer: Any) -> None:
        begin(texts, tokenizer)
        honest = texts.text

        def text(token_id: int) -> str:
            seen.add(threading.get_ident())
            return honest(token_id)

        monkeypatch.setattr(texts, "text", text)

    monkeypatch.setattr(TokenTexts, "__init__", watched)
    app = application(FakeEngine(tokenizer=chat_tokenizer()))
    asked = {"messages": [USER]} if "chat" in path else {"prompt": "a long prompt"}
    assert "prompt" in post(app, path, {**asked, **body}).text
    assert seen
    assert threading.get_ident() not in seen


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "prompt, messages or content must be given"),
        (
            "/tokenize",
            {"prompt": "a", "messages": [USER]},
            "prompt, messages or content must be given",
        ),
        ("/tokenize", {"prompt": "a", "text": "b"}, "unknown field 'text'"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools is for messages"),
        ("/tokenize", {"content": "a", "prompt": "a"}, "and only one of them"),
        ("/tokenize", {"prompt": "a", "with_pieces": True}, "with_pieces is for content"),
        ("/tokenize", {"content": "a", "add_special_tokens": True}, "is for prompt"),
        ("/tokenize", {"content": "a", "add_special": "x"}, "add_special"),
        ("/tokenize", {"content": None}, "prompt, messages or content must be given"),
        ("/tokenize", {"content": [None]}, "content"),
        ("/tokenize", {"content": [[1]]}, "content"),
        ("/tokenize", {"content": ["a", 4096]}, "content holds 4096; the vocabulary is 0 to 4095"),
        ("/tokenize", {"content": ["a" * 100_000] * 2}, "200000 characters"),
        ("/tokenize", {"content": [5] * 513}, "content has 513 ids; this model's maximum"),
        ("/tokenize", {"messages": [{"role": "king"}]}, "king"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, "no chat template"),
        ("/tokenize", {"prompt": "a" * 200_000}, "200000 characters"),
        ("/detokenize", {}, "tokens is missing"),
        ("/detokenize", {"tokens": [4096]}, "tokens holds 4096; the vocabulary is 0 to 4095"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("/detokenize", {"tokens": [5] * 513}, "tokens has 513 ids; this model's maximum"),
        ("/detokenize", {"tokens": [True]}, "tokens.0 is true"),
    ],
)
def test_refusals(path: str, body: Any, message: str) -> None:
    assert message in refused(application(), path, body)["message"]


def test_stats_tell_the_output_of_the_last_minutes_to_those_who_ask() -> None:
    app = application()
    history = engine_of(app).output_history
    for tokens in (3, 8):
        history.note(EngineStats(num_output_tokens=tokens))
    told = get(app, "/stats?history=true")["output_history"]
    assert [tokens for _, tokens in told] == [3, 8]
    assert all(seconds >= 0 for seconds, _ in told)
    assert call(app, "GET", "/stats?history=maybe").status_code == 400


@pytest.mark.parametrize("path", ["/flush_prefix_cache", "/reset_prefix_cache"])
def test_the_prefix_cache_is_emptied(path: str) -> None:
    app = application()
    assert call(app, "POST", path).status_code == 200
    assert engine_of(app).num_flushes == 1


def test_metrics_and_stats_outlive_the_engine() -> None:
    app = application(FakeEngine(stats_to_tell=EngineStats(num_output_tokens=7)))
    text = call(app, "GET", "/metrics")
    assert text.headers["content-type"].startswith("text/plain")
    assert 'paceline:generation_tokens_total{model_name="fake"} 7.0' in text.text
    assert get(app, "/stats")["tokens"]["output"] == 7
    engine_of(app).dies_at = 0
    assert 'paceline:engine_up{model_name="fake"} 0.0' in call(app, "GET", "/metrics").text
    assert get(app, "/stats")["state"] == "failed"
    assert "output_history" not in get(app, "/stats")
    prefixed = application(metrics_prefix="vllm")
    assert "vllm:num_requests_running" in call(prefixed, "GET", "/metrics").text


def test_the_description_is_complete() -> None:
    document = get(application(), "/openapi.json")
    schemas = document["components"]["schemas"]
    assert schemas["CompletionRequest"]["additionalProperties"] is False
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    for path, method in [("/v1/completions", "post"), ("/tokenize", "post")]:
        operation = document["paths"][path][method]
        assert {"200", "400", "401", "413", "415"} <= set(operation["responses"])
        assert "requestBody" in operation
    assert {"429", "500", "503", "504"} <= set(
        document["paths"]["/v1/completions"]["post"]["responses"]
    )
    assert set(_references(document)) <= {f"#/components/schemas/{name}" for name in schemas}
    assert not any("422" in each["responses"] for _, each in _operations(document))


def test_every_answer_is_described() -> None:
    document = get(application(), "/openapi.json")
    for path, operation in _operations(document):
        if path not in OPEN_PATHS:
            assert "401" in operation["responses"], path


def _operations(document: Any) -> list[tuple[str, Any]]:
    return [(path, each) for path, item in document["paths"].items() for each in item.values()]


def _references(value: Any) -> set[str]:
    if isinstance(value, dict):
        found = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return found.union(*map(_references, value.values()))
    return set().union(*map(_references, value)) if isinstance(value, list) else set()


def test_tokens_are_spelled_as_they_stand_in_a_text() -> None:
    tokenizer = embedded_tokenizer()
    texts = TokenTexts(tokenizer)
    text = "Ünï 日本 code: x = 1\n\tend"
    ids = tokenizer.encode(text)
    assert b"".join(texts.raw(i) for i in ids).decode() == text
    part = next(i for i in ids if len(texts.raw(i)) == 1 and texts.raw(i) > b"\x7f")
    assert texts.text(part) == f"bytes:\\x{texts.raw(part)[0]:02x}"
    [end] = tokenizer.eos_token_ids[:1]
    assert texts.text(end) == tokenizer.id_to_token(end)
    assert texts.text(10**6) == "token_id:1000000"


# --- what clients of llama.cpp and vLLM ask ------------------------------------------------------


def test_props_and_tokenizer_info_tell_what_clients_look_for() -> None:
    app, tokenizer = application(), embedded_tokenizer()
    props, info = get(app, "/props"), get(app, "/tokenizer_info")
    assert props["default_generation_settings"]["n_ctx"] == info["model_max_length"] == 512
    assert props["total_slots"] >= 1
    assert props["chat_template"] == info["chat_template"] == tokenizer.chat_template
    assert tokenizer.encode(props["eos_token"])[-1] in tokenizer.eos_token_ids
    assert get(app, "/ping") == call(app, "POST", "/ping").json() == {"status": "ready"}
    engine_of(app).state = "failed"
    assert call(app, "GET", "/ping").status_code == 503


def test_a_template_is_applied_without_an_answer() -> None:
    tokenizer = chat_tokenizer()
    app = application(FakeEngine(tokenizer=tokenizer))
    text = post(app, "/apply-template", {"messages": [USER]}).json()["prompt"]
    assert text == tokenizer.apply_chat_template([USER])
    assert not engine_of(app).calls
    assert refused(app, "/apply-template", {"messages": []})["param"] == "messages"


def test_paths_are_known_without_their_version() -> None:
    app = application(FakeEngine(tokenizer=chat_tokenizer()))
    assert get(app, "/models") == get(app, "/v1/models")
    path, body = "/chat/completions", {"messages": [USER]}
    bare, versioned = post(app, path, body).json(), post(app, f"/v1{path}", body).json()
    assert bare["choices"] == versioned["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_tells_of_a_finished_answer(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    with caplog.at_level(logging.INFO, "paceline.server.hosting.answering"):
        body = {"prompt": "Once", "max_tokens": 3, "stream": stream}
        assert call(application(), "POST", "/v1/completions", json=body).status_code == 200
    (line,) = [record.message for record in caplog.records if "tok/s" in record.message]
    form = r"/v1/completions 200: \d+ tokens read, 3 written in \d+\.\d\d s, \d+\.\d tok/s"
    assert re.fullmatch(form, line), line
