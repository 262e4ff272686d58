"""From the fields of a body to what the engine takes. Owns defaults, aliases and the context check.

Knows no HTTP and no endpoint: whatever is wrong is a ``RequestError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.core.errors import ContextLengthError, RequestError
from paceline.request.engine_stats import EngineInfo
from paceline.request.sampling_params import (
    MAX_STOP_STRINGS,
    NEUTRAL,
    SamplingParams,
    SpeculativeParams,
)
from paceline.request.structured_outputs import StructuredOutputs
from paceline.server.protocol.generation import (
    MAX_LOGIT_BIAS,
    GenerationFields,
    LogitBias,
    Speculation,
)
from paceline.text.tokenizer import Tokenizer

LLAMA_CPP_DRAWN_SEED = 2**32 - 1
"""As llama.cpp's ``/props`` says that a seed is drawn, and as it takes it (b11549: two answers with
it differ, while those with 2**32 - 2 are equal)."""
_SAME = (
    *("min_tokens", "presence_penalty", "frequency_penalty", "allowed_token_ids", "bad_words"),
    *("include_stop_str_in_output", "ignore_eos", "logprob_token_ids", "n"),
)
"""Fields that parameters have under the same name and with the same default."""
MAX_DIGITS = 10
"""Of a token id that is written as a text."""


def sampling_params(
    fields: GenerationFields,
    info: EngineInfo,
    tokenizer: Tokenizer | None,
    *,
    max_tokens: int | None,
    structured: StructuredOutputs | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    more_stops: Sequence[str] = (),
    more_stop_ids: Sequence[int] = (),
) -> SamplingParams:
    """What the engine is asked for.

    Args:
        more_stops: strings that end an answer besides the request's own, as far as there is room.

    Raises:
        RequestError: fields cannot be used together or are out of range.
    """
    biases, banned = _logit_bias(fields.logit_bias or {}, tokenizer)
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or ()
    given = {name: value for name in _SAME if (value := getattr(fields, name)) is not None}
    return SamplingParams(
        **given,
        **_with_defaults(fields, info),
        max_tokens=max_tokens,
        logit_bias=biases,
        banned_token_ids=banned,
        seed=None if fields.seed == LLAMA_CPP_DRAWN_SEED else fields.seed,
        stop=(*stop, *more_stops)[:MAX_STOP_STRINGS],
        stop_token_ids=(*(fields.stop_token_ids or ()), *more_stop_ids),
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
        speculative=speculative_params(fields),
        structured_outputs=structured,
    )


def truncated(
    token_ids: list[int], most: int | None, info: EngineInfo, max_tokens: int | None = None
) -> list[int]:
    """The last tokens of a prompt: so many, or with -1 as many as leave room for an answer.

    Raises:
        RequestError: nothing would be left.
    """
    if most is None:
        return token_ids
    if most == 0:
        raise RequestError.of(
            "truncate_prompt_tokens",
            "is 0, which leaves no prompt; send at least 1, or -1 for as "
            "many as leave room for an answer",
        )
    if most == -1:
        most = max(1, info.max_model_len - (max_tokens or 1))
    return token_ids[-most:]


def answer_limit(
    num_prompt_tokens: int,
    max_tokens: int | None,
    info: EngineInfo,
    *,
    is_cut: bool = False,
    name: str = "max_tokens",
) -> int:
    """Most tokens of an answer: what was asked for, or all that the context leaves.

    Args:
        is_cut: whether a ``max_tokens`` beyond what the context leaves means all of that.
        name: what the client calls ``max_tokens``.

    Raises:
        ContextLengthError: prompt and answer do not fit into the context together.
    """
    room = info.max_model_len - num_prompt_tokens
    # OpenAI's words, by which clients that know no codes recognise this error.
    longest = f"this model's maximum context length is {info.max_model_len} tokens"
    if room < 1:
        raise ContextLengthError(
            f"{longest}; the prompt has {num_prompt_tokens}, and the answer needs at least one: "
            "shorten the prompt"
        )
    if max_tokens is None or (is_cut and max_tokens > room):
        return room
    if max_tokens > room:
        raise ContextLengthError(
            f"{longest}; the prompt has {num_prompt_tokens} and {name} is {max_tokens}: "
            f"shorten the prompt, or ask for at most {room}"
        )
    return max_tokens


def _with_defaults(fields: GenerationFields, info: EngineInfo) -> dict[str, Any]:
    defaults = info.sampling.values if info.sampling.is_stated else fields.unstated_sampling
    values = {}
    for name, neutral in NEUTRAL.items():
        value = getattr(fields, name)
        values[name] = defaults.get(name, neutral) if value is None else value
    if values["top_p"] == 0:
        values |= {"top_k": 1, "top_p": 1.0}
    return values


def _logit_bias(
    given: LogitBias, tokenizer: Tokenizer | None
) -> tuple[dict[int, float], tuple[int, ...]]:
    """Biases by token id, and the tokens that are banned.

    OpenAI has an object whose keys are ids. In llama.cpp's a key may also be a text, each token of
    which gets the bias, and it may be a list of pairs, in which digits are a text too. Biases of
    one token add up.

    Raises:
        RequestError: a text cannot be encoded, or all of them are too many tokens.
    """
    biases, banned = dict[int, float](), list[int]()
    pairs: Iterable[tuple[int | str, float]]
    if isinstance(given, dict):
        pairs = ((int(key) if _is_id(key) else key, bias) for key, bias in given.items())
    else:
        pairs = given
    for token, bias in pairs:
        for token_id in _ids_of(token, tokenizer):
            if bias is False:
                banned.append(token_id)
            else:
                biases[token_id] = biases.get(token_id, 0.0) + bias
    if len(biases) + len(banned) > MAX_LOGIT_BIAS:
        raise RequestError.of(
            "logit_bias",
            f"has {len(biases) + len(banned)} tokens; at most {MAX_LOGIT_BIAS} are allowed",
        )
    return biases, tuple(banned)


def _is_id(key: str) -> bool:
    """``"1_0"`` and ``" 1"`` are Python's idea of a number alone."""
    return key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS


def _ids_of(token: int | str, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(token, int):
        return [token]
    if tokenizer is None:
        raise RequestError.of(
            "logit_bias", f"names {token[:40]!r}; the model has no tokenizer, so send token ids"
        )
    return tokenizer.encode(token, add_special_tokens=False)


def speculative_params(fields: GenerationFields) -> SpeculativeParams:
    """The object ``speculative``, or its aliases.

    Raises:
        RequestError: an alias contradicts the object, or a method is unknown.
    """
    wish = fields.speculative or Speculation()
    is_off, depth = fields.disable_spec_decode, fields.num_speculative_tokens
    if is_off is not None and "enabled" in wish.model_fields_set and wish.enabled == is_off:
        raise RequestError.of(
            "disable_spec_decode", "contradicts speculative.enabled; send one of them"
        )
    if depth is not None and wish.num_speculative_tokens not in (None, depth):
        raise RequestError.of(
            "num_speculative_tokens",
            "contradicts speculative.num_speculative_tokens; send one of them",
        )
    return SpeculativeParams(
        enabled=wish.enabled if is_off is None else not is_off,
        methods=wish.method if wish.methods is None else wish.methods,
        num_speculative_tokens=wish.num_speculative_tokens if depth is None else depth,
    )
