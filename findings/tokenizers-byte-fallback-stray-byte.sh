#!/bin/sh
# tokenizers 0.23.3: one stray byte token makes whole characters beside it unreadable.
#
# The decoder ByteFallback, which Llama 2, Mistral and Gemma have in their tokenizer.json, joins a run
# of byte tokens and reads it as UTF-8. If the run as a whole is no UTF-8, every byte of it becomes
# U+FFFD, those of complete characters as well. So a text that was shown correctly while it was
# written turns into U+FFFD alone with the next token: the first byte of a character that never ends.
# Python's own reading of the same bytes (errors="replace") keeps the two characters.
#
# An answer that is cut by a limit of tokens in the middle of a character is such a text.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet tokenizers==0.23.3
"$folder/env/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from tokenizers import Tokenizer, decoders, models

spelled = [f"<0x{byte:02X}>" for byte in range(256)]
backend = Tokenizer(models.BPE({token: i for i, token in enumerate(spelled)}, [], byte_fallback=True))
backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
written = "\u16a0\u16a2\u16a6".encode()[:7]  # two runes, and the first byte of a third one
before, after = backend.decode(list(written[:6])), backend.decode(list(written))
print("tokenizers", version("tokenizers"))
print("six byte tokens:  ", ascii(before))
print("seven byte tokens:", ascii(after))
print("Python:           ", ascii(written.decode(errors="replace")))
expected = before == "\u16a0\u16a2" and after == "\ufffd" * 7
print("as described" if expected else "CHANGED")
sys.exit(not expected)
PYTHON
