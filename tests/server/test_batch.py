"""Batches: formats, resuming, damage to either file, and the application behind them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, EngineDeadError
from paceline.server import batch
from paceline.server.app import create_app
from paceline.server.batch import (
    URLS,
    AnswerFile,
    application_handle,
    count_lines,
    read_batch,
    run_batch,
)
from paceline.server.engine_process.messages import EngineState
from tests.server.chats import chat_tokenizer
from tests.server.fakes import FakeEngine

URL = "/v1/completions"


def request(custom_id: str, **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


def write(path: Path, *rows) -> Path:
    path.write_bytes(b"".join(r if isinstance(r, bytes) else dump(r) for r in rows))
    return path


def dump(row: object) -> bytes:
    return json.dumps(row).encode() + b"\n"


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Echo:
    """AnswerFile with the body; statuses can be set by custom body field ``status``."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.now = self.most = 0

    async def __call__(self, url: str, body: dict):
        self.asked.append(body["prompt"])
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001 * body.get("slow", 0))
        self.now -= 1
        if body.get("status") == 0:
            raise RuntimeError("the engine is gone")
        return body.get("status", 200), {"echo": body["prompt"]}


def run(source: Path, target: Path, handle, places: int = 4):
    answers = AnswerFile(target)
    try:
        return asyncio.run(run_batch(read_batch(source), answers, handle, places))
    finally:
        answers.close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_answers_come_in_any_order_and_within_the_places(tmp_path: Path, target: Path) -> None:
    rows = [request(f"r{i}", prompt=f"p{i}", slow=9 - i) for i in range(9)]
    source, echo, done = write(tmp_path / "in.jsonl", *rows), Echo(), []
    answers = AnswerFile(target)
    summary = asyncio.run(run_batch(read_batch(source), answers, echo, 3, done.append))
    assert (summary.answered, summary.failed, summary.skipped) == (9, 0, 0)
    assert echo.most == 3
    assert done == list(range(1, 10))
    found = {row["custom_id"]: row for row in read(target)}
    assert found.keys() == {row["custom_id"] for row in rows}
    answer = found["r4"]
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["body"] == {"echo": "p4"}
    assert answer["error"] is None
    assert len({row["id"] for row in found.values()}) == 9


def test_a_second_run_asks_only_for_what_is_missing(tmp_path: Path, target: Path) -> None:
    statuses = {"fine": 200, "refused": 400, "down": 500, "raised": 0, "full": 429}
    rows = [request(name, prompt=name, status=status) for name, status in statuses.items()]
    source = write(tmp_path / "in.jsonl", b"no json\n", *rows)
    first = run(source, target, Echo())
    assert (first.answered, first.failed) == (1, 5)
    with target.open("ab") as file:
        file.write(b'{"id": "cut o')  # as a power cut leaves it
    echo = Echo()
    second = run(source, target, echo)
    assert sorted(echo.asked) == ["down", "full", "raised"]
    assert (second.answered, second.failed, second.skipped) == (0, 4, 2)
    found = [row["custom_id"] for row in read(target)]
    assert sorted(map(str, found)) == ["None", "down", "fine", "full", "raised", "refused"]


BAD = [
    (b"{\n", "not valid JSON"),
    (b"[1]\n", "not a JSON object"),
    (b"\xff\xfe{}\n", "not valid JSON"),
    (b"[" * 100_000 + b"\n", "not valid JSON"),
    (dump({"method": "POST", "url": URL, "body": {}}), "custom_id"),
    (dump({**request("x"), "custom_id": 7}), "custom_id"),
    (dump({**request("x"), "method": "GET"}), "method"),
    (dump({**request("x"), "url": "/v1/moderations"}), "/v1/chat/completions"),
    (dump({**request("x"), "body": "text"}), "body"),
    (dump({**request("x"), "extra": 1}), "extra"),
    (dump(request("x", stream=True)), "stream"),
    (dump(request("good")), "earlier line"),
]


@pytest.mark.parametrize(("line", "problem"), BAD)
def test_a_bad_line_is_an_answer_that_says_so(
    tmp_path: Path, target: Path, line: bytes, problem: str
) -> None:
    good = request("good", prompt="p")
    source = write(tmp_path / "in.jsonl", b"\xef\xbb\xbf" + dump(good), b" \r\n", line)
    assert count_lines(source) == 2
    summary = run(source, target, Echo())
    assert (summary.answered, summary.failed) == (1, 1)
    (refused,) = (row for row in read(target) if row["error"])
    assert refused["response"] is None
    assert "line 3" in refused["error"]["message"]
    assert problem in refused["error"]["message"]


@given(cut=st.integers(0, 600))
def test_wherever_the_answers_were_cut_off_the_rest_is_asked_for(tmp_path_factory, cut) -> None:
    folder = tmp_path_factory.mktemp("cut")
    source = write(folder / "in.jsonl", *[request(f"r{i}", prompt=f"p{i}") for i in range(4)])
    target = folder / "out.jsonl"
    run(source, target, Echo())
    whole = target.read_bytes()
    target.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    assert run(source, target, Echo()).skipped == kept
    assert sorted(row["custom_id"] for row in read(target)) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize(
    "content", [b"precious notes\nmore\n", b'{"prompt": "x"}\n', b"[1]\n", b'"x"\n']
)
def test_a_file_of_something_else_is_left_alone(target: Path, content: bytes) -> None:
    target.write_bytes(content)
    with pytest.raises(ConfigError, match="holds something else"):
        AnswerFile(target)
    assert target.read_bytes() == content
    assert list(target.parent.iterdir()) == [target]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read requests"):
        list(read_batch(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot write answers"):
        AnswerFile(tmp_path / "none" / "out.jsonl")
    source = write(tmp_path / "in.jsonl", request("a", prompt="p"), request("b", prompt="q"))
    with pytest.raises(ConfigError, match="cannot write answers"):
        run(source, Path("/dev/full"), Echo())


def test_the_server_application_answers(tmp_path: Path, target: Path) -> None:
    rows = [
        request("fine", prompt="Once", max_tokens=5),
        request("wrong", prompt="Once", max_tokens=5, nonsense=1),
        request("elsewhere", prompt="Once", model="another"),
    ]
    source = write(tmp_path / "in.jsonl", *rows)
    engine = FakeEngine(state="ready")
    summary = run(source, target, application_handle(create_app(engine), engine))
    assert (summary.answered, summary.failed) == (1, 2)
    found = {row["custom_id"]: row["response"] for row in read(target)}
    assert found["fine"]["status_code"] == 200
    assert found["fine"]["body"]["usage"]["completion_tokens"] == 5
    assert found["wrong"]["status_code"] == 400
    assert found["wrong"]["body"]["error"]["param"] == "nonsense"
    assert found["elsewhere"]["status_code"] == 404


def test_each_endpoint_of_a_batch_answers(tmp_path: Path, target: Path) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Once"},
        "/v1/embeddings": {"input": ["Once", "Twice"]},
        "/v1/responses": {"input": "Hi"},
    }
    assert sorted(bodies) == sorted(URLS)
    rows = [{**request(url), "url": url, "body": body} for url, body in bodies.items()]
    rows.append({**request("long"), "url": "/v1/embeddings", "body": {"input": "a " * 9999}})
    engine = FakeEngine(tokenizer=chat_tokenizer(), state="ready")
    source = write(tmp_path / "in.jsonl", *rows)
    summary = run(source, target, application_handle(create_app(engine), engine))
    assert (summary.answered, summary.failed) == (4, 1)
    found = {row["custom_id"]: row["response"] for row in read(target)}
    vectors = found["/v1/embeddings"]["body"]["data"]
    assert [len(each["embedding"]) for each in vectors] == [8, 8]
    assert found["/v1/responses"]["body"]["status"] == "completed"
    assert found["long"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("before", ["starting", "hung"])
@pytest.mark.parametrize("outcome", ["ready", "failed"])
def test_a_restart_is_waited_for_and_its_failure_ends_the_batch(
    tmp_path: Path, target: Path, before: EngineState, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_POLL_SECONDS", 0.001)
    rows = [request(f"r{i}", prompt="Once", max_tokens=2) for i in range(9)]
    source = write(tmp_path / "in.jsonl", *rows)
    engine = FakeEngine(state=before)
    answers = AnswerFile(target)

    async def restart() -> object:
        handle = application_handle(create_app(engine), engine)
        asyncio.get_running_loop().call_later(0.05, setattr, engine, "state", outcome)
        return await run_batch(read_batch(source), answers, handle, 4)

    try:
        if outcome == "failed":
            with pytest.raises(EngineDeadError, match="continues"):
                asyncio.run(restart())
        else:
            assert asyncio.run(restart()).answered == 9
    finally:
        answers.close()
    assert len(read(target)) == (9 if outcome == "ready" else 0)


@pytest.mark.parametrize(("deaths", "status"), [(1, 200), (2, 500)])
def test_a_request_whose_engine_died_is_sent_once_more(
    tmp_path: Path, target: Path, deaths: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, left = FakeEngine(state="ready"), [EngineDeadError("it died")] * deaths

    def check_alive(step: int = 0) -> None:
        if step and left:
            raise left.pop()

    monkeypatch.setattr(engine, "check_alive", check_alive)
    source = write(tmp_path / "in.jsonl", request("a", prompt="Once"))
    run(source, target, application_handle(create_app(engine), engine))
    (row,) = read(target)
    assert row["response"]["status_code"] == status
    assert len(engine.calls) == 2
