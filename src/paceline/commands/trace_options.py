"""The options of ``paceline trace``. Imports nothing slow: its ``--help`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.commands.options import EngineOptions, argument, option


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TraceOptions(EngineOptions):
    """Options of ``paceline trace``."""

    model: Annotated[
        str | None,
        argument("MODEL", help="Folder, GGUF file, name or hub id (default: the embedded model)."),
    ] = None
    prompts: Annotated[str, option("--prompts", help="A JSONL file, as for paceline run.")]
    output: Annotated[str, option("-o", "--output", help="Folder of the trace.")]
    top_logprobs: Annotated[
        int, option("--top-logprobs", min=1, help="Log-probabilities kept per token.")
    ] = 32
    max_tokens: Annotated[int, option("--max-tokens", help="Most tokens of one answer.")] = 256
    temperature: Annotated[float, option("--temperature", help="0 is greedy.")] = 0.0
    seed: Annotated[int, option("--seed", help="Prompt i samples with seed + i.")] = 0
    shard_size: Annotated[int, option("--shard-size", min=1, help="Prompts per file.")] = 64
    chat: Annotated[
        bool | None,
        option("--chat/--no-chat", help="Use the chat template (default: if there is one)."),
    ] = None
    no_thinking: Annotated[
        bool, option("--no-thinking", help="Ask the chat template for no thoughts.")
    ] = False
