"""The server's description of itself, held against its answers by ``schemathesis``.

What it sends is drawn from the document: bodies that the document allows, and bodies that it does
not. An answer must be of a status, type and shape that the document names.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.server.served import KEY, chat_model, served

PROGRAM = REPOSITORY / ".clients" / "bin" / "schemathesis"
EXAMPLES = 30
# A schema cannot say how long a text is in tokens, nor which fields go together: bodies that it
# allows are refused for that, rightly. The router's Allow header names the methods of the first
# endpoint alone that has the path. Every other check of the program is made.
NOT_CHECKED = "positive_data_acceptance,unsupported_method"
# Of the bodies that these do not allow, the program lists so many that it runs out of memory before
# the first is sent; it draws some instead.
MANY = ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/input_tokens")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lists_all", [True, False])
@pytest.mark.skipif(
    not PROGRAM.exists(), reason="schemathesis is not installed; `make clients` does that"
)
def test_answers_are_what_the_document_says(tmp_path: Path, lists_all: bool) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    chosen = [word for path in MANY for word in ("--exclude-path", path)]
    if not lists_all:
        chosen = [word for path in MANY for word in ("--include-path", path)]
        chosen += ["--phases", "fuzzing"]
    with served(chat_model(folder), "--max-model-len", "128") as url:
        command = [PROGRAM, "run", f"{url}/openapi.json", "-H", f"Authorization: Bearer {KEY}"]
        command += ["--checks", "all", "--exclude-checks", NOT_CHECKED, "--warnings", "off"]
        command += ["--max-examples", str(EXAMPLES), "--seed", "1", "--request-timeout", "60"]
        command += ["--no-shrink", "--continue-on-failure", "--suppress-health-check", "all"]
        command += chosen
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Failures" not in done.stdout
