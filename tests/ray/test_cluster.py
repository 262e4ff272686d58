"""A cluster that was there before: joining it, and Serve's own configuration as documented."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="replicas need the extra ray")
import yaml

from tests.ray.servers import LONG, SMALL, environment, iter_until, serving, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent
SCALE = Path(__file__).parents[2] / "docs" / "scale.md"
TOKEN = "a-token-of-tests-that-is-long-enough"
BODY = {"prompt": "def f(a, b):", "max_tokens": 8, "temperature": 0}


@dataclass(frozen=True)
class Head:
    """A running ``ray start --head`` that asks for :data:`TOKEN`."""

    address: str
    dashboard: str

    def command(self, *words: str) -> str:
        done = subprocess.run(
            [BIN / words[0], *words[1:]], env=with_token(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def with_token(token: str = TOKEN) -> dict[str, str]:
    return environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a short path
        port, dashboard = free_port(), free_port()
        options = {
            "port": port,
            "dashboard-port": dashboard,
            "dashboard-agent-listen-port": free_port(),
            "ray-client-server-port": free_port(),
            "num-cpus": 2,
            "object-store-memory": 100 << 20,
            "temp-dir": folder,
        }
        words = (f"--{name}={value}" for name, value in options.items())
        command = [BIN / "ray", "start", "--head", "--block", "--disable-usage-stats", *words]
        process = subprocess.Popen(
            command, env=with_token(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        try:
            said = list(iter_until(process.stdout, "--block"))
            assert "--block" in said[-1], "".join(said)
            yield Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}")
        finally:
            process.terminate()
            process.communicate(timeout=60)


def refusal(head: Head, token: str) -> str:
    """What ``paceline serve`` says that cannot join."""
    command = [sys.executable, "-m", "paceline", "serve", "embedded", "--replicas", "1", *SMALL]
    done = subprocess.run(
        [*command, "--port", "0", "--ray-address", head.address],
        env=with_token(token),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.parametrize("token", ["", "another-token-of-tests"])
def test_without_the_token_it_says_where_it_belongs(
    head: Head, token: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # has no token of its own
    said = refusal(head, token)
    assert "asks for a token" in said
    assert "ray get-auth-token" in said


def test_a_cluster_is_joined_and_left(head: Head) -> None:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    with serving("--replicas", "1", "--ray-address", head.address, **token) as (_, client):
        first = client.post("/v1/completions", json=BODY).json()["choices"]
        assert "Serve runs there already" in refusal(head, TOKEN)
        assert client.post("/v1/completions", json=BODY).json()["choices"] == first
    assert "0.0/2.0 CPU" in head.command("ray", "status", "--address", head.address)


def test_a_batch_is_answered_by_a_cluster(head: Head, tmp_path: Path) -> None:
    row = {"custom_id": "r0", "method": "POST", "url": "/v1/completions", "body": BODY}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    command = [
        "run-batch",
        "embedded",
        str(tmp_path / "in.jsonl"),
        *SMALL,
        "--ray-address",
        head.address,
    ]
    subprocess.run([sys.executable, "-m", "paceline", *command], env=with_token(), check=True)
    answer = json.loads((tmp_path / "in.out.jsonl").read_text())
    assert answer["response"]["body"]["usage"]["completion_tokens"] == 8


def documented(port: int) -> Iterator[dict[str, Any]]:
    """The configurations of the page, with a model and sizes for this machine."""
    for block in SCALE.read_text().split("```yaml\n")[1:]:
        found = yaml.safe_load(block.split("```")[0])
        found["http_options"] = {**found.get("http_options", {}), "port": port}
        args = found["applications"][0]["args"]
        args |= {"model": "embedded", "threads": 1, "max_model_len": 512, "kv_cache_memory": "64M"}
        args |= {"replicas": 1} if "replicas" in args else {}
        yield found


def deploy(head: Head, config: dict[str, Any], folder: Path) -> None:
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    head.command("serve", "deploy", "--address", head.dashboard, str(path))


def num_replicas(head: Head) -> int:
    status = yaml.safe_load(head.command("serve", "status", "--address", head.dashboard))
    engine = status["applications"]["paceline"]["deployments"].get("engine", {})
    states: dict[str, int] = engine.get("replica_states", {})
    return states.get("RUNNING", 0)


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:  # nobody listens yet
        return False


@contextmanager
def busy(client: httpx.Client) -> Iterator[None]:
    """Four requests at any time, of which most wait for the only place."""
    is_over = Event()

    def ask() -> None:
        while not is_over.is_set():
            client.post("/v1/completions", json=LONG).read()

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask) for _ in range(4)]
        try:
            yield
        finally:
            is_over.set()
    for each in asked:
        each.result()


def test_the_documented_configurations_serve_and_scale(head: Head, tmp_path: Path) -> None:
    port = free_port()
    plain, scaled = documented(port)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        deploy(head, plain, tmp_path)
        until(lambda: is_ready(client))
        answer = client.post("/v1/completions", json=BODY).json()
        assert answer["usage"]["completion_tokens"] == 8
        autoscaling = scaled["applications"][0]["deployments"][0]["autoscaling_config"]
        autoscaling |= {"max_replicas": 2, "look_back_period_s": 11, "upscale_delay_s": 0}
        autoscaling |= {"downscale_delay_s": 0}
        scaled["applications"][0]["args"]["max_num_seqs"] = 1
        deploy(head, scaled, tmp_path)
        until(lambda: num_replicas(head) == 1)
        with busy(client):
            until(lambda: num_replicas(head) == 2)
        until(lambda: num_replicas(head) == 1)
    head.command("serve", "shutdown", "--yes", "--address", head.dashboard)
