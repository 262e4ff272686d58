"""Formats over HTTP with drafts and without: valid as often, and the same text, in any company.

The embedded model answers chats in three ways that promise JSON: a response format, the same behind
thoughts, and a tool that must be called. Each request is sent with speculation on and off, greedily
and sampled with a fixed seed, with so many others at once. An answer counts as valid when it ended
by itself and is JSON of its schema.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from harness import arguments, chosen, note, numbers
from load_server import ServerProcess
from report import Report, Row, Target, grid, identical_target, table, verdict
from structured import SCHEMAS

TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}</tool_call>
{% endfor %}assistant: {% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}"""
THOUGHTS = "<think>\nyes</think>"
KINDS = ("format", "thoughts", "tools")
PATIENCE = 300.0


def body_of(kind: str, name: str, seed: int, drafts: bool) -> dict[str, Any]:
    """One chat."""
    schema, words = SCHEMAS[name], f"Write a {name} for case {seed}."
    if kind == "thoughts":  # a small model repeats what it has seen
        words += f" {THOUGHTS}" * 6
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 400,
        "temperature": 0 if seed % 2 else 0.7,
        "seed": seed,
        "speculative": {"enabled": drafts},
        "chat_template_kwargs": {"enable_thinking": kind == "thoughts"},
    }
    if kind == "tools":
        function = {"name": "save", "parameters": schema}
        return {
            **body,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    return {**body, "response_format": form}


def told(kind: str, answer: dict[str, Any]) -> tuple[str, str, bool]:
    """Everything that was said, the JSON in it, and whether the answer ended by itself."""
    (choice,) = answer["choices"]
    message, text = choice["message"], choice["message"]["content"] or ""
    if kind == "tools" and message.get("tool_calls"):
        text = message["tool_calls"][0]["function"]["arguments"]
    said = json.dumps({k: v for k, v in message.items() if k != "tool_calls"}) + text
    return said, text, choice["finish_reason"] != "length"


def is_valid(name: str, text: str) -> bool:
    try:
        return conforms(json.loads(text), SCHEMAS[name])
    except ValueError:
        return False


def conforms(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is what a schema says, by the keywords that the schemas here have."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        own = schema["properties"]
        if not isinstance(value, dict) or value.keys() != own.keys():
            return False
        return all(conforms(value[key], each) for key, each in own.items())
    if kind == "array":
        is_list = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return is_list and all(conforms(each, schema["items"]) for each in value)
    if kind == "string":
        least, most = schema.get("minLength", 0), schema.get("maxLength", 1 << 20)
        fits = isinstance(value, str) and least <= len(value) <= most
        pattern = (
            r"\d{4}-\d\d-\d\d" if schema.get("format") == "date" else schema.get("pattern", "")
        )
        return fits and re.search(pattern, value) is not None
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    return isinstance(value, bool)


Request = tuple[str, str, int, bool]


async def answers(url: str, wanted: Sequence[Request], at_once: int) -> list[dict[str, Any]]:
    """One sample per request, with so many in flight."""
    places = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:

        async def one(request: Request) -> dict[str, Any]:
            kind, name, seed, drafts = request
            sample = {"kind": kind, "schema": name, "seed": seed, "drafts": drafts}
            async with places:
                response = await client.post("/v1/chat/completions", json=body_of(*request))
            if response.status_code != 200:
                return {**sample, "error": response.text[:300]}
            said, text, has_ended = told(kind, response.json())
            return {**sample, "said": said, "valid": has_ended and is_valid(name, text)}

        return await asyncio.gather(*map(one, wanted))


def run(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    names = list(SCHEMAS)[: options.schemas]
    wanted: list[Request] = [
        (kind, name, seed, drafts)
        for seed in range(options.seeds)
        for name in names
        for kind in KINDS
        for drafts in (True, False)
    ]
    samples = []
    for at_once in options.concurrency:
        found = asyncio.run(answers(url, wanted, at_once))
        samples += [{"at_once": at_once, **each} for each in found]
        note(f"{at_once} at once: {sum(each.get('valid', False) for each in found)} valid")
    return samples


def summary(samples: Sequence[dict[str, Any]], at_once: int, kind: str) -> Row:
    own = [s for s in samples if (s["at_once"], s["kind"]) == (at_once, kind)]
    arms = [[s for s in own if s["drafts"] is drafts] for drafts in (True, False)]
    valid = [sum(s.get("valid", False) for s in arm) for arm in arms]
    # In any company: what the same request got alone counts as well.
    alone = {(s["schema"], s["seed"]): s.get("said") for s in samples if s["kind"] == kind}
    return {
        "kind": kind,
        "at_once": at_once,
        "requests": len(arms[0]),
        "valid_with_drafts": valid[0],
        "valid_without": valid[1],
        "identical": all(s.get("said") == alone[s["schema"], s["seed"]] for s in own),
    }


def targets(results: Sequence[Row]) -> list[Target]:
    differ = sum(row["valid_with_drafts"] != row["valid_without"] for row in results)
    return [
        Target("rows in which drafts change how many are valid", differ, 0),
        Target("valid answers", sum(row["valid_with_drafts"] for row in results), 1, "at least"),
        identical_target(results, "answers"),
    ]


def tables(results: Sequence[Row]) -> list[str]:
    columns = (
        ("JSON as", "kind"),
        ("at once", "at_once"),
        ("requests", "requests"),
        ("valid with drafts", "valid_with_drafts"),
        ("valid without", "valid_without"),
        ("identical", verdict),
    )
    return [table(*grid(results, *columns))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.sized("--concurrency", [1, 4, 16, 32], [1, 4], "requests at once", type=numbers)
    parser.sized("--seeds", 2, 1, "requests per schema; the first is sampled, the second greedy")
    parser.sized("--schemas", len(SCHEMAS), 2, "how many of the benchmark `structured`'s")
    options = parser.parse_args(argv)
    report = Report("served_formats", chosen(options, "quick", "concurrency", "seeds", "schemas"))
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        server = ServerProcess("--chat-template", str(template), "--kv-cache-memory", "256M")
        try:
            report.samples = run(f"http://127.0.0.1:{server.port}", options)
        finally:
            server.end()
    report.results = [
        summary(report.samples, at_once, kind) for kind in KINDS for at_once in options.concurrency
    ]
    for sample in report.samples:
        sample.pop("said", None)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
