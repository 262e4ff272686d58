"""Fields of other servers that Paceline does not have, with the values that ask for nothing.

Clients send them as a matter of course. Owns one table and the refusal of other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from paceline.server.protocol.foreign import LLAMA_CPP, WHY

Values = tuple[Any, ...]
_MAX_SHOWN = 60

ASKS_FOR_NOTHING: Mapping[str, Values] = {
    # OpenAI
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    # vLLM
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "priority": (0,),
    "echo": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "include_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
    "prompt_embeds": (),
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "truncation_side": ("left",),
    "request_id": (),
    # SGLang
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "stop_regex": ([],),
    "lora_path": (),
    "routed_experts_start_len": (0,),
    "images_config": ({},),
    "session_id": (),
    "session_params": ({},),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "routed_dp_rank": (),
    "data_parallel_rank": (),
    "extra_key": (),
    "custom_labels": ({},),
    "custom_params": ({},),
    "custom_logit_processor": (),
    "rid": (),
    "max_new_tokens": (),
    "min_new_tokens": (),
    **{name: values for name, (values, _) in LLAMA_CPP.items()},
}
"""For each field its values that change nothing; ``null`` is one for all of them.

A body's own fields come first: ``echo`` is one of completions, and stands here for chats alone.
"""


_BY_HEADER = "send the header x-request-id instead"
INSTEAD: Mapping[str, str] = {
    **WHY,
    **{name: why for name, (_, why) in LLAMA_CPP.items()},
    "suffix": "gaps are filled by /v1/completions and /infill",
    "best_of": "it would compute samples that nobody sees; ask for n of them and choose",
    "skip_special_tokens": "special tokens are never part of a text",
    "chat_template": "the template comes with the model or by --chat-template; its options go into "
    "chat_template_kwargs",
    "documents": "options of a chat template go into chat_template_kwargs",
    "request_id": _BY_HEADER,
    "rid": _BY_HEADER,
}
"""For some of them why other values are refused, or what to send in their place."""


def asks_for_nothing(value: Any, allowed: Values) -> bool:
    """Whether a field with this value may as well be left out.

    Args:
        allowed: values that ask for nothing, besides null.
    """
    return value is None or any(_equal(value, each) for each in allowed)


def refusal(name: str, value: Any, allowed: Values, reason: str) -> str:
    """What is said of another value, as a sentence that begins with the field's name."""
    if not allowed:
        return f"{name} is not supported: {reason}"
    accepted = ", ".join([*map(_json, allowed), "null"])
    return (
        f"{name} is {_json(value)}; only what asks for nothing is accepted ({accepted}): {reason}"
    )


def _equal(value: Any, allowed: Any) -> bool:
    """As JSON has it: 1 is 1.0 and is not true."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _json(value: Any) -> str:
    text = to_json(value, inf_nan_mode="null").decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
