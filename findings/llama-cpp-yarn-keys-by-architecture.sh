#!/bin/sh
# llama.cpp b11549 (xllamacpp 2026.10.11549): which of GGUF's YaRN keys count depends on the architecture.
#
# The same weights and keys are written as llama and as mistral3. rope.scaling.yarn_beta_fast changes
# what a mistral3 file computes and nothing in a llama file, though the gguf package names it for all;
# yarn_attn_factor and yarn_ext_factor change neither, and attn_factor changes both. A llama model with
# a beta_fast of its own is silently another model in llama.cpp.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet xllamacpp==2026.10.11549 gguf==0.19.0
"$folder/env/bin/python" - "$folder" 2>"$folder/log" <<'PYTHON' || { status=$?; tail -n 5 "$folder/log" >&2; exit $status; }
import json
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

WIDTH, HEADS, VOCABULARY = 128, 2, 256
PATH = Path(sys.argv[1]) / "model.gguf"


def write(architecture, key="", value=0.0):
    writer = gguf.GGUFWriter(PATH, architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(8.0)
    writer.add_rope_scaling_orig_ctx_len(64)
    if key:
        writer.add_float32(f"{architecture}.rope.scaling.{key}", value)
    writer.add_pooling_type(gguf.PoolingType.LAST)
    letters = [f"<0x{byte:02X}>" for byte in range(VOCABULARY - 3)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *letters])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3, *[6] * len(letters)])
    random = np.random.default_rng(0)
    for name, rows in (
        ("token_embd", VOCABULARY),
        ("output", VOCABULARY),
        *((f"blk.0.attn_{part}", WIDTH) for part in ("q", "k", "v", "output")),
        *((f"blk.0.ffn_{part}", WIDTH) for part in ("gate", "up", "down")),
    ):
        matrix = 0.3 * random.standard_normal((rows, WIDTH))
        writer.add_tensor(f"{name}.weight", matrix.astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vector():
    params = xllamacpp.CommonParams()
    params.model.path, params.embedding, params.n_ctx = str(PATH), True, 256
    params.n_parallel, params.n_gpu_layers, params.warmup = 1, 0, False
    answer = xllamacpp.Server(params).handle_embeddings({"input": [list(range(3, 103))]})
    answer = json.loads(answer) if isinstance(answer, str) else answer
    return np.array(answer["data"][0]["embedding"])


KEYS = {"yarn_beta_fast": 2.0, "yarn_attn_factor": 0.5, "yarn_ext_factor": 0.5, "attn_factor": 0.5}
found = {}
for architecture in ("llama", "mistral3"):
    write(architecture)
    plain = vector()
    for key, value in KEYS.items():
        write(architecture, key, value)
        found[architecture, key] = float(plain @ vector())
print("xllamacpp", version("xllamacpp"), "gguf", version("gguf"))
for (architecture, key), cosine in found.items():
    print(f"{architecture:9} {key:17} cosine to the vector without the key {cosine:.4f}")
counts = {each for each, cosine in found.items() if cosine < 0.99}
described = {("mistral3", "yarn_beta_fast"), ("mistral3", "attn_factor"), ("llama", "attn_factor")}
print("as described" if counts == described else "CHANGED")
sys.exit(counts != described)
PYTHON
