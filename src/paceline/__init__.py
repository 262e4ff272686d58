"""Paceline: lossless speculative decoding for large language models.

>>> from paceline import SamplingParams
>>> SamplingParams(temperature=0.0, max_tokens=8).is_greedy
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "1.0.0"

if TYPE_CHECKING:
    from paceline.api.async_llm import AsyncLLM
    from paceline.api.llm import LLM
    from paceline.api.outputs import GenerationOutput
    from paceline.core.errors import PacelineError
    from paceline.request.sampling_params import SamplingParams, SpeculativeParams
    from paceline.request.structured_outputs import StructuredOutputs, ThoughtMarks

_HOMES = {
    "LLM": "paceline.api.llm",
    "AsyncLLM": "paceline.api.async_llm",
    "GenerationOutput": "paceline.api.outputs",
    "SamplingParams": "paceline.request.sampling_params",
    "SpeculativeParams": "paceline.request.sampling_params",
    "StructuredOutputs": "paceline.request.structured_outputs",
    "ThoughtMarks": "paceline.request.structured_outputs",
    "PacelineError": "paceline.core.errors",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "GenerationOutput",
    "PacelineError",
    "SamplingParams",
    "SpeculativeParams",
    "StructuredOutputs",
    "ThoughtMarks",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used, so that ``paceline --help`` is quick."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, for completion, though none of them may have been imported."""
    return sorted({*globals(), *__all__})
