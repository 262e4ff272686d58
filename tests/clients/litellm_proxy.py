"""litellm's proxy in front of the server, asked with openai's package. Prints one JSON line.

Runs in an environment of its own: ``python litellm_proxy.py URL KEY MODEL``.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import openai
from asking import ASKED, MESSAGES, WEATHER

STARTING_SECONDS = 120
MASTER_KEY = "sk-0a1b2c3d4e5f60718293a4b5c6d7e8f9"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"the proxy does not listen; its exit code is {process.poll()}")


def main(url: str, key: str, model: str) -> None:
    served = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": key}
    config = {
        "model_list": [{"model_name": "story", "litellm_params": served}],
        "general_settings": {"master_key": MASTER_KEY},
    }
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(json.dumps(config))  # which is YAML too
        program = Path(sys.executable).with_name("litellm")
        process = subprocess.Popen(
            [program, "--config", path, "--port", str(port), "--host", "127.0.0.1"],
            stdout=sys.stderr,
        )
        try:
            wait_for(port, process)
            print(json.dumps(asked(port)))
        finally:
            process.terminate()
            process.wait()


def asked(port: int) -> dict[str, object]:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}", api_key=MASTER_KEY, max_retries=0)
    create = client.chat.completions.create
    whole = create(model="story", messages=MESSAGES, **ASKED)
    stream = create(model="story", messages=MESSAGES, stream=True, **ASKED)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    forced = {"tools": [WEATHER], "tool_choice": "required"}
    called = create(model="story", messages=MESSAGES, **ASKED, **forced)
    (call, *_) = called.choices[0].message.tool_calls
    return {
        "text": whole.choices[0].message.content,
        "streamed": "".join(pieces),
        "city": json.loads(call.function.arguments)["city"],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
