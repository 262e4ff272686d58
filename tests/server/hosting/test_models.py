"""Several models behind one address, each with an engine in a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.core.errors import ConfigError
from paceline.server.app import create_app
from paceline.server.engine_process.client import EngineClient
from paceline.server.hosting.models import Offer
from paceline.server.http import sse
from paceline.server.http.config import ServerConfig
from tests.server import factories
from tests.server.asgi import events
from tests.server.fakes import FakeEngine
from tests.server.live import Eager, Server, opened, run, until

TWO = {"b": factories.paper}
BODY: Mapping[str, Any] = {"prompt": [7], "max_tokens": 4}
COMPLETIONS, GENERATE = "/v1/completions", "/api/generate"


async def complete(server: Server, model: str, status: int = 200) -> Any:
    response = await server.post(COMPLETIONS, model=model, **BODY)
    assert response.status_code == status, response.text
    return response.json()


async def states(server: Server) -> dict[str, str]:
    listed = (await server.get("/v1/models")).json()["data"]
    return {card["id"]: card["state"] for card in listed}


async def loaded(server: Server) -> list[str]:
    return [each["name"] for each in (await server.get("/api/ps")).json()["models"]]


def test_a_model_is_loaded_when_a_request_asks_for_it() -> None:
    async def story() -> None:
        async with opened(others=TWO, served_model_names=("a",)) as server:
            assert await states(server) == {"a": "ready", "b": "unloaded"}
            assert [each["name"] for each in (await server.get("/api/tags")).json()["models"]] == [
                "a:latest",
                "b:latest",
            ]
            card = (await server.get("/v1/models/b")).json()
            assert (card["max_model_len"], card["proposers"], card["root"]) == (None, None, "b")
            answers = await asyncio.gather(*(complete(server, name) for name in "abbab"))
            assert [each["model"] for each in answers] == [*"abbab"]
            assert {each["choices"][0]["text"] for each in answers} == {"xxxx"}
            assert await states(server) == {"a": "ready", "b": "ready"}
            assert (await server.get("/v1/models/b")).json()["backend"] == "paper"
            told = await complete(server, "c", 404)
            assert told["error"]["code"] == "model_not_found"
            assert told["error"]["message"].endswith("available: a, b")

    run(story())


def test_a_stream_is_kept_alive_while_its_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.server.hosting.answering.KEEP_ALIVE_SECONDS", 0.01)
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.01)
    (tmp_path / "built").touch()  # so that it waits for a file

    async def story() -> None:
        others = {"b": partial(factories.again, str(tmp_path))}
        async with opened(others=others, served_model_names=("a",)) as server:
            stream = server.ask(model="b")
            await stream.until(lambda: ": keep-alive" in stream.text)
            await complete(server, "a")  # others go on
            assert (await states(server))["b"] == "loading"
            assert (await server.get("/health")).status_code == 200
            (tmp_path / "go").touch()
            await stream.task
            assert stream.status == 200
            told = events(stream.text.replace(sse.KEEP_ALIVE.decode(), ""))
            assert "".join(each["choices"][0]["text"] for each in told) == "xxxx"

    run(story())


def test_a_model_makes_room_for_another_when_its_requests_have_ended() -> None:
    async def story() -> None:
        names = {"served_model_names": ("a",), "max_loaded_models": 1}
        async with opened(others=TWO, **names) as server:
            stream = server.ask(model="a", max_tokens=400)
            await stream.until(lambda: "data: " in stream.text)
            other = asyncio.create_task(complete(server, "b"))
            await until(lambda: server.models.first.resident.place == "leaving")
            assert await loaded(server) == ["a:latest"]
            await stream.task
            assert len(events(stream.text)) > 1
            assert stream.text.count('"finish_reason":"length"') == 1
            await other
            assert await loaded(server) == ["b:latest"]
            await complete(server, "a")
            assert await loaded(server) == ["a:latest"]

    run(story())


def test_a_model_that_does_not_fit_is_refused_with_the_figures() -> None:
    async def story() -> None:
        async with opened(
            others=TWO, served_model_names=("a",), memory_budget=float(1 << 40)
        ) as server:
            server.models.find("b").size = 1 << 41
            error = (await complete(server, "b", 400))["error"]
            assert (error["code"], error["param"]) == ("model_too_large", "model")
            assert "needs 2048.00 GiB" in error["message"]
            assert "may have 1024.00 GiB" in error["message"]
            server.models.find("b").size = 0
            await complete(server, "b")
            assert server.models.find("b").size > 1 << 20  # what its process takes

    run(story())


def test_a_model_that_does_not_load_is_an_error_and_harms_no_other() -> None:
    async def story() -> None:
        others = {"b": factories.unreadable, "c": factories.stillborn}
        async with opened(others=others, served_model_names=("a",)) as server:
            stream = server.ask(model="a", max_tokens=400)
            for model, why in (("b", "there is no such model"), ("c", "its process was ended")):
                error = (await complete(server, model, 500))["error"]
                assert (error["code"], error["param"]) == ("model_load_failed", "model")
                assert why in error["message"]
                told = await server.post(GENERATE, model=model)
                assert (told.status_code, why in told.json()["error"]) == (500, True)
            await stream.task
            assert stream.text.endswith("data: [DONE]\n\n")
            assert await states(server) == {"a": "ready", "b": "unloaded", "c": "unloaded"}

    run(story())


def test_a_killed_engine_is_brought_back_and_the_other_goes_on() -> None:
    async def story() -> None:
        async with opened(others=TWO, served_model_names=("a",)) as server:
            await complete(server, "b")
            mine, other = server.ask(model="a", max_tokens=4000), server.ask(model="b")
            await mine.until(lambda: "data: " in mine.text)
            server.signal(signal.SIGKILL)
            await asyncio.gather(mine.task, other.task)
            assert '"code":"engine_dead"' in mine.text
            assert "error" not in other.text
            await complete(server, "b")
            await until(lambda: server.client.state == "ready")
            await complete(server, "a")
            assert (await server.get("/health")).status_code == 200

    run(story())


def test_an_engine_that_is_not_started_again_is_loaded_by_the_next_request() -> None:
    async def story() -> None:
        async with opened(restarts=Eager(0), others=TWO, served_model_names=("a",)) as server:
            server.signal(signal.SIGKILL)
            await until(lambda: server.client.state == "failed")
            assert not server.models.failure  # the other model goes on
            await complete(server, "a")
            await complete(server, "b")

    run(story())


def test_ollamas_keep_alive_says_how_long_a_model_stays() -> None:
    async def story() -> None:
        async with opened(others=TWO, served_model_names=("a",)) as server:
            told = (await server.post(GENERATE, model="b", keep_alive="5m")).json()
            assert (told["done"], told["done_reason"]) == (True, "load")
            first, other = (await server.get("/api/ps")).json()["models"]
            assert (first["name"], other["name"]) == ("a:latest", "b:latest")
            assert first["expires_at"].startswith("2300")
            assert not other["expires_at"].startswith("2300")
            found = server.models.find("b")
            assert other["reserved"] == found.size > 0
            assert other["size"] >= found.num_bytes
            await server.post(GENERATE, model="a", keep_alive="9999999999h")
            again = (await server.get("/api/ps")).json()["models"][0]
            assert {**again, "size": first["size"]} == first  # the system's figure may have grown
            for path in (GENERATE, "/api/chat", "/api/embed", "/api/embeddings"):
                for forever in (-1, "-1", "-1s"):
                    told = await server.post(path, model="b", keep_alive=forever)
                    assert told.status_code == 200, told.text
                other = (await server.get("/api/ps")).json()["models"][1]
                assert other["expires_at"].startswith("2300")
            told = (await server.post(GENERATE, model="b", keep_alive=0)).json()
            assert (told["response"], told["done_reason"]) == ("", "unload")
            assert await loaded(server) == ["a:latest"]
            await server.post("/api/chat", model="b", keep_alive=0.05)
            await until(lambda: server.models.find("b").resident.place == "unloaded")
            for wrong in ("soon", "5 parsecs", [1]):
                response = await server.post(GENERATE, model="b", keep_alive=wrong)
                assert response.status_code == 400
                assert "keep_alive" in response.text or "is not a duration" in response.text

    run(story())


def test_the_only_model_can_be_unloaded_and_comes_back() -> None:
    async def story() -> None:
        async with opened() as server:
            assert (await server.post(GENERATE, model="paper", keep_alive=0)).status_code == 200
            assert await loaded(server) == []
            assert (await server.get("/health")).status_code == 200
            await server.works()
            assert await loaded(server) == ["paper:latest"]

    run(story())


def test_metrics_are_by_model_and_do_not_fall_when_one_is_unloaded() -> None:
    async def prompt_tokens(server: Server) -> dict[str, float]:
        text = (await server.get("/metrics")).text
        return {
            sample.labels["model_name"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "paceline:request_success_total"
            and sample.labels["finished_reason"] == "length"
        }

    async def story() -> None:
        names = {"served_model_names": ("a",), "max_loaded_models": 1}
        async with opened(others=TWO, **names) as server:
            for name in "abba":
                await complete(server, name)
            assert await prompt_tokens(server) == {"a": 2, "b": 2}
            text = (await server.get("/metrics")).text
            assert 'paceline:engine_up{model_name="a"} 1.0' in text
            assert 'paceline:engine_up{model_name="b"} 0.0' in text
            assert (await server.get("/stats?model=b")).json()["state"] == "unloaded"

    run(story())


def test_a_draining_server_loads_nothing() -> None:
    async def story() -> None:
        async with opened(others=TWO, served_model_names=("a",)) as server:
            server.models.drain()
            for path in ("/health", "/props?model=b"):
                assert (await server.get(path)).status_code == 503
            await complete(server, "b", 503)
            assert server.models.find("b").resident.place == "unloaded"

    run(story())


def test_a_name_belongs_to_the_model_that_was_named_first() -> None:
    engine = FakeEngine(state="ready")
    others = [Offer(FakeEngine(), ("x", "/two/x"))]  # type: ignore[arg-type]
    config = ServerConfig(served_model_names=("x", "/one/x"))
    models = create_app(engine, config, others).state.models  # type: ignore[arg-type]
    assert models.names == ("x", "/one/x", "/two/x")
    assert models.find("x:latest") is models.first
    with pytest.raises(ConfigError, match="two models are named 'x'"):
        create_app(engine, config, [Offer(FakeEngine(), ("x",))])  # type: ignore[arg-type]


def test_clients_that_leave_while_a_model_loads_hold_no_places(tmp_path: Path) -> None:
    (tmp_path / "built").touch()

    async def story() -> None:
        others = {"b": partial(factories.again, str(tmp_path))}
        async with opened(others=others, served_model_names=("a",)) as server:
            call = server.ask(stream=False, model="b")
            await until(lambda: server.models.num_unfinished == 1)
            call.leaves.set()
            await until(lambda: server.models.num_unfinished == 0)
            (tmp_path / "go").touch()
            await complete(server, "b")

    run(story())


def test_a_model_that_comes_too_late_is_a_timeout(tmp_path: Path) -> None:
    (tmp_path / "built").touch()

    async def story() -> None:
        others = {"b": partial(factories.again, str(tmp_path))}
        async with opened(others=others, request_timeout=0.2) as server:
            assert (await complete(server, "b", 504))["error"]["code"] == "request_timeout"
            error = json.loads((await server.post(GENERATE, model="b")).text)["error"]
            assert "took longer" in error

    run(story())


def test_an_engine_can_be_started_again_after_it_was_closed() -> None:
    async def story() -> None:
        client = EngineClient(factories.paper)
        for _ in range(2):
            await client.start()
            assert client.state == "ready"
            assert (await client.stats()).num_running == 0
            await client.close()
            assert (client.state, client.pid) == ("closed", None)

    run(story())
