"""A batch answered by several engines: Ray Data takes lines to them and records back.

Owns that each line gets one record: Ray runs a shard again whose worker died, and a second record
of a line is dropped. If this process dies the file has what was written, and the same command
continues.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import ray.data
from ray.exceptions import RayError

from paceline.core.errors import EngineDeadError
from paceline.ray.cluster import cluster, forget_program
from paceline.server.batch import (
    AnswerFile,
    BatchLine,
    BatchRun,
    BatchSummary,
    answer_lines,
    batch_handle,
)
from paceline.server.engine_process.client import EngineClient
from paceline.server.http.config import ServerConfig

LINES_PER_SHARD = 64
"""What is computed again when a worker dies, at most twice that: one runs and one is ready."""
LINE, RECORD = "line", "record"
_AGAIN = "the same command continues with what has no answer yet"


class Worker:
    """An engine, in one of Ray's processes.

    Args:
        make_client: makes the engine's client, not started.
        config: of :func:`~paceline.server.batch.batch_config`.
    """

    def __init__(self, make_client: Callable[[], EngineClient], config: ServerConfig) -> None:
        forget_program()
        self._runner = asyncio.Runner()
        client = make_client()
        self._runner.run(client.start())
        self._handle, self._places = batch_handle(client, config)

    def __call__(self, shard: dict[str, Sequence[str]]) -> dict[str, list[str]]:
        lines = [BatchLine(**json.loads(line)) for line in shard[LINE]]
        records = list[dict[str, Any]]()
        self._runner.run(answer_lines(lines, records.append, self._handle, self._places))
        return {RECORD: [json.dumps(record) for record in records]}


def answer_batch(
    make_client: Callable[[], EngineClient],
    config: ServerConfig,
    lines: Iterable[BatchLine],
    answers: AnswerFile,
    advance: Callable[[int], None],
    *,
    replicas: int,
    threads: int,
    ray_address: str | None,
) -> BatchSummary:
    """Answer all lines that have no answer yet.

    Args:
        make_client: makes an engine's client, not started, where the engine is to be.
        config: of :func:`~paceline.server.batch.batch_config`.
        advance: called with the number of lines that are done.
        threads: of each engine, for which it asks as many of the cluster's CPUs.
        ray_address: of a cluster to join; None starts one on this machine, which ends with this.

    Raises:
        ConfigError: a file cannot be read or written, or the cluster cannot be joined.
        EngineDeadError: the engines cannot go on; answers that were written stay.
    """
    run = BatchRun(answers, advance)
    left = {line.custom_id: json.dumps(asdict(line)) for line in run.left(lines)}
    if not left:
        return run.summary
    with cluster(ray_address, replicas * threads):
        try:
            for row in _records(list(left.values()), (make_client, config), replicas, threads):
                record = json.loads(row[RECORD])
                if left.pop(record["custom_id"], None) is not None:
                    run.write(record)
        except RayError as error:
            raise EngineDeadError(f"the engines cannot go on: {error}; {_AGAIN}") from error
    if left:
        raise EngineDeadError(f"{len(left)} lines came back without an answer; {_AGAIN}")
    return run.summary


def _records(
    lines: list[str], arguments: tuple[Any, ...], replicas: int, threads: int
) -> Iterable[dict[str, str]]:
    """Rows of records as shards are done."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    num_shards = -(-len(lines) // LINES_PER_SHARD)
    rows = ray.data.from_items([{LINE: line} for line in lines], override_num_blocks=num_shards)
    done = rows.map_batches(
        Worker,
        fn_constructor_args=arguments,
        batch_size=None,
        num_cpus=threads,
        compute=ray.data.ActorPoolStrategy(size=min(replicas, num_shards)),
    )
    found: Iterable[dict[str, str]] = done.iter_rows()
    return found
