"""Which requests are in the next step, with how many tokens. Owns the queues; runs nothing.

First come, first served. Every running request gets exactly one span per step: its next prefill
chunk or its last token. When blocks run out the latest request gives back all of its blocks and is
computed again later; its output does not change, because its noise depends on positions only.
"""

from __future__ import annotations

from collections import deque

from paceline.cache.block_pool import blocks_for
from paceline.cache.kv_cache import KVCache
from paceline.config import EngineConfig
from paceline.core.errors import RequestError
from paceline.engine.step import Scheduled, step_shape
from paceline.models.backend import BLOCK_SIZE
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import StepShape
from paceline.request.request import Request, RequestStatus

PROMPT_LOGPROB_ROWS = 64
"""Most prompt rows per step whose full logits exist at one time."""
MIN_CHUNK = 16
DEFAULT_STEP_MS = 100.0
DEFAULT_STEP_RATIO = 4.0


class Scheduler:
    """Queues of one engine. See the module's docstring for the order of service."""

    def __init__(self, config: EngineConfig, kv: KVCache, cost: CostModel) -> None:
        self._config = config
        self._kv = kv
        self.cost = cost
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_cached_tokens = 0
        """Tokens whose KV came out of the prefix cache, since the start."""
        self.num_queried_tokens = 0
        """Tokens that were looked for there."""
        self.preempted: list[Request] = []
        """Requests that the last :meth:`schedule` sent back to the queue."""

    def add(self, request: Request) -> None:
        """Queue a request; ``RequestError`` where the whole KV cache is too small for it."""
        capacity = self._kv.pool.num_blocks - 1
        if blocks_for(request.max_len) > capacity:
            raise RequestError(
                f"the request may grow to {request.max_len} tokens; the KV cache holds "
                f"{capacity * BLOCK_SIZE}: lower max_tokens or raise --kv-cache-memory"
            )
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out, finished or not, and free its KV."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._kv.free(request.request_id)

    def schedule(self) -> list[Scheduled]:
        """Reserve one span for every request that can take part in the next step."""
        self.preempted = []
        items = self._spans()
        while not items and self.running:  # prefills hold all blocks and none can go on
            self._preempt(self.running[-1])
            items = self._spans() if self.running else []
        return items

    def _spans(self) -> list[Scheduled]:
        items = self._decodes()
        can_admit = self.waiting and len(self.running) < self._config.max_num_seqs
        if can_admit or len(items) < len(self.running):
            self._prefill(items)
        return items

    def _decodes(self) -> list[Scheduled]:
        items = []
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING or (
                len(request.token_ids) - request.num_computed != 1
            ):
                continue
            while not self._kv.reserve(request.request_id, 1):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            else:
                items.append(Scheduled(request, 1))
        return items

    def _prefill(self, items: list[Scheduled]) -> None:
        """Fill the step up with prefill chunks, of running requests before waiting ones."""
        budget = self._config.max_num_batched_tokens - len(items)
        if items:
            budget = min(budget, self._prefill_limit(step_shape(items)))
        for request in self.running:
            if request.num_uncomputed > 1 and budget > 0:
                budget -= self._add_chunk(request, budget, items)
        self._admit(budget, items)

    def _prefill_limit(self, decodes: StepShape) -> int:
        """Prompt tokens that may share a step with decoding requests."""
        limit = self._config.max_step_ms
        if limit is None:
            plain = self.cost.predict(decodes)
            limit = max(DEFAULT_STEP_MS, DEFAULT_STEP_RATIO * plain)
        rows = self.cost.rows_within(decodes, limit, self._config.max_num_batched_tokens)
        return max(MIN_CHUNK, rows)

    def _add_chunk(self, request: Request, budget: int, items: list[Scheduled]) -> int:
        """Schedule the next prefill chunk; returns how many rows it takes."""
        count = min(budget, request.num_uncomputed)
        if request.params.prompt_logprobs is not None:
            count = min(count, PROMPT_LOGPROB_ROWS)
        if count < request.num_uncomputed and request.num_computed < request.resume_at:
            count = min(count, request.resume_at - request.num_computed)  # its state is kept
        item = Scheduled(request, count)
        if not self._kv.reserve(request.request_id, count, item.certain):
            return 0
        items.append(item)
        return count

    def _admit(self, budget: int, items: list[Scheduled]) -> None:
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._config.max_num_seqs:
                return
            if self._waits_for_parent(request):
                continue
            if not self._start(request):
                return
            self.waiting.remove(request)
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            budget -= self._add_chunk(request, budget, items)

    def _parent(self, request: Request) -> Request | None:
        if request.fork_of is None or request.num_output_tokens:
            return None
        everyone = [*self.running, *self.waiting]
        return next((r for r in everyone if r.request_id == request.fork_of), None)

    def _waits_for_parent(self, request: Request) -> bool:
        parent = self._parent(request)
        return parent is not None and parent.num_computed < parent.prompt_len

    def _start(self, request: Request) -> bool:
        """Give a request its first KV: forked, from the prefix cache, or empty."""
        parent = self._parent(request)
        wanted = len(request.token_ids) - 1  # the last token is always computed
        if parent is not None and self._kv.can_fork(parent.request_id, wanted):
            if not self._kv.fork(parent.request_id, request.request_id, wanted):
                return False
            request.num_computed = wanted
            request.prompt_logprobs = list(parent.prompt_logprobs)
            return True
        reuse = 0 if request.params.reads_prompt else wanted
        if self.running and not self._has_room(request, reuse):
            return False
        self._kv.open(request.request_id, request.cache_salt, request.adapter_name)
        request.num_computed = self._kv.attach_prefix(request.request_id, request.token_ids, reuse)
        self.num_queried_tokens += reuse
        self.num_cached_tokens += request.num_computed
        if not request.num_preemptions:  # later it would find what it computed itself
            request.num_cached_tokens = request.num_computed
        return True

    def _has_room(self, request: Request, reuse: int) -> bool:
        """Whether there are blocks for all tokens of a request that others do not hold already."""
        needed, available = blocks_for(len(request.token_ids)), self._kv.num_available
        if needed <= available:
            return True
        held = self._kv.blocks_held(request.token_ids[:reuse], request.cache_salt)
        return needed - held <= available

    def _preempt(self, request: Request) -> None:
        self._kv.free(request.request_id)
        self.running.remove(request)
        request.num_computed = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)
        self.preempted.append(request)
