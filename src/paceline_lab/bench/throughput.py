"""``paceline bench throughput``: a dataset through the Python API as fast as it goes.

Both arms of a comparison take turns in blocks, on the same prompts with the same seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.api.llm import LLM
from paceline.api.outputs import GenerationOutput
from paceline.cli.compare import EXIT_DIFFERENT, WARM_UP_TOKENS, ArmComparison, compare, open_arms
from paceline.cli.prompts import Encoder
from paceline.cli.report import Figures, banner, check_answered
from paceline.cli.settings import engine_options, speculative_config
from paceline.cli.terminal import Screen
from paceline.config.template_options import parse_template_options
from paceline.request.sampling_params import SamplingParams
from paceline_lab.bench.datasets import make_samples
from paceline_lab.bench.options import BenchThroughputOptions, wants_ignore_eos
from paceline_lab.bench.runs import block_size, ratio_of_medians
from paceline_lab.bench.token_counting import LocalTokenCounter


def bench_throughput_command(options: BenchThroughputOptions) -> int:
    """The work of ``paceline bench throughput``: 1 when promised identity is broken."""
    speculative, settings = speculative_config(options, options.model), engine_options(options)
    if not options.compare:
        with LLM(options.model, speculative_config=speculative, **settings) as llm:
            screen = Screen(llm.proposers, json=options.json)
            screen.note(banner(llm))
            return _report(options, llm, screen, *_measured(options, llm, screen))
    # Prompts of a small dataset come more than once.
    with open_arms(options.model, speculative, settings, json=options.json) as (plain, llm, screen):
        prompts, params = _tasks(options, llm)
        size = block_size(len(prompts), llm.config.max_num_seqs)
        with screen.progress("blocks", -(-len(prompts) // size)) as advance:
            comparison = compare(plain, llm, prompts, params, group_size=size, advance=advance)
        _, figures = comparison.arms()
        return _report(options, llm, screen, figures, comparison.outputs, comparison)


def _tasks(
    options: BenchThroughputOptions, llm: LLM
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts as token ids, and the length and seed of each."""
    counter = LocalTokenCounter(llm.tokenizer, llm.model)
    samples = make_samples(options, counter, options.num_prompts, options.seed)
    template_options = parse_template_options(options.default_chat_template_kwargs)
    encoder = Encoder(llm.tokenizer, template_options=template_options)
    prompts, params = [], []
    for index, sample in enumerate(samples):
        is_text = isinstance(sample.prompt, str) and not options.chat
        prompts.append(llm.encode(sample.prompt) if is_text else encoder.encode(sample.messages))
        params.append(
            SamplingParams(
                max_tokens=sample.output_len,
                temperature=options.temperature,
                seed=options.seed + index,
                ignore_eos=wants_ignore_eos(options),
            )
        )
    return prompts, params


def _measured(
    options: BenchThroughputOptions, llm: LLM, screen: Screen
) -> tuple[Figures, list[GenerationOutput]]:
    """One engine on all prompts at once, after a warm-up."""
    (prompts, params), figures = _tasks(options, llm), Figures()
    short = replace(params[0], max_tokens=WARM_UP_TOKENS)
    # With a salt of its own, it leaves nothing in the prefix cache that a prompt would find.
    llm.generate(prompts[:1], short, cache_salt="warm-up")
    with screen.progress("prompts", len(prompts)) as advance:
        return figures, check_answered(figures.measure(llm, prompts, params, advance))


def _report(
    options: BenchThroughputOptions,
    llm: LLM,
    screen: Screen,
    figures: Figures,
    outputs: Sequence[GenerationOutput],
    comparison: ArmComparison | None = None,
) -> int:
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    document: dict[str, Any] = {
        "model": llm.model,
        "dtype": llm.config.dtype,
        "backend": llm.backend,
        "device": llm.config.device,
        "dataset_name": options.dataset_name,
        "temperature": options.temperature,
        "seed": options.seed,
        **_document(figures, len(outputs), prompt_tokens),
    }
    said = []
    if comparison is not None:
        plain, _ = comparison.arms()
        document["plain"] = _document(plain, len(outputs), prompt_tokens)
        screen.say(f"plain: {_line(document['plain'])}")
        document["speedup"] = plain.over(figures)
        said.append(_compared(comparison, document))
    screen.say(f"speculative: {_line(document)}" if comparison else _line(document))
    screen.say(f"Total num prompt tokens:  {prompt_tokens}")
    screen.say(f"Total num output tokens:  {figures.output_tokens}")
    for line in said:
        screen.say(line)
    if options.json:
        screen.document(document)
    is_broken = comparison is not None and comparison.differing and llm.promises_identity
    return EXIT_DIFFERENT if is_broken else 0


def _document(figures: Figures, num_requests: int, prompt_tokens: int) -> dict[str, Any]:
    """An arm under vLLM's keys, with counts of tokens and speculation."""
    seconds, counts = figures.seconds, figures.document()
    total = prompt_tokens + figures.output_tokens
    return {
        "elapsed_time": seconds,
        "num_requests": num_requests,
        "total_num_tokens": total,
        "requests_per_second": num_requests / seconds,
        "tokens_per_second": total / seconds,
        "total_prompt_tokens": prompt_tokens,
        "total_output_tokens": figures.output_tokens,
        "output_tokens_per_second": figures.tokens_per_second,
        **{name: counts[name] for name in counts if name.startswith(("num_", "acc", "mean_"))},
    }


def _line(document: dict[str, Any]) -> str:
    """vLLM's closing line."""
    return (
        f"Throughput: {document['requests_per_second']:.2f} requests/s, "
        f"{document['tokens_per_second']:.2f} total tokens/s, "
        f"{document['output_tokens_per_second']:.2f} output tokens/s"
    )


def _compared(comparison: ArmComparison, document: dict[str, Any]) -> str:
    """Add the ratio and what differs to the document, and say it."""
    ratio = ratio_of_medians(
        [pair.speculative.tokens_per_second for pair in comparison.pairs],
        [pair.plain.tokens_per_second for pair in comparison.pairs],
    )
    document |= {
        "output_tokens_per_second_ratio": None if ratio is None else asdict(ratio),
        "outputs_differing": comparison.differing,
    }
    count, total = len(comparison.differing), document["num_requests"]
    same = f"DIFFERENT output for {count}" if count else "identical output for all"
    blocks = "" if ratio is None else f"; by block {ratio.value:.3f}, 95 %: {ratio.interval}"
    return f"{same} of {total} prompts, {comparison.claim.sentence(comparison.load)}{blocks}"
