"""The engine of ``acceptance.py``: the answers that replays go by, given again with real drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from acceptance_sets import Cell
from harness import note
from host_time import forward_seconds
from node_budget import NodeBudget
from trace_sets import MAX_MODEL_LEN

from paceline import LLM
from paceline.engine.engine import Engine
from paceline.llm import embedded_model
from paceline.traces import Trace

BATCH = 8


def open_llm(device: str, batch: int = BATCH) -> LLM:
    return LLM(
        embedded_model("target"),
        speculative_config="[]",
        device=device,
        max_num_seqs=batch,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        strict=True,
    )


def budgeted(llm: LLM, configs: Sequence[Any], nodes: int) -> NodeBudget:
    """Let these proposers draft so many nodes in every step, and return the planner."""

    def install(engine: Engine) -> NodeBudget:
        planner = NodeBudget(nodes, lambda: forward_seconds(engine)[1])
        engine.drafting.planner = planner
        return planner

    llm.set_speculation(list(configs))
    return llm.call(install)


def answer(llm: LLM, cell: Cell, traces: Sequence[Trace]) -> list[Any]:
    prompts = [trace.token_ids[: trace.prompt_len].tolist() for trace in traces]
    return llm.generate(prompts, [cell.params[trace.prompt_index] for trace in traces])


def answered(
    llm: LLM, cell: Cell, configs: Sequence[Any], nodes: int, count: int
) -> dict[str, Any]:
    """How many of the answers are those of plain decoding, token for token."""
    traces = cell.answers(count)
    try:
        budgeted(llm, configs, nodes)
        outputs = answer(llm, cell, traces)
        for output in outputs:
            if output.error is not None:
                raise output.error
    except Exception as error:
        note(f"{cell.name}: failed: {error!r}")
        return {"identical": 0, "prompts": len(traces), "error": repr(error)}
    pairs = zip(outputs, traces, strict=True)
    same = sum(list(o.token_ids) == trace.output_token_ids.tolist() for o, trace in pairs)
    return {"identical": same, "prompts": len(traces)}
