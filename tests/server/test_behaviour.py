"""What callers of any server for completions count on, over a socket and with real tokens.

The subjects are those that the tests of other servers have; each is asked with drafts coming.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.bodies import CODE, REGEX, STORY, Body, ask_all
from tests.server.served import KEY

WARM: Body = {"prompt": STORY, "max_tokens": 16, "temperature": 0.8, "seed": 42}
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def http(served_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served_url, headers=HEADERS, timeout=60) as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=WARM | fields)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(http: httpx.Client, **fields: Any) -> str:
    return complete(http, **fields)["choices"][0]["text"]


def test_a_seed_repeats_and_another_does_not(http: httpx.Client) -> None:
    texts = [text_of(http, seed=seed) for seed in (1, 2, 3, 4)]
    assert [text_of(http, seed=seed) for seed in (4, 3, 2, 1)] == texts[::-1]
    assert len(set(texts)) == 4
    assert len({text_of(http, seed=None) for _ in range(4)}) > 1


def test_without_temperature_every_seed_says_the_same(http: httpx.Client) -> None:
    assert len({text_of(http, temperature=0, seed=seed) for seed in (1, 2, None)}) == 1


def test_what_shares_the_batch_changes_nothing(served_url: str) -> None:
    """The same request alone, sixteen times at once, and among others."""
    others = [WARM | {"prompt": CODE[i:], "seed": i, "temperature": 1.3} for i in range(6)]

    def told(bodies: list[Body], concurrency: int) -> list[Any]:
        answers = ask_all(served_url, bodies, concurrency, KEY)
        return [json.loads(answer)["choices"] for answer in answers]

    [alone] = told([WARM], 1)
    assert told([WARM] * 16, 16) == [alone] * 16
    crowd = told([each for other in others for each in (other, WARM)], 24)
    assert crowd[1::2] == [alone] * 6
    assert crowd[::2] == told(others, 1)


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_as_many_tokens_as_were_asked_for(http: httpx.Client, count: int) -> None:
    answer = complete(http, max_tokens=count, ignore_eos=True, prompt=CODE)
    assert answer["usage"]["completion_tokens"] == count
    assert answer["choices"][0]["finish_reason"] == "length"


def test_more_prompts_than_run_at_once(http: httpx.Client) -> None:
    prompts = [f"def f{i}(x):\n    return" for i in range(40)]
    choices = complete(http, prompt=prompts, max_tokens=6, temperature=0)["choices"]
    assert [choice["index"] for choice in choices] == list(range(40))
    for i in (0, 17, 39):
        assert choices[i]["text"] == text_of(http, prompt=prompts[i], max_tokens=6, temperature=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_never_seen(http: httpx.Client, stream: bool) -> None:
    whole = text_of(http, max_tokens=30, temperature=0)
    stop = whole[len(whole) // 2 :][:5]
    cut = whole[: whole.index(stop)]
    body = WARM | {"max_tokens": 30, "temperature": 0, "stop": ["never said", stop]}
    response = http.post("/v1/completions", json=body | {"stream": stream})
    if stream:
        events = [each.removeprefix("data: ") for each in response.text.split("\n\n")[:-2]]
        choices = [json.loads(event)["choices"][0] for event in events]
    else:
        choices = response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == cut
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", stop)


def ids_of(http: httpx.Client, **fields: Any) -> list[int]:
    choice = complete(http, return_origins=True, ignore_eos=True, **fields)["choices"][0]
    return [token["id"] for token in choice["tokens"]]


def test_tokens_are_favoured_banned_and_end_the_answer(http: httpx.Client) -> None:
    free = ids_of(http, temperature=0)
    assert ids_of(http, logit_bias={"753": 100}) == [753] * 16
    assert free[0] not in ids_of(http, temperature=0, logit_bias={str(free[0]): -100})
    assert set(ids_of(http, allowed_token_ids=[5, 267, 753])) <= {5, 267, 753}
    answer = complete(http, temperature=0, stop_token_ids=free[5:6])
    assert answer["usage"]["completion_tokens"] == free.index(free[5]) + 1
    assert answer["choices"][0]["stop_reason"] == free[5]


def test_bad_words_are_not_said(http: httpx.Client) -> None:
    def told(**fields: Any) -> str:
        answer = complete(http, temperature=0, max_tokens=48, **fields)
        text: str = answer["choices"][0]["text"]
        return text

    free = told()
    words = sorted({word.strip(".,!") for word in free.split()}, key=len)[-3:]
    pair = " ".join(free.split()[1:3])
    assert all(word in free for word in words)
    assert not any(f" {word} " in told(bad_words=words) for word in words)
    assert pair not in told(bad_words=[pair])


def test_logprobs_of_named_tokens(http: httpx.Client) -> None:
    full = complete(http, temperature=0, logprobs=20, max_tokens=3, return_token_ids=True)
    choice = full["choices"][0]
    taken, tops = choice["token_ids"], choice["logprobs"]["top_logprobs"]
    named = complete(
        http, temperature=0, logprobs=0, max_tokens=3, logprob_token_ids=[*taken, 4095]
    )["choices"][0]["logprobs"]
    assert named["token_logprobs"] == choice["logprobs"]["token_logprobs"]
    for own, token, told in zip(tops, named["tokens"], named["top_logprobs"], strict=True):
        assert set(choice["logprobs"]["tokens"]) <= set(told)
        assert told[token] == own[token]
        for text in set(told) & set(own):
            assert told[text] == pytest.approx(own[text], abs=1e-5)


def test_chats_name_tokens_in_their_order(http: httpx.Client) -> None:
    wish = {"logprobs": True, "top_logprobs": 3, "logprob_token_ids": [297, 5], "max_tokens": 2}
    body = {"messages": [{"role": "user", "content": "Hi"}], **wish}
    answer = http.post("/v1/chat/completions", json=body).json()
    texts = [http.post("/detokenize", json={"tokens": [i]}).json()["prompt"] for i in (297, 5)]
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert [top["token"] for top in entry["top_logprobs"]] == texts


def test_logprobs_are_those_of_the_tokens_that_were_taken(http: httpx.Client) -> None:
    answer = complete(http, temperature=0, logprobs=5)
    told = answer["choices"][0]["logprobs"]
    assert len(told["tokens"]) == answer["usage"]["completion_tokens"]
    for token, logprob, top in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert len(top) == 5
        assert logprob == max(top.values()) == top[token] <= 0
        assert sum(math.exp(each) for each in top.values()) <= 1 + 1e-5
    scored = complete(
        http, prompt=STORY + answer["choices"][0]["text"], echo=True, max_tokens=0, logprobs=0
    )["choices"][0]["logprobs"]
    count = len(told["tokens"])
    if scored["tokens"][-count:] == told["tokens"]:  # the text may be cut otherwise
        assert scored["token_logprobs"][-count:] == told["token_logprobs"]


@pytest.mark.parametrize(
    "text", [CODE, STORY, " ", "\n\n\t", "Ünï 日本 🚲\u200d🚲", "<|endoftext|>x"]
)
def test_tokens_of_a_text_are_that_text(http: httpx.Client, text: str) -> None:
    tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    back = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert back == text
    if len(tokens) > 1:
        texts = [text_of(http, prompt=prompt, max_tokens=4) for prompt in (text, tokens)]
        assert texts[0] == texts[1]


def test_a_prefix_is_read_once(http: httpx.Client) -> None:
    prompt, salt = STORY * 4, {"cache_salt": f"{time.monotonic()}"}

    def cached(**fields: Any) -> tuple[int, str]:
        answer = complete(http, prompt=prompt, **fields)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] % 16 == 0
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"]

    none, first = cached(**salt)
    most, second = cached(**salt)
    assert none == 0
    assert most >= len(http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]) - 16
    assert first == second
    assert cached(cache_salt="another")[0] == 0
    assert http.post("/flush_prefix_cache").status_code == 200
    assert cached(**salt) == (0, first)


def test_a_context_is_filled_and_not_overrun(http: httpx.Client) -> None:
    room = 512 - 500
    full = complete(http, prompt=[5] * 500, max_tokens=room, ignore_eos=True)
    assert full["usage"]["total_tokens"] == 512
    for fields in ({"prompt": [5] * 500, "max_tokens": room + 1}, {"prompt": [5] * 512}):
        response = http.post("/v1/completions", json=WARM | fields)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert http.get("/health").status_code == 200


LEFT = WARM | {"prompt": CODE, "max_tokens": 450, "ignore_eos": True, "n": 3}


def leave_stream(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json=LEFT | {"stream": True}) as response:
        next(response.iter_lines())


def leave_answer(http: httpx.Client) -> None:
    before = http.get("/stats").json()["tokens"]["output"]
    where, body = http.base_url, json.dumps(LEFT)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((where.host, where.port)) as line:
        line.sendall(f"{head}{body}".encode())
        while http.get("/stats").json()["tokens"]["output"] == before:
            time.sleep(0.001)


def tokens_until_left(http: httpx.Client, leave: Callable[[httpx.Client], None]) -> int:
    """How many tokens were made for a client that leaves; nothing else of it may remain."""
    before = http.get("/stats").json()["tokens"]["output"]
    leave(http)
    while (stats := http.get("/stats").json())["running"] + stats["waiting"]:
        time.sleep(0.02)
    assert stats["kv"]["used"] == 0
    return stats["tokens"]["output"] - before


def test_who_hangs_up_frees_everything(http: httpx.Client) -> None:
    """Streams left in the middle, and answers nobody waits for.

    On a machine that is busy with others, the answer may have ended before the client leaves; then
    it is asked for again.
    """
    for leave in (leave_stream, leave_answer):
        while tokens_until_left(http, leave) >= 3 * 450 / 2:
            pass


def test_an_invalid_request_leaves_the_others_alone(served_url: str, http: httpx.Client) -> None:
    good = [WARM | {"seed": i, "structured_outputs": {"regex": REGEX}} for i in range(6)]
    bad = [{"logit_bias": {"5000": 1}}, {"structured_outputs": {"regex": "("}}, {"n": 0}]
    alone = ask_all(served_url, good, 1, KEY)

    async def together() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=served_url, headers=HEADERS, timeout=60) as client:
            pairs = zip(good, [WARM | fields for fields in bad * 2], strict=True)
            bodies = [each for pair in pairs for each in pair]
            return await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies))

    responses = asyncio.run(together())
    assert [r.status_code for r in responses] == [200, 400] * 6
    for response, text in zip(responses[::2], alone, strict=True):
        assert response.json()["choices"] == json.loads(text)["choices"]


@pytest.mark.parametrize("told", [None, "Bearer", "Bearer wrong", f"Bearer {KEY}x", KEY])
def test_without_the_key_nothing_is_answered(served_url: str, told: str | None) -> None:
    headers = {} if told is None else {"Authorization": told}
    with httpx.Client(base_url=served_url, headers=headers, timeout=60) as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/flush_prefix_cache"):
            assert client.post(path, json=WARM).status_code == 401
        for path in ("/v1/models", "/metrics", "/stats", "/"):
            assert client.get(path).status_code == 401
        assert client.get("/health").status_code == 200


def test_bodies_that_never_end_hold_up_nobody(served_url: str, http: httpx.Client) -> None:
    """Half a head, half a body, and a body of another length; then a client with manners."""
    where = urlsplit(served_url)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        "Content-Type: application/json\r\n"
    )
    begun = [head, f'{head}Content-Length: 500\r\n\r\n{{"prompt": ', f"{head}Content-Length: 9"]
    lines = [socket.create_connection((where.hostname, where.port)) for _ in begun * 5]
    for line, start in zip(lines, begun * 5, strict=True):
        line.sendall(start.encode())
    assert text_of(http)
    for line in lines:
        line.close()
    assert text_of(http)
    with socket.create_connection((where.hostname, where.port)) as line:
        raw = json.dumps(WARM | {"max_tokens": 2}).encode()
        line.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode())
        for byte in range(0, len(raw), 16):
            line.sendall(raw[byte : byte + 16])
            time.sleep(0.002)
        assert line.recv(64).startswith(b"HTTP/1.1 200")
