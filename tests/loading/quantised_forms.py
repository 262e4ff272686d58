"""The quantised formats by name: what ``config.json`` says of each, and how it is packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.loading.quantised_packing import (
    Array,
    Parts,
    Rng,
    awq,
    bnb4,
    bnb8,
    fp8,
    gptq,
    int8,
    mxfp4,
    nvfp4,
    packed_integers,
)


@dataclass(frozen=True)
class Form:
    """A quantised format: its configuration, and a packer.

    Attributes:
        pack: from sizes ``n`` and ``k`` to the tensors by the ends of their names, and the weights
            ``[n, k]`` as float32.
    """

    config: Mapping[str, Any]
    pack: Callable[[Rng, int, int], tuple[Parts, Array]]
    kind: str = ""


def _with(pack: Callable[..., tuple[Parts, Array]], **options: Any) -> Any:
    return lambda rng, n, k: pack(rng, n, k, **options)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
_GPTQ_2 = {**_GPTQ, "checkpoint_format": "gptq_v2", "desc_act": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [48, 40], "activation_scheme": "dynamic"}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
_OPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
_PACKED = _compressed("pack-quantized", num_bits=4)
_FP8 = _compressed("float-quantized", num_bits=8)
_GROUPED = _compressed("naive-quantized", num_bits=8, type="float", strategy="group", group_size=8)
_BLOCKED = _compressed("float-quantized", block_structure=[16, 24])

FORMS: dict[str, Form] = {
    "gptq": Form(_GPTQ, _with(gptq), "GPTQ 4-bit, groups of 32"),
    "gptq-sym": Form(_GPTQ, _with(gptq, sym=True)),
    "gptq-8": Form(_GPTQ, _with(gptq, bits=8), "GPTQ 8-bit, groups of 32"),
    "gptq-act": Form(_GPTQ, _with(gptq, ordered=False)),
    "gptq-act-8": Form(_GPTQ, _with(gptq, ordered=False, bits=8, sym=True)),
    "gptq-act-shared": Form(_GPTQ, _with(gptq, ordered=False, shared=True)),
    "gptq-2-act": Form(_GPTQ_2, _with(gptq, ordered=False, version=2)),
    "gptq-plain-order": Form(_GPTQ, _with(gptq, with_index=False)),
    "gptq-row": Form(_GPTQ, lambda rng, n, k: gptq(rng, n, k, group=k), "GPTQ 4-bit, one scale a"),
    "awq": Form(_AWQ, _with(awq), "AWQ 4-bit, groups of 32"),
    "packed-4": Form(_PACKED, _with(packed_integers), "compressed-tensors 4-bit, groups of 32"),
    "packed-8": Form(_PACKED, _with(packed_integers, bits=8)),
    "packed-zeros": Form(_PACKED, _with(packed_integers, zeros="packed")),
    "packed-8-zeros": Form(_PACKED, _with(packed_integers, bits=8, zeros="packed")),
    "packed-plain-zeros": Form(_PACKED, _with(packed_integers, zeros="plain")),
    "packed-order": Form(_PACKED, _with(packed_integers, ordered=False)),
    "packed-row": Form(_PACKED, lambda rng, n, k: packed_integers(rng, n, k, group=k)),
    "int8": Form(_compressed("int-quantized"), _with(int8), "compressed-tensors 8-bit, one scale"),
    "int8-zeros": Form(_compressed("int-quantized"), _with(int8, zeros=True)),
    "int8-one": Form(_compressed("int-quantized"), _with(int8, scale=(1,))),
    "fp8-one": Form(_FP8, _with(fp8, shape=(1,)), "FP8, one scale"),
    "fp8-scalar": Form(_FP8, _with(fp8, shape=()), "FP8, one scale"),
    "fp8-row": Form(_FP8, lambda rng, n, k: fp8(rng, n, k, shape=(n, 1)), "FP8, one scale a"),
    "fp8-row-flat": Form(_FP8, lambda rng, n, k: fp8(rng, n, k, shape=(n,)), ""),
    "fp8-block": Form(_BLOCKED, _with(fp8, block=(16, 24)), "FP8, blocks of 16 x 24"),
    "fp8-group": Form(_GROUPED, _with(fp8, block=(1, 8)), "FP8, groups of 8"),
    "fp8-inverse": Form(
        _BLOCKS, _with(fp8, scale=".weight_scale_inv", block=(48, 40)), "FP8, blocks of"
    ),
    "fp8-modelopt": Form({**_OPT, "quant_algo": "FP8"}, _with(fp8), "FP8"),
    "nvfp4": Form(
        _compressed("nvfp4-pack-quantized"),
        _with(nvfp4, codes=".weight_packed", whole=".weight_global_scale"),
        "NVFP4",
    ),
    "nvfp4-modelopt": Form(_OPT, _with(nvfp4, codes=".weight", whole=".weight_scale_2"), "NVFP4"),
    "mxfp4-packed": Form(
        _compressed("mxfp4-pack-quantized"),
        _with(mxfp4, codes=".weight_packed", scale=".weight_scale", blocks=False),
        "MXFP4",
    ),
    "mxfp4": Form(
        {"quant_method": "mxfp4"}, _with(mxfp4, codes=".weight_blocks", scale=".weight_scales")
    ),
    "mxfp4-short": Form({"quant_method": "mxfp4"}, _with(mxfp4, codes="_blocks", scale="_scales")),
    "nf4": Form(_BNB, _with(bnb4), "bitsandbytes nf4, blocks of 64"),
    "nf4-nested": Form(_BNB, _with(bnb4, nested=True), ""),
    "nf4-as-bfloat16": Form(_BNB, _with(bnb4, storage=torch.bfloat16), ""),
    "nf4-as-float32": Form(_BNB, _with(bnb4, storage=torch.float32), ""),
    "nf4-nested-rounded": Form(_BNB, _with(bnb4, nested=True, rounded=True), ""),
    "nf4-by-columns": Form(_BNB, _with(bnb4, by_columns=True), ""),
    "fp4": Form({"load_in_4bit": True}, _with(bnb4, kind="fp4", block=128), "bitsandbytes fp4"),
    "bnb-int8": Form(_BNB, _with(bnb8), "bitsandbytes 8-bit, one scale a row"),
}


@dataclass(frozen=True)
class Stored:
    """What a checkpoint's tensors are before they lie in a file."""

    tensors: Parts = field(default_factory=dict)
    plain: Parts = field(default_factory=dict)

    def add(self, linear: str, form: Form, rng: Rng, n: int, k: int) -> None:
        parts, weights = form.pack(rng, n, k)
        self.tensors.update({linear + end: part.contiguous() for end, part in parts.items()})
        self.plain[f"{linear}.weight"] = torch.from_numpy(np.ascontiguousarray(weights))
