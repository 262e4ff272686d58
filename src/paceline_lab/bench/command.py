"""``paceline bench serve``: from options, by vLLM's names, to a workload and its servers."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from paceline.cli.terminal import Screen, printable
from paceline.core.checks import check_choice
from paceline.core.errors import ConfigError
from paceline.core.files import write_json
from paceline_lab.bench import server
from paceline_lab.bench.client import BACKENDS, RequestSampling, Target, clean_url, new_session
from paceline_lab.bench.datasets import arrival_times, make_samples, make_trace_samples, read_trace
from paceline_lab.bench.options import BenchServeOptions, wants_ignore_eos
from paceline_lab.bench.runs import ServerArm, Workload, run_benchmark, run_comparison
from paceline_lab.bench.token_counting import TokenCounter, open_counter, server_counter
from paceline_lab.bench.view import Result, goodput, percentiles

EXIT_NOTHING = 1


def bench_serve_command(options: BenchServeOptions) -> int:
    """The work of ``paceline bench serve``: 1 when no request was completed."""
    _check(options)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_bench(options))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The lighter event loop where it is installed: the server needs the processor too."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


def _check(options: BenchServeOptions) -> None:
    """Raise for what can be seen before a server is asked."""
    check_choice("--backend", options.backend, BACKENDS)
    if options.trace_path is not None and not math.isinf(options.request_rate):
        raise ConfigError("--trace-path and --request-rate cannot be used together")
    if options.compare_extra_body is not None and options.compare_with is None:
        raise ConfigError("--compare-extra-body is for the server of --compare-with")
    percentiles(options)
    goodput(options)
    if options.result_filename is not None and not options.save_result:
        raise ConfigError("--result-filename needs --save-result")
    _json_object(options.extra_body, "--extra-body")
    _json_object(options.compare_extra_body, "--compare-extra-body")
    _headers(options)
    _urls(options)


async def _bench(options: BenchServeOptions) -> int:
    screen = Screen(json=options.json)
    async with AsyncExitStack() as stack:
        arms = [await _arm(options, place, stack, screen) for place in range(len(_urls(options)))]
        target = arms[0].target
        # Prompts are measured before the run, by calls that block: nothing else runs meanwhile.
        if options.tokenizer is not None:
            counter = open_counter(options.tokenizer)
        else:
            counter = server_counter(target.url, target.model, target.headers)
        screen.note(f"{printable(target.model)} at {target.url}; lengths by {counter.name}")
        workload = _workload(options, counter)
        comparison = None
        gc.freeze()  # The prompts live as long as the run: collections need not look at them.
        stack.callback(gc.unfreeze)
        total = len(workload.samples) * len(arms)
        with screen.progress("requests", total) as advance:
            if len(arms) > 1:
                comparison = await run_comparison(arms[0], arms[1], workload, advance)
            else:
                await run_benchmark(arms[0], workload, advance)
    return _report(options, Result(options, arms[0], counter.name, comparison), screen)


def _report(options: BenchServeOptions, result: Result, screen: Screen) -> int:
    for line in result.lines():
        screen.say(line)
    document = result.document()
    if options.save_result:
        # The model's name comes from the server: it must not lead to another folder.
        model = re.sub(r"[^\w.-]", "_", document["model_id"].split("/")[-1])
        name = f"{options.backend}-{model}-{document['date']}.json"
        path = Path(options.result_filename or name)
        write_json(path, document, ConfigError, make_folder=True)
        screen.note(f"written: {path}")
    if options.json:
        screen.document(document)
    arms = result.arms
    return 0 if all(any(not o.error for o in arm.outcomes) for arm in arms) else EXIT_NOTHING


def _urls(options: BenchServeOptions) -> list[str]:
    host = f"[{options.host}]" if ":" in options.host else options.host
    first = options.base_url or f"http://{host}:{options.port}"
    return [clean_url(url) for url in (first, options.compare_with) if url is not None]


async def _arm(
    options: BenchServeOptions, place: int, stack: AsyncExitStack, screen: Screen
) -> ServerArm:
    """The server at this place, with a session of its own that the stack closes."""
    url, headers = _urls(options)[place], _headers(options)
    session = await stack.enter_async_context(new_session(headers, options.request_timeout_sec))
    if options.ready_check_timeout_sec > 0:
        screen.note(f"waiting for {url}, for at most {options.ready_check_timeout_sec:g} s")
        await server.wait_until_ready(session, url, options.ready_check_timeout_sec)
    extra = options.extra_body
    if place and options.compare_extra_body is not None:
        extra = options.compare_extra_body
    target = Target(
        url,
        options.model or await server.first_model(session, url),
        options.backend,
        headers,
        _json_object(extra, "--extra-body"),
    )
    return ServerArm(session, target)


def _headers(options: BenchServeOptions) -> dict[str, str]:
    if options.api_key == "":
        raise ConfigError("--api-key is empty; give a key, or leave the option out")
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for header in options.header or ():
        name, equals, value = header.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--header {header!r} is not a header; write KEY=VALUE")
        headers[name.strip()] = value.strip()
    return headers


def _json_object(text: str | None, name: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, not {text}")
    return value


def _workload(options: BenchServeOptions, counter: TokenCounter) -> Workload:
    """Samples and their times; those of the trial and the warm-up are drawn after the measured."""
    count, seed = options.num_prompts, options.seed
    has_trial = options.ready_check_timeout_sec > 0
    extra = has_trial + options.num_warmups
    if options.trace_path is not None:
        rows = read_trace(options.trace_path, count)
        count = len(rows)
        repeated = (rows * (1 + extra))[: count + extra]
        samples = make_trace_samples(repeated, options, counter, seed)
        arrivals = [row.time for row in rows]
    else:
        samples = make_samples(options, counter, count + extra, seed)
        arrivals = arrival_times(count, options.request_rate, options.burstiness, seed)
    return Workload(
        samples[:count],
        arrivals,
        RequestSampling(
            options.temperature,
            seed,
            options.top_p,
            options.top_k,
            options.min_p,
            wants_ignore_eos(options),
        ),
        samples[count] if has_trial else None,
        samples[count + has_trial :],
        options.max_concurrency,
    )
