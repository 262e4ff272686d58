"""``paceline bench throughput``: a dataset through the Python API as fast as it goes.

Both arms of a comparison take turns in blocks, on the same prompts with the same seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.commands.bench_options import BenchThroughputOptions, dataset_config, wants_ignore_eos
from paceline.commands.display import Screen, banner
from paceline.commands.report import Figures, check_answered
from paceline.commands.resolve import (
    NO_MEMORY,
    engine_options,
    speculative_config,
    without_memory,
)
from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError, PacelineError
from paceline.llm import LLM, embedded_model
from paceline.models.checkpoint import Checkpoint, load_checkpoint
from paceline.outputs import GenerationOutput
from paceline.sampling_params import SamplingParams
from paceline.workbench.serving.counting import LocalTokenCounter
from paceline.workbench.serving.datasets import make_samples
from paceline.workbench.serving.ratios import after, block_size, ratio_of_medians
from paceline.writing import write_json

EXIT_DIFFERENT = 1
WARM_UP_TOKENS = 16
Task = tuple[list[int], SamplingParams]


@dataclass(slots=True)
class Arm:
    """One engine and what it has done.

    Attributes:
        rates: output tokens per second of each block.
    """

    llm: LLM
    figures: Figures = field(default_factory=Figures)
    prompt_tokens: int = 0
    num_requests: int = 0
    rates: list[float] = field(default_factory=list)
    outputs: list[GenerationOutput] = field(default_factory=list)

    def run(self, tasks: Sequence[Task], advance: Callable[[int], None]) -> None:
        """Generate one block and count it.

        Raises:
            PacelineError: a prompt cannot be served, or failed: its tokens would be no measurement.
        """
        prompts, params = [prompt for prompt, _ in tasks], [wish for _, wish in tasks]
        block = Figures()
        self.outputs += check_answered(block.measure(self.llm, prompts, params, advance))
        self.figures.add_figures(block)
        self.rates.append(block.tokens_per_second)
        self.prompt_tokens += sum(map(len, prompts))
        self.num_requests += len(tasks)

    def document(self) -> dict[str, Any]:
        """Under vLLM's keys, with counts of tokens and speculation."""
        seconds = self.figures.seconds
        total = self.prompt_tokens + self.figures.output_tokens
        counts = self.figures.speculative()
        return {
            "elapsed_time": seconds,
            "num_requests": self.num_requests,
            "total_num_tokens": total,
            "requests_per_second": self.num_requests / seconds,
            "tokens_per_second": total / seconds,
            "total_prompt_tokens": self.prompt_tokens,
            "total_output_tokens": self.figures.output_tokens,
            "output_tokens_per_second": self.figures.tokens_per_second,
            **{name: value for name, value in counts.items() if name.startswith("num_")},
            "acceptance_rate": counts["acceptance_rate"],
            "mean_acceptance_length": counts["mean_acceptance_length"],
        }

    def line(self) -> str:
        """vLLM's closing line."""
        found = self.document()
        return (
            f"Throughput: {found['requests_per_second']:.2f} requests/s, "
            f"{found['tokens_per_second']:.2f} total tokens/s, "
            f"{found['output_tokens_per_second']:.2f} output tokens/s"
        )


def bench_throughput_command(options: BenchThroughputOptions) -> int:
    """Run ``paceline bench throughput``; the exit code is 1 when promised identity is broken.

    Raises:
        PacelineError: the options, the dataset or the model cannot be used.
    """
    dataset_config(options)
    if options.output_json is not None and not Path(options.output_json).parent.is_dir():
        raise ConfigError(f"--output-json: {Path(options.output_json).parent} is no folder")
    speculative = speculative_config(options, options.model)
    if options.compare:
        if not speculative:
            raise ConfigError("--compare needs speculation: leave out --no-speculation")
        # Otherwise the arm that reads a prompt second would find it there.
        options = replace(options, enable_prefix_caching=False)
        speculative = without_memory(speculative)  # a small dataset comes more than once
    source = load_checkpoint(
        options.model or embedded_model("target"), load_format=options.load_format
    )
    screen = Screen()
    with ExitStack() as stack:
        wanted = ((), speculative) if options.compare else (speculative,)
        arms = [Arm(stack.enter_context(_open(options, source, each))) for each in wanted]
        screen.note(banner(arms[-1].llm))
        if options.compare:
            screen.note(NO_MEMORY)
        if options.compare and not arms[-1].llm.proposers:
            raise PacelineError("no proposer could be built, so there is nothing to compare")
        tasks = _tasks(options, arms[0].llm)
        total = len(tasks) * len(arms)
        with screen.progress("prompts", total, not options.disable_tqdm) as advance:
            _run(arms, tasks, advance)
        return _report(options, arms, screen)


def _open(
    options: BenchThroughputOptions, source: Checkpoint, config: tuple[SpeculativeConfig, ...]
) -> LLM:
    return LLM(source, speculative_config=config, **engine_options(options))


def _tasks(options: BenchThroughputOptions, llm: LLM) -> list[Task]:
    """Prompts as token ids, each with its length and seed."""
    counter = LocalTokenCounter(llm.tokenizer, llm.model)
    samples = make_samples(dataset_config(options), counter, options.num_prompts, options.seed)
    tasks = []
    for index, sample in enumerate(samples):
        is_text = isinstance(sample.prompt, str) and not options.chat
        params = SamplingParams(
            max_tokens=sample.output_len,
            temperature=options.temperature,
            seed=options.seed + index,
            ignore_eos=wants_ignore_eos(options),
        )
        prompt = sample.prompt if is_text else sample.messages
        tasks.append((llm.encode(prompt), params))
    return tasks


def _run(arms: Sequence[Arm], tasks: Sequence[Task], advance: Callable[[int], None]) -> None:
    prompt, params = tasks[0]
    short = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens or WARM_UP_TOKENS))
    for arm in arms:
        # With a salt of its own, it leaves nothing in the prefix cache that a prompt would find.
        arm.llm.generate([prompt], short, cache_salt="warm-up")
    block = len(tasks)
    if len(arms) > 1:
        block = block_size(len(tasks), arms[0].llm.config.max_num_seqs)
    done = 0
    for number, first in enumerate(range(0, len(tasks), block)):
        for arm in arms if number % 2 == 0 else reversed(arms):
            part = tasks[first : first + block]
            arm.run(part, after(done, advance))
            done += len(part)


def _report(options: BenchThroughputOptions, arms: Sequence[Arm], screen: Screen) -> int:
    document: dict[str, Any] = {
        "model": arms[0].llm.model,
        "dtype": arms[0].llm.config.dtype,
        "backend": arms[0].llm.backend,
        "device": arms[0].llm.config.device,
        "dataset_name": options.dataset_name,
        "temperature": options.temperature,
        "seed": options.seed,
        **arms[-1].document(),
    }
    for name, arm in zip(("plain", "speculative") if len(arms) > 1 else ("",), arms, strict=True):
        screen.say(f"{name}: {arm.line()}" if name else arm.line())
    screen.say(f"Total num prompt tokens:  {arms[0].prompt_tokens}")
    screen.say(f"Total num output tokens:  {arms[0].figures.output_tokens}")
    differing = _compared(arms, document, screen) if len(arms) > 1 else []
    _write(options, document, screen)
    return EXIT_DIFFERENT if differing and arms[-1].llm.promises_identity else 0


def _compared(arms: Sequence[Arm], document: dict[str, Any], screen: Screen) -> list[int]:
    """Add the plain arm and the ratio to the document; returns the prompts that differ."""
    plain, speculative = arms
    both = zip(plain.outputs, speculative.outputs, strict=True)
    differing = [i for i, (a, b) in enumerate(both) if a.token_ids != b.token_ids]
    ratio = ratio_of_medians(speculative.rates, plain.rates)
    document |= {
        "plain": plain.document(),
        "speedup": plain.figures.seconds / speculative.figures.seconds,
        "output_tokens_per_second_ratio": None if ratio is None else ratio.document(),
        "outputs_differing": differing,
    }
    blocks = "" if ratio is None else f"; by block {ratio.value:.3f}, 95 %: {ratio.interval}"
    same = f"DIFFERENT output for {len(differing)}" if differing else "identical output for all"
    screen.say(f"{same} of {len(plain.outputs)} prompts, {document['speedup']:.2f}x{blocks}")
    return differing


def _write(options: BenchThroughputOptions, document: dict[str, Any], screen: Screen) -> None:
    if options.output_json is not None:
        write_json(options.output_json, document, ConfigError)
    if options.json:
        screen.say(json.dumps(document))
