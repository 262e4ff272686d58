"""``/v1/embeddings`` and Ollama's ``/api/embed``: bodies, batches, formats, errors."""

from __future__ import annotations

import base64
import math
import struct
from dataclasses import replace
from typing import Any

import openai
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from paceline.core.errors import ConfigError
from paceline.server.http.config import ServerConfig
from paceline.text.tokenizer import Tokenizer
from tests.server.chats import ChatServer, chat_tokenizer
from tests.server.served import KEY, NAME

PATH = "/v1/embeddings"
TEXTS = ["Once upon a time", "def add(a, b):", "Rain."]


def post(server: ChatServer, path: str = PATH, status: int = 200, **fields: Any) -> Any:
    response = server.http.post(path, json=fields)
    assert response.status_code == status, response.text
    return response.json()


def unpacked(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def wanted(server: ChatServer, token_ids: list[int], pooling: str = "mean") -> list[float]:
    return unpacked(server.engine.embedding_of(token_ids, pooling))


def encoded(server: ChatServer, text: str) -> list[int]:
    assert server.engine.tokenizer is not None
    return server.engine.tokenizer.encode(text)


def test_every_kind_of_input() -> None:
    server = ChatServer()
    ids = [encoded(server, text) for text in TEXTS]
    for given, found in ((TEXTS[0], ids[:1]), (TEXTS, ids), (ids[0], ids[:1]), (ids, ids)):
        told = post(server, input=given)
        assert told["object"] == "list"
        assert told["model"] == "fake"
        assert [each["index"] for each in told["data"]] == [*range(len(found))]
        assert [each["embedding"] for each in told["data"]] == [wanted(server, i) for i in found]
        count = sum(map(len, found))
        assert told["usage"] == {"prompt_tokens": count, "total_tokens": count}
    call = server.engine.calls[-1]
    assert (call.params.pooling, call.params.max_tokens) == ("mean", 1)


def test_a_long_list_goes_in_batches_in_its_order() -> None:
    server = ChatServer(max_queue=0)  # eight places
    ids = [[i + 1] * (i + 1) for i in range(30)]
    told = post(server, input=ids)
    assert [each["embedding"] for each in told["data"]] == [wanted(server, i) for i in ids]
    assert [call.token_ids for call in server.engine.calls] == ids


def test_formats_and_dimensions() -> None:
    server = ChatServer()
    plain = post(server, input="Rain.")["data"][0]["embedding"]
    packed = post(server, input="Rain.", encoding_format="base64")["data"][0]["embedding"]
    assert unpacked(base64.b64decode(packed)) == plain
    short = post(server, input="Rain.", dimensions=3)["data"][0]["embedding"]
    assert len(short) == 3
    assert math.hypot(*short) == pytest.approx(1)
    length = math.hypot(*plain[:3])
    assert short == pytest.approx([each / length for each in plain[:3]])


def test_pooling_is_the_requests_or_the_servers() -> None:
    server, other = ChatServer(), ChatServer(pooling="last")
    ids = encoded(server, TEXTS[0])
    for asked, fields, kind in (
        (server, {}, "mean"),
        (other, {}, "last"),
        (server, {"pooling": "last"}, "last"),
    ):
        found = post(asked, input=TEXTS[0], **fields)["data"][0]["embedding"]
        assert found == wanted(server, ids, kind)
    with pytest.raises(ConfigError, match="pooling is 'rank'; allowed: mean, last"):
        ServerConfig(pooling="rank")


def test_pooling_is_otherwise_the_models() -> None:
    server, other = ChatServer(), ChatServer(pooling="mean")
    for each, kind in ((server, "last"), (other, "mean")):
        each.engine.info = replace(each.engine.info, pooling="last")
        ids = encoded(each, TEXTS[0])
        found = post(each, input=TEXTS[0])["data"][0]["embedding"]
        assert found == wanted(each, ids, kind)
        found = post(each, "/api/embed", model="fake", input=TEXTS[0])["embeddings"][0]
        assert found == wanted(each, ids, kind)
        assert each.http.get("/v1/models").json()["data"][0]["pooling"] == kind
        shown = each.http.post("/api/show", json={"model": "fake"}).json()
        assert shown["capabilities"][:2] == ["completion", "embedding"]


def test_a_models_pooling_that_is_not_offered_is_named() -> None:
    server = ChatServer()
    server.engine.info = replace(server.engine.info, pooling="mean, then Dense")
    error = post(server, status=400, input="a")["error"]
    assert "pooling by 'mean, then Dense', which is not offered" in error["message"]
    assert "allowed: mean, last" in error["message"]
    assert post(server, input="a", pooling="mean")["data"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": "a", "dimensions": 9}, "dimensions", "the model has 8"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": []}, "input", "input has 0"),
        ({"input": [[]]}, "input", "none of them empty"),
        ({"input": {"text": "a"}}, "input", "input must be a string"),
        ({}, "input", "input is missing"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "pooling": "rank"}, "pooling", "'mean', 'last', 'cls', 'max' or 'weighted"),
        ({"input": "a", "stream": True}, "stream", "unknown field"),
        ({"input": [5] * 2048}, None, "maximum context length is 2048 tokens"),
        ({"input": "", "add_special_tokens": False}, None, "the prompt is empty"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str | None, words: str) -> None:
    server = ChatServer()
    error = post(server, status=400, **fields)["error"]
    assert words in error["message"]
    assert error["param"] == param
    assert not server.engine.calls


def test_another_model_a_key_and_a_prompt_that_is_cut() -> None:
    server = ChatServer(api_keys=("secret",))
    assert post(server, status=401, input="a")["error"]["code"] == "invalid_api_key"
    server = ChatServer()
    assert post(server, status=404, input="a", model="b")["error"]["code"] == "model_not_found"
    post(server, input=[[5, 6, 7]], truncate_prompt_tokens=2)
    assert server.engine.calls[-1].token_ids == [6, 7]


def test_ollamas_forms() -> None:
    server = ChatServer()
    ids = [encoded(server, text) for text in TEXTS]
    told = post(server, "/api/embed", model="fake:latest", input=TEXTS)
    assert told["model"] == "fake:latest"
    assert told["embeddings"] == [wanted(server, each) for each in ids]
    assert told["prompt_eval_count"] == sum(map(len, ids))
    assert told["total_duration"] > 0
    one = post(server, "/api/embed", model="fake", input=TEXTS[0], dimensions=2, keep_alive="5m")
    assert len(one["embeddings"][0]) == 2
    older = post(server, "/api/embeddings", model="fake", prompt=TEXTS[0])
    assert older == {"embedding": told["embeddings"][0]}
    assert post(server, "/api/embed", model="fake", input=[])["embeddings"] == []
    assert post(server, "/api/embeddings", model="fake", prompt="") == {"embedding": []}


def test_ollama_cuts_what_is_too_long_unless_told_not_to() -> None:
    server = ChatServer()
    text = "rain and " * 3000
    post(server, "/api/embed", model="fake", input=text)
    call = server.engine.calls[-1]
    assert call.token_ids == encoded(server, text)[:2047]
    error = post(server, "/api/embed", 400, model="fake", input=text, truncate=False)["error"]
    assert "maximum context length" in error
    assert "is not served here" in post(server, "/api/embed", 404, model="x", input="a")["error"]


def test_what_ollama_cuts_ends_as_the_model_wants() -> None:
    server, text = ChatServer(), "rain and " * 3000
    plain = encoded(server, text)
    end = chat_tokenizer().eos_token_ids[0]
    backend = tokenizers.Tokenizer.from_str(chat_tokenizer().to_json())
    backend.post_processor = TemplateProcessing(single="$A e", special_tokens=[("e", end)])
    server.engine.tokenizer = Tokenizer(backend)
    post(server, "/api/embed", model="fake", input=text)
    assert server.engine.calls[-1].token_ids == [*plain[:2046], end]
    post(server, "/api/embed", model="fake", input="rain and ")
    assert server.engine.calls[-1].token_ids == encoded(server, "rain and ")


def test_openais_client_and_a_real_engine(served_url: str) -> None:
    with openai.OpenAI(base_url=f"{served_url}/v1", api_key=KEY, max_retries=0) as client:
        together = client.embeddings.create(model=NAME, input=TEXTS)
        alone = [client.embeddings.create(model=NAME, input=text).data[0] for text in TEXTS]
        plain = client.embeddings.create(model=NAME, input=TEXTS, encoding_format="float")
    assert [each.embedding for each in together.data] == [each.embedding for each in alone]
    for one, other in zip(together.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-9)
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-6)
    assert together.usage.prompt_tokens > 3
