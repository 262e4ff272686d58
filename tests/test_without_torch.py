"""What runs where torch is not installed, and what is said of the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.backends.native.native import why_not_native
from paceline.core.installation import install_command
from paceline.loading.catalogue import embedded_model
from tests.loading.gguf_writing import convert
from tests.loading.test_gguf_blocks import WIDE
from tests.loading.test_quantised_checkpoints import save_quantised
from tests.proposers.heads import embedded_head
from tests.quick import share

native = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
BLOCKED = "import sys; sys.modules['torch'] = None\n"
COMMAND = BLOCKED + "from paceline.cli.main import main; main(sys.argv[1:])"
PLAIN_AND_DRAFTED = """
import json
from paceline import LLM, SamplingParams

model, prompts, method = json.loads(sys.argv[1])
answers = []
for config in ([], [method]):
    options = {"kv_cache_memory": 1 << 25, "max_model_len": 128, "max_num_seqs": 4}
    with LLM(model, speculative_config=config, **options) as llm:
        given = [{"prompt_token_ids": each} for each in prompts]
        params = [SamplingParams(max_tokens=24, seed=1, logprobs=2, ignore_eos=True)] * len(given)
        found = llm.generate([each["prompt_token_ids"] for each in given], params)
        answers.append([list(each.token_ids) for each in found])
print(json.dumps(answers))
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120
    )


@native
def test_the_command_line_answers() -> None:
    done = run(COMMAND, "run", "embedded", "-p", "def f(", "--max-tokens", "8", "--dtype", "int4")
    assert done.returncode == 0, done.stderr
    assert done.stdout


def made(folder: Path, kind: str) -> tuple[str, dict[str, object]]:
    """A model of a kind, and what drafts for it."""
    if kind == "gguf":
        convert("llama", folder / "m.gguf", qtype="Q4_0", changes=WIDE)
        return str(folder / "m.gguf"), {"method": "suffix"}
    if kind == "gptq":
        save_quantised(folder / "tiny", "gptq-act")
        return str(folder / "tiny"), {"method": "suffix"}
    target = str(embedded_model("target"))
    if kind == "head":
        embedded_head(folder / "head")
        return target, {"method": "eagle3", "model": str(folder / "head")}
    if kind == "draft":
        return target, {"method": "draft_model", "model": str(embedded_model("draft"))}
    return target, {"method": kind, **({"dtype": "int4"} if kind == "self" else {})}


@native
@pytest.mark.parametrize("kind", share(["gguf", "gptq", "head", "draft", "self", "suffix"], 2))
def test_models_and_drafts_of_every_kind_run(tmp_path: Path, kind: str) -> None:
    model, method = made(tmp_path, kind)
    prompts = [[5, 9, 7, 5, 9, 7, 5, 9], [11, 12, 13]]
    done = run(BLOCKED + PLAIN_AND_DRAFTED, json.dumps([model, prompts, method]))
    assert done.returncode == 0, done.stderr[-2000:]
    plain, drafted = json.loads(done.stdout.splitlines()[-1])
    assert plain == drafted
    assert all(len(tokens) == 24 for tokens in plain)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "embedded", "-p", "hi", "--backend", "reference"),
        ("run", "embedded", "-p", "hi", "--device", "cuda"),
        ("train", "lm", "-o", "x"),
    ],
)
def test_what_needs_torch_says_so(arguments: tuple[str, ...]) -> None:
    done = run(COMMAND, *arguments)
    assert done.returncode == 2
    assert install_command("torch") in done.stderr
    assert "Traceback" not in done.stderr
