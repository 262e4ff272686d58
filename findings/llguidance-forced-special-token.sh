#!/bin/sh
# llguidance 1.9.1 cannot write a text that spells a special token, where it was given a
# tokenizer.json and nothing but that text may come.
#
# The grammar allows one text, "<|end|>". The compiler forces it, encodes it by the tokenizer.json,
# which finds the special token <|end|> in it, and hands out that token. Its own matcher then refuses
# the token, because no special token is part of a text, and the matcher is in error. The mask alone
# would have led through: it allows "<" and so on. With a tokenizer of Python's side that does not
# encode special tokens (encode_special_tokens = True), the same text is forced in ordinary tokens.
#
# A schema with {"const": "<|end|>"}, an enum of chat marks, or a regular expression that comes to
# such a text behaves so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet llguidance==1.9.1 tokenizers==0.23.3
"$folder/env/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import tokenizers
from llguidance import LLMatcher, LLTokenizer

TEXT = "<|end|>"
letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(sorted(letters))}, merges=[])
backend = tokenizers.Tokenizer(model)
backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = tokenizers.decoders.ByteLevel()
backend.add_special_tokens(["<eos>", TEXT])
eos = backend.token_to_id("<eos>")
size = backend.get_vocab_size()


class Literal:
    """The same vocabulary, in which a text never becomes a special token."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id = eos, None
    special_token_ids = [eos, backend.token_to_id(TEXT)]
    tokens = [backend.decode([i], skip_special_tokens=False).encode() for i in range(size)]

    def __call__(self, text):
        backend.encode_special_tokens = True
        try:
            return backend.encode(text).ids
        finally:
            backend.encode_special_tokens = False


def written(tokenizer):
    """What is forced, and whether the matcher takes it."""
    grammar = LLMatcher.grammar_from_regex("<[|]end[|]>")
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    forced = matcher.compute_ff_tokens()
    taken = all(matcher.consume_token(token) for token in forced)
    return [backend.id_to_token(token) for token in forced], taken, matcher.get_error()[:120]


print("llguidance", version("llguidance"), "tokenizers", version("tokenizers"))
by_file = written(LLTokenizer(backend.to_str(), size, eos))
literal = written(LLTokenizer(Literal(), size, eos))
print("by tokenizer.json:", *by_file, sep="\n  ")
print("by literal texts:", *literal, sep="\n  ")
expected = by_file[0] == [TEXT] and not by_file[1] and literal[0] == list(TEXT) and literal[1]
print("as described" if expected else "CHANGED")
sys.exit(not expected)
PYTHON
