"""aider: one message about a file of a repository. Prints one JSON line.

Runs in an environment of its own: ``python aider_message.py URL KEY MODEL``. The model talks
nonsense, so that no edit comes of it; what counts is that its words arrive.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asking import WORDS

OPTIONS = (
    *("--no-auto-commits", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"),
    *("--no-pretty", "--yes-always", "--no-gitignore", "--no-detect-urls", "--map-tokens", "0"),
    *("--edit-format", "ask", "--no-show-release-notes", "--no-suggest-shell-commands"),
)


def main(url: str, key: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "init", "--quiet", folder], check=True)
        Path(folder, "a.py").write_text("print(1)\n")
        Path(folder, "settings.json").write_text(
            json.dumps(
                [
                    {
                        "name": f"openai/{model}",
                        "use_temperature": 0.0,
                        "extra_params": {"max_tokens": 24},
                        "use_repo_map": False,
                    }
                ]
            )
        )
        found: list[str] = []
        for stream in ("--stream", "--no-stream"):
            words = [Path(sys.executable).with_name("aider"), *OPTIONS, stream]
            words += ["--model", f"openai/{model}", "--openai-api-base", f"{url}/v1"]
            words += ["--openai-api-key", key, "--model-settings-file", "settings.json"]
            words += ["--llm-history-file", "history", "--message", WORDS, "a.py"]
            done = subprocess.run(
                words,
                cwd=folder,
                env={**os.environ, "HOME": folder},
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            history = Path(folder, "history")
            found.append(history.read_text().rpartition("LLM RESPONSE")[2].partition("\n")[2])
            history.unlink()
    print(json.dumps({"text": found[0].strip(), "streamed": found[1].strip()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
