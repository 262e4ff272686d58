"""Traces of the embedded target on the benchmarks' prompts, made once and kept.

Every answer has the full number of tokens: it goes on past the model's own end, so that all
programs weigh their texts alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from harness import ROOT, note

from paceline import LLM, SamplingParams, StructuredOutputs, __version__
from paceline.api.llm import embedded_model
from paceline.api.outputs import GenerationOutput
from paceline.loading.checkpoint import model_fingerprint
from paceline.request.traces import Trace, TraceWriter

FOLDER = ROOT / "traces" / "benchmarks"
MAX_MODEL_LEN = 1024
BATCH = 8


def traced(
    name: str,
    texts: Sequence[str],
    max_tokens: int,
    temperature: float,
    folder: Path = FOLDER,
    grammars: Sequence[StructuredOutputs] = (),
) -> Path:
    """The folder of the answers to some texts; the prompts' ends where they are too long.

    Args:
        name: for people; what is in it is told by the rest of the folder's name.
        grammars: of the answers, one per text, or none at all. A replay knows nothing of them.
    """
    ruled = [repr(grammars)] if grammars else []
    said = json.dumps([__version__, MAX_MODEL_LEN, *texts, max_tokens, temperature, *ruled])
    place = folder / f"{name}-{xxhash.xxh3_64_hexdigest(said.encode())}"
    if not any(place.glob("shard-*.npz")):
        note(f"answering: {name}")
        _make(place, texts, answer_params(len(texts), max_tokens, temperature, grammars))
    return place


def answer_params(
    count: int, max_tokens: int, temperature: float, grammars: Sequence[StructuredOutputs] = ()
) -> list[SamplingParams]:
    """How the prompts of a folder are answered."""
    return [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=index,
            ignore_eos=True,
            structured_outputs=grammars[index] if grammars else None,
        )
        for index in range(count)
    ]


def _make(place: Path, texts: Sequence[str], params: Sequence[SamplingParams]) -> None:
    max_tokens, temperature = params[0].max_tokens, params[0].temperature
    assert max_tokens is not None
    with LLM(
        embedded_model("target"),
        speculative_config=[],
        max_num_seqs=BATCH,
        max_model_len=MAX_MODEL_LEN,
        planner="fixed",
    ) as llm:
        prompts = [llm.encode(text)[-(MAX_MODEL_LEN - max_tokens) :] for text in texts]
        outputs = llm.generate(prompts, params)
        meta = {
            "model": llm.model,
            "model_fingerprint": model_fingerprint(llm.checkpoint),
            "dtype": llm.config.dtype,
            "vocab_fingerprint": llm.tokenizer.fingerprint,
            "params": {
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": 0,
                "max_model_len": MAX_MODEL_LEN,
            },
        }
    writer = TraceWriter(place, meta)
    writer.write_shard([_trace(index, output) for index, output in enumerate(outputs)])


def _trace(index: int, output: GenerationOutput) -> Trace:
    if output.error is not None:
        raise output.error
    return bare_trace(index, output.prompt_token_ids, output.token_ids)


def bare_trace(index: int, prompt: Sequence[int], answer: Sequence[int]) -> Trace:
    """A trace without log-probabilities, which no replay reads."""
    rows = np.zeros((len(answer), 1), np.float32)
    tokens = np.array([*prompt, *answer], np.int32)
    return Trace(index, len(prompt), tokens, rows[:, 0], rows.astype(np.int32), rows)
