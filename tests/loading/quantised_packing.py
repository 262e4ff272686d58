"""Random weights in each quantised format, packed as its specification says, and their floats.

Written against the formats alone and in numpy, so that it shares nothing with what it tests.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
Rng = np.random.Generator
Parts = dict[str, torch.Tensor]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def words_of(codes: Array, bits: int) -> torch.Tensor:
    """Codes ``[rows, count]`` packed along the last dimension, the lowest bits first."""
    each = 32 // bits
    rows, count = codes.shape
    padded = np.zeros((rows, -(-count // each) * each), np.uint64)
    padded[:, :count] = codes
    words = np.zeros((rows, padded.shape[1] // each), np.uint64)
    for place in range(each):
        words |= padded[:, place::each] << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def scales(rng: Rng, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(0.01, 0.05, shape).astype(np.float32)).to(dtype)


def array(tensor: torch.Tensor) -> Array:
    return tensor.float().numpy()


def gptq(
    rng: Rng,
    n: int,
    k: int,
    *,
    bits: int = 4,
    group: int = 32,
    ordered: bool = True,
    shared: bool = False,
    sym: bool = False,
    version: int = 1,
    with_index: bool = True,
) -> tuple[Parts, Array]:
    """With ``shared`` all linears of as many inputs have them in the same order."""
    groups = k // group
    index = np.arange(k) // group
    if not ordered:
        index = (np.random.default_rng(k) if shared else rng).permutation(index)
    code = rng.integers(0, 1 << bits, (k, n))
    zero = np.full((groups, n), 1 << (bits - 1)) if sym else rng.integers(0, 1 << bits, (groups, n))
    scale = scales(rng, groups, n)
    weights = array(scale)[index] * (code - zero[index]).astype(np.float32)
    zeros = words_of(zero, bits)
    if version == 1:
        ones = int("1" * 8, 16) if bits == 4 else int("01" * 4, 16)
        zeros = torch.from_numpy((zeros.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
    parts = {".qweight": words_of(code.T, bits).t(), ".qzeros": zeros, ".scales": scale}
    if with_index:
        parts[".g_idx"] = torch.from_numpy(index.astype(np.int32))
    return parts, weights.T


def awq(rng: Rng, n: int, k: int, *, group: int = 32) -> tuple[Parts, Array]:
    groups = k // group
    code, zero = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (groups, n))
    scale = scales(rng, groups, n)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])

    def interleaved(values: Array) -> torch.Tensor:
        return words_of(values.reshape(len(values), -1, 8)[..., order].reshape(len(values), n), 4)

    differences = (code - zero.repeat(group, 0)).astype(np.float32)
    weights = array(scale).repeat(group, 0) * differences
    return {
        ".qweight": interleaved(code),
        ".qzeros": interleaved(zero),
        ".scales": scale,
    }, weights.T


def packed_integers(
    rng: Rng,
    n: int,
    k: int,
    *,
    bits: int = 4,
    group: int = 32,
    zeros: str = "",
    ordered: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Parts, Array]:
    half, groups = 1 << (bits - 1), k // group
    value = rng.integers(-half, half, (n, k))
    zero = rng.integers(-half, half, (n, groups)) if zeros else np.zeros((n, groups), np.int64)
    index = np.arange(k) // group
    if not ordered:
        index = rng.permutation(index)
    scale = scales(rng, n, groups, dtype=dtype)
    parts = {
        ".weight_packed": words_of(value + half, bits),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor([n, k]),
    }
    if zeros == "packed":
        parts[".weight_zero_point"] = words_of((zero + half).T, bits).t()
    elif zeros:
        parts[".weight_zero_point"] = torch.from_numpy(zero.astype(np.int8))
    if not ordered:
        parts[".weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
    return parts, array(scale)[:, index] * (value - zero[:, index]).astype(np.float32)


def int8(
    rng: Rng, n: int, k: int, *, scale: tuple[int, ...] | None = None, zeros: bool = False
) -> tuple[Parts, Array]:
    value = rng.integers(-128, 128, (n, k))
    factor = scales(rng, *((n, 1) if scale is None else scale), dtype=torch.float32)
    parts = {".weight": torch.from_numpy(value.astype(np.int8)), ".weight_scale": factor}
    if zeros:
        zero = rng.integers(-128, 128, (n, 1))
        parts[".weight_zero_point"] = torch.from_numpy(zero.astype(np.int8))
        value = value - zero
    by_row = array(factor).reshape(-1, 1)
    return parts, by_row * value.astype(np.float32)


def fp8(
    rng: Rng,
    n: int,
    k: int,
    *,
    scale: str = ".weight_scale",
    block: tuple[int, int] | None = None,
    shape: tuple[int, ...] = (),
) -> tuple[Parts, Array]:
    value = torch.from_numpy(rng.normal(size=(n, k)).astype(np.float32)).to(torch.float8_e4m3fn)
    if block is not None:
        shape = (-(-n // block[0]), -(-k // block[1]))
    factor = scales(rng, *shape, dtype=torch.float32)
    spread = array(factor)
    if block is not None:
        spread = spread.repeat(block[0], 0)[:n].repeat(block[1], 1)[:, :k]
    elif shape == (n,):
        spread = spread[:, None]
    return {".weight": value, scale: factor}, array(value) * spread


def nibbles(rng: Rng, n: int, k: int) -> tuple[torch.Tensor, Array]:
    """Bytes ``[n, k / 2]`` of two codes each, the first in the low half, and the codes."""
    code = rng.integers(0, 16, (n, k))
    data = (code[:, 0::2] | code[:, 1::2] << 4).astype(np.uint8)
    return torch.from_numpy(data), code


def mxfp4(
    rng: Rng, n: int, k: int, *, codes: str, scale: str, blocks: bool = True
) -> tuple[Parts, Array]:
    data, code = nibbles(rng, n, k)
    exponent = rng.integers(115, 125, (n, k // 32))
    weights = E2M1[code] * np.float32(2.0) ** (exponent.repeat(32, 1) - 127)
    data = data.view(n, k // 32, 16) if blocks else data
    stored = torch.from_numpy(exponent.astype(np.uint8))
    return {codes: data, scale: stored}, weights.astype(np.float32)


def nvfp4(rng: Rng, n: int, k: int, *, codes: str, whole: str) -> tuple[Parts, Array]:
    """With ``.weight_global_scale`` the scales are divided by it, otherwise multiplied."""
    data, code = nibbles(rng, n, k)
    inner = torch.from_numpy(rng.uniform(1, 400, (n, k // 16)).astype(np.float32))
    inner = inner.to(torch.float8_e4m3fn)
    divides = whole == ".weight_global_scale"
    outer = np.float32(9000.0 if divides else 1.3e-4)
    scale = array(inner) / outer if divides else array(inner) * outer
    parts = {codes: data, ".weight_scale": inner, whole: torch.tensor([outer])}
    return parts, E2M1[code] * scale.repeat(16, 1)


def bnb4(
    rng: Rng,
    n: int,
    k: int,
    *,
    kind: str = "nf4",
    block: int = 64,
    nested: bool = False,
    storage: torch.dtype = torch.uint8,
    by_columns: bool = False,
    rounded: bool = False,
) -> tuple[Parts, Array]:
    code = rng.integers(0, 16, n * k)
    table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    blocks = -(-n * k // block)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": [n, k],
    }
    parts = {
        ".weight": torch.from_numpy((code[0::2] << 4 | code[1::2]).astype(np.uint8))
        .view(storage)
        .reshape(-1, 1),
        ".weight.quant_map": torch.from_numpy(table),
    }
    if nested:
        inner = rng.integers(0, 256, blocks)
        inner_table = np.linspace(-1, 1, 256, dtype=np.float32)
        outer = rng.uniform(0.01, 0.02, -(-blocks // 256)).astype(np.float32)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03}
        absmax = inner_table[inner] * outer[np.arange(blocks) // 256]
        if rounded:  # as torch computes it in that type, of which the mean is as well
            offset = 0.030029296875
            state |= {"nested_dtype": "bfloat16", "nested_offset": offset}
            absmax = (torch.from_numpy(absmax).to(torch.bfloat16) + offset).float().numpy()
        else:
            absmax += np.float32(0.03)
        parts[".weight.absmax"] = torch.from_numpy(inner.astype(np.uint8))
        parts[".weight.nested_absmax"] = torch.from_numpy(outer)
        parts[".weight.nested_quant_map"] = torch.from_numpy(inner_table)
    else:
        magnitudes = torch.from_numpy(rng.uniform(0.01, 0.1, blocks).astype(np.float32))
        if by_columns:
            magnitudes = magnitudes.to(torch.bfloat16)
        absmax = magnitudes.float().numpy()
        stored = magnitudes.reshape(n, -1).T.contiguous() if by_columns else magnitudes
        parts[".weight.absmax"] = stored
    text = json.dumps(state).encode()
    parts[f".weight.quant_state.bitsandbytes__{kind}"] = torch.frombuffer(
        bytearray(text), dtype=torch.uint8
    )
    weights = table[code] * absmax.repeat(block)[: n * k]
    return parts, weights.reshape(n, k)


def bnb8(rng: Rng, n: int, k: int) -> tuple[Parts, Array]:
    value = rng.integers(-127, 128, (n, k)).astype(np.int8)
    largest = rng.uniform(0.5, 2.0, n).astype(np.float32)
    parts = {
        ".weight": torch.from_numpy(value),
        ".SCB": torch.from_numpy(largest),
        ".weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return parts, value.astype(np.float32) * (largest * np.float32(1 / 127))[:, None]
