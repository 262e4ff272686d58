"""Estimators of acceptance compared along recorded answers, for each proposer and for all at once.

Drafts are verified whatever they cost, and what the answers say next labels their nodes. Owns which
proposers draft together; knows no estimator's inside and no screen.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.workbench.estimators_log import Log, Recorder
from paceline.workbench.estimators_report import Scores, compare, score
from paceline.workbench.simulate import Configs, Simulator

TOGETHER = "all together"


def arms_of(configs: Configs) -> dict[str, Configs]:
    """Each proposer by itself under its method, and, of several, :data:`TOGETHER`."""
    methods = [config.method for config in configs]
    arms: dict[str, Configs] = {}
    for number, config in enumerate(configs, start=1):
        twins = methods.count(config.method) > 1
        arms[f"{config.method} ({number})" if twins else config.method] = (config,)
    return {**arms, TOGETHER: configs} if len(configs) > 1 else arms


def log_of(simulator: Simulator, configs: Configs) -> Log:
    """What proposers draft along the traces, and what the answers made of it.

    Raises:
        PacelineError: as a replay.
    """
    recorder = Recorder()
    simulator.run(configs, lambda cost, drafting, objective: recorder)
    return recorder.log


def compared(
    simulator: Simulator, configs: Configs, advance: Callable[[int], None] = lambda done: None
) -> dict[str, dict[str, Scores]]:
    """Scores by estimator for each of :func:`arms_of`; none at all where nothing was drafted.

    Args:
        configs: of the proposers, in the sizes in which they draft.
        advance: told how many arms are done.

    Raises:
        PacelineError: as a replay.
    """
    found: dict[str, dict[str, Scores]] = {}
    for name, each in arms_of(configs).items():
        outcomes = compare(log_of(simulator, each))
        found[name] = {key: score(labels) for key, labels in outcomes.items() if labels}
        advance(len(found))
    return found
