"""``paceline run-batch``: a file of requests answered as the server answers them, without a server.

Owns the files' names and what is said at the end. Interrupted, the same command continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.model_argument import model_and_file, needed_model
from paceline.cli.options import (
    JSON_HELP,
    MODEL_HELP,
    ReplicaOptions,
    RequestedModelOptions,
    SpeculationOptions,
    argument,
    option,
)
from paceline.cli.serve import as_replica, default_names, engine_factory, num_replicas, threads_of
from paceline.cli.settings import named_folders, speculative_config
from paceline.cli.terminal import Screen, printable
from paceline.config.template_options import parse_template_options
from paceline.core.errors import ConfigError
from paceline.core.installation import install_command

if TYPE_CHECKING:
    from paceline.server.batch import AnswerFile, BatchSummary
    from paceline.server.engine_process.client import EngineClient
    from paceline.server.http.config import ServerConfig


EXIT_FAILED = 1
SUFFIX = ".out.jsonl"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunBatchOptions(ReplicaOptions, SpeculationOptions, RequestedModelOptions):
    """Options of ``paceline run-batch``."""

    model: str = argument(None, MODEL_HELP)
    file: str | None = argument(None, "Requests, one JSON object a line, in OpenAI's batch format.")
    input_file: str | None = option(None, "The same as FILE.", "-i")
    output_file: str | None = option(
        None,
        "File for the answers (default: FILE with .out.jsonl). Answers already in it are kept.",
        "-o",
    )
    model_option: str | None = option(None, "The same as MODEL.", "--model")
    ray: bool = option(False, "Let Ray run the engines: one, or as many as --replicas says.")
    json: bool = option(False, JSON_HELP)


def run_batch_command(options: RunBatchOptions) -> int:
    """The work of ``paceline run-batch``."""
    try:
        from paceline.server.batch import AnswerFile, batch_config, count_lines
        from paceline.server.engine_process.client import EngineClient
    except ImportError as error:
        raise ConfigError(
            f"run-batch needs a package that is not installed ({error}): {install_command()}"
        ) from error
    model, source = inputs(options)
    options = replace(options, model=model)
    target = output_path(options, source)
    if uses_ray(options):
        options = as_replica(options, shares_machine=options.ray_address is None)
    speculative = speculative_config(options, options.model)
    factory = engine_factory(options, options.model, speculative, options.chat_template)
    screen, total = Screen(json=options.json), count_lines(source)
    names = tuple(options.served_model_name or default_names(options.model))
    client = partial(EngineClient, factory, adapters=named_folders(options.lora or (), names))
    config = batch_config(names, parse_template_options(options.default_chat_template_kwargs))
    answers = AnswerFile(target)
    try:
        if answers.done:
            screen.note(f"{len(answers.done)} answers are in {printable(str(target))} already")
        with screen.progress("answering", total) as advance:
            if uses_ray(options):
                summary = answer_on_ray(options, client, config, source, answers, advance)
            else:
                work = answer_batch(client(), config, source, answers, advance)
                summary = asyncio.run(work)
    finally:
        answers.close()
    return report(summary, target, screen, options.json)


def uses_ray(options: RunBatchOptions) -> bool:
    return options.ray or options.replicas is not None or options.ray_address is not None


def inputs(options: RunBatchOptions) -> tuple[str, Path]:
    """The model, and the file of requests, which ``--input-file`` names in place of FILE."""
    named = options.input_file
    model, file = model_and_file(options.model, options.file or named, options.model_option)
    if file is None or (named is not None and (options.file or options.model == named)):
        raise ConfigError("name the file of requests once, as FILE or with --input-file")
    return needed_model(model, "paceline run-batch"), Path(file)


def output_path(options: RunBatchOptions, source: Path) -> Path:
    """Raises ConfigError: the answers would overwrite the requests."""
    if options.output_file is None:
        return source.with_name(source.name.removesuffix(".jsonl") + SUFFIX)
    target = Path(options.output_file)
    if target.exists() and source.exists() and target.samefile(source):
        raise ConfigError(f"{target} holds the requests: choose another --output-file")
    return target


async def answer_batch(
    client: EngineClient,
    config: ServerConfig,
    source: Path,
    answers: AnswerFile,
    advance: Callable[[int], None],
) -> BatchSummary:
    """Start an engine, answer a file with it as the server would, and end it."""
    from paceline.server.batch import batch_handle, read_batch, run_batch

    try:
        await client.start()
        handle, places = batch_handle(client, config)
        return await run_batch(read_batch(source), answers, handle, places, advance)
    finally:
        await client.close()


def answer_on_ray(
    options: RunBatchOptions,
    client: Callable[[], EngineClient],
    config: ServerConfig,
    source: Path,
    answers: AnswerFile,
    advance: Callable[[int], None],
) -> BatchSummary:
    """The same by engines on a Ray cluster; ``ConfigError`` without Ray Data."""
    from paceline.server.batch import read_batch

    try:
        from paceline.ray.batch import answer_batch
    except ImportError as error:
        raise ConfigError(f"--ray needs Ray Data ({error}): {install_command('ray')}") from error
    return answer_batch(
        client,
        config,
        read_batch(source),
        answers,
        advance,
        replicas=num_replicas(options),
        threads=threads_of(options),
        ray_address=options.ray_address,
    )


def report(summary: BatchSummary, target: Path, screen: Screen, wants_json: bool) -> int:
    """Say how it went; returns the exit code."""
    parts = [f"{summary.answered} requests answered"]
    if summary.skipped:
        parts.append(f"{summary.skipped} answered before")
    if summary.failed:
        parts.append(f"{summary.failed} failed, for the reasons in the file")
    screen.note(f"{', '.join(parts)}; answers in {printable(str(target))}")
    if wants_json:
        screen.document({**asdict(summary), "output_file": str(target)})
    return EXIT_FAILED if summary.failed else 0
