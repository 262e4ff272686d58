"""``paceline trace``: the target's own answers with their log-probabilities, in shards on disk.

Owns which prompts a shard holds; the format is :mod:`paceline.request.traces`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.api.outputs import GenerationOutput
from paceline.cli.model_argument import lasting_name
from paceline.cli.options import (
    ChatOptions,
    EngineOptions,
    ModelOptions,
    option,
    sampling_option,
    token_limit,
)
from paceline.cli.prompts import encoder_of, read_prompts
from paceline.cli.report import banner
from paceline.cli.settings import engine_options
from paceline.cli.terminal import Screen
from paceline.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.request.traces import Trace


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AnsweringOptions(ChatOptions):
    """How the model answers the prompts that are traced."""

    max_tokens: int = token_limit(256)
    temperature: float = sampling_option("temperature", default=0.0)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TraceOptions(EngineOptions, AnsweringOptions, ModelOptions):
    """Options of ``paceline trace``."""

    prompts: str = option(..., "JSONL file of prompts, as for paceline run.")
    output: str = option(..., "Folder to write the traces to.", "-o")
    top_logprobs: int = option(32, "Number of log-probabilities to keep per token.", min=1)
    seed: int = option(0, "Seed of the first prompt; prompt i is sampled with seed + i.")
    shard_size: int = option(64, "Prompts per file.", min=1)


def trace_command(options: TraceOptions, is_kept: bool = True) -> int:
    """The work of ``paceline trace``.

    Args:
        is_kept: whether the folder is one that somebody named.
    """
    from paceline.api.llm import LLM
    from paceline.request.traces import TraceWriter
    from paceline_lab.bench.runs import after
    from paceline_lab.trace.experts import with_experts

    rows = read_prompts(options.prompts)
    first = _params(options, 0)
    screen = Screen()
    with LLM(options.model, speculative_config=[], **engine_options(options)) as llm:
        screen.note(banner(llm))
        prompts = encoder_of(llm.tokenizer, options).encode_all(rows)
        writer = TraceWriter(options.output, _meta(options, llm, prompts, first))
        begin = min(writer.num_shards * options.shard_size, len(prompts))
        if begin:
            screen.note(f"{begin} of {len(prompts)} prompts are there already")
        num_tokens = 0
        with screen.progress("tracing", len(prompts)) as advance:
            for start in range(begin, len(prompts), options.shard_size):
                batch = prompts[start : start + options.shard_size]
                params = [_params(options, start + i) for i in range(len(batch))]
                outputs = llm.generate(batch, params, on_finished=after(start, advance))
                traces = [_to_trace(start + i, output) for i, output in enumerate(outputs)]
                if llm.checkpoint.config.mlp.experts:
                    traces = llm.call(partial(with_experts, traces=traces))
                writer.write_shard(traces)
                num_tokens += sum(len(trace.logprobs) for trace in traces)
        count = writer.num_shards
        shards = "1 shard" if count == 1 else f"{count} shards"
        place = f", in {shards} in {writer.folder}" if is_kept else ""
        screen.note(f"{len(prompts) - begin} prompts answered with {num_tokens} tokens{place}")
        stats = llm.stats()
        if stats.num_experts_read:
            mean = stats.num_experts_read / stats.num_target_forwards
            screen.note(f"a forward read {mean:.0f} experts on average, each once per layer")
    return 0


def _params(options: TraceOptions, prompt_index: int) -> SamplingParams:
    from paceline_lab.trace.requests import SEEDS

    # A seed per prompt, by its index: the same whether or not the command was interrupted.
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        logprobs=options.top_logprobs,
        seed=(options.seed + prompt_index) % SEEDS,
    )


def _meta(
    options: TraceOptions, llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[str, Any]:
    import numpy as np
    import xxhash

    from paceline.loading.checkpoint import model_fingerprint
    from paceline.request.traces import MODEL_SOURCE

    digest = xxhash.xxh3_128()
    for prompt in prompts:
        digest.update(np.array([len(prompt), *prompt], "<i4").tobytes())
    return {
        "model": llm.model,
        MODEL_SOURCE: lasting_name(options.model),
        "model_fingerprint": model_fingerprint(llm.checkpoint),
        "dtype": llm.config.dtype,
        "vocab_fingerprint": llm.tokenizer.fingerprint,
        "num_prompts": len(prompts),
        "prompts_digest": digest.hexdigest(),
        "shard_size": options.shard_size,
        "params": {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_logprobs": params.logprobs,
            "seed": options.seed,
            "max_model_len": llm.config.max_model_len,
        },
    }


def _to_trace(index: int, output: GenerationOutput) -> Trace:
    import numpy as np

    from paceline.request.traces import Trace

    if output.error is not None:
        raise output.error
    rows = output.completions[0].logprobs
    assert len(rows) == len(output.token_ids)
    top = [row.top for row in rows]
    return Trace(
        prompt_index=index,
        prompt_len=len(output.prompt_token_ids),
        token_ids=np.array([*output.prompt_token_ids, *output.token_ids], np.int32),
        logprobs=np.array([row.logprob for row in rows], np.float32),
        top_ids=np.array([[token for token, _ in each] for each in top], np.int32),
        top_logprobs=np.array([[value for _, value in each] for each in top], np.float32),
    )
