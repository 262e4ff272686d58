"""Adapters over the API: listed, chosen by ``model``, loaded and unloaded as vLLM's clients do."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.api.llm import LLM
from paceline.cli.settings import named_folders
from paceline.core.errors import ConfigError, ModelLoadError, NoAdapterError, UnknownAdapterError
from paceline.server.engine_process.client import EngineClient
from tests.adapters import adapter_folder, adapter_tensors
from tests.paths import impossible_paths
from tests.server import factories
from tests.server.asgi import application, call, complete, engine_of, post, refused, streamed
from tests.server.chats import chat_tokenizer
from tests.server.fakes import FakeEngine
from tests.server.live import Eager, Server, run, until
from tests.toy import toy_folder, toy_tensors

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Engine(FakeEngine):
    """Loads adapters of any folder but two."""

    async def load_adapter(self, name: str, folder: str, replaces: bool = False) -> None:
        if folder.endswith("nowhere"):
            raise NoAdapterError("there is no adapter at nowhere")
        if folder.endswith("damaged"):
            raise ModelLoadError("damaged is no adapter")
        self.adapters[name] = folder

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[name]


def served(**config: Any) -> FastAPI:
    config = {"allow_runtime_lora_updating": True, "served_model_names": ("base",)} | config
    engine = Engine(adapters={"sql": "there"}, tokenizer=chat_tokenizer())
    return application(engine, **config)


def test_adapters_are_listed_below_their_model() -> None:
    app = served()
    cards = call(app, "GET", "/v1/models").json()["data"]
    told = [(card["id"], card["root"], card["parent"]) for card in cards]
    assert told == [("base", "fake", None), ("sql", "there", "base")]
    assert call(app, "GET", "/v1/models/sql").json() == cards[1]


def test_a_request_chooses_by_model() -> None:
    app = served()
    assert complete(app, model="sql")["model"] == "sql"
    complete(app, model="base")
    complete(app)
    assert streamed(app, model="sql")[0]["model"] == "sql"
    message = [{"role": "user", "content": "Hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": message}),
        ("/v1/messages", {"messages": message, "max_tokens": 4}),
        ("/v1/responses", {"input": "Hi"}),
        ("/api/chat", {"messages": message, "stream": False}),
        ("/api/generate", {"prompt": "Hi", "stream": False}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/api/embed", {"input": "Hi"}),
    ):
        answer = post(app, path, {"model": "sql", **body})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "sql"
    post(app, "/api/chat", {"model": "sql:latest", "messages": message, "stream": False})
    chosen = [each.adapter for each in engine_of(app).calls]
    assert chosen == ["sql", None, None, *["sql"] * 9]


def test_adapters_come_and_go() -> None:
    app = served()
    body = {"lora_name": "new", "lora_path": "there"}
    answer = post(app, LOAD, body)
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'new' added successfully."
    complete(app, model="new")
    assert "name of a model or an adapter" in refused(app, LOAD, body)["message"]
    assert post(app, LOAD, {**body, "load_inplace": True}).status_code == 200
    answer = post(app, UNLOAD, {"lora_name": "new", "lora_int_id": 3})
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'new' removed successfully."
    error = refused(app, UNLOAD, {"lora_name": "new"}, 404)
    assert (error["type"], error["param"]) == ("not_found_error", "lora_name")
    error = refused(app, "/v1/completions", {"model": "new", "prompt": "Hi"}, 404)
    assert error["code"] == "model_not_found"
    assert error["message"].endswith("available: base, sql")


def test_a_folder_is_found_again_wherever_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    app = served()
    for name, path in (("home", "~/one"), ("here", "two")):
        assert post(app, LOAD, {"lora_name": name, "lora_path": path}).status_code == 200
    known = engine_of(app).adapters
    assert (known["home"], known["here"]) == (str(tmp_path / "one"), str(tmp_path / "two"))


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"lora_name": "new", "lora_path": "nowhere"}, 404, "lora_path"),
        ({"lora_name": "new", "lora_path": "damaged"}, 400, "lora_path"),
        ({"lora_name": "base", "lora_path": "there"}, 400, "lora_name"),
        ({"lora_name": "base", "lora_path": "there", "load_inplace": True}, 400, "lora_name"),
        ({"lora_name": "sql", "lora_path": "there"}, 400, "lora_name"),
        ({"lora_name": "", "lora_path": "there"}, 400, "lora_name"),
        ({"lora_path": "there"}, 400, "lora_name"),
        ({"lora_name": "new"}, 400, "lora_path"),
        ({"lora_name": "new", "lora_path": "there", "model": "none"}, 404, "model"),
    ],
)
def test_what_cannot_be_loaded_is_refused(body: dict[str, Any], status: int, param: str) -> None:
    app = served()
    assert refused(app, LOAD, body, status)["param"] == param
    assert engine_of(app).adapters == {"sql": "there"}


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_requests_change_nothing_unless_they_may(path: str) -> None:
    app = served(allow_runtime_lora_updating=False)
    error = refused(app, path, {"lora_name": "sql", "lora_path": "there"}, 403)
    assert error["code"] == "lora_updating_not_allowed"
    assert "--allow-runtime-lora-updating" in error["message"]
    assert engine_of(app).adapters == {"sql": "there"}


def test_an_adapter_that_went_while_a_request_came_is_not_found() -> None:
    engine = Engine(adapters={"sql": "there"}, error_at=(1, UnknownAdapterError("it is gone")))
    error = refused(application(engine), "/v1/completions", {"model": "sql", "prompt": "Hi"}, 404)
    assert error["code"] == "model_not_found"


def test_adapters_of_the_command_line_are_named() -> None:
    assert named_folders(["a=/x", "b=/y=z"]) == {"a": "/x", "b": "/y=z"}
    for given in (["/x"], ["=/x"], ["a="], ["a=/x", "a=/y"]):
        with pytest.raises(ConfigError, match="--lora"):
            named_folders(given)


# --- an engine in a process of its own ------------------------------------------------------------


def toy(folder: str, lora: dict[str, str] | None = None) -> LLM:
    """The toy in the engine's process."""
    return LLM(folder, lora=lora, max_num_seqs=4, speculative_config={"method": "suffix"})


def test_a_real_engine_loads_unloads_and_starts_again_with_adapters(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    model = str(toy_folder(tmp_path / "toy"))
    one, two = (
        str(adapter_folder(tmp_path / str(seed), adapter_tensors(toy_tensors(), seed)))
        for seed in (1, 2)
    )

    async def said(server: Server, name: str) -> str:
        wish = {"model": name, "prompt": [7, 8, 9], "return_token_ids": True, **GREEDY}
        answer = await server.post("/v1/completions", **wish)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["token_ids"])

    async def story() -> None:
        client = EngineClient(partial(toy, model), adapters={"one": one}, restarts=Eager())
        await client.start()
        try:
            config = {"served_model_names": ("base",), "allow_runtime_lora_updating": True}
            server = Server(client, **config)
            loading = await server.post(LOAD, lora_name="two", lora_path=two)
            assert loading.status_code == 200, loading.text
            before = [await said(server, name) for name in ("base", "one", "two")]
            assert len(set(before)) == 3
            together = await asyncio.gather(
                *(said(server, name) for name in ("two", "base", "one"))
            )
            assert [together[i] for i in (1, 2, 0)] == before
            await check_refusals(server, model)
            Path(two).rename(tmp_path / "elsewhere")
            server.signal(signal.SIGKILL)
            await until(lambda: client.num_restarts == 1 and client.state == "ready")
            assert [await said(server, name) for name in ("base", "one")] == before[:2]
            gone = await server.post("/v1/completions", model="two", prompt=[7])
            assert gone.status_code == 404
            long = server.ask(model="one", max_tokens=200, ignore_eos=True)
            await long.until(lambda: "data: " in long.text)
            assert (await server.post(UNLOAD, lora_name="one")).status_code == 200
            late = await server.post("/v1/completions", model="one", prompt=[7])
            assert late.status_code == 404
            await long.task
            assert '"finish_reason":"length"' in long.text
        finally:
            await client.close()

    async def check_refusals(server: Server, model: str) -> None:
        answers: list[httpx.Response] = [
            await server.post(LOAD, lora_name="bad", lora_path=folder)
            for folder in (str(tmp_path / "none"), model)
        ]
        assert [each.status_code for each in answers] == [404, 404]
        for path in impossible_paths(tmp_path).values():
            answer = await server.post(LOAD, lora_name="bad", lora_path=path)
            error = answer.json()["error"]
            assert answer.status_code in (400, 404), error
            assert error["param"] == "lora_path"
        wrong = adapter_tensors(toy_tensors(), rank=2)
        folder = adapter_folder(tmp_path / "wrong", wrong)
        answer = await server.post(LOAD, lora_name="bad", lora_path=str(folder))
        assert answer.status_code == 400
        assert "has shape" in answer.json()["error"]["message"]

    run(story())


def test_an_engine_comes_back_with_the_adapters_that_are_still_there(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    one, two = map(str, folders)
    adapters = {"one": one, "two": two}

    async def story() -> None:
        factory = partial(factories.adapted, str(tmp_path))
        missing = EngineClient(factory, adapters={**adapters, "three": str(tmp_path / "three")})
        with pytest.raises(NoAdapterError):  # which the first start tells
            await missing.start()
        client = EngineClient(factory, adapters=adapters)
        (tmp_path / "go").touch()
        await client.start()
        await client.close()  # as a model is that nobody has used for long
        folders[1].rmdir()
        await client.start()
        assert client.adapters == {"one": one}
        await client.close()

    run(story())


def test_an_adapter_is_unloaded_while_no_engine_lives(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = str(tmp_path / "one")

    async def story() -> None:
        factory = partial(factories.adapted, str(tmp_path))
        client = EngineClient(factory, adapters={"one": one}, restarts=Eager())
        await client.start()
        try:
            server = Server(client, allow_runtime_lora_updating=True)
            assert (
                await server.post("/api/generate", keep_alive=0, model="paper")
            ).status_code == 200
            await until(lambda: client.state == "closed")
            assert (await server.post(UNLOAD, lora_name="one")).status_code == 200
            assert (await server.post(UNLOAD, lora_name="one")).status_code == 404
            (tmp_path / "go").touch()
            assert (await server.post(LOAD, lora_name="one", lora_path=one)).status_code == 200
            (tmp_path / "go").unlink()
            (tmp_path / "waits").unlink()
            server.signal(signal.SIGKILL)
            await until((tmp_path / "waits").exists)  # with what it was to load
            assert (await server.post(UNLOAD, lora_name="one")).status_code == 200
            (tmp_path / "go").touch()
            await until(lambda: client.state == "ready")
            assert (await server.post(LOAD, lora_name="one", lora_path=one)).status_code == 200
        finally:
            await client.close()

    run(story())


def test_an_engine_that_cannot_load_an_adapter_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    with pytest.raises(NoAdapterError):
        LLM(str(toy_folder(tmp_path / "toy")), lora={"one": tmp_path}, speculative_config=[])
