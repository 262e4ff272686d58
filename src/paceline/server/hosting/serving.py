"""What every endpoint leans on: a model's engine, options, queue, metrics and names.

Owns the state of a model between requests, how many unfinished samples it takes on, and the answers
to a request's prompts while they come. Knows no endpoint and no format.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request

from paceline import __version__
from paceline.core.errors import ConfigError, PacelineError, RequestError
from paceline.request.engine_stats import EngineStats
from paceline.request.sampling_params import SamplingParams
from paceline.server.chat.answer_formats import ChatFormats
from paceline.server.engine_process.backlog import Backlog, Share
from paceline.server.engine_process.client import (
    Answers,
    EngineClient,
    engine_stats,
)
from paceline.server.engine_process.tokens import TokenTexts
from paceline.server.hosting.loaded_models import Room
from paceline.server.http.config import ServerConfig
from paceline.server.http.errors import RATE_LIMIT, SERVER, ApiError
from paceline.server.http.security import partition
from paceline.server.http.sse import Deadline
from paceline.server.http.tracing import current_trace_id
from paceline.server.metrics.server_metrics import (
    AnswerTimes,
    ModelMetrics,
    Operation,
    ServerMetrics,
)
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
LATEST = ":latest"
"""A tag with which a name means the same, as Ollama's clients write it."""
_REFUSALS = {
    "draining": "the server is ending and takes no new requests",
    "starting": "the engine is being started again; try again soon",
    "hung": "the engine does not answer; it is started again if that goes on",
}


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One prompt and what is wanted of it."""

    token_ids: list[int]
    params: SamplingParams


class Serving:
    """The state of one model on a server, and of its engine when it is loaded.

    Args:
        client: started, unless the model is to be loaded later.
        names: under which requests ask for it, the first in answers.
        metrics, room, backlog, schemas: that it shares with the server's other models.
        num_bytes: of its weights, as far as that is known before it is loaded.

    Attributes:
        is_known: it was loaded before, so that the client has its facts.
        resident: whether it is loaded, and until when.
        fingerprint: what decides, besides the model, which tokens follow from a seed.
        texts: of its tokens, once it was loaded.
        formats: how it reads and writes chats, of a model with a tokenizer that was loaded.

    Raises:
        ModelTooLargeError: it is loaded, and larger than all of the room.
    """

    texts: TokenTexts
    fingerprint: str
    formats: ChatFormats

    def __init__(
        self,
        client: EngineClient,
        config: ServerConfig,
        names: Sequence[str],
        metrics: ServerMetrics,
        room: Room,
        backlog: Backlog,
        schemas: SchemaThread,
        num_bytes: int = 0,
    ) -> None:
        self.client = client
        self.config = config
        self.created = int(time.time())
        self.names = tuple(names)
        self.num_bytes = self.size = num_bytes
        self.metrics = ModelMetrics(metrics, self.name)
        self.admission = SampleQueue(0, config.max_queue, self.metrics.rejected.inc)
        self.schemas = schemas
        self._backlog = backlog
        self._num_loads = 0
        self._is_draining = False
        is_loaded = client.state == "ready"
        if is_loaded:
            self._take_facts()
        self.resident = room.resident(self, is_loaded)

    @property
    def name(self) -> str:
        return self.names[0]

    def adapter_of(self, asked: str | None) -> str | None:
        """The adapter that a request for this model means; None: the model as it is."""
        if asked is None:
            return None
        names = asked, asked.removesuffix(LATEST)
        if any(name in self.names for name in names):
            return None
        return next((name for name in names if name in self.client.adapters), None)

    @property
    def is_known(self) -> bool:
        return self._num_loads > 0

    @property
    def pooling(self) -> str:
        """Of embeddings whose requests do not say; of a loaded model."""
        return self.config.pooling or self.client.info.pooling or "mean"

    @property
    def has_failed(self) -> bool:
        return self.client.state == "failed"

    @property
    def state(self) -> str:
        """Of its engine where it is loaded, otherwise of its way there."""
        if self.resident.is_open:
            return self.client.state
        return "draining" if self._is_draining else self.resident.place

    def using(self, keep_alive: float | None = None) -> AbstractAsyncContextManager[None]:
        """Have it loaded while a block runs, as a ``Resident`` does.

        Raises (when the block is entered):
            ApiError: 503, it would have to be loaded, and the server is ending.
        """
        return self.resident.using(keep_alive, self.check_takes_requests)

    async def open(self) -> None:
        """Load it; see :class:`~paceline.server.hosting.loaded_models.Loadable`."""
        if self.has_failed:
            await self.client.close()
        await self.client.start()
        self._take_facts()

    def _take_facts(self) -> None:
        info, self._num_loads = self.client.info, self._num_loads + 1
        self.num_bytes, self.size = info.num_bytes, memory_of(self.client)
        self.admission.max_num_seqs = info.max_num_seqs
        self.fingerprint = f"paceline-{__version__}-{info.dtype}-{info.backend}"
        tokenizer = self.client.tokenizer
        self.texts = TokenTexts(tokenizer)
        if tokenizer is not None:
            parsers = self.config.reasoning_parser, self.config.tool_call_parser
            self.formats = ChatFormats.of(tokenizer, *parsers)
        self._note_unknown_options(tokenizer)

    def _note_unknown_options(self, tokenizer: Tokenizer | None) -> None:
        if tokenizer is not None and tokenizer.has_chat_template:
            for name in self.config.default_chat_template_kwargs:
                if not tokenizer.template_knows(name):
                    log.warning(
                        "the chat template of %s does not know %s, which the default options of "
                        "templates set",
                        self.name,
                        name,
                    )

    async def close(self) -> None:
        """Unload it."""
        if self.is_known:
            await self.note_counters()
            self.metrics.take(EngineStats(), self.client, self._num_loads)
        await self.client.close()

    def drain(self) -> None:
        """Take no new requests."""
        self._is_draining = True
        self.client.drain()

    async def note_counters(self) -> None:
        """Let the metrics know what the engine has counted."""
        stats = await engine_stats(self.client)
        self.metrics.take(stats, self.client, self._num_loads)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ConfigError: the model has none."""
        if self.client.tokenizer is None:
            raise ConfigError(
                "the model has no tokenizer; send token ids to /v1/completions instead of text"
            )
        return self.client.tokenizer

    def check_takes_requests(self) -> None:
        """Raises ApiError: 503, the server is ending, or its engine starting or hung."""
        state = self.state
        if state in _REFUSALS:
            again = {"Retry-After": "5"}
            raise ApiError(503, _REFUSALS[state], SERVER, code=state, headers=again)

    def admitted(self, count: int) -> AbstractContextManager[None]:
        """Hold places for a request's samples, before any work goes into it.

        Raises (the first at once, the others when the block is entered):
            ApiError: 503, the server is ending or its engine starting; 429, the queue is full.
            RequestError: so many places do not exist.
        """
        self.check_takes_requests()
        return self.admission.places(count)

    @asynccontextmanager
    async def answering(
        self,
        request: Request,
        prompts: Sequence[EncodedPrompt],
        deadline: Deadline,
        cache_salt: str | None,
        operation: Operation,
        adapter: str | None = None,
        is_stream: bool = False,
    ) -> AsyncIterator[Answers]:
        """Submit the prompts of a request that was admitted; leaving the block aborts what runs.

        Args:
            is_stream: pieces wait for the client, and otherwise for the end of the answer. Where
                too many wait, the request ends.

        Raises (when the block is entered):
            RequestError, EngineClosedError: the engine refuses a prompt, or is dead.
        """
        params = [prompt.params for prompt in prompts]
        times = AnswerTimes(self.metrics, operation, len(prompts), params[0].n, deadline, is_stream)
        trace_id = current_trace_id()
        generating = self.client.generate(
            [prompt.token_ids for prompt in prompts],
            params,
            cache_salt=partition(request.scope, cache_salt),
            trace_id=trace_id,
            adapter=adapter,
            share=self._share(deadline, is_stream, params[0], trace_id),
        )
        is_taken_on, failure = False, None
        try:
            async with generating as answers:
                is_taken_on = True
                answers.on_read = times.observe
                yield answers
        except Exception as error:
            failure = error
            raise
        finally:
            if is_taken_on or not isinstance(failure, RequestError):  # a refusal takes no time
                times.close(failure is not None)

    def _share(
        self, deadline: Deadline, is_stream: bool, params: SamplingParams, trace_id: str
    ) -> Share:
        """Of what may wait for the client of a request."""
        extra, backlog = {"trace_id": trace_id}, self._backlog

        def dropped(error: PacelineError) -> None:
            log.warning("a request is ended: %s", error, extra=extra)
            self.metrics.dropped.inc()
            deadline.end(error)

        if not is_stream:
            return backlog.of_answer(dropped)
        tells_prompt = params.prompt_logprobs is not None
        return (backlog.of_prompt_and_stream if tells_prompt else backlog.of_stream)(dropped)


_MAX_RETRY_SECONDS = 60
_SMOOTHING = 0.2


class SampleQueue:
    """Places for unfinished samples.

    Args:
        max_queue: samples that may wait besides.
        on_full: told of each request that is sent away.

    Attributes:
        max_num_seqs: samples that the engine runs at once; 0 while it is not known.
    """

    def __init__(
        self, max_num_seqs: int, max_queue: int, on_full: Callable[[], None] = lambda: None
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self._on_full = on_full
        self._max_queue = max_queue
        self._seconds = 1.0  # smoothed: how long requests take
        self.num_unfinished = 0

    @property
    def limit(self) -> int:
        """Most samples that may be unfinished."""
        return self.max_num_seqs + self._max_queue

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Hold places for the samples of one HTTP request until the block ends.

        Raises:
            ApiError: 429, the queue is full; ``Retry-After`` says when to try again.
            RequestError: so many places do not exist.
        """
        limit = self.limit
        if count > limit:
            raise RequestError(
                f"prompt and n: the request has {count} samples; at most {limit} can be "
                "unfinished at once: send smaller batches"
            )
        if self.num_unfinished + count > limit:
            self._on_full()
            raise self._full()
        self.num_unfinished += count
        began = time.monotonic()
        try:
            yield
        finally:
            self.num_unfinished -= count
            self._seconds += _SMOOTHING * (time.monotonic() - began - self._seconds)

    def _full(self) -> ApiError:
        rounds = self.num_unfinished / max(1, self.max_num_seqs)
        # Half of the queue's time: who comes back then will mostly find a place.
        wait = min(max(math.ceil(self._seconds * rounds / 2), 1), _MAX_RETRY_SECONDS)
        return ApiError(
            429,
            f"the queue is full: {self.num_unfinished} samples are unfinished and "
            f"{self.limit} are allowed; try again in {wait} s",
            RATE_LIMIT,
            code="queue_full",
            headers={"Retry-After": str(wait)},
        )


T = TypeVar("T")


class SchemaThread:
    """The one thread in which schemas of clients are read, one after the other.

    A schema that takes a second holds up others, but no stream: Python gives the event loop its
    turn every few milliseconds, which it would share with more threads.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="paceline-schemas")

    async def run(self, work: Callable[[], T]) -> T:
        """Whatever ``work`` returns or raises. It is not begun if the caller is gone before."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def memory_of(client: EngineClient) -> int:
    """Bytes of an engine that has just started, with its whole KV cache and mapped weights."""
    return used_memory(client) + client.info.kv_bytes


def used_memory(client: EngineClient) -> int:
    """Bytes that an engine takes, of its KV cache what was used so far."""
    resident = 0
    with suppress(OSError, ValueError, IndexError):  # where the system does not tell
        pages = int(Path(f"/proc/{client.pid}/statm").read_text().split()[1])
        resident = pages * os.sysconf("SC_PAGE_SIZE")
    return max(resident, client.info.num_bytes)
