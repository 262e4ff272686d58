"""The id of a request: a client's own, or one that it gets."""

from __future__ import annotations

import pytest

from tests.server.asgi import application, call
from tests.server.fakes import FakeEngine

PATH = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 2}


@pytest.mark.parametrize("name", ["a", "req_123", "A.b:c/d+e=f@g-h", "x" * 128])
@pytest.mark.parametrize("stream", [False, True])
def test_a_plain_id_comes_back(name: str, stream: bool) -> None:
    body = {**BODY, "stream": stream}
    response = call(application(), "POST", PATH, json=body, headers={"x-request-id": name})
    assert response.headers["x-request-id"] == name


@pytest.mark.parametrize("name", [None, "", "x" * 129, "a b", "a\u00e9", "a\tb", "<script>", 'a"b'])
def test_any_other_request_gets_one_of_its_own(name: str | None) -> None:
    app = application()
    headers = {} if name is None else {"x-request-id": name.encode("latin-1")}
    answers = [call(app, "POST", PATH, json=BODY, headers=headers) for _ in range(2)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert all(each.startswith("req_") for each in ids)


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/completions", 401), ("/nowhere", 401), ("/health", 200)]
)
def test_refusals_have_one_too(path: str, status: int) -> None:
    app = application(api_keys=("key",))
    response = call(app, "GET", path, headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (status, "mine")


def test_an_unexpected_failure_is_found_in_the_log_by_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = application(FakeEngine(error_at=(2, ValueError("a secret"))))
    headers = {"x-request-id": "mine"}
    response = call(app, "POST", PATH, json=BODY | {"max_tokens": 9}, headers=headers)
    assert response.status_code == 500
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert "request mine failed unexpectedly" in caplog.text
