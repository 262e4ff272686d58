"""Which of a model's weights stay in memory, and which are read from disk as they are needed.

Knows sizes alone: no file, no tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.errors import ConfigError

SLOTS = 3
"""Layers in memory of those that are read: one computes, two come."""
LEAST_EXPERTS = 8
"""Experts of each size for which there must be room, or as many as a layer has."""


class Placement(NamedTuple):
    """What of a model stays in memory.

    Attributes:
        streamed: layers that do not, in their order.
        resident_bytes: that stay, with the memory of what comes and goes.
        streamed_bytes: that every step reads.
        experts: of all layers together, which come from disk; 0 where none do.
        kept: for how many of them there is room.
        expert_bytes: of one, on average.
    """

    streamed: tuple[int, ...]
    resident_bytes: int
    streamed_bytes: int
    experts: int = 0
    kept: int = 0
    expert_bytes: int = 0

    def told(self, num_layers: int) -> str:
        """What it is, of a model of so many layers."""
        stay = f"{self.resident_bytes / 1e9:.2f} GB stay in memory"
        if self.experts:
            return f"{stay}, {self.kept} of {self.experts} experts among them; others are read"
        return (
            f"{len(self.streamed)} of {num_layers} layers are read from disk in every step, "
            f"{self.streamed_bytes / 1e9:.2f} GB; {stay}"
        )

    @property
    def share_streamed(self) -> float:
        """Of the weights of a dense model, those that every step reads from disk."""
        whole = self.streamed_bytes + self.resident_bytes
        return self.streamed_bytes / whole if whole else 0.0

    @property
    def share_from_disk(self) -> float:
        """Of the experts that a step reads, if all are chosen alike; 0 where all are in memory."""
        return 1.0 - self.kept / self.experts if self.experts else 0.0

    @property
    def from_disk(self) -> str:
        """What does not stay, to a tenth; empty where all does."""
        if self.experts:
            return f"{self.share_from_disk:.1f} of the experts"
        return f"{self.share_streamed:.1f} of the weights" if self.streamed else ""

    def bytes_of_row(self, chosen: int) -> int:
        """That a step of one row reads which chooses so many experts, if all are chosen alike."""
        return self.streamed_bytes + round(chosen * self.share_from_disk * self.expert_bytes)


def place_layers(layers: Sequence[int], others: int, limit: int) -> Placement:
    """Stream as few layers as the limit allows, evenly between those that stay.

    Args:
        layers: bytes of each that could be streamed.
        others: bytes that have to stay.
        limit: bytes for all weights.

    Raises:
        ConfigError: what has to stay is more than that.
    """
    whole, largest = sum(layers), max(layers)
    if others + whole <= limit:
        return Placement((), others + whole, 0)
    least = others + SLOTS * largest
    if least > limit:
        raise ConfigError(
            f"{_too_small(limit, least)}: its embedding and its head, and {SLOTS} of its "
            f"{len(layers)} layers"
        )
    count = SLOTS
    while others + SLOTS * largest + whole - sum(layers[i] for i in _spread(count, layers)) > limit:
        # Whole rounds, so that the first layer of a step can come while the last ones compute.
        count = min(count + SLOTS, len(layers))
    streamed = _spread(count, layers)
    num_bytes = sum(layers[i] for i in streamed)
    return Placement(streamed, others + SLOTS * largest + whole - num_bytes, num_bytes)


def _too_small(limit: int, least: int) -> str:
    """In the units of the option, rounded so that what it asks for is enough."""
    return f"--weight-memory is {limit >> 20}M; this model needs {-(-least >> 20)}M or more"


def _spread(count: int, layers: Sequence[int]) -> tuple[int, ...]:
    """So many layers at even distances."""
    return tuple((2 * i + 1) * len(layers) // (2 * count) for i in range(count))


def place_experts(layers: Sequence[Sequence[int]], others: int, limit: int) -> Placement:
    """Keep all but experts, and as many of these as the limit allows.

    Args:
        layers: bytes of the experts of each layer that is a mixture.
        others: bytes that have to stay.
        limit: bytes for all weights.

    Raises:
        ConfigError: what has to stay is more than that.
    """
    sizes = [max(layer) for layer in layers for _ in layer]
    whole = sum(sizes)
    if others + whole <= limit:
        return Placement((), others + whole, 0)
    # The memory is shared out by how many experts there are of each size.
    rarest = min(Counter(sizes).values())
    least = others + min(LEAST_EXPERTS, rarest) * -(-whole // rarest)
    if least > limit:
        raise ConfigError(
            f"{_too_small(limit, least)}: all but its experts, and {LEAST_EXPERTS} of these"
        )
    kept, mean = (limit - others) * len(sizes) // whole, whole // len(sizes)
    return Placement((), limit, 0, len(sizes), kept, mean)
