"""Gaps in texts: ``suffix`` of completions and of Ollama's, and llama.cpp's ``/infill``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.asgi import application, complete, engine_of, post, refused
from tests.server.fakes import FakeEngine
from tests.server.llama_cpp.gaps import MARKS, fim_tokenizer

INFILL, COMPLETION, GENERATE = "/infill", "/v1/completions", "/api/generate"
BEFORE, BEHIND = "def add(a, b):\n    ", "\n\nprint(add(1, 2))"
GAP = {"input_prefix": BEFORE, "input_suffix": BEHIND}


def filling(answer: Any = " return a + b") -> Any:
    return application(FakeEngine(answer, fim_tokenizer()))


def asked(app: Any) -> str:
    """The last prompt, with every token spelled out."""
    return fim_tokenizer().decode(engine_of(app).calls[-1].token_ids, skip_special_tokens=False)


def test_three_ways_to_fill_a_gap_ask_the_same() -> None:
    app = filling()
    choice = complete(app, BEFORE, suffix=BEHIND)["choices"][0]
    infilled = post(app, INFILL, GAP).json()
    generated = post(
        app, GENERATE, {"model": "fake", "prompt": BEFORE, "suffix": BEHIND, "stream": False}
    )
    assert choice["text"] == infilled["content"] == generated.json()["response"] == " return a + b"
    first, *others = [call.token_ids for call in engine_of(app).calls]
    assert others == [first, first]
    before, behind, middle = MARKS
    assert asked(app) == f"{before}{BEFORE}{behind}{BEHIND}{middle}"


def test_marks_in_a_text_are_text() -> None:
    """Nobody moves the gap, ends the text or begins a file by writing a mark into it."""
    app = filling()
    written = f"{MARKS[2]} <|endoftext|> <|im_start|>"
    extra = [{"filename": written, "text": written}]
    gap = {"input_prefix": written, "input_suffix": written, "input_extra": extra}
    assert post(app, INFILL, {**gap, "prompt": written}).status_code == 200
    ids = engine_of(app).calls[-1].token_ids
    tokenizer = fim_tokenizer()
    assert tokenizer.fim is not None
    marks = [each for each in ids if each in tokenizer.fim.all or tokenizer.is_special(each)]
    assert marks == [tokenizer.fim.before, tokenizer.fim.behind, tokenizer.fim.middle]
    assert asked(app).count(written) == 4


def test_other_files_and_first_words() -> None:
    app = filling()
    files = [{"filename": "a.py", "text": "A = 1"}, {"text": "B = 2"}]
    post(app, INFILL, {**GAP, "input_extra": files, "prompt": "return"})
    text = asked(app)
    assert text.startswith(f"A = 1\n\nB = 2\n\n{MARKS[0]}{BEFORE}")
    assert text.endswith(f"{BEHIND}{MARKS[2]}return")


def test_an_answer_ends_where_the_model_writes_a_mark() -> None:
    tokenizer = fim_tokenizer()
    words = tokenizer.encode(" return")
    assert tokenizer.fim is not None
    app = filling([*words, tokenizer.fim.before, *words])
    assert post(app, INFILL, GAP).json()["content"] == " return"
    assert complete(app, BEFORE, suffix=BEHIND)["choices"][0]["text"] == " return"
    assert len(complete(app, BEFORE, suffix=BEHIND, ignore_eos=True)["choices"][0]["text"]) > 7


def test_the_form_is_that_of_completion() -> None:
    app = filling()
    whole = post(app, INFILL, GAP).json()
    continued = post(app, "/completion", {"prompt": "Once"}).json()
    assert whole.keys() == continued.keys()
    assert (whole["content"], whole["stop_type"]) == (" return a + b", "eos")
    assert whole["tokens_evaluated"] == len(engine_of(app).calls[0].token_ids)
    assert all(mark in whole["prompt"] for mark in MARKS)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"n_predict": 2}, "limit", " return a"),
        ({"n_predict": -1}, "eos", " return a + b"),
        ({"n_predict": 0}, "limit", ""),
        ({"stop": ["+"]}, "word", " return a "),
    ],
)
def test_where_an_answer_ends(fields: dict[str, Any], kind: str, text: str) -> None:
    answer = post(filling(), INFILL, {**GAP, **fields}).json()
    assert (answer["stop_type"], answer["content"]) == (kind, text)


def test_what_editors_send_is_taken() -> None:
    """llama.vim's request."""
    body = {
        **GAP,
        "id_slot": 0,
        "input_extra": [],
        "prompt": "    ",
        "n_predict": 128,
        "stop": [],
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.99,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/prompt_n"],
    }
    app = filling()
    answer = post(app, INFILL, body)
    assert answer.status_code == 200, answer.text
    assert engine_of(app).calls[-1].params.top_k == 40
    assert answer.json().keys() == {"content", "timings/prompt_n"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (INFILL, GAP),
        (COMPLETION, {"prompt": BEFORE, "suffix": BEHIND}),
    ],
)
def test_a_model_without_marks_says_so(path: str, body: dict[str, Any]) -> None:
    error = refused(application(), path, body)
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "no_fim_tokens"
    assert "fill-in-the-middle tokens; serve one that has" in error["message"]
    assert (
        post(application(), COMPLETION, {"prompt": BEFORE}).status_code == 200
    )  # its other advice


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (INFILL, {"input_prefix": None}, "input_prefix"),
        (INFILL, {"suffix": "x"}, "suffix"),
        (INFILL, {"echo": True}, "echo"),
        (INFILL, {"n": 2}, "n"),
        (INFILL, {"n_predict": 3, "max_tokens": 4}, "n_predict"),
        (INFILL, {"samplers": ["dry"]}, "samplers"),
        (INFILL, {"input_extra": [{"text": 1}]}, "input_extra.0.text"),
        (INFILL, {"return_progress": True}, "return_progress"),
        (INFILL, {"mirostat": 2}, "mirostat"),
        (COMPLETION, {"prompt": [1, 2], "suffix": "x"}, "suffix"),
        (COMPLETION, {"prompt": "a", "suffix": "x", "echo": True}, "echo"),
        (COMPLETION, {"prompt": "a", "suffix": "x", "truncate_prompt_tokens": 4}, "truncate"),
        (COMPLETION, {"prompt": "a", "suffix": 3}, "suffix"),
    ],
)
def test_what_does_not_go_with_a_gap(path: str, fields: dict[str, Any], param: str) -> None:
    body = {**GAP, **fields} if path == INFILL else fields
    error = refused(filling(), path, body)
    assert param in f"{error['param']} {error['message']}"


def test_a_gap_beyond_the_context_is_refused_before_it_is_encoded() -> None:
    error = refused(filling(), INFILL, {**GAP, "input_suffix": "a " * 100_000})
    assert error["code"] == "context_length_exceeded"
