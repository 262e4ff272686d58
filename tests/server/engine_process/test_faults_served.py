"""``paceline serve`` under faults of the system: killed processes, full disks, missing folders."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.loading.catalogue import embedded_model
from tests.programs import module
from tests.server.served import LOOKUP, chat_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
watch = module("server_process")
LIMITS = ("--threads", "1", "--max-model-len", "512", "--kv-cache-memory", "32M")
PROMPT = "def add(a, b):"
LONG = {"max_tokens": 480, "ignore_eos": True, "disable_spec_decode": True}


@contextmanager
def served(*options: str) -> Iterator[Any]:
    server = watch.ServerProcess(*LIMITS, *options)
    try:
        yield server
    finally:
        server.kill()


def url_of(server: Any) -> str:
    return f"http://127.0.0.1:{server.port}"


def complete(url: str, **body: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **body}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


@contextmanager
def streaming(url: str, **body: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream whose first piece has arrived."""
    given = {"prompt": PROMPT, "stream": True, "temperature": 0, **LONG, **body}
    with httpx.stream("POST", f"{url}/v1/completions", json=given, timeout=120) as response:
        lines = response.iter_lines()
        first = next(lines)
        assert first.startswith("data: ")
        yield itertools.chain([first], lines)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status(url: str, path: str = "/health") -> int:
    return httpx.get(f"{url}{path}", timeout=30).status_code


def use_helpers(url: str) -> None:
    """Render a template and compile a grammar, which processes of their own do."""
    message = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
    assert httpx.post(f"{url}/v1/chat/completions", json=message, timeout=60).status_code == 200
    schema = {"properties": {uuid.uuid4().hex: {"type": "boolean"}}, "type": "object"}
    assert complete(url, structured_outputs={"json": schema}).status_code == 200


def test_a_killed_server_takes_its_processes_along_and_starts_again(tmp_path: Path) -> None:
    folder = str(chat_model(tmp_path))
    with served(folder) as first:
        use_helpers(url_of(first))
        for pid in first.family():
            if pid != first.pids[watch.ENGINE]:
                os.kill(pid, signal.SIGKILL)
        use_helpers(url_of(first))
        family = first.family()
        assert len(family) >= 3
        with streaming(url_of(first)) as lines:
            first.kill()
            until(lambda: not any(map(is_alive, family)))
            with pytest.raises(httpx.TransportError):
                list(lines)
    with served(folder, "--port", str(first.port)) as second:
        assert complete(url_of(second)).status_code == 200


SCHEMA = {"properties": {"a": {"type": "string", "minLength": 300}}, "required": ["a"]}
WISHES: tuple[dict[str, Any], ...] = (
    {},
    {"disable_spec_decode": True},
    {"temperature": 0.8, "seed": 3},
    {"structured_outputs": {"json": {"type": "object", **SCHEMA}}},
)
"""Of streams that run while a process beside the engine's is killed."""
STREAMED = {"max_tokens": 300, "disable_spec_decode": False, "logprobs": 0}


def helpers(server: Any, name: str) -> set[int]:
    """Processes with this name that are not the engine's, whose command names its maker too."""
    return set(server.named(name)) - set(server.named(watch.ENGINE_NAME))


def kill_amid_streams(server: Any, name: str) -> list[Any]:
    """The choices of streams, each put together, amid which the processes of a name are killed."""
    (engine,) = server.named(watch.ENGINE_NAME)
    with ExitStack() as stack:
        streams = [
            stack.enter_context(streaming(url_of(server), **{**STREAMED, **wish}))
            for wish in WISHES
        ]
        os.kill(engine, signal.SIGSTOP)  # so that no stream ends before
        try:
            victims = helpers(server, name)
            assert victims
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            until(lambda: not any(map(is_alive, victims)))
        finally:
            os.kill(engine, signal.SIGCONT)
        return [put_together(lines) for lines in streams]


def put_together(lines: Iterator[str]) -> Any:
    """What a whole answer would be."""
    *events, done = [line.removeprefix("data: ") for line in lines if line]
    assert done == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    tokens = [token for each in choices for token in each["logprobs"]["tokens"]]
    return "".join(each["text"] for each in choices), tokens, choices[-1]["finish_reason"]


def answers(url: str) -> list[Any]:
    """The same requests, each alone."""
    found = []
    for wish in WISHES:
        (choice,) = complete(url, **{**LONG, **STREAMED, **wish}).json()["choices"]
        found.append((choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]))
    return found


def test_processes_beside_the_engine_may_be_killed_amid_streams(tmp_path: Path) -> None:
    with served(str(chat_model(tmp_path)), "--speculative-config", json.dumps([LOOKUP])) as server:
        url = url_of(server)
        known = answers(url)
        use_helpers(url)
        for name in ("template_worker.py", "grammar_worker.py"):
            former = helpers(server, name)
            assert kill_amid_streams(server, name) == known
            use_helpers(url)
            assert helpers(server, name).isdisjoint(former)
        assert kill_amid_streams(server, "forkserver") == known
        use_helpers(url)
        assert answers(url) == known
        assert server.stats()["restarts"] == 0
        assert server.alarms == []
        # Another one starts when it is needed, which is for the next engine.
        os.kill(server.pids[watch.ENGINE], signal.SIGKILL)
        until(lambda: server.stats()["restarts"] == 1 and status(url) == 200)
        use_helpers(url)
        assert answers(url) == known
        assert helpers(server, "forkserver")
        assert server.end() == 0


@pytest.mark.timing
def test_a_server_starts_while_its_model_loads(tmp_path: Path) -> None:
    with served(str(chat_model(tmp_path))) as server:
        assert cpu_seconds(server.pids[watch.HTTP]) < 3


def test_a_server_killed_while_its_model_loads_leaves_nothing() -> None:
    command = [sys.executable, "-m", "paceline", "serve", "embedded", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    family: list[int] = []

    def has_engine() -> bool:
        family[:] = watch.descendants(process.pid)
        return any(
            Path(f"/proc/{pid}/comm").read_text().strip() == watch.ENGINE_NAME for pid in family
        )

    until(has_engine)
    process.kill()
    process.wait()
    until(lambda: not any(map(is_alive, family)))


def test_a_disk_that_fills_up_behind_the_log_stops_nothing() -> None:
    with served() as server:
        before = complete(url_of(server)).json()["choices"]
        http = server.pids[watch.HTTP]
        for pid in (http, *watch.descendants(http)):  # engines are forked from one of these
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, 1))
        size = len(server.log)
        for _ in range(3):
            assert complete(url_of(server)).json()["choices"] == before
        assert complete(url_of(server), temperature=-1).status_code == 400
        os.kill(server.pids[watch.ENGINE], signal.SIGKILL)  # and what is logged of that
        until(lambda: server.stats()["restarts"] == 1)
        until(lambda: status(url_of(server)) == 200)
        assert complete(url_of(server)).json()["choices"] == before
        assert len(server.log) == size
        assert server.end() == 0


def test_a_disk_that_was_full_before_the_start_stops_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "paceline", "serve", "embedded", "--port", str(port), *LIMITS]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        until(lambda: process.poll() is not None or _is_open(port))
        for _ in range(3):
            assert complete(f"http://127.0.0.1:{port}").status_code == 200
        process.terminate()
        process.wait(60)
    finally:
        process.kill()


def _is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_model_folder_that_vanishes_is_missed_at_the_next_start_only(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(embedded_model("target"), folder)
    with served(str(folder), "--max-engine-restarts", "2") as server:
        before = complete(url_of(server), max_tokens=40).json()["choices"]
        shutil.rmtree(folder)
        assert complete(url_of(server), max_tokens=40).json()["choices"] == before
        with streaming(url_of(server)) as lines:
            os.kill(server.pids[watch.ENGINE], signal.SIGKILL)
            rest = list(lines)
        assert any('"code":"engine_dead"' in line for line in rest)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert server.wait() == 2
        assert "error: the server ends: the engine cannot be started: " in server.log


def test_a_signal_in_mid_stream_lets_the_stream_end() -> None:
    with served() as server:
        whole = complete(url_of(server), **LONG).json()["choices"][0]["text"]
        with streaming(url_of(server)) as lines:
            os.kill(server.pids[watch.HTTP], signal.SIGTERM)
            until(lambda: status(url_of(server)) == 503)
            *events, done = [line.removeprefix("data: ") for line in lines if line]
        choices = [json.loads(event)["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == whole
        assert (choices[-1]["finish_reason"], done) == ("length", "[DONE]")
        assert server.end() == 0


def test_a_stopped_engine_times_out_and_goes_on_later() -> None:
    with served("--request-timeout", "3") as server:
        engine = server.pids[watch.ENGINE]
        with streaming(url_of(server)) as lines:
            os.kill(engine, signal.SIGSTOP)
            assert complete(url_of(server)).status_code == 504
            assert any('"code":"request_timeout"' in line for line in lines)
        assert status(url_of(server)) == 503
        os.kill(engine, signal.SIGCONT)
        until(lambda: status(url_of(server)) == 200)
        assert complete(url_of(server), max_tokens=2).status_code == 200
        os.kill(engine, signal.SIGSTOP)
        assert server.end() == 0  # a process that does not react is killed
        assert not is_alive(engine)
