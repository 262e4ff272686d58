"""Fields of other servers that Paceline does not have, with the values that ask for nothing.

Clients send them as a matter of course. Owns the table, which ``docs/server.md`` repeats for
people, and the refusal of other values. Knows no body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

_FILTERS = "the filters are temperature, top_k, top_p and min_p"
_PENALTIES = "the penalties are repetition_penalty, presence_penalty and frequency_penalty"
_SAMPLERS = [
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
]
"""llama.cpp's own list, as /props of b11549 has it."""
_DRY = f"there is no DRY penalty; {_PENALTIES}"
_TEXT = "the models served here read text"
_ROUTING = "one process has one engine, which places requests itself"
_WHOLE = "answers are told whole"
_PARSERS = "--reasoning-parser and --tool-call-parser say how answers are read"
_DRAFTS = "send speculative.num_speculative_tokens instead"
_TIME = "--request-timeout holds for all answers"
_INFILL = "send it to /infill"
_BY_HEADER = "send the header x-request-id instead"
_MAX_SHOWN = 60

Values = tuple[Any, ...]

FOREIGN: Mapping[str, tuple[Values, str]] = {
    # OpenAI
    "best_of": ((1,), "it would compute samples that nobody sees; ask for n of them and choose"),
    "suffix": (("",), "gaps are filled by /v1/completions and /infill"),
    "functions": (([],), "send tools instead"),
    "function_call": (("none",), "send tool_choice instead"),
    "modalities": ((["text"],), "the models served here read and write text"),
    "service_tier": (("auto", "default"), "all requests wait in one queue"),
    "verbosity": (("medium",), "options of a chat template go into chat_template_kwargs"),
    # vLLM
    "use_beam_search": ((False,), "answers are sampled"),
    "length_penalty": ((1,), "it is for beam search; answers are sampled"),
    "early_stopping": ((False,), "it is for beam search; answers are sampled"),
    "detokenize": ((True,), "answers are text; return_token_ids adds the ids"),
    "skip_special_tokens": ((True,), "special tokens are never part of a text"),
    "spaces_between_special_tokens": ((True,), "special tokens are never part of a text"),
    "logits_processors": (
        ([],),
        "requests cannot bring code; send logit_bias or structured_outputs",
    ),
    "priority": ((0,), "all requests wait in one queue"),
    "echo": ((False,), "only /v1/completions repeats its prompt"),
    "add_special_tokens": ((False,), "a chat template writes them itself"),
    "documents": (([],), "options of a chat template go into chat_template_kwargs"),
    "include_reasoning": ((True,), _PARSERS),
    "return_tokens_as_token_ids": ((False,), "send return_token_ids instead"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "chat_template": (
        (),
        "the template comes with the model or by --chat-template; its options go into "
        "chat_template_kwargs",
    ),
    "media_io_kwargs": (({},), _TEXT),
    "mm_processor_kwargs": (({},), _TEXT),
    "repetition_detection": ((), _PENALTIES),
    "thinking_token_budget": (
        (),
        "completions have no thoughts that are known as such; send a chat",
    ),
    "kv_transfer_params": (({},), _ROUTING),
    "vllm_xargs": (({},), "there are no plugins that read it"),
    "guided_decoding_backend": ((), "there is one grammar engine"),
    "guided_whitespace_pattern": ((), "the grammar of JSON has one rule for white space"),
    "truncation_side": (("left",), "truncate_prompt_tokens keeps the last tokens"),
    "request_id": ((), _BY_HEADER),
    # SGLang
    "separate_reasoning": ((True,), _PARSERS),
    "stream_reasoning": ((True,), _PARSERS),
    "no_stop_trim": ((False,), "send include_stop_str_in_output instead"),
    "return_hidden_states": ((False,), "/v1/embeddings gives pooled hidden states"),
    "return_routed_experts": ((False,), _WHOLE),
    "return_cached_tokens_details": ((False,), "usage.prompt_tokens_details counts cached tokens"),
    "stop_regex": (([],), "send stop, or structured_outputs.regex"),
    "lora_path": ((), "model names the adapter of a request"),
    "routed_experts_start_len": ((0,), _WHOLE),
    "images_config": (({},), _TEXT),
    "session_id": ((), "prefixes are found by what they say"),
    "session_params": (({},), "prefixes are found by what they say"),
    "bootstrap_host": ((), _ROUTING),
    "bootstrap_port": ((), _ROUTING),
    "bootstrap_room": ((), _ROUTING),
    "routed_dp_rank": ((), _ROUTING),
    "data_parallel_rank": ((), _ROUTING),
    "extra_key": ((), "send cache_salt instead"),
    "custom_labels": (({},), "/metrics has labels of the server's own"),
    "custom_params": (({},), "there are no plugins that read it"),
    "custom_logit_processor": (
        (),
        "requests cannot bring code; send logit_bias or structured_outputs",
    ),
    "rid": ((), _BY_HEADER),
    "max_new_tokens": ((), "send max_tokens instead"),
    "min_new_tokens": ((), "send min_tokens instead"),
    # llama.cpp
    "n_predict": ((-1,), "send max_tokens instead"),
    "penalize_nl": ((True,), "penalties hold for all tokens"),
    "n_probs": ((0,), "send logprobs instead"),
    "post_sampling_probs": ((False,), "log-probabilities are told as the model gives them"),
    "n_cmpl": ((1,), "send n instead"),
    "n_keep": ((0,), "an answer ends where the context does"),
    "n_discard": ((0,), "an answer ends where the context does"),
    "n_indent": ((0,), "answers do not end by their indentation; send stop"),
    "min_keep": ((0, 1), _FILTERS),
    "typical_p": ((1,), _FILTERS),
    "tfs_z": ((1,), _FILTERS),
    "top_n_sigma": ((-1,), _FILTERS),
    "xtc_probability": ((0,), _FILTERS),
    "dynatemp_range": ((0,), _FILTERS),
    "mirostat": ((0,), _FILTERS),
    "adaptive_target": ((-1,), _FILTERS),
    "samplers": ((_SAMPLERS,), _FILTERS),
    "backend_sampling": ((False,), "where a token is sampled changes nothing here"),
    "dry_multiplier": ((0,), _DRY),
    "cache_prompt": ((True,), "prefixes are always cached; cache_salt keeps them apart"),
    "id_slot": ((-1,), "requests have no slots: a cached prefix is found by what it says"),
    "t_max_prompt_ms": ((), _TIME),
    "t_max_predict_ms": ((0,), _TIME),
    "response_fields": (([],), _WHOLE),
    "return_tokens": ((False,), "send return_token_ids instead"),
    "return_progress": ((False,), _WHOLE),
    "timings_per_token": ((False,), "send include_metrics instead"),
    "lora": (([],), "model names the adapter of a request"),
    "image_data": (([],), _TEXT),
    "reasoning_format": (("auto", "deepseek", "none"), "completions are not parsed"),
    "reasoning_in_content": ((False,), "send reasoning_format: none in a chat"),
    "chat_format": (("Content-only",), _PARSERS),
    "generation_prompt": (("",), "continue_final_message goes on with a message"),
    "thinking_forced_open": ((False,), _PARSERS),
    "parse_tool_calls": ((True,), _PARSERS),
    "grammar_lazy": ((False,), "a grammar holds from the first token, or behind the thoughts"),
    "grammar_triggers": (([],), "a grammar holds from the first token, or behind the thoughts"),
    "preserved_tokens": (([],), _PARSERS),
    "speculative.types": (("none",), "send speculative.methods instead"),
    "speculative.n_max": ((), _DRAFTS),
    "speculative.n_min": ((), _DRAFTS),
    "speculative.p_min": ((), _DRAFTS),
    "input_prefix": ((), _INFILL),
    "input_suffix": ((), _INFILL),
    "input_extra": ((), _INFILL),
}
"""For each field its values that change nothing, besides ``null``, and why others are refused.

A body's own fields come first: ``echo`` is one of completions, and stands here for chats alone.
"""
ASKS_FOR_NOTHING: Mapping[str, Values] = {name: values for name, (values, _) in FOREIGN.items()}
INSTEAD: Mapping[str, str] = {name: why for name, (_, why) in FOREIGN.items()}


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
    accepted = ", ".join([*map(as_json, allowed), "null"])
    return (
        f"{name} is {as_json(value)}; only what asks for nothing is accepted ({accepted}): {reason}"
    )


def _equal(value: Any, allowed: Any) -> bool:
    """As JSON has it: 1 is 1.0 and is not true."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def as_json(value: Any) -> str:
    """A value for an error's text, cut where it is long."""
    text = to_json(value, inf_nan_mode="null").decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
