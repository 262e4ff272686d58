"""Run by an interpreter that has xllamacpp: what llama.cpp drafts by a head, token by token.

    python llama_drafts.py TARGET HEAD TYPE NUM_TOKENS PROMPTS

``PROMPTS`` is JSON, for each completion what it is asked with: ``prompt``, which are token ids, and
maybe a ``grammar``. Of each the server takes one token of the target and then drafts; drafts, but
for those of DFlash 2, and how many of their tokens are accepted are in its log, on standard error.
"""

from __future__ import annotations

import json
import sys

import xllamacpp as llama


def main(target: str, head: str, kind: str, count: str, prompts: str) -> None:
    params = llama.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = target, 256, 1
    params.cpuparams.n_threads, params.warmup, params.verbosity = 1, False, 9
    types = llama.common_speculative_type
    params.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind.upper()}")]
    draft, floats = params.speculative.draft, llama.ggml_type.GGML_TYPE_F32
    draft.mparams.path, draft.n_max, draft.p_min = head, int(count), 0.0
    for each in (params, draft):
        each.cache_type_k = each.cache_type_v = floats
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = llama.Server(params)
    for prompt in json.loads(prompts):
        greedy = {"temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        server.handle_completions({**prompt, "n_predict": int(count) + 1, **greedy})


if __name__ == "__main__":
    main(*sys.argv[1:])
