"""Bodies of the other APIs: embeddings, responses, Anthropic's messages, Ollama's.

Owns bodies that are right, and values that are made to hurt their fields. Knows neither sockets nor
servers.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.server.fuzz.fields import COUNT, FIELDS, FLOAT, Maker, one_of
from tests.server.fuzz.shapes import schema
from tests.server.fuzz.values import NAME, anything, nest, number, text

CHAT_FIELDS = FIELDS["/v1/chat/completions"]
FLAG = CHAT_FIELDS["stream"]
MESSAGES, TOOLS, MODEL = (CHAT_FIELDS[name] for name in ("messages", "tools", "model"))
PROMPT = FIELDS["/v1/completions"]["prompt"]
KEEP_ALIVE = one_of("5m", "-1", -1, 300, "", "soon", "9999999999h", "9" * 400 + "s", [], 1e300)


def _streamed(rng: Random) -> dict[str, Any]:
    return {"stream": rng.random() < 0.5} if rng.random() < 0.6 else {}


def responses(rng: Random) -> dict[str, Any]:
    words = rng.choice(["How is it?", [{"role": "user", "content": "How is it?"}]])
    body = {"model": NAME, "input": words, "max_output_tokens": rng.randrange(1, 6)}
    return body | _streamed(rng)


def messages(rng: Random) -> dict[str, Any]:
    return _counted(rng) | {"max_tokens": rng.randrange(1, 6)} | _streamed(rng)


def _counted(_: Random) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": "How is it?"}]}


def _embeddings(rng: Random) -> dict[str, Any]:
    return {"model": NAME, "input": rng.choice(["Once", ["One", "Two"], [5, 6], [[5], [6, 7]]])}


def _ollama_chat(rng: Random) -> dict[str, Any]:
    options = {"num_predict": rng.randrange(1, 6), "temperature": rng.choice([0, 0.7])}
    return {**_counted(rng), "options": options} | _streamed(rng)


def _generate(rng: Random) -> dict[str, Any]:
    body = {"model": NAME, "prompt": rng.choice(["Once", ""]), "raw": rng.random() < 0.3}
    return {**body, "options": {"num_predict": rng.randrange(1, 6)}} | _streamed(rng)


def _infill(rng: Random) -> dict[str, Any]:
    body = {"input_prefix": "def f(", "input_suffix": rng.choice(["", "return 1"])}
    return {**body, "n_predict": rng.randrange(0, 6)} | _streamed(rng)


def _native(rng: Random) -> dict[str, Any]:
    prompt = rng.choice(["Once", [5, "Once"], ["Once", [5, 6]], {"prompt_string": "Once"}])
    return {"prompt": prompt, "n_predict": rng.randrange(0, 6)} | _streamed(rng)


def _embed(rng: Random) -> dict[str, Any]:
    return {"model": NAME, "input": rng.choice(["Once", ["One", "Two"], "", []])}


BASES: dict[str, tuple[int, Callable[[Random], dict[str, Any]]]] = {
    "/v1/responses": (3, responses),
    "/v1/responses/input_tokens": (1, responses),
    "/v1/messages": (3, messages),
    "/v1/messages/count_tokens": (1, _counted),
    "/v1/embeddings": (2, _embeddings),
    "/apply-template": (1, _counted),
    "/api/chat": (3, _ollama_chat),
    "/api/generate": (3, _generate),
    "/api/embed": (1, _embed),
    "/api/embeddings": (1, lambda rng: {"model": NAME, "prompt": "Once"}),
    "/api/show": (1, lambda rng: {rng.choice(["model", "name"]): NAME}),
    "/infill": (2, _infill),
    "/completion": (2, _native),
}
"""By path: how often it is asked in proportion, and a body that is right."""


def _items(rng: Random) -> Any:
    """Of a response's input."""
    call = {"type": "function_call", "call_id": "a", "name": text(rng), "arguments": text(rng)}
    output = {"type": "function_call_output", "call_id": rng.choice(["a", ""]), "output": text(rng)}
    reference = {"type": "item_reference", "id": rng.choice(["msg_1", "", "é" * 400])}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": text(rng)}
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc"}]}
    short = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    some = [call, output, reference, thought, image, {"type": text(rng)}, {}, 3]
    return rng.choice([some, [rng.choice(some)], [short] * 9000, text(rng), [], nest(rng)])


_MANY = [{"type": "text", "text": "a"}] * 9000


def _blocks(rng: Random) -> Any:
    """Messages of Anthropic's."""
    used = {"type": "tool_use", "id": text(rng), "name": text(rng), "input": anything(rng)}
    result = {"type": "tool_result", "tool_use_id": text(rng), "content": anything(rng)}
    words = {"type": "text", "text": text(rng)}
    others = [{"type": kind} for kind in ("image", "document", "thinking", "search", "", "text")]
    role, block = rng.choice(["user", "assistant", "system"]), rng.choice([used, result, words])
    told = {"role": role, "content": rng.choice([[block], [*others], text(rng), _MANY])}
    return rng.choice([[told], [told] * 3, [], [{}], "hello", [words]])


def _options(rng: Random) -> Any:
    """Of Ollama's."""
    names = ["num_predict", "num_ctx", "temperature", "top_k", "top_p", "seed", "stop", "mirostat"]
    return rng.choice(
        [
            {rng.choice(names): number(rng)},
            {rng.choice(names): anything(rng)},
            {"num_ctx": rng.choice([1, 256, 257, 1 << 31])},
            {"stop": ["a"] * rng.choice([32, 33, 9000])},
            {"unknown": 1},
            [],
        ]
    )


def _files(rng: Random) -> Any:
    file = {"filename": text(rng), "text": text(rng)}
    return rng.choice(
        [[file], [{"text": "a"}] * 9000, [{"text": ""}], [{}], [file, {"x": 1}], text(rng)]
    )


def _thinking(rng: Random) -> Any:
    kinds = ["enabled", "disabled", "adaptive", "", 3]
    return rng.choice([{"type": rng.choice(kinds), "budget_tokens": number(rng)}, {}, [], "on"])


def _text(rng: Random) -> Any:
    form = {"type": rng.choice(["json_schema", "json_object", "text", "x"]), "schema": schema(rng)}
    return rng.choice([{"format": form}, {"format": {}}, {"verbosity": "loud"}, [], "x"])


_OLLAMA: dict[str, Maker] = {
    "model": MODEL,
    "stream": FLAG,
    "options": _options,
    "format": lambda rng: rng.choice(["json", "", "xml", schema(rng), []]),
    "think": one_of(True, False, "high", "much", 3),
    "keep_alive": KEEP_ALIVE,
    "logprobs": FLAG,
    "top_logprobs": COUNT,
}
_ANTHROPIC: dict[str, Maker] = {
    "model": MODEL,
    "messages": _blocks,
    "system": lambda rng: rng.choice([text(rng), [{"type": "text", "text": text(rng)}], [{}], 3]),
    "tools": lambda rng: [{"name": text(rng), "input_schema": schema(rng)}],
    "tool_choice": lambda rng: {"type": rng.choice(["any", "tool", "none", ""]), "name": text(rng)},
    "thinking": _thinking,
}
_RESPONSES: dict[str, Maker] = {
    "model": MODEL,
    "input": _items,
    "instructions": text,
    "previous_response_id": one_of("resp_1", "", "é", 3, "../x"),
    "store": FLAG,
    "include": one_of([], ["reasoning.encrypted_content"], ["x"], [3], "x"),
    "max_output_tokens": COUNT,
    "top_logprobs": COUNT,
    "text": _text,
    "reasoning": one_of({"effort": "high"}, {"effort": "x"}, {"summary": 3}, []),
    "tools": lambda rng: [{"type": "function", "name": text(rng), "parameters": schema(rng)}],
    "tool_choice": CHAT_FIELDS["tool_choice"],
    "metadata": anything,
    "stream": FLAG,
    "temperature": FLOAT,
    "truncation": one_of("auto", "x", 3),
    "background": FLAG,
}
OTHER_FIELDS: dict[str, dict[str, Maker]] = {
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": _RESPONSES,
    "/v1/messages": {
        **_ANTHROPIC,
        "max_tokens": COUNT,
        "temperature": FLOAT,
        "top_k": COUNT,
        "top_p": FLOAT,
        "stop_sequences": CHAT_FIELDS["stop"],
        "stream": FLAG,
        "metadata": anything,
        "output_config": lambda rng: {"format": {"type": "json_schema", "schema": schema(rng)}},
    },
    "/v1/messages/count_tokens": _ANTHROPIC,
    "/v1/embeddings": {
        "model": MODEL,
        "input": PROMPT,
        "pooling": one_of("mean", "last", "max", "rank", 3),
        "encoding_format": one_of("float", "base64", "x"),
        "dimensions": COUNT,
        "truncate_prompt_tokens": COUNT,
        "add_special_tokens": FLAG,
    },
    "/apply-template": {name: CHAT_FIELDS[name] for name in ("messages", "tools", "model")},
    "/api/chat": {**_OLLAMA, "messages": MESSAGES, "tools": TOOLS},
    "/api/generate": {
        **_OLLAMA,
        "prompt": text,
        "system": text,
        "raw": FLAG,
        "template": text,
        "suffix": text,
        "images": one_of([], ["a"], 3),
        "context": one_of([], [1, 2], 3),
    },
    "/api/embed": {
        "model": MODEL,
        "input": PROMPT,
        "truncate": FLAG,
        "dimensions": COUNT,
        "options": _options,
        "keep_alive": KEEP_ALIVE,
    },
    "/api/embeddings": {"model": MODEL, "prompt": text, "keep_alive": KEEP_ALIVE},
    "/infill": {
        **{
            name: FIELDS["/v1/completions"][name]
            for name in ("stop", "seed", "stream", "logit_bias")
        },
        "input_prefix": text,
        "input_suffix": text,
        "input_extra": _files,
        "prompt": text,
        "n_predict": COUNT,
        "samplers": one_of([], ["top_k"], "x", None),
        "repeat_penalty": FLOAT,
        "id_slot": number,
    },
    "/completion": {
        **{
            name: FIELDS["/v1/completions"][name]
            for name in ("prompt", "stop", "seed", "stream", "logit_bias")
        },
        "n_predict": COUNT,
        "n_cmpl": one_of(1, 2, 0),
        "n_probs": one_of(0, 1, 21),
        "return_tokens": FLAG,
        "cache_prompt": FLAG,
        "timings_per_token": FLAG,
        "response_fields": one_of([], ["content", "timings/prompt_n"], ["/"], "x"),
        "grammar": one_of("", 'root ::= "a"', "x"),
        "id_slot": number,
    },
    "/api/show": {"model": MODEL, "name": MODEL, "verbose": FLAG},
}
