"""For each field of a body, values that are made to hurt it. Owns names of fields, no requests."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.server.fuzz.shapes import schema, structured
from tests.server.fuzz.values import NAME, Raw, anything, nest, number, text

Maker = Callable[[Random], Any]


def one_of(*values: Any) -> Maker:
    return lambda rng: rng.choice(values)


def _prompt(rng: Random) -> Any:
    count = rng.choice([3, 255, 256, 257, 5000])
    return rng.choice(
        [
            text(rng),
            [text(rng), text(rng)],
            [],
            [[]],
            [""],
            [5] * count,
            [[5]] * count,
            ["a"] * count,
            [["a"]],
            [5, "a"],
            [True],
            [5.0],
            [-1],
            [2**31],
            [10**6],
            [[5, 10**9]],
            "word " * count,
            "a" * count,
            "\n" * count,
        ]
    )


def _logit_bias(rng: Random) -> Any:
    keys = rng.choice(["7", "-1", "1e3", "99999", "9" * 12, "٣", " 7", "", "0x7", "007"])
    return rng.choice(
        [
            {keys: number(rng)},
            {keys: 1},
            {str(i): 1 for i in range(rng.choice([1024, 1025, 60_000]))},
            {"5": None},
            {"5": "1"},
            [[5, 1]],
        ]
    )


def _stop(rng: Random) -> Any:
    return rng.choice(
        [
            text(rng),
            [text(rng) for _ in range(3)],
            ["ab"] * rng.choice([31, 33, 10_000]),
            [""],
            [None],
            "a" * 1025,
            ["e", "e", "ee"],
        ]
    )


def _ids(rng: Random) -> Any:
    return rng.choice(
        [[], [-1], [10**6], [2**31], [5.0], [True], [5] * 5000, list(range(4000)), ["5"], 5]
    )


def _message(rng: Random) -> dict[str, Any]:
    role = rng.choice(["system", "developer", "user", "assistant", "tool", "function", "", 3])
    content = rng.choice(
        [
            text(rng),
            [{"type": "text", "text": text(rng)}],
            [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}],
            [{"type": "input_audio", "input_audio": {}}],
            [{"type": ["text"]}],
            [],
            None,
            {},
            [[]],
        ]
    )
    message: dict[str, Any] = {"role": role, "content": content}
    if rng.random() < 0.4:
        call = {"name": text(rng), "arguments": rng.choice(["{}", "{", text(rng), "[" * 5000])}
        message["tool_calls"] = rng.choice(
            [
                [{"id": "1", "type": "function", "function": call}],
                [{"function": call}] * 200,
                [],
                None,
                "x",
            ]
        )
    if rng.random() < 0.3:
        key = rng.choice(["name", "tool_call_id", "reasoning_content", "refusal", "annotations"])
        message[key] = anything(rng)
    return message


def _messages(rng: Random) -> Any:
    return rng.choice(
        [
            [_message(rng)],
            [_message(rng) for _ in range(4)],
            [{"role": "user", "content": "a"}] * rng.choice([200, 10_001]),
            [{"role": "user", "content": [{"type": "text", "text": "a"}] * 10_001}],
            [],
            ["hello"],
            {"role": "user", "content": "a"},
        ]
    )


def _tools(rng: Random) -> Any:
    name = rng.choice(["f", "a b", "", "x" * 65, "é", '"', "a.b-c_d"])
    function: dict[str, Any] = {"name": name, "strict": rng.choice([None, True, False])}
    function["parameters"] = schema(rng)
    if rng.random() < 0.3:
        function["description"] = text(rng)
    tool = {"type": rng.choice(["function", "function", "retrieval"]), "function": function}
    named = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(130)]
    return rng.choice([[tool], [tool], [tool, tool], named, named[:128], [], [{}], "x"])


def _tool_choice(rng: Random) -> Any:
    function = {"type": "function", "function": {"name": rng.choice(["add", "missing", "", 3])}}
    return rng.choice(["none", "auto", "required", "any", function, {"type": "function"}])


def _structural_tag(rng: Random) -> Any:
    inner = rng.choice(
        [
            {"type": "any_text", "excludes": [text(rng)]},
            {"type": "json_schema", "json_schema": schema(rng)},
            {"type": "regex", "pattern": text(rng)},
            {"type": "grammar", "grammar": text(rng)},
            nest(rng),
        ]
    )
    tag = {"type": "tag", "begin": text(rng), "content": inner, "end": [text(rng), "</a>"]}
    triggered = {"type": "triggered_tags", "triggers": [tag["begin"]], "tags": [tag, tag]}
    several = {"type": "tags_with_separator", "tags": [tag], "separator": text(rng)}
    depth = rng.choice([1, 60, 3000])
    deep = Raw('{"type":"or","elements":[' * depth + "1" + "]}" * depth)
    return {"format": rng.choice([inner, tag, triggered, several, deep])}


def _response_format(rng: Random) -> Any:
    return rng.choice(
        [
            {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(rng)}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(rng)}},
            {"type": "json_schema", "json_schema": {"schema": {}, "strict": True}},
            {"type": "json_schema"},
            {"type": "json_object"},
            {"type": "json_object", "schema": schema(rng)},
            {"type": "text", "schema": {}},
            {"type": "structural_tag", **_structural_tag(rng)},
            {"type": "regex", "pattern": "a"},
            "json",
        ]
    )


def _template_options(rng: Random) -> Any:
    name = rng.choice(["enable_thinking", "messages", "bos_token", "self", "raise_exception", "é"])
    return rng.choice([{name: anything(rng)}, {"a": nest(rng)}, {"range": 3}, {"loop": []}, []])


def _speculative(rng: Random) -> Any:
    return rng.choice(
        [
            {"enabled": anything(rng)},
            {"method": rng.choice(["ngram", "nonsense", [], ["prompt_lookup", 3], text(rng)])},
            {"num_speculative_tokens": rng.choice([0, 64, 65, -1, 1.5, 10**30])},
            {"enabled": False, "method": ["prompt_lookup"] * 5000},
            {"unknown": 1},
        ]
    )


COUNT = one_of(0, 1, 2, 16, 17, 20, 21, 300, -1, 2**31, 2**63, 1.5, True, "1", Raw("1e2"))
FLOAT = one_of(0, 1, -1, 0.5, 2.5, 101, 1e-9, True, "1", Raw("1e400"), Raw("NaN"), Raw("-0.0"))
_BOOL = one_of(True, False, None, 0, 1, "true", [])

_GENERATION: dict[str, Maker] = {
    "model": one_of(NAME, "other", "", None, "a" * 5000, "\0", 3),
    "temperature": FLOAT,
    "top_p": FLOAT,
    "min_p": FLOAT,
    "presence_penalty": FLOAT,
    "frequency_penalty": FLOAT,
    "repetition_penalty": FLOAT,
    "top_k": COUNT,
    "n": COUNT,
    "seed": number,
    "max_tokens": COUNT,
    "min_tokens": COUNT,
    "prompt_logprobs": COUNT,
    "num_speculative_tokens": COUNT,
    "stop": _stop,
    "stop_token_ids": _ids,
    "allowed_token_ids": _ids,
    "bad_words": _stop,
    "logprob_token_ids": _ids,
    "logit_bias": _logit_bias,
    "stream": _BOOL,
    "stream_options": one_of({}, {"include_usage": True}, {"include_usage": 1}, {"x": 1}, []),
    "ignore_eos": _BOOL,
    "skip_special_tokens": _BOOL,
    "include_metrics": _BOOL,
    "return_origins": _BOOL,
    "disable_spec_decode": _BOOL,
    "user": text,
    "cache_salt": text,
    "structured_outputs": structured,
    "response_format": _response_format,
    "structural_tag": _structural_tag,
    "grammar": text,
    "json_schema": schema,
    "speculative": _speculative,
}
FIELDS: dict[str, dict[str, Maker]] = {
    "/v1/completions": {
        **_GENERATION,
        "prompt": _prompt,
        "logprobs": COUNT,
        "echo": _BOOL,
        "suffix": text,
        "best_of": COUNT,
        "add_special_tokens": _BOOL,
    },
    "/v1/chat/completions": {
        **_GENERATION,
        "messages": _messages,
        "logprobs": _BOOL,
        "top_logprobs": COUNT,
        "max_completion_tokens": COUNT,
        "tools": _tools,
        "tool_choice": _tool_choice,
        "parallel_tool_calls": _BOOL,
        "chat_template_kwargs": _template_options,
        "chat_template": one_of("{{ messages }}", "{% for i in range(10**9) %}{% endfor %}"),
        "add_generation_prompt": _BOOL,
        "continue_final_message": _BOOL,
        "functions": _tools,
        "metadata": anything,
        "modalities": one_of(["text"], ["audio"], "text"),
    },
    "/tokenize": {
        "prompt": text,
        "messages": _messages,
        "add_special_tokens": _BOOL,
        "tools": _tools,
        "chat_template_kwargs": _template_options,
        "return_token_strs": _BOOL,
        "content": one_of("a b", ["a", 5, "b"], [], [4096], None),
        "add_special": _BOOL,
        "parse_special": _BOOL,
        "with_pieces": _BOOL,
    },
    "/detokenize": {"tokens": _ids, "model": anything, "prompt": text},
}
