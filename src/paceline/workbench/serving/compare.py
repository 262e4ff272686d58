"""Two servers in turns: the same requests in alternating blocks, paired prompt by prompt.

What slows the machine down for a while slows both arms. Each block begins with an empty prefix
cache where the server can flush it, and the arm that begins alternates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.workbench.serving import server
from paceline.workbench.serving.bench import Arm, Workload
from paceline.workbench.serving.client import Outcome
from paceline.workbench.serving.figures import METRICS, PER_REQUEST
from paceline.workbench.serving.ratios import Ratio, after, block_size, ratio_of_medians
from paceline.workbench.serving.requests import make_bodies


@dataclass(slots=True)
class Comparison:
    """Two arms that were sent the same, and what follows from it.

    Attributes:
        block: requests of one block.
        flushed: for each arm, whether every block began with an empty prefix cache.
    """

    ours: Arm
    theirs: Arm
    block: int
    flushed: list[bool] = field(default_factory=lambda: [True, True])

    @property
    def pairs(self) -> list[tuple[int, Outcome, Outcome]]:
        """Place and outcomes of the requests that neither arm failed."""
        both = zip(self.ours.outcomes, self.theirs.outcomes, strict=True)
        return [(i, a, b) for i, (a, b) in enumerate(both) if not a.error and not b.error]

    @property
    def differing(self) -> list[int]:
        """Requests, counted from 0, whose texts are not the same."""
        return [i for i, a, b in self.pairs if a.text != b.text]

    def ratios(self) -> dict[str, Ratio]:
        """Ours over theirs: output tokens per second by block, times by request."""
        found: dict[str, Ratio | None] = {"output_throughput": self._throughput()}
        for name in PER_REQUEST:
            both = [(METRICS[name](a), METRICS[name](b)) for _, a, b in self.pairs]
            pairs = [(*ours, *theirs) for ours, theirs in both if ours and theirs]
            found[name] = ratio_of_medians([a for a, _ in pairs], [b for _, b in pairs])
        return {name: ratio for name, ratio in found.items() if ratio is not None}

    def _throughput(self) -> Ratio | None:
        """Over blocks that both arms answered in full: a failed request would count as speed."""
        whole = [
            place
            for place in range(len(self.ours.block_seconds))
            if not any(o.error for arm in (self.ours, self.theirs) for o in self._part(arm, place))
        ]
        ours, theirs = (
            [self._rate(arm, place) for place in whole] for arm in (self.ours, self.theirs)
        )
        return ratio_of_medians(ours, theirs)

    def _part(self, arm: Arm, place: int) -> Sequence[Outcome]:
        return arm.outcomes[place * self.block : (place + 1) * self.block]

    def _rate(self, arm: Arm, place: int) -> float:
        tokens = sum(outcome.output_len for outcome in self._part(arm, place))
        return tokens / arm.block_seconds[place]


async def run_comparison(
    ours: Arm,
    theirs: Arm,
    workload: Workload,
    on_finished: Callable[[int], None] = lambda finished: None,
) -> Comparison:
    """Measure both arms in turns.

    Args:
        on_finished: called with the number of requests that have ended, of both arms.

    Raises:
        BenchmarkError: a server fails the trial.
    """
    arms = (ours, theirs)
    for arm in arms:
        await arm.prepare(workload)
    count = len(workload.samples)
    found = Comparison(ours, theirs, block_size(count, workload.max_concurrency or 1))
    bodies = [make_bodies(arm.target, workload.samples, workload.sampling) for arm in arms]
    done = 0
    for number, first in enumerate(range(0, count, found.block)):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            arm, part = arms[which], bodies[which][first : first + found.block]
            found.flushed[which] &= await server.flush_prefix_cache(arm.session, arm.target.url)
            await arm.measure(part, workload, first, after(done, on_finished))
            done += len(part)
    return found
