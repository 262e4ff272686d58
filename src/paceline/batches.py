"""One prompt or a batch of them: what callers of the Python API pass in, and what they get back.

Knows no engine and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.errors import RequestError
from paceline.outputs import GenerationOutput
from paceline.sampling_params import SamplingParams

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
Lora = str | Sequence[str | None] | None
"""Name of an adapter for all prompts, or one or None for each."""


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt rather than a batch of them; ``RequestError`` if neither."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; allowed are a string, a list of token ids, a "
            "list of messages, or a list of these"
        )
    return bool(prompts) and isinstance(prompts[0], int | Mapping)


def unpacked(outputs: list[GenerationOutput], single: bool) -> Any:
    """The list of a batch; the output of a single prompt, whose error is raised."""
    if not single:
        return outputs
    if outputs[0].error is not None:
        raise outputs[0].error
    return outputs[0]


def for_stream(params: SamplingParams | None, default: SamplingParams) -> SamplingParams:
    """Those of one streamed prompt; ``RequestError`` where they ask for several samples."""
    params = params or default
    if params.n != 1:
        raise RequestError(f"n is {params.n}; a stream carries one sample, use generate()")
    return params


def params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    """One per prompt; ``RequestError`` where there are more or fewer."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters for {count} prompts")
    return list(params)


def adapters_for(lora: Lora, count: int) -> list[str | None]:
    """One per prompt; ``RequestError`` where there are more or fewer."""
    if lora is None or isinstance(lora, str):
        return [lora] * count
    if len(lora) != count:
        raise RequestError(f"{len(lora)} adapters for {count} prompts")
    return list(lora)


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; yields what is told the number of finished prompts."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda finished: bar.update(task, completed=finished)
