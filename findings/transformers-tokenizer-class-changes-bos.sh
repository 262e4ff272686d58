#!/bin/sh
# transformers 5.24.0: add_bos_token and add_eos_token of a tokenizer_config.json change nothing where
# there is a tokenizer.json, and the name in tokenizer_class does.
#
# The folder's tokenizer.json puts <s> before a text. Saying add_bos_token: false keeps it, and
# add_eos_token: true adds no </s>: both keys are dropped before any class sees them. The same words as
# arguments of from_pretrained count. With tokenizer_class GPTNeoXTokenizer the <s> is gone, whatever the flags say, since that class leaves out what
# tokenizer.json says about the ends of a text; with CodeLlamaTokenizer it comes even where
# tokenizer.json has none.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet transformers==5.24.0 tokenizers==0.23.3
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$folder/env/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

place = Path(sys.argv[1]) / "model"
place.mkdir()
tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
NAMES = {1: "<s>", 2: "</s>"}


def around(begins, name, flags, **arguments):
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(each, special=True) for each in tokens[:3]])
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    backend.save(str(place / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": name, **flags}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    ids = AutoTokenizer.from_pretrained(place, **arguments).encode("x")
    return NAMES.get(ids[0], "") + "text" + NAMES.get(ids[-1], "")


ASKED = {"add_bos_token": False, "add_eos_token": True}
found = {
    "PreTrainedTokenizerFast, no flags": around(True, "PreTrainedTokenizerFast", {}),
    "PreTrainedTokenizerFast, no <s>, but </s>": around(True, "PreTrainedTokenizerFast", ASKED),
    "Qwen2Tokenizer, no <s>, but </s>": around(True, "Qwen2Tokenizer", ASKED),
    "Qwen2Tokenizer, the same as arguments": around(True, "Qwen2Tokenizer", {}, **ASKED),
    "GPTNeoXTokenizer, no flags": around(True, "GPTNeoXTokenizer", {}),
    "CodeLlamaTokenizer, none in tokenizer.json": around(False, "CodeLlamaTokenizer", {}),
}
print("transformers", version("transformers"), "tokenizers", version("tokenizers"))
for asked, text in found.items():
    print(f"{asked:45} {text}")
described = ["<s>text"] * 3 + ["text</s>", "text", "<s>text"]
print("as described" if list(found.values()) == described else "CHANGED")
sys.exit(list(found.values()) != described)
PYTHON
