"""Fields of llama.cpp that Paceline does not have, and why fields of others are refused.

Owns two tables, which ``docs/server.md`` repeats for people. Knows no body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

LLAMA_CPP: Mapping[str, tuple[tuple[Any, ...], str]] = {
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
"""For each field its values that change nothing, and why others are refused."""

WHY: Mapping[str, str] = {
    "functions": "send tools instead",
    "function_call": "send tool_choice instead",
    "modalities": "the models served here read and write text",
    "service_tier": "all requests wait in one queue",
    "verbosity": "options of a chat template go into chat_template_kwargs",
    "truncation_side": "truncate_prompt_tokens keeps the last tokens",
    "max_new_tokens": "send max_tokens instead",
    "min_new_tokens": "send min_tokens instead",
    "use_beam_search": "answers are sampled",
    "length_penalty": "it is for beam search; answers are sampled",
    "early_stopping": "it is for beam search; answers are sampled",
    "detokenize": "answers are text; return_token_ids adds the ids",
    "spaces_between_special_tokens": "special tokens are never part of a text",
    "logits_processors": "requests cannot bring code; send logit_bias or structured_outputs",
    "custom_logit_processor": "requests cannot bring code; send logit_bias or structured_outputs",
    "priority": "all requests wait in one queue",
    "echo": "only /v1/completions repeats its prompt",
    "add_special_tokens": "a chat template writes them itself",
    "include_reasoning": _PARSERS,
    "separate_reasoning": _PARSERS,
    "stream_reasoning": _PARSERS,
    "return_tokens_as_token_ids": "send return_token_ids instead",
    "prompt_embeds": "prompts are text or token ids",
    "media_io_kwargs": _TEXT,
    "mm_processor_kwargs": _TEXT,
    "images_config": _TEXT,
    "repetition_detection": _PENALTIES,
    "thinking_token_budget": "completions have no thoughts that are known as such; send a chat",
    "kv_transfer_params": _ROUTING,
    "vllm_xargs": "there are no plugins that read it",
    "custom_params": "there are no plugins that read it",
    "custom_labels": "/metrics has labels of the server's own",
    "guided_decoding_backend": "there is one grammar engine",
    "guided_whitespace_pattern": "the grammar of JSON has one rule for white space",
    "no_stop_trim": "send include_stop_str_in_output instead",
    "return_hidden_states": "/v1/embeddings gives pooled hidden states",
    "return_routed_experts": _WHOLE,
    "routed_experts_start_len": _WHOLE,
    "return_cached_tokens_details": "usage.prompt_tokens_details counts cached tokens",
    "stop_regex": "send stop, or structured_outputs.regex",
    "lora_path": "model names the adapter of a request",
    "session_id": "prefixes are found by what they say",
    "session_params": "prefixes are found by what they say",
    "extra_key": "send cache_salt instead",
    "bootstrap_host": _ROUTING,
    "bootstrap_port": _ROUTING,
    "bootstrap_room": _ROUTING,
    "routed_dp_rank": _ROUTING,
    "data_parallel_rank": _ROUTING,
}
"""Why fields of OpenAI, vLLM and SGLang are refused."""
