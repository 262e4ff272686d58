"""Load against a scripted server: what is measured, counted as failed, and compared."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from paceline.core.errors import BenchmarkError, ConfigError
from paceline_lab.bench import client, runs, server
from paceline_lab.bench.client import (
    BACKENDS,
    Outcome,
    RequestSampling,
    Sample,
    Target,
    clean_url,
    make_bodies,
    new_session,
)
from paceline_lab.bench.runs import (
    Comparison,
    ServerArm,
    Workload,
    run_benchmark,
    run_comparison,
    run_load,
)
from tests.lab.fake_server import Clock, FakeServer, Script, serving


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer()) as server:
        yield server


@pytest.fixture
def clock(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which nothing takes longer on a busy machine."""
    fake.clock = Clock()
    for module in (client, runs):
        monkeypatch.setattr(module, "time", fake.clock)
    return fake.clock


def workload(count: int, **more: Any) -> Workload:
    samples = [Sample(f"prompt {i}", 2, 3) for i in range(count)]
    return Workload(samples, more.pop("arrivals", [0.0] * count), **more)


def measured(
    fake: FakeServer, work: Workload, backend: str = "openai", timeout_s: float = 60.0
) -> ServerArm:
    async def run() -> ServerArm:
        async with new_session({}, timeout_s) as session:
            arm = ServerArm(session, Target(fake.url, "m", backend))
            await run_benchmark(arm, work)
            return arm

    return asyncio.run(run())


def compared(ours: FakeServer, theirs: FakeServer, work: Workload) -> Comparison:
    async def run() -> Comparison:
        async with new_session({}, 60.0) as session:
            arms = [ServerArm(session, Target(each.url, "m")) for each in (ours, theirs)]
            return await run_comparison(arms[0], arms[1], work)

    return asyncio.run(run())


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("backend", BACKENDS)
def test_times_and_counts_of_a_stream(fake: FakeServer, backend: str) -> None:
    # More tokens than events: the count is the server's, not the number of events.
    fake.script = lambda body, number: Script(delay=0.1, gap=0.05, tokens=5)
    (outcome,) = measured(fake, workload(1), backend).outcomes
    assert outcome.error == ""
    assert (outcome.text, outcome.finish_reason) == ("one two three", "stop")
    assert (outcome.prompt_len, outcome.output_len, len(outcome.itls)) == (7, 5, 2)
    # The chat's first event, which has the role alone, is no token.
    assert outcome.ttft == pytest.approx(0.1)
    assert outcome.itls == pytest.approx([0.05, 0.05])
    assert outcome.latency == pytest.approx(0.2)
    assert outcome.tpot == pytest.approx(0.1 / 4)


@pytest.mark.usefixtures("clock")
def test_an_answer_without_text_ends_when_it_begins(fake: FakeServer) -> None:
    fake.script = lambda body, number: Script(texts=(), tokens=1, delay=0.05)
    (outcome,) = measured(fake, workload(1)).outcomes
    assert (outcome.error, outcome.itls) == ("", [])
    assert outcome.ttft == outcome.latency == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script(status=400), "HTTP 400: refused with 400"),
        (Script(status=503), "HTTP 503: refused with 503"),
        (Script(cut_after=1), "disconnected"),
        (Script(cut_after=0), "disconnected"),
        (Script(stream_error="boom"), "error in the stream: boom"),
        (Script(usage=False), "no usage"),
        (Script(done=False), ""),
    ],
)
def test_failures_are_counted_and_are_no_samples(
    fake: FakeServer, script: Script, reason: str
) -> None:
    fake.script = lambda body, number: script if body["prompt"] == "prompt 1" else Script()
    arm = measured(fake, workload(3))
    errors = [outcome.error for outcome in arm.outcomes]
    assert [bool(error) for error in errors] == [False, bool(reason), False]
    assert reason in errors[1]
    figures = arm.figures((99.0,), None)
    assert figures["failed"] == (1 if reason else 0)
    assert list(figures["failure_reasons"].values()) == [1] * figures["failed"]
    assert figures["total_output_tokens"] == 3 * figures["completed"]
    if reason:
        assert (figures["ttfts"][1], figures["output_lens"][1]) == (None, 0)


def test_an_answer_that_does_not_come_is_a_failure_too(fake: FakeServer) -> None:
    fake.script = lambda body, number: Script(delay=600.0)
    arm = measured(fake, workload(1), timeout_s=0.2)
    assert arm.figures((99.0,), None)["failure_reasons"] == {"timed out": 1}


def test_a_server_that_is_gone_is_a_failure_too() -> None:
    with serving(FakeServer()) as fake:
        pass
    (outcome,) = measured(fake, workload(1)).outcomes
    assert outcome.error.startswith("no connection")


def test_bodies_always_carry_temperature_and_seed() -> None:
    samples = [Sample("a", 1, 5), Sample("b", 1, 6)]
    target = Target("http://x", "m", extra_body={"top_k": 7, "temperature": 0.5})
    bodies = [read_body(body) for body in make_bodies(target, samples, RequestSampling(seed=10))]
    assert [body["seed"] for body in bodies] == [10, 11]
    assert [body["max_tokens"] for body in bodies] == [5, 6]
    assert bodies[0]["temperature"] == 0.5  # what the user says comes first
    assert bodies[0]["stream_options"] == {"include_usage": True}
    assert not {"ignore_eos", "top_p", "min_p"} & bodies[0].keys()
    (plain,) = make_bodies(Target("http://x", "m"), samples[:1], RequestSampling(ignore_eos=True))
    assert read_body(plain)["temperature"] == 0.0
    assert read_body(plain)["ignore_eos"] is True


def read_body(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(body)
    return found


def test_messages_need_the_chat_backend() -> None:
    chat = Sample(({"role": "user", "content": "hello"},), 1, 1)
    with pytest.raises(ConfigError, match="openai-chat"):
        make_bodies(Target("http://x", "m"), [chat], RequestSampling())
    (body,) = make_bodies(Target("http://x", "m", "openai-chat"), [chat], RequestSampling())
    assert read_body(body)["messages"] == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_urls_are_cleaned(url: str) -> None:
    assert clean_url(url) == "http://h:1"


def test_a_url_needs_its_scheme() -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        clean_url("localhost:8000")


def test_concurrency_is_limited(fake: FakeServer) -> None:
    fake.script = lambda body, number: Script(delay=0.02)
    done: list[int] = []

    async def run() -> None:
        async with new_session({}, 60.0) as session:
            arm = ServerArm(session, Target(fake.url, "m"))
            await run_benchmark(arm, workload(8, max_concurrency=2), done.append)
            queued = [outcome.queued for outcome in arm.outcomes]
            assert queued[-1] >= 0.02
            assert queued[0] < queued[-1]

    asyncio.run(run())
    assert fake.most_running == 2
    assert done == list(range(1, 9))


def test_requests_are_sent_at_their_times() -> None:
    arrivals = [0.0, 0.05, 0.1]
    sent = 0

    async def run() -> tuple[list[Outcome], float]:
        all_sent = asyncio.Event()

        async def send(body: bytes, outcome: Outcome) -> None:
            # Nobody may wait for an earlier answer: none comes before the last request.
            nonlocal sent
            sent += 1
            if sent == len(arrivals):
                all_sent.set()
            await asyncio.wait_for(all_sent.wait(), 60.0)

        return await run_load(send, [b""] * 3, arrivals)

    outcomes, seconds = asyncio.run(run())
    for outcome, arrival in zip(outcomes, arrivals, strict=True):
        assert outcome.start >= arrival
    assert seconds >= 0.1


def test_ready_model_trial_and_warm_up(fake: FakeServer) -> None:
    fake.starting = 2

    async def run() -> ServerArm:
        async with new_session({"Authorization": "Bearer k"}, 60.0) as session:
            await server.wait_until_ready(session, fake.url, 60.0)
            arm = ServerArm(session, Target(fake.url, await server.first_model(session, fake.url)))
            trial, warmups = Sample("trial", 1, 1), [Sample("warm", 1, 1)]
            await run_benchmark(arm, workload(2, trial=trial, warmups=warmups))
            return arm

    arm = asyncio.run(run())
    assert arm.target.model == "org/fake-model"
    assert [body["prompt"] for body in fake.bodies[:2]] == ["trial", "warm"]
    assert {body["prompt"] for body in fake.bodies[2:]} == {"prompt 0", "prompt 1"}
    assert len(arm.outcomes) == 2
    assert all(headers["Authorization"] == "Bearer k" for headers in fake.headers)


def test_a_server_that_does_not_become_ready(fake: FakeServer) -> None:
    fake.starting = 1000

    async def run(timeout_s: float) -> None:
        async with new_session({}, 60.0) as session:
            await server.wait_until_ready(session, fake.url, timeout_s)

    with pytest.raises(BenchmarkError, match="HTTP 503"):
        asyncio.run(run(0.2))


def test_a_server_that_is_not_there_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECT_S", 0.0)
    with serving(FakeServer()) as fake:
        pass

    async def run() -> None:
        async with new_session({}, 60.0) as session:
            await server.wait_until_ready(session, fake.url, 600.0)

    with pytest.raises(BenchmarkError, match=f"no server answers at {fake.url}; start it"):
        asyncio.run(run())


def test_the_trial_stops_a_run_that_could_only_fail(fake: FakeServer) -> None:
    fake.script = lambda body, number: Script(status=401)
    with pytest.raises(BenchmarkError, match="HTTP 401"):
        measured(fake, workload(0, trial=Sample("trial", 1, 1)))


def test_speculation_is_what_the_run_added(fake: FakeServer) -> None:
    fake.counters = {
        'spec_decode_num_drafts_total{proposer="a"}': 2,
        'spec_decode_num_drafts_total{proposer="b"}': 3,
        "spec_decode_num_draft_tokens_total": 10,
        "spec_decode_num_accepted_tokens_total": 6,
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 4,
        'spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 2,
        'spec_decode_num_accepted_tokens_per_pos_total{position="2"}': 0,
    }
    measured(fake, workload(3))  # of another run, and not counted
    figures = measured(fake, workload(4)).figures((99.0,), None)
    assert figures["spec_decode_num_drafts"] == 20
    assert figures["spec_decode_draft_tokens"] == 40
    assert figures["spec_decode_accepted_tokens"] == 24
    assert figures["spec_decode_acceptance_rate"] == pytest.approx(60.0)
    assert figures["spec_decode_acceptance_length"] == pytest.approx(1 + 24 / 20)
    assert figures["spec_decode_per_position_acceptance_rates"] == pytest.approx([0.8, 0.4])


def test_two_servers_take_turns_with_clean_caches(fake: FakeServer) -> None:
    order: list[str] = []

    def script(name: str, odd: Mapping[str, str]) -> Callable[[Mapping[str, Any], int], Script]:
        def answer(body: Mapping[str, Any], number: int) -> Script:
            order.append(name)
            text = odd.get(body["prompt"], "same")
            status = 500 if text == "fail" else 200
            return Script(texts=(text,), tokens=4, status=status)

        return answer

    fake.script = script("a", {"prompt 2": "other"})
    other = FakeServer(script=script("b", {"prompt 5": "fail"}), can_flush=False)
    with serving(other):
        found = compared(fake, other, workload(8, max_concurrency=2))
    assert "".join(order) == "aabb" + "bbaa" + "aabb" + "bbaa"
    assert fake.events == ["flush", "request", "request"] * 4
    assert found.flushed == [True, False]
    assert found.differing == [2]
    assert [place for place, _, _ in found.pairs] == [0, 1, 2, 3, 4, 6, 7]
    ratios = found.ratios()
    # The block with a failed request, and its prompt, are in neither arm.
    assert ratios["output_throughput"].num_pairs == 3
    assert ratios["ttft"].num_pairs == ratios["e2el"].num_pairs == 7
    seeds = {body["prompt"]: body["seed"] for body in fake.bodies}
    assert seeds == {body["prompt"]: body["seed"] for body in other.bodies}


def test_a_slower_server_is_seen_as_slower(fake: FakeServer, clock: Clock) -> None:
    texts = ("one", " two")
    other = FakeServer(lambda body, number: Script(texts, delay=0.1, gap=0.1), clock=clock)
    fake.script = lambda body, number: Script(texts, delay=0.09, gap=0.08)
    with serving(other):
        ratios = compared(fake, other, workload(3, max_concurrency=1)).ratios()
    for name in ("ttft", "tpot", "e2el"):
        assert ratios[name].high < 1
    assert ratios["output_throughput"].low > 1


def test_arrivals_keep_their_distances_across_blocks(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[list[float]] = []

    async def load(
        send: Any, bodies: Any, arrivals: Any, *rest: Any
    ) -> tuple[list[Outcome], float]:
        blocks.append(arrivals)
        return [Outcome(error="not sent") for _ in bodies], 1.0

    monkeypatch.setattr("paceline_lab.bench.runs.run_load", load)
    times = [1.0, 3.0, 6.0, 10.0]
    found = compared(fake, fake, workload(4, arrivals=times, max_concurrency=2))
    warm_up, *measured_blocks = blocks[1:]
    assert (blocks[0], warm_up) == ([], [])
    assert measured_blocks == [[1.0, 3.0], [1.0, 3.0], [3.0, 7.0], [3.0, 7.0]]
    assert (found.pairs, found.ratios()) == ([], {})


def test_aiohttp_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    for name in ("client",):
        monkeypatch.delitem(sys.modules, f"paceline_lab.bench.{name}")
    with pytest.raises(ConfigError, match=r"\[bench\]"):
        importlib.import_module("paceline_lab.bench.client")
