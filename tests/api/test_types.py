"""What a type checker tells a program that uses the public API, where it is right and where not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENT = """
from paceline import LLM, AsyncLLM, SamplingParams
from paceline.config.speculative import DraftModelConfig, SuffixConfig

CHAT = [{"role": "user", "content": "Hello"}]
llm = LLM("embedded", speculative_config=[SuffixConfig(), {"method": "ngram"}])
params = SamplingParams(max_tokens=8)
reveal_type(llm.generate("text", params))
reveal_type(llm.generate(["one", "two"]))
reveal_type(llm.generate([1, 2, 3]))
reveal_type(llm.chat(CHAT).outputs[0].text)
reveal_type(llm.chat([CHAT, CHAT])[0].outputs[0].token_ids)
reveal_type(llm.call(lambda engine: engine.vocab_size))
reveal_type(next(llm.stream("text")).text)
llm.set_speculation(DraftModelConfig(model="draft", temperature=0.5))


async def ask(server: AsyncLLM) -> None:
    reveal_type(await server.agenerate("text"))
    reveal_type(await server.achat([CHAT]))
    async for step in server.astream("text"):
        reveal_type(step.token_ids)
"""
OUTPUT = "paceline.api.outputs.GenerationOutput"
REVEALED = [
    *(OUTPUT, f"list[{OUTPUT}]", OUTPUT, "str", "list[int]", "int", "str"),
    *(OUTPUT, f"list[{OUTPUT}]", "typing.Sequence[int]"),
]
WRONG = {
    "llm.generate(3)": "call-overload",
    'llm.generate("text", {"max_tokens": 8})': "call-overload",
    "llm.set_speculation(3)": "arg-type",
    "SuffixConfig(draft_layers=2)": "call-arg",
    "llm.generates()": "attr-defined",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_program_is_told_what_it_gets_and_what_it_may_not_ask(tmp_path: Path) -> None:
    right = CLIENT.strip().splitlines()
    program = tmp_path / "client.py"
    program.write_text("\n".join([*right, *WRONG]))
    # In the checkout, whose cache of checked sources spares most of the time.
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(program)]
    environment = os.environ | {"MYPYPATH": str(ROOT / "src")}
    told = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    revealed = [line.split('"')[1] for line in told if "Revealed type" in line]
    assert [each.replace("builtins.", "") for each in revealed] == REVEALED
    errors = [line for line in told if ": error:" in line]
    for at, (code, kind) in enumerate(WRONG.items(), len(right) + 1):
        assert f"client.py:{at}: error:" in errors[0], (code, told)
        assert errors.pop(0).endswith(f"[{kind}]"), code
    assert not errors
