"""One prompt or a batch of them: what callers of the Python API pass in, and what they get back.

Knows no engine and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, cast

from paceline.api.outputs import GenerationOutput
from paceline.core.errors import RequestError
from paceline.request.sampling_params import SamplingParams

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
Lora = str | Sequence[str | None] | None
"""Name of an adapter for all prompts, or one or None for each."""
RENAMED = {
    "sampling_params": "params",
    "use_tqdm": "progress",
    "lora_request": "lora",
    "chat_template_kwargs": "keywords of their own",
}
"""vLLM's keywords, and what says the same here."""
OF_EVERY_TEMPLATE = ("tools", "add_generation_prompt")


def batch_of(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether it is one prompt rather than a batch of them.

    Raises:
        RequestError: it is neither.
    """
    if is_single(prompts):
        return [cast(Prompt, prompts)], True
    return list(cast(Sequence[Prompt], prompts)), False


def is_single(prompts: object) -> bool:
    """Whether this is one prompt rather than a batch of them; ``RequestError`` if neither."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; allowed: a string, a list of token ids, a "
            "list of messages, or a list of these"
        )
    return bool(prompts) and isinstance(prompts[0], int | Mapping)


def check_chats(messages: Any) -> None:
    """Raises RequestError: this is neither a chat nor a list of chats."""
    chats = [messages] if is_single(messages) else messages
    for chat in chats:
        if isinstance(chat, str) or not chat or not all(isinstance(m, Mapping) for m in chat):
            raise RequestError(
                f"{chat!r:.60} is not a chat; allowed: lists of messages, such as "
                '{"role": "user", "content": "Hello"}; generate() takes texts and token ids'
            )


def check_keywords(options: Mapping[str, Any], mentions: Callable[[str], bool] | None) -> None:
    """Refuse keywords that nothing would read: they are mistakes.

    Args:
        mentions: whether the model's chat template has a name; None for a prompt that is no chat,
            so that no template is used.

    Raises:
        TypeError: as for any keyword that a function does not have.
    """
    unread = [
        name
        for name in options
        if mentions is None or not (name in OF_EVERY_TEMPLATE or mentions(name))
    ]
    if not unread:
        return
    hints = "".join(f"; {name} is {RENAMED[name]} here" for name in unread if name in RENAMED)
    allowed = ", ".join(each.name for each in fields(SamplingParams))
    template = (
        "the chat template of a chat, and this prompt is none"
        if mentions is None
        else "the model's chat template, which does not mention them"
    )
    raise TypeError(
        f"unexpected keyword argument {', '.join(map(repr, unread))}{hints}. How an answer is "
        "sampled is said by SamplingParams, as the second argument: generate(prompts, "
        f"SamplingParams(max_tokens=32)); its fields are {allowed}. Other keywords are for "
        f"{template}"
    )


def unpacked(
    outputs: list[GenerationOutput], single: bool
) -> GenerationOutput | list[GenerationOutput]:
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
        raise RequestError.of("n", f"is {params.n}; a stream carries one sample, use generate()")
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
