"""Clients that people have, each in an environment of its own: ``make clients`` makes it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.server.page.browser import open_browser
from tests.server.served import KEY, NAME, chat_model, served

FOLDER = REPOSITORY / ".clients"
PYTHON = FOLDER / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not PYTHON.exists(), reason="the clients are not installed; `make clients` does that"
    ),
]


def report(script: str, *arguments: str, python: Path = PYTHON) -> dict[str, Any]:
    """The last line that a script beside this file prints."""
    path = Path(__file__).with_name(script)
    command: list[str | Path] = [python, path]
    if path.suffix == ".mjs":  # packages are looked for from where the script lies
        command = ["node", shutil.copy(path, FOLDER / "node")]
    settings = {n: v for n, v in os.environ.items() if not n.startswith(("OPENAI_", "PYTHON"))}
    settings["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network first
    done = subprocess.run(
        [*command, *arguments], env=settings, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model"))


def total(usage: Any) -> int:
    return sum(usage) if isinstance(usage, list) else usage["total_tokens"]


@pytest.mark.parametrize("script", ["langchain_chat.py", "litellm_chat.py"])
def test_a_client(script: str, model: Path) -> None:
    with served(model) as url:
        drafted = report(script, url, KEY, NAME)
    with served(model, speculation=("--no-speculation",)) as url:
        assert report(script, url, KEY, NAME) == drafted
    assert drafted["streamed"] == drafted["answer"]
    assert total(drafted["streamed_usage"]) == total(drafted["usage"]) > 24
    assert drafted["finish"] == "length"
    assert drafted["num_logprobs"] == 24
    assert drafted["call"] == drafted["streamed_call"]
    name, arguments = drafted["call"]
    assert name == "weather"
    assert arguments["city"] in ("Rome", "Oslo")
    if "errors" in drafted:
        assert drafted["again"]
        assert drafted["streamed_text"] == drafted["text"] != ""
        kinds = ["BadRequestError", "ContextWindowExceededError", "AuthenticationError"]
        assert drafted["errors"] == [*kinds, "NotFoundError"]
    else:
        assert drafted["batch"][:2] == [drafted["answer"]] * 2
        assert {person["kind"] for person in drafted["person"].values()} <= {"reader", "writer"}


SAME_WORDS = [
    "openai_chat.py",
    "instructor_person.py",
    "pydantic_ai_agent.py",
    "langchain_responses.py",
    "llama_index_chat.py",
    "litellm_proxy.py",
    "dspy_predict.py",
    "llm_program.py",
    "mcp_agent.py",
    "openai_node.mjs",
    "ai_sdk.mjs",
]
ASK = """
const [url, key, model, done] = arguments;
client.ask(url, key, model).then(done, (error) => done({ error: error.message }));
"""
ANY_OF = {"kind": ("reader", "writer"), "city": ("Rome", "Oslo")}


def test_clients_that_ask_for_the_same_words(model: Path) -> None:
    """Whole or streamed, by chats or responses: they get the same, with speculation and without."""
    with served(model) as url:
        drafted = {script: report(script, url, KEY, NAME) for script in SAME_WORDS}
    with served(model, speculation=("--no-speculation",)) as url:
        assert {script: report(script, url, KEY, NAME) for script in SAME_WORDS} == drafted
    texts = {told.get(name) for told in drafted.values() for name in ("text", "streamed")}
    by_responses = {told["by_responses"] for told in drafted.values() if "by_responses" in told}
    (text,) = (texts | by_responses) - {None}
    assert len(text) > 60
    for told in drafted.values():
        assert set(told) & {"text", *ANY_OF}
        assert all(told[name] in ANY_OF[name] for name in ANY_OF if name in told)
    assert drafted["openai_chat.py"]["embeddings_are_equal"]
    assert drafted["openai_chat.py"]["has_after"]
    rains = f"It rains in {drafted['mcp_agent.py']['city']}."
    assert drafted["mcp_agent.py"]["result"] == rains
    assert drafted["openai_node.mjs"]["num_vectors"] == 2
    assert drafted["llama_index_chat.py"]["num_vectors"] == 2


def test_the_openai_package_in_a_browser(model: Path, tmp_path: Path) -> None:
    """From a page of another origin, which the server was told of; it gets the words of Node."""
    script = shutil.copy(Path(__file__).with_name("openai_node.mjs"), FOLDER / "node")
    (tmp_path / "index.html").write_text('<script src="client.js"></script>')
    bundler = FOLDER / "node" / "node_modules" / ".bin" / "esbuild"
    options = ("--bundle", "--format=iife", "--global-name=client", "--log-level=error")
    # A script has no await outside of functions; the one of Node is dropped with what it is for.
    dropped = ("--define:process=undefined", "--minify-syntax")
    subprocess.run(
        [bundler, script, *options, *dropped, f"--outfile={tmp_path / 'client.js'}"], check=True
    )
    with serving(tmp_path) as origin, served(model, "--allowed-origins", origin) as url:
        by_node = report("openai_node.mjs", url, KEY, NAME)
        with open_browser() as browser:
            browser.set_script_timeout(60)
            browser.get(origin)
            told = browser.execute_async_script(ASK, url, KEY, NAME)
            browser.get(origin.replace("127.0.0.1", "localhost"))  # an origin it was not told of
            refused = browser.execute_async_script(ASK, url, KEY, NAME)
    assert told == by_node
    assert refused == {"error": "Connection error."}


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The origin of a web server of a folder's files."""
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_aider(model: Path) -> None:
    python = FOLDER / "aider" / "bin" / "python"
    with served(model) as url:
        drafted = report("aider_message.py", url, KEY, NAME, python=python)
    with served(model, speculation=("--no-speculation",)) as url:
        assert report("aider_message.py", url, KEY, NAME, python=python) == drafted
    assert drafted["text"] == drafted["streamed"] != ""


def test_a_benchmark_of_others(model: Path) -> None:
    python = FOLDER / "guidellm" / "bin" / "python"
    with served(model) as url:
        told = report("guidellm_run.py", url, KEY, NAME, str(model), python=python)
    assert told == {"successful": 4, "errored": 0, "output_tokens": [8] * 4}


def test_anthropics_own_client(model: Path) -> None:
    with served(model) as url:
        drafted = report("anthropic_messages.py", url, KEY, NAME)
    with served(model, speculation=("--no-speculation",)) as url:
        assert report("anthropic_messages.py", url, KEY, NAME) == drafted
    assert drafted["text"] == drafted["streamed"] == drafted["later"] != ""
    assert drafted["usage_is_the_same"]
    assert drafted["stop_reason"] == "max_tokens"
    assert drafted["input"]["city"] in ("Rome", "Oslo")
    assert drafted["count"] == drafted["input_tokens"]
    assert drafted["refusals"] == [
        ["NotFoundError", 404, "not_found_error"],
        ["BadRequestError", 400, "invalid_request_error"],
        ["AuthenticationError", 401, "authentication_error"],
        ["ContentTooLargeError", 413, "request_too_large"],
    ]


def test_ollamas_own_client(model: Path) -> None:
    with served(model) as url:
        drafted = report("ollama_chat.py", url, KEY, NAME)
    with served(model, speculation=("--no-speculation",)) as url:
        assert report("ollama_chat.py", url, KEY, NAME) == drafted
    assert drafted["text"] == drafted["streamed"] == drafted["later"] == drafted["chat"] != ""
    assert drafted["raw"] == drafted["raw_streamed"] == drafted["completion"] != ""
    assert drafted["embeddings"] == drafted["vectors"] != []
    assert drafted["done"] == [True, "length", 24]
    assert drafted["prompt_tokens"] == drafted["chat_prompt_tokens"]
    assert drafted["city"] in ("Rome", "Oslo")
    assert drafted["after"] == "assistant"
    assert drafted["listed"] == drafted["running"] == [f"{NAME}:latest"]
    assert drafted["shown"] == ["completion", "tools"]
    assert drafted["refusals"] == [404, 400, 413, 401]


def test_openais_own_client_for_responses(model: Path) -> None:
    with served(model) as url:
        drafted = report("openai_responses.py", url, KEY, NAME)
    with served(model, speculation=("--no-speculation",)) as url:
        assert report("openai_responses.py", url, KEY, NAME) == drafted
    assert drafted["texts"] == [drafted["text"]] * 3
    assert drafted["text"] == drafted["later"] != ""
    assert drafted["events"] == ["response.created", "response.incomplete"]
    assert drafted["numbers_count_up"]
    assert drafted["usage_is_the_same"]
    assert drafted["reason"] == "max_output_tokens"
    assert drafted["called"] == ["function_call", "weather", "completed"]
    assert drafted["arguments"]["city"] in ("Rome", "Oslo")
    assert drafted["after_is_the_same"]
    assert drafted["kept"]
    assert drafted["listed"] == ["function_call_output"]
    assert len(set(drafted["persons"])) == 1
    assert drafted["refusals"] == [
        ["NotFoundError", "model"],
        ["BadRequestError", "previous_response_id"],
        ["BadRequestError", "max_output_tokens"],
    ]


def test_an_evaluation_harness_scores_as_with_transformers(model: Path) -> None:
    with served(model, "--dtype", "float32") as url:
        scores = report("lm_eval_scores.py", url, KEY, NAME, str(model))
    ours, theirs = scores["served"], scores["transformers"]
    assert scores["remote"] == ours  # with the server's own tokenizer
    assert (ours["acc"], ours["acc_norm"]) == (theirs["acc"], theirs["acc_norm"])
    assert ours["is_greedy"] == theirs["is_greedy"]
    assert 0.5 < ours["acc"] <= 1
    for own, other in zip(ours["loglikelihoods"], theirs["loglikelihoods"], strict=True):
        assert own == pytest.approx(other, abs=2e-3)
