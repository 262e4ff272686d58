"""Checked access to the numbers of an untrusted ``config.json``. Knows no model family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from paceline.core.errors import ModelLoadError, UnsupportedModelError

MOST_LAYERS = 4096
"""Far beyond real models, and far below absurd ones."""


_SPELT = {"Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON has not, as transformers 5 writes them: ``{"__float__": "Infinity"}``."""


Value = TypeVar("Value")


def supported(what: str, said: str, allowed: Mapping[str, Value]) -> Value:
    """What a word stands for; :class:`UnsupportedModelError` for one that is not allowed."""
    if said not in allowed:
        raise UnsupportedModelError(
            f"{what} {said[:40]!r} is not supported; supported: {', '.join(allowed)}"
        )
    return allowed[said]


def _spelt(value: Any) -> Any:
    if not isinstance(value, Mapping) or [*value] != ["__float__"]:
        return value
    word = value["__float__"]
    return _SPELT.get(word, value) if isinstance(word, str) else value


class Fields:
    """Typed getters over a configuration, with the family's defaults behind it.

    A key that is absent takes its default; ``null`` counts as absent where a number is needed.
    Every getter raises :class:`ModelLoadError` naming the key, what it holds and what is allowed.
    """

    def __init__(
        self, raw: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, where: str = ""
    ) -> None:
        self._raw = raw
        self._defaults = defaults or {}
        self._where = where

    def get(self, key: str) -> Any:
        return self._raw[key] if key in self._raw else self._defaults.get(key)

    def says(self, key: str) -> bool:
        """Whether the configuration itself has a value there, whatever its family's default is."""
        return self._raw.get(key) is not None

    def error(
        self, key: str, allowed: str, error_type: type[ModelLoadError] = ModelLoadError
    ) -> ModelLoadError:
        """What is wrong with a key's value, and what it must be."""
        value = self.get(key)
        if value is None:
            return error_type(f"the model configuration has no {self._where}{key}")
        return error_type(
            f"the model configuration says {self._where}{key} = {str(value)[:80]}; "
            f"it must be {allowed}"
        )

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number in ``[low, high]``, also where transformers wrote it in words, as infinity."""
        value = _spelt(self.get(key))
        if value is None:
            value = default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # not-a-number fails this too
            raise self.error(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in ``[low, high]``."""
        value = self.number(key, low, high, default)
        if value != int(value):
            raise self.error(key, f"a whole number from {low} to {high}")
        return int(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def numbers(self, key: str, length: int, low: float, high: float) -> tuple[float, ...]:
        """A list of ``length`` numbers in ``[low, high]``."""
        return tuple(entry.number(key, low, high) for entry in self._entries(key, length))

    def integers(self, key: str, length: int, low: int, high: int) -> tuple[int, ...]:
        """A list of ``length`` whole numbers in ``[low, high]``."""
        return tuple(entry.integer(key, low, high) for entry in self._entries(key, length))

    def _entries(self, key: str, length: int) -> list[Fields]:
        value = self.get(key)
        if not isinstance(value, list | tuple) or len(value) != length:
            raise self.error(key, f"a list of {length} numbers")
        return [Fields({key: item}, where=self._where) for item in value]

    def layers(self, key: str) -> Sequence[int]:
        """A list of layers' numbers; empty where there is none."""
        layers = self.get(key) or []
        if not isinstance(layers, list | tuple) or any(type(index) is not int for index in layers):
            raise self.error(key, "a list of layers")
        return layers

    def by_layer(self, key: str, num_layers: int) -> Sequence[Any]:
        """A list with an entry for each layer."""
        entries = self.get(key)
        if not isinstance(entries, list | tuple) or len(entries) != num_layers:
            raise self.error(key, f"a list with one entry for each of {num_layers} layers")
        return entries

    def layer_kinds(self, key: str, num_layers: int, *allowed: str) -> Sequence[str]:
        """A list with a word for each layer; :class:`UnsupportedModelError` for another word."""
        kinds = self.by_layer(key, num_layers)
        for kind in kinds:
            supported(f"{key} with", str(kind), dict.fromkeys(allowed))
        return kinds

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object; ``null`` counts as absent."""
        value = self._raw.get(key)
        value = self._defaults.get(key) if value is None else value
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of them. Ids outside the vocabulary can never be emitted: left out."""
        value = self.get(key)
        items = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.error(key, "a token id, a list of token ids, or null")
        return tuple(dict.fromkeys(item for item in items if 0 <= item < vocab_size))
