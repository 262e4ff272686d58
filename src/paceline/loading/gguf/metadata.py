"""A GGUF file's metadata under its architecture's prefix, checked as they are read.

Knows how keys are found and which layers there are; not what they mean in a ``config.json``.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.loading.gguf.container import GgufContainer
from paceline.loading.gguf.names import HEADS
from paceline.models.families import GGUF_ASSISTANT, GGUF_MODEL_TYPES, gguf_family
from paceline.models.families.fields import MOST_LAYERS
from paceline.models.families.rope import FULL, SLIDING

WINDOWS = "attention.sliding_window_pattern"
PER_LAYER_KEYS = ("attention.head_count_kv", "feed_forward_length")
"""Keys that may have a value for each layer of families whose layers differ."""
_NO_ATTENTION = {
    "attention.head_count": 1,
    "attention.head_count_kv": 1,
    "attention.key_length": 2,
    "attention.value_length": 2,
    "feed_forward_length": 1,
}
"""What stands for the zeros in files of Mamba-2, which has no attention and no feed-forwards."""


def architecture_of(container: GgufContainer) -> str:
    """The value of ``general.architecture``; ``UnsupportedModelError`` if it does not run here."""
    name = container.metadata.get("general.architecture")
    if name not in GGUF_MODEL_TYPES and name not in HEADS:
        raise UnsupportedModelError(
            f"GGUF architecture {str(name)[:40]!r} is not supported; supported: "
            f"{', '.join(GGUF_MODEL_TYPES)}, and as heads {', '.join(HEADS)}"
        )
    return str(name)


class GgufMetadata:
    """What a file says of its model.

    Attributes:
        family: of the architecture.
        whole: all metadata, by their full keys.
        tensors: those in the file.
        path: for errors.

    Raises:
        UnsupportedModelError: the architecture does not run here, or layers differ where they must
            not; on reading.
        ModelLoadError: a value is of the wrong kind; on reading.
    """

    def __init__(self, container: GgufContainer) -> None:
        self.architecture = architecture_of(container)
        self.family = gguf_family(self.architecture)
        self.path, self.tensors, self.whole = container.path, container.tensors, container.metadata
        self._own = _NO_ATTENTION if self.architecture == "mamba2" else {}

    def listed(self, key: str, default: Any = None) -> Any:
        """A value as it is, which may be a list with an entry for each layer."""
        return self._own.get(key, self.whole.get(f"{self.architecture}.{key}", default))

    def get(self, key: str, default: Any = None) -> Any:
        """One value; a list with one entry per layer counts as one if all are the same.

        Of keys that are read layer by layer besides, the first entry stands for all. Where the
        default is a number, so is the value.
        """
        value = self._one(key, default)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if is_number and not _is_finite(value):
            raise self.error(key, value, "a number")
        return value

    def _one(self, key: str, default: Any) -> Any:
        value = self.listed(key, default)
        if not isinstance(value, list):
            return value
        if self.family.recurrent:  # whose lists have 0 where a layer has nothing of the kind
            value = [item for item in value if item] or value[:1]
        is_read_by_layer = self.family.per_layer and key in PER_LAYER_KEYS
        if value and (is_read_by_layer or all(item == value[0] for item in value)):
            return value[0]
        raise UnsupportedModelError(
            f"{self.architecture}.{key} differs between layers, which is not supported"
        )

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key, default)
        if not _is_finite(value) or not value > 0:
            raise self.error(key, value, "a positive number")
        number: float = value
        return number

    def error(self, key: str, value: object, wanted: str) -> ModelLoadError:
        return ModelLoadError(
            f"the GGUF metadata says {self.architecture}.{key} = {str(value)[:40]}; it must be "
            f"{wanted}"
        )

    def has(self, layer: int, part: str) -> bool:
        """Whether a layer has a part's weights."""
        return f"blk.{layer}.{part}.weight" in self.tensors

    def has_any(self, end: str) -> bool:
        """Whether the name of a tensor ends so, after a dot."""
        return any(name.endswith(f".{end}") for name in self.tensors)

    @cached_property
    def layers_behind(self) -> int:
        """Layers for multi-token prediction, which the format counts among a model's blocks.

        An assistant's own layers are all called so.
        """
        if self.architecture == GGUF_ASSISTANT:
            return 0
        count, behind = self.number("block_count"), self.get("nextn_predict_layers", 0)
        if isinstance(behind, bool) or not isinstance(behind, int) or not 0 <= behind < count:
            wanted = f"a number from 0 to {count - 1}, as block_count is {count}"
            raise self.error("nextn_predict_layers", behind, wanted)
        return behind

    @cached_property
    def num_layers(self) -> int:
        return int(self.number("block_count")) - self.layers_behind

    @property
    def layers(self) -> range:
        """The layers whose tensors may be looked at; the reader of the number refuses more."""
        return range(min(self.num_layers, MOST_LAYERS))

    @cached_property
    def layer_types(self) -> list[str] | None:
        """Which layers have a sliding window; None where there is no list of them."""
        pattern = self.listed(WINDOWS)
        if not isinstance(pattern, list):
            return None
        own = pattern[: len(pattern) - self.layers_behind]
        return [SLIDING if slides else FULL for slides in own]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
