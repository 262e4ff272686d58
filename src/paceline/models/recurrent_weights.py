"""From a checkpoint's tensors to the packed weights of a recurrent layer.

Under ``model.layers.I.linear_attn.`` there are ``in_proj`` (or, of the delta rule, its parts
``in_proj_{qkv,z,b,a}``), ``conv1d``, ``A_log`` (or ``A``, which is ``-exp(A_log)``), ``dt_bias``,
``D``, ``norm`` and ``out_proj``. Instead of ``in_proj_qkv`` and ``conv1d`` there may be three
tensors each. Knows no arithmetic but that of ``A``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.core.errors import ModelLoadError
from paceline.models.recurrent import DELTA, MAMBA2, SHORT_CONV, Recurrent, RecurrentWeights
from paceline.models.tensor_reader import TensorReader
from paceline.tensors.arrays import floats as as_floats

_DELTA_PARTS: tuple[str, ...] = ("qkv", "z", "b", "a")


def read_recurrent(
    reader: TensorReader, shape: Recurrent, hidden_size: int, layer: int
) -> RecurrentWeights:
    """The weights of a recurrent layer; ``ModelLoadError`` also for a head that would grow."""
    p = f"model.layers.{layer}.linear_attn."
    names, widths = [p + "in_proj"], [sum(shape.in_widths)]
    if shape.kind == DELTA:
        parts, widths = _DELTA_PARTS, list(shape.in_widths)
        if reader.has(p + "in_proj_q.weight"):
            parts, widths = (
                ("q", "k", "v", *parts[1:]),
                [shape.keys, shape.keys, shape.inner, *widths[1:]],
            )
        names = [f"{p}in_proj_{part}" for part in parts]
    has_heads = shape.kind != SHORT_CONV
    normed = {DELTA: shape.value_dim, MAMBA2: shape.inner}.get(shape.kind, 0)
    bias = p + "conv1d.bias"
    return RecurrentWeights(
        first=reader.linear(names, p + "in_proj", widths, hidden_size, shape.in_bias),
        last=reader.linear(
            [p + "out_proj"], p + "out_proj", [hidden_size], shape.inner, shape.out_bias
        ),
        conv=_conv(reader, p, shape),
        conv_bias=reader.packed_vector(bias, shape.channels) if shape.conv_bias else None,
        decay=_decay(reader, p, shape.heads) if has_heads else None,
        step_bias=reader.packed_vector(p + "dt_bias", shape.heads) if has_heads else None,
        skip=reader.packed_vector(p + "D", shape.heads) if shape.kind == MAMBA2 else None,
        in_scale=_in_scale(reader, shape) if shape.in_scales else None,
        norm=reader.packed_vector(p + "norm.weight", normed) if shape.norm != "none" else None,
    )


def _conv(reader: TensorReader, prefix: str, shape: Recurrent) -> Any:
    """Stored as ``[channels, 1, kernel]`` or ``[channels, kernel]``, in one tensor or three."""
    names = [f"{prefix}{part}_conv1d.weight" for part in "qkv"]
    names = names if reader.has(names[0]) else [prefix + "conv1d.weight"]
    shapes = [reader.shape_of(name) for name in names]
    channels = sum(sum(stored[:1]) for stored in shapes)
    if channels != shape.channels:
        raise ModelLoadError(
            f"tensor {names[0]} and those like it are of {channels} channels; the configuration "
            f"needs {shape.channels}"
        )
    parts = []
    for name, stored in zip(names, shapes, strict=True):
        middle = [1] if len(stored) == 3 else []
        part = as_floats(reader.vector(name, *stored[:1], *middle, shape.kernel))
        parts.append(part.reshape(-1, shape.kernel))
    return reader.pack(np.ascontiguousarray(np.concatenate(parts).T))


def _in_scale(reader: TensorReader, shape: Recurrent) -> Any:
    widths = shape.inner, shape.inner, shape.keys, shape.keys, shape.heads
    return reader.pack(np.repeat(np.array(shape.in_scales, np.float32), widths))


def _decay(reader: TensorReader, prefix: str, heads: int) -> Any:
    if reader.has(prefix + "A_log"):
        decay = -np.exp(as_floats(reader.vector(prefix + "A_log", heads)))
    else:
        decay = as_floats(reader.vector(prefix + "A", heads))
    if not (decay <= 0).all():
        raise ModelLoadError(
            f"tensor {prefix}A has values that are above 0 or not numbers; what decays a state "
            "must be below 0"
        )
    return reader.pack(decay)
