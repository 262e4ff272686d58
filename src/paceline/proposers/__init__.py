"""From configurations to proposers, built-in ones and plugins alike. Owns nothing of any of them.

What an entry point of :mod:`paceline.config.speculative` leads to is called with a configuration
and what the proposer has to fit to, and returns the proposer. Knows no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

from paceline.config import METHODS, SpeculativeConfig
from paceline.config.speculative import (
    ENTRY_POINTS,
    ForwardingConfig,
    HeadConfig,
    check_method,
    plugins,
)
from paceline.core.errors import PacelineError
from paceline.proposers.base import Proposer, TargetInfo
from paceline.proposers.plugin import PluginProposer, contained

log = logging.getLogger(__name__)

Builder = Callable[[SpeculativeConfig, TargetInfo], Proposer]


def build_proposers(
    configs: Sequence[SpeculativeConfig], target: TargetInfo, *, strict: bool
) -> list[Proposer]:
    """The proposers of an engine, in the order of their configurations.

    One that cannot be built is left out with a warning, so that decoding goes on without it. Those
    that run models share ``target.kv_bytes``.

    Raises:
        PacelineError: ``strict``, and one cannot be built.
    """
    num_models = sum(config.has_own_kv for config in configs)
    target = replace(target, kv_bytes=target.kv_bytes // max(1, num_models))
    proposers = []
    for config in configs:
        try:
            proposers.append(find_builder(config.method)(config, target))
        except PacelineError as error:
            if strict:
                raise
            of = f" with model {config.model}" if config.model else ""
            log.warning("no drafts by %s%s, decoding goes on without: %s", config.method, of, error)
    return proposers


def check_fit(config: SpeculativeConfig, target: TargetInfo) -> None:
    """Open a draft and compare it with a target whose weights are not loaded.

    Raises:
        PacelineError: it cannot be read, or it was made for another target.
    """
    if isinstance(config, HeadConfig):
        from paceline.proposers.heads import check_head

        check_head(config, target)
    elif isinstance(config, ForwardingConfig):
        from paceline.proposers.draft_model.loading import check_draft

        check_draft(config, target)
    else:
        find_builder(config.method)(config, target)


def find_builder(method: str) -> Builder:
    """What builds the proposers of a method that a configuration may name."""
    if check_method(method) in METHODS:
        value = f"{__name__}.{METHODS[method].builder}"
        builder: Builder = EntryPoint(method, value, ENTRY_POINTS).load()
        return builder
    entry = plugins()[method]

    def build(config: SpeculativeConfig, target: TargetInfo) -> Proposer:
        make: Any = contained(entry, entry.load)
        proposer: Proposer = contained(entry, lambda: PluginProposer(config, make(config, target)))
        return proposer

    return build
