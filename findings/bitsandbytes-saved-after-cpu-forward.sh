#!/bin/sh
# bitsandbytes 0.50.2: a 4-bit linear that is saved after a forward on the CPU is read back wrongly.
#
# On processors with AVX-512 BF16 the first forward packs the weight for that processor and turns the
# magnitudes of its blocks into bfloat16, transposed: [inputs / block, outputs]. state_dict() undoes
# the packing of the codes, but not this. Whoever reads the file takes the magnitudes in the order in
# which they lie, so that a block gets another block's, wherever a row of the matrix has several
# blocks. The same linear saved before its first forward is read back exactly.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/env/bin/pip" install --quiet --no-deps bitsandbytes==0.50.2 packaging==25.0
"$folder/env/bin/python" - 2>/dev/null <<'PYTHON'
import sys
from importlib.metadata import version

import bitsandbytes as bnb
import torch


def read_back(linear):
    """The weights that a reader of the saved tensors gets."""
    saved = linear.state_dict()
    parts = {name.removeprefix("weight."): part for name, part in saved.items() if name != "weight"}
    weight = bnb.nn.Params4bit.from_prequantized(saved["weight"], parts, device="cpu")
    return bnb.functional.dequantize_4bit(weight.data, weight.quant_state).float(), parts["absmax"]


print("bitsandbytes", version("bitsandbytes"), "torch", torch.__version__)
if not bnb.functional.has_avx512bf16():
    print("this processor has no AVX-512 BF16, without which the weight is not packed")
    sys.exit(0)
torch.manual_seed(0)
options = {"compute_dtype": torch.bfloat16, "compress_statistics": False, "quant_type": "nf4"}
linear = bnb.nn.Linear4bit(192, 64, bias=False, **options)
linear.weight.data = torch.randn(64, 192) * torch.linspace(0.1, 1, 64)[:, None]
linear = linear.to(torch.bfloat16).to("cpu").eval()
before, magnitudes = read_back(linear)
with torch.no_grad():
    linear(torch.ones(1, 192, dtype=torch.bfloat16))
after, saved = read_back(linear)
print("magnitudes saved before:", tuple(magnitudes.shape), magnitudes.dtype)
print("magnitudes saved after: ", tuple(saved.shape), saved.dtype)
largest, wrong = before.abs().max().item(), (before - after).abs().max().item()
in_order = (magnitudes.reshape(64, 3).T - saved.float()).abs().max().item()
print(f"largest weight {largest:.3f}, largest difference of what is read back {wrong:.3f}")
expected = wrong > largest / 10 and in_order < largest / 100
print("as described" if expected else "CHANGED")
sys.exit(not expected)
PYTHON
