"""The load generator tells right answers from wrong ones; a short load on a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.programs import FOLDER, ROOT, module

client = module("load_server")
watch = module("server_process")

CHOICE = client.Choice("ab", (7, 8), (-0.5, -1.0), "length", None)
KNOWN = client.Known({"prompt": "x"}, [1], [CHOICE])


def part(text: str, ids: list[int], logprobs: list[float], reason: str | None) -> dict[str, Any]:
    return {
        "index": 0,
        "text": text,
        "tokens": [{"id": token} for token in ids],
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": reason,
        "stop_reason": None,
    }


def stream(*parts: dict[str, Any], end: str = "data: [DONE]\n\n", whole: bool = True) -> Any:
    events = [f"data: {json.dumps({'choices': [each]})}\n\n" for each in parts]
    return client.Answer(200, bytearray("".join([*events, end]).encode()), whole)


FIRST, SECOND = part("a", [7], [-0.5], None), part("b", [8], [-1.0], "length")


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        (stream(FIRST, SECOND), True),
        (stream(FIRST, end="data: {", whole=False), True),  # given up in mid-event
        (stream(FIRST, SECOND, end=""), False),
        (stream(FIRST), False),
        (stream(SECOND), False),
        (stream(SECOND, FIRST), False),
        (stream(FIRST, FIRST | {"finish_reason": "length"}), False),
        (stream(FIRST, part("b", [9], [-1.0], "length")), False),
        (stream(FIRST, part("b", [8], [-1.1], "length")), False),
        (stream(FIRST, part("b", [8], [-1.0], "stop")), False),
        (stream(part("b", [8], [-1.0], None), end="", whole=False), False),
        (client.Answer(500, bytearray(b"{}"), True), False),
    ],
)
def test_an_answer_is_compared_with_the_known_one(answer: Any, is_right: bool) -> None:
    try:
        client.check(KNOWN, answer, {"stream": True}, "whole")
    except client.LoadError:
        assert not is_right
    else:
        assert is_right


def test_usage_is_compared_too() -> None:
    document = {"choices": [part("ab", [7, 8], [-0.5, -1.0], "length")]}
    for usage, is_right in (((1, 2), True), ((1, 3), False), ((2, 2), False)):
        told = dict(zip(("prompt_tokens", "completion_tokens"), usage, strict=True))
        body = json.dumps({**document, "usage": told}).encode()
        answer = client.Answer(200, bytearray(body), True)
        if is_right:
            client.check(KNOWN, answer, {"stream": False}, "whole")
        else:
            with pytest.raises(client.LoadError, match="usage"):
                client.check(KNOWN, answer, {"stream": False}, "whole")


def test_growth_is_judged_after_the_warm_up() -> None:
    sizes = [50, 100, *[200] * 18, 206, 206]
    readings = [watch.Reading("p", float(at), size, 3, 1) for at, size in enumerate(sizes)]
    assert watch.growth(readings, "p", 2.0)["growth"] == pytest.approx(0.03)
    assert "error" in watch.growth(readings, "p", 99.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_load() -> None:
    command = [sys.executable, str(FOLDER / "load_server.py"), "--quick", "--json"]
    command += ["--minutes", "0.17", "--streams", "16", "--prompts", "embedded"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    missed = [t["name"] for t in document["targets"] if not t["met"]]
    assert [name for name in missed if not name.startswith("growth")] == []  # it is too short
    assert document["results"][0]["accepted"] > 0
