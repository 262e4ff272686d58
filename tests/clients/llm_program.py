"""The program ``llm``: a prompt and a schema, with the server as an extra model. Prints one JSON
line.

Runs in an environment of its own: ``python llm_program.py URL KEY MODEL``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asking import ASKED, WORDS

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["reader", "writer"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


def main(url: str, key: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        entry = {
            "model_id": "story",
            "model_name": model,
            "api_base": f"{url}/v1",
            "api_key_name": "story",
            "supports_schema": True,
        }
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([entry]))  # YAML too
        Path(folder, "keys.json").write_text(json.dumps({"story": key}))

        def run(*words: str) -> str:
            options = [word for name, value in ASKED.items() for word in ("-o", name, str(value))]
            done = subprocess.run(
                [Path(sys.executable).with_name("llm"), "-m", "story", *options, *words, WORDS],
                env={**os.environ, "LLM_USER_PATH": folder},
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.rstrip("\n")

        told = {
            "text": run("--no-stream"),
            "streamed": run(),
            "kind": json.loads(run("--no-stream", "--schema", json.dumps(SCHEMA)))["kind"],
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
