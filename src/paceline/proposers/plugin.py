"""A plugin's object as a proposer: what it need not have is added here.

A plugin is a class that takes a configuration and what it has to fit to, with ``propose``,
``observe`` and ``finish``; its method names it everywhere. Its trees are copied, so that it may
keep them, and cut to their budget. Whether they are trees at all is for the engine to find out, as
with any proposer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from operator import index
from typing import Any

from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigError, PacelineError
from paceline.proposers.base import DraftBudget, Proposer
from paceline.request.request import Request, VerifyResult
from paceline.request.span import DraftTree

NEEDED = ("propose", "observe", "finish")


class PluginProposer(Proposer):
    """See the module's docstring.

    Args:
        plugin: the plugin's object. Where it counts forwards of a model in ``num_forwards``, the
            planner asks it only when that seems worth the time; ``lag(request)`` may say how many
            of a request's tokens it has yet to read, or None where it will not draft.

    Raises:
        ConfigError: it lacks what a plugin needs.
    """

    def __init__(self, config: SpeculativeConfig, plugin: Any) -> None:
        missing = [name for name in NEEDED if not callable(getattr(plugin, name, None))]
        if missing:
            raise ConfigError(
                f"plugin {config.method} has no {' and no '.join(missing)}; a plugin's class needs "
                f"{', '.join(NEEDED)}"
            )
        self.name = config.method
        self.config = config
        self.costs_forwards = hasattr(plugin, "num_forwards")
        self._num_forwards = 0
        self._plugin = plugin
        self._lag_error: Exception | None = None
        self._count_forwards()

    def _count_forwards(self) -> None:
        if self.costs_forwards:
            self._num_forwards = index(self._plugin.num_forwards)

    @property
    def num_forwards(self) -> int:
        """As it was after the latest draft; reading it can fail, which belongs to a draft."""
        return self._num_forwards

    def lag(self, request: Request) -> int | None:
        """What the plugin says; where it raises it is asked for a draft, which fails in its turn.

        The planner asks this of all proposers, and one must not cost the others their drafts.
        """
        if not hasattr(self._plugin, "lag"):
            return 0
        try:
            lag = self._plugin.lag(request)
            return None if lag is None else index(lag)
        except Exception as error:
            self._lag_error = error
            return 0

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        error, self._lag_error = self._lag_error, None
        if error is not None:
            raise error
        trees = self._plugin.propose(requests, budget)
        self._count_forwards()
        nodes = [min(most, self.config.tree_nodes) for most in budget.max_nodes]
        depth = [min(most, self.config.num_speculative_tokens) for most in budget.max_depth]
        limits = zip(trees, nodes, depth, strict=True)
        return [self._own(tree).within(*most) for tree, *most in limits]

    def observe(self, request: Request, result: VerifyResult) -> None:
        self._plugin.observe(request, result)

    def finish(self, request: Request) -> None:
        self._plugin.finish(request)

    def _own(self, tree: DraftTree) -> DraftTree:
        """The same tree of plain numbers; NumPy's are taken as well, fractions are not."""
        return DraftTree(
            list(map(index, tree.token_ids)),
            list(map(index, tree.parents)),
            list(map(float, tree.accept_probs)),
            [self.name] * len(tree.token_ids),
        )


def contained(entry: EntryPoint, call: Callable[[], Any]) -> Any:
    """What a call into a plugin's code returns."""
    try:
        return call()
    except PacelineError:
        raise
    except Exception as error:
        raise ConfigError(
            f"plugin {entry.name} ({entry.value}) cannot be built: {error!r}"
        ) from error
