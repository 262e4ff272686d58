#!/bin/sh
# transformers 5.24.0: Gemma 4's assistant reads the keys and values of the token that was rejected.
#
# Keys and values that the target hands over are cut to the length of the text, whose last token, the
# one that the target chose itself, has none yet. After a rejection the rejected token's lie there, so
# that the assistant attends to a token that is not in the text. Only in the first draft after the
# prompt, and after drafts that were accepted whole, it sees those of the text alone.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/env/bin/pip" install --quiet transformers==5.24.0
"$folder/env/bin/python" - 2>/dev/null <<'PYTHON'
import sys

import torch
import transformers
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

print("transformers", transformers.__version__, "torch", torch.__version__)
KINDS = ["sliding_attention", "full_attention"]
sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16}
sizes |= {"hidden_size_per_layer_input": 0, "sliding_window": 64, "layer_types": KINDS}
torch.manual_seed(0)
target = Gemma4ForCausalLM(Gemma4TextConfig(**sizes, initializer_range=0.2)).eval()
inner = Gemma4TextConfig(**sizes, num_kv_shared_layers=2, vocab_size_per_layer_input=0)
assistant = Gemma4AssistantForCausalLM(
    Gemma4AssistantConfig(text_config=inner, backbone_hidden_size=64)
).eval()
assistant.generation_config.num_assistant_tokens = 3
seen, forward = [], assistant.forward


def watched(*args, **named):
    keys = named["shared_kv_states"]["full_attention"][0][0, 0]
    seen.append((int(named["position_ids"]), keys.clone()))
    return forward(*args, **named)


assistant.forward = watched
prompt = torch.tensor([[5, 9, 2, 7, 7, 30, 11]])
options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
text = target.generate(prompt, assistant_model=assistant, **options)
with torch.no_grad():
    whole = target(text, return_shared_kv_states=True).shared_kv_states["full_attention"][0][0, 0]
stale = 0
for position, keys in seen[::3]:
    own = torch.isclose(keys, whole[: len(keys)], atol=1e-4).all(dim=1)
    stale += int((~own).sum())
    print(f"draft at position {position}: {len(keys)} keys, {int((~own).sum())} of another token")
first, keys = seen[0]
expected = first == len(keys) == prompt.shape[1] and stale > 0
print("as described" if expected else "CHANGED")
sys.exit(not expected)
PYTHON
