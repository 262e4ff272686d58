"""The Python API for asyncio: :class:`~paceline.api.llm.LLM` awaited and cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, overload

from paceline.api.batches import (
    Lora,
    Message,
    Prompt,
    adapters_for,
    batch_of,
    check_chats,
    for_stream,
    params_for,
    unpacked,
)
from paceline.api.llm import LLM
from paceline.api.outputs import Collector, GenerationOutput, Job
from paceline.request.request import StepOutput
from paceline.request.sampling_params import SamplingParams


class AsyncLLM(LLM):
    """The same for asyncio: ``await llm.agenerate(..)``, ``async for x in llm.astream(..)``.

    >>> import asyncio
    >>> async def ask():
    ...     with AsyncLLM("embedded") as llm:
    ...         answer = await llm.agenerate("def f", SamplingParams(max_tokens=2, temperature=0))
    ...         return len(answer.token_ids)
    >>> asyncio.run(ask())
    2
    """

    @overload
    async def agenerate(
        self,
        prompts: Prompt,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        lora: Lora = None,
        **template_options: Any,
    ) -> GenerationOutput: ...
    @overload
    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        lora: Lora = None,
        **template_options: Any,
    ) -> list[GenerationOutput]: ...
    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        lora: Lora = None,
        **template_options: Any,
    ) -> GenerationOutput | list[GenerationOutput]:
        """:meth:`LLM.generate` without blocking the event loop; cancelling it ends its requests."""
        batch, single = batch_of(prompts)
        wishes = params_for(params, len(batch), self.sampling_defaults.params())
        encoded = await asyncio.to_thread(
            lambda: [self.encode(prompt, **template_options) for prompt in batch]
        )
        adapters = adapters_for(lora, len(batch))
        async with self._submitted(encoded, wishes, cache_salt, adapters) as (jobs, inbox):
            collector = Collector(jobs)
            while not collector.done:
                for output in await inbox.get():
                    collector.take(output)
        return unpacked(collector.outputs(), single)

    @overload
    async def achat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        lora: Lora = None,
        **template_options: Any,
    ) -> GenerationOutput: ...
    @overload
    async def achat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        lora: Lora = None,
        **template_options: Any,
    ) -> list[GenerationOutput]: ...
    async def achat(self, messages: Any, *params: Any, **options: Any) -> Any:
        """:meth:`LLM.chat` without blocking the event loop; cancelling it ends its requests."""
        check_chats(messages)
        return await self.agenerate(messages, *params, **options)

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        lora: str | None = None,
        **template_options: Any,
    ) -> AsyncIterator[StepOutput]:
        """:meth:`LLM.stream` without blocking the event loop; cancelling it ends the request."""
        wish = for_stream(params, self.sampling_defaults.params())
        encoded = await asyncio.to_thread(self.encode, prompt, **template_options)
        async with self._submitted([encoded], [wish], cache_salt, [lora]) as (_, inbox):
            done = False
            while not done:
                (output,) = await inbox.get()
                done = output.finish_reason is not None
                if output.error is not None:
                    raise output.error
                yield output

    @asynccontextmanager
    async def _submitted(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        cache_salt: str,
        adapters: Sequence[str | None],
    ) -> AsyncIterator[tuple[list[Job], asyncio.Queue[Sequence[StepOutput]]]]:
        """Requests that end with the block, whichever way it is left."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Sequence[StepOutput]] = asyncio.Queue()

        def sink(outputs: Sequence[StepOutput]) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, outputs)

        submit = partial(self.submit, prompts, params, sink, cache_salt, adapters=adapters)
        submitting = asyncio.ensure_future(asyncio.to_thread(submit))
        try:
            yield await asyncio.shield(submitting), inbox
        finally:
            submitting.add_done_callback(self._abandon)

    def _abandon(self, submitting: asyncio.Future[list[Job]]) -> None:
        """Abort what was submitted; requests that have ended already do not mind."""
        if not submitting.cancelled() and submitting.exception() is None:
            self.abort([i for job in submitting.result() for i in job.ids])
