"""The measured rows of ``draft_length.py``: a few lengths end to end, on the inflated models."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from draft_length_models import draft_folder, target_folder
from draft_length_replays import LONGEST, chain, on, simulate
from draft_length_report import MEASURED, PLANNER
from harness import Sample, take_turns
from machine_curves import Curve
from never_slower_arms import Served, serve
from report import Report
from trace_sets import MAX_MODEL_LEN

from paceline.config import EngineConfig
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine
from paceline.sampling_params import SamplingParams, SpeculativeParams
from paceline.traces import Trace
from paceline.workbench.simulate import Simulator

LENGTHS: tuple[int | str, ...] = (0, 2, 8, PLANNER)


def measure(
    options: argparse.Namespace,
    share: str,
    curve: Curve,
    simulators: Mapping[str, Simulator],
    report: Report,
) -> None:
    """A few lengths end to end, in turns, on the first prompt of every text."""
    engine = open_engine(options, share, curve)
    for text, simulator in simulators.items():
        trace = simulator.traces[0]
        samples = runs(engine, trace, options)
        end = trace.prompt_len + options.measured_tokens
        same = replace(
            on(simulator, curve), traces=[replace(trace, token_ids=trace.token_ids[:end])]
        )
        label = {"draft": share, "text": text}
        said, _ = simulate(same, LENGTHS, label)
        for row in said:
            head = {**label, "kind": MEASURED, "K": row["K"]}
            own = [sample for sample in samples if sample.arm == row["K"]]
            report.samples += [{**head, "error": s.error, **s.facts} for s in own]
            plain = [sample for sample in samples if sample.arm == 0]
            report.results.append({**head, **compared(own, plain, row)})


def open_engine(options: argparse.Namespace, share: str, curve: Curve) -> Engine:
    """The inflated pair, with the costs that were measured."""
    config = EngineConfig(
        device=options.device,
        max_num_seqs=1,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        speculative=(chain(str(draft_folder(options.size, share)), LONGEST),),
        strict=True,
    )
    target = str(target_folder(options.size))
    return build_engine(target, config, lambda *_: curve.target).engine


def runs(engine: Engine, trace: Trace, options: argparse.Namespace) -> list[Sample]:
    """The prompt of a trace answered with every length, after a turn that warms up."""
    prompt = trace.token_ids[: trace.prompt_len].tolist()
    arms: dict[Any, Callable[[Any], Served]] = {}
    for length in LENGTHS:
        arms[length] = partial(answer, engine, wish_of(length, options), prompt)
    take_turns(arms, [0], 1, decoding)
    return take_turns(arms, [0], options.repeat, decoding)


def wish_of(length: int | str, options: argparse.Namespace) -> SamplingParams:
    """Drafts of a length, none for 0, or as the planner likes."""
    speculative = SpeculativeParams()
    if length != PLANNER:
        speculative = SpeculativeParams(bool(length), num_speculative_tokens=int(length) or None)
    return SamplingParams(
        max_tokens=options.measured_tokens,
        temperature=options.temperature,
        seed=0,
        ignore_eos=True,
        speculative=speculative,
    )


def answer(engine: Engine, wish: SamplingParams, prompt: Sequence[int], _: Any) -> Served:
    return serve(engine, [prompt], [wish])


def decoding(served: Served) -> dict[str, Any]:
    """Seconds and tokens after the step that brought the first token."""
    ends = []
    for now, outputs in served.steps:
        for output in outputs:
            if output.error is not None:
                raise output.error
        ends.append((now, sum(len(output.token_ids) for output in outputs)))
    first = next(index for index, (_, tokens) in enumerate(ends) if tokens)
    tokens = sum(count for _, count in ends[first + 1 :])
    return {"decode_seconds": ends[-1][0] - ends[first][0], "decode_tokens": tokens}


def compared(
    own: Sequence[Sample], plain: Sequence[Sample], said: Mapping[str, Any]
) -> dict[str, Any]:
    """A row: what was measured beside what was simulated of the same answer."""
    errors = [sample.error for sample in (*own, *plain) if sample.failed]
    if errors or "error" in said:
        return {"error": errors[0] if errors else said["error"]}
    seconds, plain_seconds = (
        statistics.median(sample.facts["decode_seconds"] for sample in samples)
        for samples in (own, plain)
    )
    return {
        "speedup": plain_seconds / seconds,
        "tokens_per_second": own[0].facts["decode_tokens"] / seconds,
        "simulated_speedup": said["speedup"],
    }
