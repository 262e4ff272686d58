"""``paceline bench throughput``: a dataset through the Python API as fast as it goes.

Both arms of a comparison take turns in blocks, on the same prompts with the same seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.commands.bench_options import BenchThroughputOptions, dataset_config, wants_ignore_eos
from paceline.commands.compare import open_arms
from paceline.commands.display import Screen, banner
from paceline.commands.report import Figures, check_answered
from paceline.commands.resolve import engine_options, speculative_config
from paceline.llm import LLM
from paceline.outputs import GenerationOutput
from paceline.sampling_params import SamplingParams
from paceline.workbench.serving.counting import LocalTokenCounter
from paceline.workbench.serving.datasets import make_samples
from paceline.workbench.serving.ratios import after, block_size, ratio_of_medians

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

    @property
    def prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    def document(self) -> dict[str, Any]:
        """Under vLLM's keys, with counts of tokens and speculation."""
        seconds, requests = self.figures.seconds, len(self.outputs)
        total = self.prompt_tokens + self.figures.output_tokens
        counts = self.figures.document()
        return {
            "elapsed_time": seconds,
            "num_requests": requests,
            "total_num_tokens": total,
            "requests_per_second": requests / seconds,
            "tokens_per_second": total / seconds,
            "total_prompt_tokens": self.prompt_tokens,
            "total_output_tokens": self.figures.output_tokens,
            "output_tokens_per_second": self.figures.tokens_per_second,
            **{name: counts[name] for name in counts if name.startswith(("num_", "acc", "mean_"))},
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
    """The work of ``paceline bench throughput``: 1 when promised identity is broken."""
    dataset_config(options)
    speculative, settings = speculative_config(options, options.model), engine_options(options)
    with ExitStack() as stack:
        if options.compare:
            # Prompts of a small dataset come more than once.
            *llms, screen = stack.enter_context(open_arms(options.model, speculative, settings))
        else:
            llms = [LLM(options.model, speculative_config=speculative, **settings)]
            screen = Screen(stack.enter_context(llms[0]).proposers)
            screen.note(banner(llms[0]))
        arms = [Arm(llm) for llm in llms]
        tasks = _tasks(options, llms[0])
        with screen.progress("prompts", len(tasks) * len(arms)) as advance:
            _run(arms, tasks, advance)
        return _report(options, arms, screen)


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
    if options.json:
        screen.say(json.dumps(document))
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
        "output_tokens_per_second_ratio": None if ratio is None else asdict(ratio),
        "outputs_differing": differing,
    }
    blocks = "" if ratio is None else f"; by block {ratio.value:.3f}, 95 %: {ratio.interval}"
    same = f"DIFFERENT output for {len(differing)}" if differing else "identical output for all"
    screen.say(f"{same} of {len(plain.outputs)} prompts, {document['speedup']:.2f}x{blocks}")
    return differing
