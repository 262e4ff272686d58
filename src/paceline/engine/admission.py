"""Turns a prompt and its parameters into requests, or refuses them. Owns the limits' messages."""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.cache.memory_needs import LEAST_NODES
from paceline.config import EngineConfig
from paceline.core.errors import ContextLengthError, RequestError
from paceline.request.request import Adapter, Constraint, Request, StopChecker
from paceline.request.sampling_params import SamplingParams


class Admission:
    """Numbers and seeds the requests of one engine.

    Args:
        config: ``max_model_len`` must be resolved.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        assert config.max_model_len is not None
        self._context = config.max_model_len
        self._vocab_size = vocab_size
        self._eos = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._seeds = random.Random(config.seed)
        self._next_id = 0

    def requests(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        stop_checkers: Sequence[StopChecker],
        cache_salt: str,
        constraints: Sequence[Constraint],
        resume_at: int = 0,
        adapter: Adapter | None = None,
    ) -> list[Request]:
        """One request per sample; without a seed they share one that is drawn here.

        Raises:
            RequestError: as :func:`check_prompt`.
        """
        check_prompt(prompt_token_ids, params, self._context, self._vocab_size)
        group = make_requests(
            self._next_id,
            prompt_token_ids,
            params,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            context=self._context,
            eos_token_ids=self._eos,
            cache_salt=cache_salt,
            stop_checkers=stop_checkers,
            constraints=constraints,
            resume_at=resume_at,
            adapter=adapter,
        )
        self._next_id += len(group)
        return group


def check_prompt(
    prompt_token_ids: Sequence[int], params: SamplingParams, context: int, vocab_size: int
) -> None:
    """Refuse a prompt that cannot be served.

    Raises:
        ContextLengthError: the prompt leaves no room for an answer.
        RequestError: the prompt is empty, or a token is outside the vocabulary.
    """
    if not prompt_token_ids:
        raise RequestError("the prompt is empty; at least one token is needed")
    if len(prompt_token_ids) >= context:
        raise ContextLengthError(
            f"the prompt has {len(prompt_token_ids)} tokens; the context holds {context}, at "
            "least one of them for the answer: shorten the prompt"
        )
    for token_id in set(prompt_token_ids):  # all streams wait meanwhile, however long it is
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"prompt token {token_id!r} is not in the vocabulary 0 to {vocab_size - 1}"
            )
    params.check_vocabulary(vocab_size)


def make_requests(
    first_id: int,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    context: int,
    eos_token_ids: frozenset[int],
    cache_salt: str,
    stop_checkers: Sequence[StopChecker],
    constraints: Sequence[Constraint] = (),
    resume_at: int = 0,
    adapter: Adapter | None = None,
) -> list[Request]:
    """One request per sample; all but the first begin with the KV of the first one's prompt."""
    limit = context
    if params.max_tokens is not None:
        limit = min(context, len(prompt_token_ids) + params.max_tokens)
    # What comes after that point has to find room in a log; several samples begin at the very end.
    tail = len(prompt_token_ids) - resume_at
    return [
        Request(
            request_id=first_id + index,
            token_ids=list(prompt_token_ids),
            prompt_len=len(prompt_token_ids),
            params=params,
            seed=seed,
            max_len=limit,
            eos_token_ids=eos_token_ids,
            sample_index=index,
            fork_of=first_id if index else None,
            cache_salt=cache_salt if adapter is None else adapter.salt(cache_salt),
            resume_at=resume_at if params.n == 1 and tail <= LEAST_NODES else 0,
            stop_checker=stop_checkers[index] if stop_checkers else None,
            constraint=constraints[index] if constraints else None,
            adapter=adapter,
        )
        for index in range(params.n)
    ]
