"""``run-batch --ray``: the rows of the plain command, whatever is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="replicas need the extra ray")

from paceline.ray.batch import LINES_PER_SHARD
from tests.ray.servers import SMALL, descendants, environment, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_LINES = 6 * LINES_PER_SHARD + 3
ON_RAY = ("--ray", "--replicas", "2")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for i in range(NUM_LINES):
            how = {"temperature": 0.0} if i % 2 else {"temperature": 1.0, "seed": i}
            body = {"prompt": f"def f{i}(a, b):\n", "max_tokens": 8 + i % 16, **how}
            row = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(row) + "\n")
        file.write("not JSON\n")
        file.write(json.dumps(row) + "\n")  # a second line of this id
    return path


def command(source: Path, target: Path, *how: str) -> list[str]:
    files = [str(source), "--output-file", str(target)]
    return [sys.executable, "-m", "paceline", "run-batch", "embedded", *files, *SMALL, *how]


@contextmanager
def started(source: Path, target: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command on Ray, after its first shard."""
    process = subprocess.Popen(command(source, target, *ON_RAY), env=environment())
    try:
        until(lambda: process.poll() is not None or num_rows(target) >= LINES_PER_SHARD)
        assert num_rows(target) < NUM_LINES, "there is nothing left to be disturbed"
        yield process
    finally:
        process.kill()


def num_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def rows(path: Path) -> list[tuple[str | None, Any]]:
    """Each row's id with what it says, in the order of ids."""
    read = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(((row["custom_id"], _told(row)) for row in read), key=str)


def _told(row: dict[str, Any]) -> Any:
    if row["response"] is None:
        return row["error"]
    body = row["response"]["body"]
    return row["response"]["status_code"], body["choices"], body["usage"]["completion_tokens"]


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> list[tuple[str | None, Any]]:
    target = tmp_path / "plain.jsonl"
    subprocess.run(command(source, target), env=environment(), check=False)
    found = rows(target)
    assert len(found) == NUM_LINES + 2
    assert len({str(told) for _, told in found}) > NUM_LINES / 2
    return found


def test_killed_workers_and_engines_cost_no_row(
    source: Path, tmp_path: Path, expected: list[tuple[str | None, Any]]
) -> None:
    target = tmp_path / "out.jsonl"
    with started(source, target) as process:
        worker, other = descendants(process.pid, "MapWorker")
        os.kill(worker, signal.SIGKILL)
        engine = descendants(other, "multiprocessing.forkserver")[-1]
        os.kill(engine, signal.SIGKILL)
        assert process.wait(300) == 1  # of the two lines that cannot be sent
    assert rows(target) == expected


def test_a_killed_command_goes_on(
    source: Path, tmp_path: Path, expected: list[tuple[str | None, Any]]
) -> None:
    target = tmp_path / "out.jsonl"
    with started(source, target) as process:
        process.kill()
    kept = num_rows(target)
    done = subprocess.run(command(source, target, *ON_RAY), env=environment(), check=False)
    assert done.returncode == 1
    assert kept < num_rows(target)
    assert rows(target) == expected
