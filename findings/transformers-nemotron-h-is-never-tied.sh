#!/bin/sh
# transformers 5.24.0: a NemotronH model whose configuration says tie_word_embeddings is not tied.
#
# Other classes name which weight their head shares; that of NemotronH names none. The model has a
# head of its own, and save_pretrained writes both matrices beside a config.json that says that they
# are one. Whoever trusts config.json and takes the embedding for the head runs another model.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/env/bin/pip" install --quiet transformers==5.24.0 safetensors==0.8.0
"$folder/env/bin/python" - "$folder" 2>/dev/null <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, NemotronHConfig, NemotronHForCausalLM

print("transformers", transformers.__version__, "torch", torch.__version__)
sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
mamba = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2}
torch.manual_seed(0)
models = {
    "llama": LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)),
    "nemotron_h": NemotronHForCausalLM(
        NemotronHConfig(layers_block_type=["mamba", "mlp", "attention"], **mamba, **sizes)
    ),
}
found = {}
for name, model in models.items():
    folder = Path(sys.argv[1]) / name
    model.save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    stored = [key for key in load_file(folder / "model.safetensors") if "layers" not in key]
    ends = sorted(key for key in stored if "embed" in key or "head" in key)
    found[name] = torch.equal(model.lm_head.weight, model.get_input_embeddings().weight), ends
    print(f"{name}: tie_word_embeddings {told}, head is the embedding: {found[name][0]}, stored: {ends}")
expected = found == {
    "llama": (True, ["model.embed_tokens.weight"]),
    "nemotron_h": (False, ["backbone.embeddings.weight", "lm_head.weight"]),
}
print("as described" if expected else "CHANGED")
sys.exit(not expected)
PYTHON
