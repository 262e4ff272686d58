"""``paceline verify``: every prompt plainly and speculatively, compared and scored by regret.

Owns the order of things and what is shown. Differences and their judgement are
:mod:`paceline_lab.verify.verification`'s; ``--quality`` is
:mod:`paceline_lab.verify.quality_command`'s.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.resources import files
from itertools import cycle
from typing import Any

from paceline.api.llm import LLM
from paceline.cli.compare import open_arms
from paceline.cli.options import COMPARED_TOKENS, DEFAULTS, SamplingOptions
from paceline.cli.prompts import Prompt, encoder_of, read_prompts
from paceline.cli.report import Figures, check_answered
from paceline.cli.settings import engine_options, sampling_params, speculative_config
from paceline.cli.terminal import Screen, table
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigError
from paceline.request.sampling_params import SamplingParams
from paceline_lab.verify.options import VerifyOptions
from paceline_lab.verify.verification import (
    DEFAULT_MAX_REGRET,
    Tally,
    drafting_variants,
    mixed_requests,
    score_output,
)

EXIT_FAILED = 1
ROUND = 4
"""Times the requests that run at once: so many are queued together."""

Work = Sequence[tuple[list[int], SamplingParams]]


@dataclass(slots=True)
class IdentityArms:
    """Both arms, and what they have done.

    The plain one answers one request at a time: that is what plain decoding means. Two arms that
    run the same requests side by side may agree although their bits depend on who shares a batch.
    """

    plain: LLM
    speculative: LLM
    tally: Tally = field(default_factory=Tally)
    plain_figures: Figures = field(default_factory=Figures)
    speculative_figures: Figures = field(default_factory=Figures)

    def run(self, work: Work) -> None:
        """Answer requests in both arms, score the speculative answers, and count."""
        prompts, params = [prompt for prompt, _ in work], [wish for _, wish in work]
        expected = check_answered(self.plain_figures.measure(self.plain, prompts, params))
        answered = check_answered(
            self.speculative_figures.measure(self.speculative, prompts, params)
        )
        for prompt, wish, one, two in zip(prompts, params, expected, answered, strict=True):
            score = partial(score_output, prompt=prompt, output=two.token_ids, params=wish)
            self.tally.add(one, two, self.plain.call(score))


def verify_command(options: VerifyOptions) -> int:
    """The work of ``paceline verify``."""
    if options.quality:
        from paceline_lab.verify.quality_command import quality_command

        return quality_command(options)
    _check(options)
    prompts = _prompts(options)
    options = replace(options, seed=secrets.randbits(32) if options.seed is None else options.seed)
    configs = speculative_config(options, options.model)
    settings = engine_options(options)
    opened = open_arms(
        options.model, configs, settings, is_timed=False, json=options.json, max_num_seqs=1
    )
    with opened as (plain, llm, screen):
        arms = IdentityArms(plain, llm)
        ids = encoder_of(llm.checkpoint.tokenizer, options).encode_all(prompts)
        for work in _rounds(options, arms, ids, configs):
            arms.run(work)
            screen.note(_progress(arms.tally, options.num_tokens))
        return _report(arms, options, configs, screen)


def _check(options: VerifyOptions) -> None:
    """Refuse options that would be without effect."""
    if options.no_speculation:
        raise ConfigError("verify compares speculation with its absence: drop --no-speculation")
    names = ("text", "dtypes", "llama", "llama_kv_type", "text_tokens", "window", "stride")
    for name in (name for name in names if getattr(options, name) is not None):
        raise ConfigError(f"--{name.replace('_', '-')} belongs to --quality; add that, or drop it")
    if options.prompt is not None and options.prompts is not None:
        raise ConfigError("--prompt and --prompts cannot be used together")
    if options.num_tokens is not None:
        for name in ("temperature", "top_p", "top_k", "min_p", "ignore_eos"):
            if getattr(options, name) != getattr(SamplingOptions, name):
                raise ConfigError(
                    f"--num-tokens mixes all ways of sampling: drop --{name.replace('_', '-')}"
                )


def _prompts(options: VerifyOptions) -> list[Prompt]:
    if options.prompt is not None:
        return [Prompt(options.prompt)]
    return read_prompts(options.prompts or str(files("paceline") / "embedded" / "prompts.jsonl"))


def _rounds(
    options: VerifyOptions,
    arms: IdentityArms,
    prompts: list[list[int]],
    configs: tuple[SpeculativeConfig, ...],
) -> Iterator[Work]:
    """What runs together: the prompts as they are, or a mixture until enough was compared.

    About every second request asks for log-probabilities, which show a difference in any bit of a
    row of logits. The others are greedy without logits, where the kernels can be.
    """
    size = ROUND * (options.max_num_seqs or DEFAULTS.max_num_seqs)
    assert options.seed is not None
    wanted = options.num_tokens
    if wanted is None:
        params = sampling_params(options, options.seed)
        wishes = cycle((replace(params, logprobs=params.logprobs or 0), params))
        work = list(zip(prompts, wishes, strict=False))
        for start in range(0, len(work), size):
            yield work[start : start + size]
        return
    context = arms.plain.config.max_model_len
    assert context is not None
    requests = mixed_requests(
        prompts,
        seed=options.seed,
        max_tokens=options.max_tokens or COMPARED_TOKENS,
        context=context,
        vocab_size=arms.plain.call(lambda engine: engine.vocab_size),
        methods=sorted({config.method for config in configs}),
    )
    variants = drafting_variants(configs)
    for number, variant in enumerate(variants, start=1):
        arms.speculative.set_speculation(variant)
        while arms.tally.num_tokens < wanted * number / len(variants):
            yield [next(requests) for _ in range(size)]


def _progress(tally: Tally, wanted: int | None) -> str:
    of = f" of {wanted}" if wanted is not None else ""
    return (
        f"{tally.num_tokens}{of} tokens, {tally.num_prompts} prompts, "
        f"{tally.num_differences} differences, largest regret {tally.max_regret:.4g}"
    )


def _report(
    arms: IdentityArms, options: VerifyOptions, configs: Sequence[SpeculativeConfig], screen: Screen
) -> int:
    bound = DEFAULT_MAX_REGRET if options.max_regret is None else options.max_regret
    llm, figures = arms.speculative, arms.tally.figures()
    failures = arms.tally.failures(llm.promises_identity, bound)
    if not arms.speculative_figures.num_draft_tokens:
        screen.note("nothing was drafted, so this says nothing about speculation")
    screen.say(_table(figures))
    screen.say(_verdict(failures, figures))
    if options.json:
        document = {
            "device": llm.config.device,
            "model": llm.model,
            "dtype": llm.config.dtype,
            "speculative_config": [asdict(config) for config in configs],
            "promises_identity": llm.promises_identity,
            "seed": options.seed,
            "allowed_regret": 0.0 if llm.promises_identity else bound,
            "passed": not failures,
            "failures": failures,
            **figures,
            "plain": arms.plain_figures.document(),
            "speculative": arms.speculative_figures.document(),
        }
        screen.document(document)
    return EXIT_FAILED if failures else 0


def _table(figures: dict[str, Any]) -> str:
    def cell(value: object) -> str:
        if isinstance(value, bool):
            return "yes" if value else "NO"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    names = [name for name in figures if name != "first_differences"]
    return table([{"figure": name, "value": cell(figures[name])} for name in names])


def _verdict(failures: Sequence[str], figures: dict[str, Any]) -> str:
    scope = f"{figures['num_tokens']} tokens of {figures['num_prompts']} prompts"
    first = figures["first_differences"]
    where = (
        f"; the first difference is in prompt {first[0]['prompt_index'] + 1}, "
        f"token {first[0]['position'] + 1}"
        if first
        else ""
    )
    if failures:
        return f"FAILED over {scope}: {'; '.join(failures)}{where}"
    if first:
        return f"passed: {scope}, differences within rounding{where}"
    return f"passed: identical over {scope}"
