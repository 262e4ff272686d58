"""guidellm: a short benchmark of the server. Prints one JSON line.

Runs in an environment of its own: ``python guidellm_run.py URL KEY MODEL FOLDER``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

REQUESTS = 4


def main(url: str, key: str, model: str, folder: str) -> None:
    with tempfile.TemporaryDirectory() as results:
        path = Path(results, "found.json")
        command = [Path(sys.executable).with_name("guidellm"), "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={url},model={model},api_key={key}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={folder}"]
        command += ["--profile", "kind=synchronous"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"]
        command += ["--output", f"kind=json,path={path}"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        (benchmark,) = json.loads(path.read_text())["benchmarks"]
    requests = benchmark["requests"]
    told = {
        "successful": len(requests["successful"]),
        "errored": len(requests["errored"]),
        "output_tokens": [each["output_tokens"] for each in requests["successful"]],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
