"""Comparisons of arrays with tensors of torch, which say what they must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from paceline.tensors.torch_arrays import to_numpy, to_torch


def host(values: Any) -> np.ndarray:
    return to_numpy(values) if isinstance(values, torch.Tensor) else np.asarray(values)


def tensor(values: Any) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else to_torch(np.asarray(values))


def arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Weights as a checkpoint has them."""
    return {name: host(values) for name, values in tensors.items()}


def same(one: Any, other: Any) -> bool:
    """Equal bit for bit in type, shape and values, but for zeros' signs."""
    one, other = host(one), host(other)
    return one.dtype == other.dtype and np.array_equal(one, other)


def assert_close(found: Any, wanted: Any, **tolerances: Any) -> None:
    torch.testing.assert_close(tensor(found), tensor(wanted), **tolerances)
