"""How a model is sampled where a request says nothing. Owns what goes first, and what is last.

The model's own files go first (``generation_config.json``, or ``general.sampling`` of a GGUF file),
then its makers' card, which the catalogue keeps for models that have a name. Most small models
write nonsense at temperature 1 without a filter, so a model of which neither says anything is
sampled as llama.cpp does. Knows no file format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import RequestError
from paceline.request.sampling_params import SamplingParams

NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""What a model's makers may set, and the values that change nothing."""
LLAMA_CPP: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's defaults (``common_params_sampling`` of b11549)."""
OLLAMA: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's (``DefaultOptions`` of its API), without the penalty, which counts 64 tokens there."""

FROM_FILES = "the model's files"
FROM_CARD = "its model card"
UNSTATED = "llama.cpp's defaults; the model states none"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's sampling, and where it comes from.

    Attributes:
        values: those of :data:`NEUTRAL` that are set; the others change nothing.
        source: for people.
    """

    values: Mapping[str, float]
    source: str = UNSTATED

    @property
    def is_stated(self) -> bool:
        """Whether the model's makers chose it."""
        return self.source != UNSTATED

    def __str__(self) -> str:
        values = {**NEUTRAL, **self.values}
        told = [
            f"{name.replace('_', '-')} {value:g}"
            for name, value in values.items()
            if value != NEUTRAL[name] or name == "temperature"
        ]
        return f"{', '.join(told)} ({self.source})"

    def params(self) -> SamplingParams:
        """For a request that says nothing at all: it may go on to the end of the context."""
        return SamplingParams(max_tokens=None, **self.values)  # type: ignore[arg-type]


AS_LLAMA_CPP = SamplingDefaults(LLAMA_CPP)


def sampling_defaults(
    files: Mapping[str, Any], card: Mapping[str, float] | None = None
) -> SamplingDefaults:
    """The first of the sources that says anything.

    Args:
        files: what the model's files say, by Hugging Face's names; other keys are passed over,
            and a value that no request could have is told to the log.
        card: what its model card says.
    """
    usable = usable_sampling(files)
    if usable:
        return SamplingDefaults(usable, FROM_FILES)
    if card:
        return SamplingDefaults(card, FROM_CARD)
    return AS_LLAMA_CPP


def usable_sampling(given: Mapping[str, Any]) -> dict[str, float]:
    """Those of :data:`NEUTRAL` that a request can have; the log tells of values out of range."""
    usable = {}
    for name in NEUTRAL:
        value = given.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            log.warning("a default of the model's sampling is not followed: %s", error)
        else:
            usable[name] = value
    return usable
