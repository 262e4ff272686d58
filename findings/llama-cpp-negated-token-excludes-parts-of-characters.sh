#!/bin/sh
# llama.cpp b11549 (xllamacpp 2026.10.11549): in a GBNF grammar, !<token> is any token but this one,
# yet it never is one that holds only a part of a character.
#
# Its mask reads a token's bytes as characters first. A token that begins a character without
# completing it has none, so that it is taken for the rest of a token that the rules before have used
# up, which must not end within a character (llama_grammar_reject_candidates_for_stack in
# src/llama-grammar.cpp). So a model whose vocabulary writes emoji and rare scripts in several tokens
# cannot write them where a grammar such as root ::= !</think>* </think> allows everything. The
# wildcard of characters, root ::= .*, does allow the same tokens.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet xllamacpp==2026.10.11549 gguf==0.19.0
"$folder/env/bin/python" - "$folder/vocabulary.gguf" 2>/dev/null <<'PYTHON'
import ctypes
import math
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import gguf

path = sys.argv[1]
shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2 writes as they are
others = [byte for byte in range(256) if byte not in shown]
letters = [chr(byte if byte in shown else 256 + others.index(byte)) for byte in range(256)]
END = 256
tokens = [*letters, "<end>", "ab"]
writer = gguf.GGUFWriter(path, "llama")
for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
    writer.add_uint32(f"llama.{key}", 8)
writer.add_uint32("llama.attention.head_count", 1)
writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
writer.add_string("tokenizer.ggml.model", "gpt2")
writer.add_string("tokenizer.ggml.pre", "gpt-2")
writer.add_array("tokenizer.ggml.tokens", tokens)
writer.add_array("tokenizer.ggml.merges", ["a b"])
writer.add_array("tokenizer.ggml.token_type", [3 if token == "<end>" else 1 for token in tokens])
writer.add_uint32("tokenizer.ggml.eos_token_id", END)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()


class Params(ctypes.Structure):  # llama_model_params
    _fields_ = [
        *((f"pointer{n}", ctypes.c_void_p) for n in range(2)),
        *((f"number{n}", ctypes.c_int) for n in range(5)),
        *((f"pointer{n}", ctypes.c_void_p) for n in range(2, 6)),
        ("vocab_only", ctypes.c_bool),
        *((f"flag{n}", ctypes.c_bool) for n in range(5)),
    ]


class Candidate(ctypes.Structure):  # llama_token_data
    _fields_ = [("id", ctypes.c_int), ("logit", ctypes.c_float), ("p", ctypes.c_float)]


class Candidates(ctypes.Structure):  # llama_token_data_array
    _fields_ = [
        ("data", ctypes.POINTER(Candidate)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    ]


(library,) = Path(find_spec("xllamacpp").origin).parent.glob("xllamacpp*.so")
llama = ctypes.CDLL(str(library))
for name in ("llama_model_load_from_file", "llama_model_get_vocab", "llama_sampler_init_grammar"):
    getattr(llama, name).restype = ctypes.c_void_p
llama.llama_model_default_params.restype = Params
llama.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
llama.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
llama.llama_sampler_init_grammar.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
llama.llama_sampler_apply.argtypes = [ctypes.c_void_p, ctypes.POINTER(Candidates)]
params = llama.llama_model_default_params()
params.vocab_only = True
vocabulary = llama.llama_model_get_vocab(llama.llama_model_load_from_file(path.encode(), params))


def allowed(grammar):
    """Ids of the tokens with which a text may begin."""
    sampler = llama.llama_sampler_init_grammar(vocabulary, grammar.encode(), b"root")
    data = (Candidate * len(tokens))(*((token, 0.0, 0.0) for token in range(len(tokens))))
    llama.llama_sampler_apply(sampler, Candidates(data, len(tokens), -1, False))
    return {each.id for each in data if each.logit > -math.inf}


print("xllamacpp", version("xllamacpp"))
begins = set(range(0xC2, 0xF5))  # bytes that begin a character of several
by_token, by_character = allowed("root ::= !<[97]>+"), allowed("root ::= [^a]+")
print("'b' by !<[97]>:", ord("b") in by_token, " by [^a]:", ord("b") in by_character)
for name, found in (("!<[97]>", by_token), ("[^a]", by_character)):
    print(f"{len(found & begins)} of {len(begins)} tokens that begin a character, by {name}")
expected = ord("b") in by_token and not begins & by_token and begins <= by_character
print("as described" if expected else "CHANGED")
sys.exit(not expected)
PYTHON
