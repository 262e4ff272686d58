"""Requests for a server over the embedded models: one per feature, and mixtures drawn by a seed.

Owns bodies, how they are sent, and what of an answer has to be equal. Knows no engine.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import httpx

from tests.server.chats import TOOLS, USER

Body = dict[str, Any]
CODE = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
STORY = "Once upon a time there was a little girl. She had a little dog. One day the little"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["reader", "writer"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
REGEX = r"(    def [a-z_]{2,8}\(self\): # [a-z ]{3,12}\n)+"
LARK = 'start: ("def " NAME "(self):\\n")+\nNAME: /[a-z_]{3,9}/'
GBNF = 'root ::= "- " [a-z]{3,8} ("\\n" root)?'
TAGS = {
    "type": "triggered_tags",
    "triggers": ["<p"],
    "at_least_one": True,
    "tags": [
        {
            "type": "tag",
            "begin": f"<p={kind}>",
            "content": {"type": "json_schema", "json_schema": SCHEMA},
            "end": "</p>",
        }
        for kind in ("new", "old")
    ],
}
CHAT_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "weather"}}
# Drafts repeat their own tokens here, so that what they cost matters in the middle of a step.
_LOOPING: Body = {"prompt": "values = [0, 0, 0, 0, 0, 0, 0, 0, 0,", "max_tokens": 32}
END = 0  # the id of the token that ends a text

COMPLETION: dict[str, Body] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.3},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "all_filters": {"top_k": 12, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    "penalties": _LOOPING | {"presence_penalty": 0.6, "frequency_penalty": 0.4, "temperature": 0.7},
    "repetition_penalty": _LOOPING | {"repetition_penalty": 1.2, "temperature": 0},
    "logit_bias": {"logit_bias": {"294": 4, "267": -100}},
    "allowed_token_ids": {"allowed_token_ids": list(range(1024))},
    "bad_words": {"bad_words": ["return", "the", "x, y", "little"], "temperature": 0},
    "min_tokens": {"min_tokens": 9, "logit_bias": {str(END): 100}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {str(END): 4}},
    "stop_strings": {"stop": ["self", " was", "on"], "max_tokens": 30},
    "stop_string_kept": {"stop": ["el", "e d"], "include_stop_str_in_output": True},
    "stop_token": {"stop_token_ids": [267, 294, 297]},
    "n": {"n": 2},
    "logprobs": {"logprobs": 3},
    "logprob_token_ids": {"logprobs": 1, "logprob_token_ids": [294, 5, 267]},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "echo": {"echo": True, "logprobs": 1},
    "stream": {"stream": True, "logprobs": 1},
    "stream_usage": {"stream": True, "stream_options": {"include_usage": True}, "n": 2},
    "batch": {"prompt": [CODE, STORY, "# A list of names\n"]},
    "token_ids": {"prompt": [[412, 1127, 267, 753] * 4, [267, 753, 2344]]},
    "suffix": {"suffix": "\n        return self.x\n"},
    "depth": {"num_speculative_tokens": 2},
}
STRUCTURED: dict[str, Body] = {
    "json_schema": {"structured_outputs": {"json": SCHEMA}},
    "json_object": {"structured_outputs": {"json_object": True}},
    "regex": {"structured_outputs": {"regex": REGEX}},
    "choice": {"structured_outputs": {"choice": ["positive answer", "positive", "negative"]}},
    "lark": {"structured_outputs": {"grammar": LARK}},
    "gbnf": {"structured_outputs": {"grammar": GBNF}},
    "structural_tag": {"structured_outputs": {"structural_tag": {"format": TAGS}}},
}
CHAT: dict[str, Body] = {
    "chat": {},
    "chat_stream": {"stream": True, "stream_options": {"include_usage": True}},
    "chat_logprobs": {"logprobs": True, "top_logprobs": 2},
    "chat_n_stream": {"n": 2, "stream": True},
    "tools_auto": {"tools": TOOLS},
    "tools_required": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 32},
    "tools_named": {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 32, "stream": True},
    "response_format": {"response_format": CHAT_FORMAT, "max_tokens": 32},
    "response_format_stream": {"response_format": {"type": "json_object"}, "stream": True},
}
FEATURES: dict[str, Body] = {
    **{n: {"prompt": CODE, "seed": 5, "max_tokens": 12, **o} for n, o in COMPLETION.items()},
    **{n: {"prompt": CODE, "seed": 6, "max_tokens": 32, **o} for n, o in STRUCTURED.items()},
    **{n: {"messages": [USER], "seed": 7, "max_tokens": 12, **o} for n, o in CHAT.items()},
}


def is_structured(body: Body) -> bool:
    """Whether a grammar holds for the answer."""
    forced = body.get("tool_choice") not in (None, "auto", "none")
    return forced or "structured_outputs" in body or "response_format" in body


def mixed_bodies(count: int, seed: int) -> list[Body]:
    """Bodies in which several features meet, the same for the same seed."""
    draw = random.Random(seed)
    return [_mixed(draw, index) for index in range(count)]


def _mixed(draw: random.Random, index: int) -> Body:
    kind = draw.choice(["text", "text", "batch", "structured", "chat", "chat", "tools", "format"])
    body: Body = {
        "seed": index,
        "max_tokens": draw.randint(1, 48),
        "temperature": draw.choice([0, 0.7, 1.3]),
        "stream": draw.random() < 0.5,
        **_some(draw, _SAMPLING, 0.2),
    }
    if body["stream"] and draw.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    if kind in ("chat", "tools", "format"):
        words = draw.sample(STORY.split(), draw.randint(1, 12))
        body["messages"] = [{"role": "system", "content": CODE}, USER][draw.randint(0, 1) :]
        body["messages"].append({"role": "user", "content": " ".join(words)})
        if draw.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": draw.randint(0, 5)}
    else:
        body |= _some(draw, {"logprobs": [0, 3], "echo": [True], "prompt_logprobs": [1]}, 0.3)
    return body | _of_kind(draw, kind)


_SAMPLING: dict[str, list[Any]] = {
    "top_p": [0.5, 0.9],
    "top_k": [1, 5, 40],
    "min_p": [0.02, 0.1],
    "presence_penalty": [0.8, -0.5],
    "frequency_penalty": [0.5],
    "repetition_penalty": [1.2],
    "logit_bias": [{"294": 5}, {"267": -100, "753": 2}],
    "min_tokens": [1],
    "bad_words": [["return", "the", "def __init__"]],
    "stop": ["a", ["self", "\n\n"], ["el", " the"]],
    "include_stop_str_in_output": [True],
    "n": [2],
    "ignore_eos": [True],
}


def _some(draw: random.Random, fields: dict[str, list[Any]], share: float) -> Body:
    return {name: draw.choice(v) for name, v in fields.items() if draw.random() < share}


def _of_kind(draw: random.Random, kind: str) -> Body:
    start = draw.randint(0, 40)
    prompts = [CODE[start:], STORY[start:], draw.choice([CODE, STORY]) * 3]
    match kind:
        case "text":
            ids = [draw.randrange(1, 4096) for _ in range(draw.randint(1, 30))]
            return {"prompt": draw.choice([*prompts, ids])}
        case "batch":
            return {"prompt": draw.sample(prompts, draw.randint(1, 3))}
        case "structured":
            return {"prompt": prompts[0], **draw.choice(list(STRUCTURED.values()))}
        case "tools":
            choice = draw.choice(["auto", "required", NAMED])
            return {"tools": TOOLS, "tool_choice": choice}
        case "format":
            return {"response_format": draw.choice([CHAT_FORMAT, {"type": "json_object"}])}
        case _:
            return {}


def ask_all(url: str, bodies: Sequence[Body], concurrency: int, key: str) -> list[str]:
    """The texts of the answers, in the order of the bodies; each must be a 200."""

    async def ask(client: httpx.AsyncClient, places: asyncio.Semaphore, body: Body) -> str:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        async with places:
            response = await client.post(path, json=body)
        assert response.status_code == 200, (body, response.text)
        return response.text

    async def all_of_them() -> list[str]:
        places = asyncio.Semaphore(concurrency)
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
            return await asyncio.gather(*(ask(client, places, body) for body in bodies))

    return asyncio.run(all_of_them())


_IDS = re.compile(r'(?<="id":)"(cmpl|chatcmpl|call)[-_][0-9a-f]+"|(?<="created":)\d+')


def comparable(text: str) -> Any:
    """All of an answer but ids and times: a body byte for byte, a stream with its pieces joined."""
    text = _IDS.sub('""', text)
    if not text.startswith("data: "):
        return text
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    total: Any = {}
    for event in events:
        document = json.loads(event.removeprefix("data: "))
        choices = {choice["index"]: _by_index(choice) for choice in document.pop("choices")}
        total = {**total, **document, "choices": _joined(total.get("choices"), choices)}
    return total


def _by_index(choice: Any) -> Any:
    delta = choice.get("delta", {})
    if "tool_calls" in delta:
        delta["tool_calls"] = {call["index"]: call for call in delta["tool_calls"]}
    return choice


def _joined(total: Any, part: Any) -> Any:
    """Texts and lists go on, objects key by key; everything else is told once."""
    if total is None or part is None:
        return total if part is None else part
    if isinstance(part, dict):
        return {**total, **{key: _joined(total.get(key), each) for key, each in part.items()}}
    return total + part if isinstance(part, str | list) else part
