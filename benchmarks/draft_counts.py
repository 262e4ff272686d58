"""What an engine counts while a draft model drafts for it, beside an engine that never speculates.

Counts do not depend on the machine's speed. Knows no draft: who drafts is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harness import note, run_sample

from paceline import LLM, SamplingParams
from paceline.llm import embedded_model
from paceline.metrics import SpeculationCounters
from paceline.outputs import GenerationOutput

BATCH = 8
MAX_MODEL_LEN = 1024


def open_llm(device: str) -> LLM:
    return LLM(
        embedded_model("target"),
        speculative_config="[]",
        device=device,
        max_num_seqs=BATCH,
        max_model_len=MAX_MODEL_LEN,
        planner="fixed",
        strict=True,
    )


def counted(
    device: str,
    texts: Sequence[str],
    speculative: Mapping[str, Any],
    temperatures: Sequence[float],
    max_tokens: int,
) -> Iterator[dict[str, Any]]:
    """A row per arm and temperature: its counters, or the error.

    Args:
        texts: prompts; their ends where they are too long.
        speculative: the speculative configuration of each arm, by its name.
    """
    with open_llm(device) as plain_llm, open_llm(device) as llm:
        prompts = [llm.encode(text)[-(MAX_MODEL_LEN - max_tokens) :] for text in texts]
        for temperature in temperatures:
            params = [
                SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
                for seed in range(len(prompts))
            ]
            plain = run_sample("plain", "", lambda: plain_llm.generate(prompts, params), _facts)  # noqa: B023
            for name, config in speculative.items():
                note(f"temperature {temperature}: {name}")

                def run(config: Any = config) -> Any:
                    llm.set_speculation(config)
                    return llm.generate(prompts, params)  # noqa: B023

                sample = run_sample(name, "", run, _facts)
                row = {"arm": name, "temperature": temperature}
                if sample.failed or plain.failed:
                    yield {**row, "error": sample.error or plain.error}
                else:
                    yield {**row, **_summary(sample.facts, plain.facts)}


def _facts(outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
    total = SpeculationCounters()
    for output in outputs:
        if output.error is not None:
            raise output.error
        total.add(output.completions[0].counters)
    return {"token_ids": [output.token_ids for output in outputs], "counters": total}


def _summary(facts: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios from the counters, and how many outputs equal those of plain decoding."""
    pairs = zip(facts["token_ids"], plain["token_ids"], strict=True)
    counters: SpeculationCounters = facts["counters"]
    return {
        "prompts": len(plain["token_ids"]),
        "identical": sum(one == other for one, other in pairs),
        "mean_acceptance_length": counters.mean_acceptance_length,
        "acceptance_rate": counters.acceptance_rate,
        "counters": asdict(counters),
    }
