"""Vocabularies and texts on which the ids of GGUF files are compared with llama.cpp's.

``recorded/gguf_ids.json.xz`` holds the texts, two small vocabularies and, for each way of cutting
texts, the ids that llama.cpp made. ``record_gguf_ids.py`` has written it.
"""

from __future__ import annotations

import functools
import json
import lzma
from pathlib import Path
from typing import Any

from paceline.text.gguf_tokenizer import PREFIX

FILE = Path(__file__).with_name("recorded") / "gguf_ids.json.xz"

BYTE_LEVEL = (
    *("", "default", "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"),
    *("midm-2.0", "lfm2", "jina-v5-nano", "minicpm5", "deepseek-llm", "deepseek-coder"),
    *("deepseek-v3", "spark2_5", "youtu", "falcon", "mpt", "starcoder", "gpt-2", "phi-2"),
    *("jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum"),
    *("modern-bert", "jais-2", "jina-v1-en", "jina-v2-code", "roberta-bpe", "refact"),
    *("command-r", "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "qwen35", "stablelm2"),
    *("olmo", "dbrx", "smaug-bpe", "poro-chat", "chatglm-bpe", "glm4", "glm5", "viking", "jais"),
    *("tekken", "smollm", "codeshell", "bloom", "gpt3-finnish", "exaone", "exaone4"),
    *("exaone-moe", "chameleon", "minerva-7b", "megrez", "gpt-4o", "llama4", "kanana2"),
    *("talkie", "granite-embed-multi-97m", "tiny_aya", "cohere2moe", "superbpe", "trillion"),
    *("granite-docling", "bailingmoe", "bailingmoe2", "llada-moe", "seed-coder", "hunyuan"),
    *("hunyuan-dense", "hy_v4", "joyai-llm", "kimi-k2", "ufakzeka", "grok-2", "afmoe"),
    *("laguna", "minimax-m2", "solar-open", "mellum2"),
)
"""Every name of llama.cpp's list (b11549) for vocabularies that spell bytes."""
PIECES = ("scores", "runs that tie", "scores that tie", "one score", "phi-3", "listed merges")
"""Ways of vocabularies of SentencePiece's kind, of which the last one lists its merges."""


@functools.cache
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lzma.decompress(FILE.read_bytes()))
    return found


def ids_of(case: str) -> list[list[int]]:
    """The recorded ids of each text. Cases mostly agree: a text's variants are kept once."""
    variants, chosen = recorded()["variants"], recorded()["cases"][case]
    return [lists[index] for lists, index in zip(variants, chosen, strict=True)]


def metadata_of(case: str, vocabularies: dict[str, Any]) -> dict[str, Any]:
    """What a GGUF file with one of the two vocabularies says."""
    if case in PIECES:
        found = _pieces(case, vocabularies["pieces"])
    else:
        found = {**vocabularies["bytes"], "model": "gpt2", "pre": case}
        if not case:
            del found["pre"]
    name = "Phi-3-mini" if case == "phi-3" else "made"
    return {"general.name": name} | {PREFIX + key: value for key, value in found.items()}


def _pieces(case: str, vocabulary: dict[str, Any]) -> dict[str, Any]:
    found = {**vocabulary, "model": "llama", "unknown_token_id": 0}
    runs = [set(token) == {"▁"} and len(token) > 1 for token in found["tokens"]]
    scores, merges = found.pop("scores"), found.pop("merges")
    if case == "listed merges":
        ids = {"bos_token_id": 1, "eos_token_id": 2}
        return found | ids | {"model": "gemma4", "merges": merges, "add_bos_token": False}
    if case == "runs that tie":
        scores = [-1e9 if run else score for run, score in zip(runs, scores, strict=True)]
    elif case == "scores that tie":
        scores = [score // 7 for score in scores]
    elif case == "one score":
        scores = [-1000.0] * len(scores)
    return found | {"scores": scores}
