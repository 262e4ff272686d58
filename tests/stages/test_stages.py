"""Models in stages: the answers of one process, and what happens when a stage is lost."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.api.llm import embedded_model
from paceline.backends.native.native import ISA_VARIABLE, why_not_native
from paceline.core.errors import ConfigError, RequestFailedError, StageError
from paceline.loading.checkpoint import load_checkpoint, model_fingerprint
from paceline.stages.backend import split
from paceline.stages.link import SIZE, Link, RemoteStage, address_of, shown_address
from paceline.stages.micro_batches import MicroBatch, MicroBatching, cut
from paceline.stages.worker import Stage
from paceline.tensors.arrays import Floats
from paceline_lab.train.model_files import load_model, save_model
from paceline_lab.train.surgery import hybridise
from tests.quick import only

TARGET, DRAFT = embedded_model("target"), embedded_model("draft")
CODE = "def add(a, b):\n    return a + b\n\n\ndef add_all(numbers):\n    total = 0\n    for number"
PROMPTS = [CODE, CODE + " in numbers:", "import os\nimport", "x = [1, 2"]
NATIVE = pytest.mark.skipif(why_not_native() is not None, reason="needs native kernels")
PROCESS = "engine.runner.decoder.ops._stages[0]._process"


def wishes() -> list[SamplingParams]:
    sampled: dict[str, Any] = {"temperature": 0.8, "seed": 3, "logprobs": 2}
    greedy: dict[str, Any] = {"temperature": 0.0}
    kinds = [sampled if index % 2 else greedy for index in range(len(PROMPTS))]
    return [SamplingParams(max_tokens=24, **kind) for kind in kinds]


def answers(model: str, **options: Any) -> list[tuple[list[int], Any]]:
    with LLM(model, max_model_len=256, num_threads=1, **options) as llm:
        found = llm.generate(PROMPTS, wishes())
    return [(each.token_ids, each.completions[0].logprobs) for each in found]


@NATIVE
@pytest.mark.parametrize("size", only([3], [2, 3]))
def test_stages_say_what_one_process_does(size: int) -> None:
    """Bit for bit, log-probabilities included; speculation changes nothing."""
    want = answers(TARGET, speculative_config=[])
    assert answers(TARGET, speculative_config=[], pipeline_parallel_size=size) == want
    assert answers(TARGET, pipeline_parallel_size=size) == want


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hybrid")
    save_model(folder, hybridise(load_model(DRAFT), "da", seed=0), Path(DRAFT), "bfloat16", "")
    return str(folder)


@pytest.mark.parametrize(
    "backend", [pytest.param("native", marks=NATIVE), pytest.param("reference")]
)
def test_states_lie_in_the_stages_of_their_layers(hybrid: str, backend: str) -> None:
    options: dict[str, Any] = {"dtype": "float32", "backend": backend}
    want = answers(hybrid, speculative_config=[], **options)
    assert answers(hybrid, pipeline_parallel_size=2, **options) == want


@pytest.mark.parametrize("backend", ["reference"])
def test_prefixes_are_found_in_all_stages(backend: str) -> None:
    options: dict[str, Any] = {"dtype": "float32", "backend": backend, "max_model_len": 256}
    with LLM(DRAFT, **options) as one, LLM(DRAFT, pipeline_parallel_size=2, **options) as two:
        for prompt in (CODE, CODE + " in numbers"):
            wish = SamplingParams(max_tokens=12, temperature=0.0)
            assert two.generate(prompt, wish).token_ids == one.generate(prompt, wish).token_ids
        assert two.stats().num_cached_tokens == one.stats().num_cached_tokens > 0


@pytest.fixture
def in_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is cut into three, or as many rows as it has, whatever that takes."""

    def choose(_: object, rows: Sequence[int], limits: Sequence[int]) -> list[MicroBatch]:
        return cut(rows, limits, min(3, sum(rows)))

    monkeypatch.setattr(MicroBatching, "choose", choose)


@NATIVE
@pytest.mark.parametrize("size", only([2], [2, 3]))
@pytest.mark.usefixtures("in_micro_batches")
def test_micro_batches_say_what_one_process_does(size: int) -> None:
    want = answers(TARGET, speculative_config=[])
    assert answers(TARGET, speculative_config=[], pipeline_parallel_size=size) == want
    assert answers(TARGET, pipeline_parallel_size=size) == want


@pytest.mark.parametrize(
    "backend",
    [pytest.param("native", marks=NATIVE), pytest.param("reference", marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("in_micro_batches")
def test_states_go_on_from_micro_batch_to_micro_batch(hybrid: str, backend: str) -> None:
    options: dict[str, Any] = {"dtype": "float32", "backend": backend}
    want = answers(hybrid, speculative_config=[], **options)
    assert answers(hybrid, pipeline_parallel_size=2, **options) == want
    assert answers(hybrid, pipeline_parallel_size=2, speculative_config=[], **options) == want


@NATIVE
@pytest.mark.usefixtures("in_micro_batches")
def test_trees_and_prompts_are_cut() -> None:
    """Branches apart from their parents; log-probabilities of prompts come from all of it."""
    wish = SamplingParams(max_tokens=32, temperature=0.0, prompt_logprobs=2)
    options: dict[str, Any] = {"max_model_len": 256, "num_threads": 1, "planner": "fixed"}
    drafts = [{"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 8}]
    with LLM(TARGET, speculative_config=[], **options) as llm:
        want = llm.generate([CODE, PROMPTS[2]], wish)
    options |= {"speculative_config": drafts, "pipeline_parallel_size": 2}
    with LLM(TARGET, **options) as llm:
        found = llm.generate([CODE, PROMPTS[2]], wish)
    assert [each.token_ids for each in found] == [each.token_ids for each in want]
    assert [each.prompt_logprobs for each in found] == [each.prompt_logprobs for each in want]
    assert sum(each.completions[0].counters.num_accepted_tokens for each in found) > 0


@NATIVE
@pytest.mark.usefixtures("in_micro_batches")
def test_a_stage_lost_between_micro_batches_ends_all_requests_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wish = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    start, doomed, steps = RemoteStage.start, list[Any](), iter(range(100))

    def start_and_die(stage: RemoteStage, x: Floats, index: int, *more: Any) -> None:
        start(stage, x, index, *more)
        if doomed and index == 1 and next(steps) == 4:  # when all requests have read something
            doomed.pop().send_signal(signal.SIGKILL)

    monkeypatch.setattr(RemoteStage, "start", start_and_die)
    with LLM(TARGET, max_model_len=512, num_threads=1) as llm:
        want = [each.token_ids for each in llm.generate(PROMPTS, wish)]
    with LLM(TARGET, max_model_len=512, num_threads=1, pipeline_parallel_size=2) as llm:
        doomed.append(llm.call(lambda engine: eval(PROCESS, {"engine": engine})))
        errors = [each.error for each in llm.generate(PROMPTS, wish)]
        assert all(isinstance(error, RequestFailedError) for error in errors)
        assert not doomed
        for _ in range(2):  # in another process, then out of the prefix cache
            assert [each.token_ids for each in llm.generate(PROMPTS, wish)] == want


@NATIVE
def test_a_lost_stage_ends_its_requests_and_no_others() -> None:
    wish = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    with LLM(TARGET, max_model_len=512, num_threads=1) as llm:
        want = llm.generate(CODE, wish).token_ids
    with LLM(TARGET, max_model_len=512, num_threads=1, pipeline_parallel_size=2) as llm:
        steps = llm.stream(CODE, wish)
        next(steps)
        llm.call(lambda engine: eval(PROCESS, {"engine": engine}).send_signal(signal.SIGKILL))
        with pytest.raises(RequestFailedError, match="lost"):
            list(steps)
        for _ in range(2):  # in a process of its own again, then out of the prefix cache
            assert llm.generate(CODE, wish).token_ids == want


def test_a_stage_that_refuses_is_not_asked_again_at_once() -> None:
    """By each request of a step, which would wait for as long as its last engine is served."""
    asked: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            for answer in ({"ready": True}, {"error": "it serves another engine"}):
                link = Link(server.accept()[0])
                asked.append(link.receive()[0]["layers"])
                link.send(answer)

        refusing = threading.Thread(target=refuse, daemon=True)
        refusing.start()
        stage = RemoteStage(shown_address(*server.getsockname()), range(2, 4), {})
        stage.lose(StageError("the connection was closed"))
        with pytest.raises(StageError, match="cannot serve: it serves another engine"):
            stage.connect()
        refusing.join()
        with pytest.raises(StageError, match="it serves another engine; it is asked again in a"):
            stage.connect()
    assert asked == [[2, 4]] * 2


@contextmanager
def listening_at(address: str) -> Iterator[str]:
    """The address of a stage that was started by its command."""
    command = [sys.executable, "-m", "paceline", "stage", "--listen", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.kill()


@pytest.fixture
def listening() -> Iterator[str]:
    with listening_at("127.0.0.1:0") as address:
        yield address


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
def test_a_stage_listens_by_ipv6() -> None:
    with listening_at("[::1]:0") as address:
        assert address.startswith("[::1]:")
        socket.create_connection(address_of(address)).close()


def test_a_stage_of_another_instruction_set_names_the_variable_that_chooses_one() -> None:
    model = load_checkpoint(DRAFT, with_tokenizer=False)
    greeting: dict[str, Any] = {
        "threads": None,
        "model": DRAFT,
        "fingerprint": model_fingerprint(model),
        "layers": [0, 1],
        "dtype": "float32",
        "deterministic": True,
        "backend": "reference",
        "ops": "another",
    }
    with pytest.raises(ConfigError, match=f"set {ISA_VARIABLE} to what both have"):
        Stage(greeting)


@NATIVE
def test_the_command_serves_one_engine_after_another(listening: str) -> None:
    want = answers(TARGET, speculative_config=[])
    with socket.create_connection(address_of(listening)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")  # no engine
    for _ in range(2):
        options: dict[str, Any] = {"pipeline_parallel_size": 2, "pipeline_stages": (listening,)}
        assert answers(TARGET, **options) == want


def test_layers_are_divided_evenly() -> None:
    config = load_checkpoint(TARGET, with_tokenizer=False).config
    assert split(config, 3) == [range(2), range(2, 5), range(5, 8)]
    assert split(config, 1) == [range(8)]
    with pytest.raises(ConfigError, match="allowed: 1 to 8"):
        split(config, 9)


def test_what_cannot_be_in_stages_is_said() -> None:
    with pytest.raises(ConfigError, match="2 pipeline_stages are named"):
        LLM(TARGET, pipeline_parallel_size=2, pipeline_stages=("a:1", "b:2"))
    with pytest.raises(ConfigError, match="weight_memory"):
        LLM(TARGET, pipeline_parallel_size=2, weight_memory=1 << 20)
    with pytest.raises(ConfigError, match="another method"):
        LLM(
            TARGET,
            speculative_config=[{"method": "self", "draft_layers": 2}],
            pipeline_parallel_size=2,
        )
    with pytest.raises(ConfigError, match="not the address"):
        address_of("nowhere")
    with pytest.raises(ConfigError, match="paceline stage --listen"):
        LLM(TARGET, pipeline_parallel_size=2, pipeline_stages=("127.0.0.1:1",))


def test_messages_and_arrays_arrive_as_they_were() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = Link(socket.create_connection(server.getsockname()))
        theirs = Link(server.accept()[0])
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    ours.send({"do": "run", "taps": [1, 2]}, rows, np.zeros((0, 4), np.int64))
    message, (one, two) = theirs.receive()
    assert message == {"do": "run", "taps": [1, 2]}
    assert one.tobytes() == rows.tobytes()
    assert one.shape == (2, 3)
    assert two.shape == (0, 4)
    ours._socket.sendall(SIZE.pack(1 << 30))
    with pytest.raises(StageError, match="is not a stage"):
        theirs.receive()
    ours.send({}, np.zeros(2, np.float16))
    with pytest.raises(StageError):
        theirs.receive()
    ours.close()
