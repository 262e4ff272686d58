"""The verdict on speculation: where two arms' outputs differ, and by how much tokens fell short.

Counts and judges; the rule is in ``docs/losslessness.md``. Knows no engine: outputs and their
regrets are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np

from paceline.request.request import FinishReason, TokenLogprobs
from paceline.workbench.regret import Floats, Regrets

DEFAULT_MAX_REGRET = 0.5


class Answer(Protocol):
    """One finished output."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def logprobs(self) -> list[TokenLogprobs]: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """How one prompt's speculative output differs from the plain one.

    Attributes:
        prompt_index: counted from 0.
        position: index in the output of the first difference.
        count: positions that differ, those that only one output has included; an end at the same
            place for another reason counts as one.
        wrong_length: the outputs end differently although they say the same up to the end of one
            of them, or both ended at the limit of length.
    """

    prompt_index: int
    position: int
    count: int
    wrong_length: bool


def difference(prompt_index: int, plain: Answer, speculative: Answer) -> Difference | None:
    """None for identical outputs."""
    one, two = plain.token_ids, speculative.token_ids
    differing = [i for i, (a, b) in enumerate(zip_longest(one, two)) if a != b]
    if not differing:
        if plain.finish_reason == speculative.finish_reason:
            return None
        return Difference(prompt_index, len(one), 1, wrong_length=True)
    contained = differing[0] >= min(len(one), len(two))
    both_full = plain.finish_reason == speculative.finish_reason == FinishReason.LENGTH
    wrong = contained or (both_full and len(one) != len(two))
    return Difference(prompt_index, differing[0], len(differing), wrong)


def compared_logprobs(plain: Answer, speculative: Answer) -> list[bool]:
    """For each token with log-probabilities, up to the first that differs: whether they are equal.

    Rows of logits may differ where the same token is the best one by far. After the first token
    that differs the texts are different ones. What one output lacks is a difference.
    """
    equal = []
    for one, two in zip_longest(plain.logprobs, speculative.logprobs):
        if one is not None and two is not None and one.token_id != two.token_id:
            break
        equal.append(one == two)
    return equal


@dataclass(slots=True)
class Tally:
    """Everything that was compared so far."""

    num_prompts: int = 0
    num_tokens: int = 0
    num_logprob_tokens: int = 0
    num_logprob_differences: int = 0
    differences: list[Difference] = field(default_factory=list)
    _inner: list[Floats] = field(default_factory=list)
    _boundary: list[Floats] = field(default_factory=list)

    def add(self, plain: Answer, speculative: Answer, regrets: Regrets) -> None:
        """Count the next prompt: its two outputs and the scores of the speculative one."""
        found = difference(self.num_prompts, plain, speculative)
        if found is not None:
            self.differences.append(found)
        assert len(regrets.inner) + len(regrets.boundary) == len(speculative.token_ids)
        self.num_prompts += 1
        self.num_tokens += len(speculative.token_ids)
        equal = compared_logprobs(plain, speculative)
        self.num_logprob_tokens += len(equal)
        self.num_logprob_differences += equal.count(False)
        self._inner.append(regrets.inner)
        self._boundary.append(regrets.boundary)

    @property
    def num_differences(self) -> int:
        return sum(found.count for found in self.differences)

    @property
    def num_boundary_tokens(self) -> int:
        return sum(map(len, self._boundary))

    @property
    def max_regret(self) -> float:
        return _highest(self._inner)

    @property
    def max_boundary_excess(self) -> float:
        return _highest(self._boundary)

    def figures(self) -> dict[str, Any]:
        """All counts and figures, as they are reported."""
        inner = np.concatenate([*self._inner, np.zeros(0)])
        return {
            "identical": not self.differences and not self.num_logprob_differences,
            "num_tokens": self.num_tokens,
            "num_differences": self.num_differences,
            "num_logprob_tokens": self.num_logprob_tokens,
            "num_logprob_differences": self.num_logprob_differences,
            "max_regret": self.max_regret,
            "p99_regret": float(np.quantile(inner, 0.99, method="higher")) if len(inner) else 0.0,
            "mean_regret": float(inner.mean()) if len(inner) else 0.0,
            "num_prompts": self.num_prompts,
            "num_differing_prompts": len(self.differences),
            "num_wrong_lengths": sum(found.wrong_length for found in self.differences),
            "num_regret_tokens": int(np.count_nonzero(inner)),
            "num_boundary_tokens": self.num_boundary_tokens,
            "max_boundary_excess": self.max_boundary_excess,
            "first_differences": [
                {"prompt_index": found.prompt_index, "position": found.position}
                for found in self.differences
            ],
        }

    def failures(self, promises_identity: bool, max_regret: float) -> list[str]:
        """Why the comparison fails; empty when it passes.

        Args:
            promises_identity: nothing at all may differ, and no token may have regret.
            max_regret: the largest regret that rounding explains, where identity is not promised.
        """
        figures = self.figures()
        if promises_identity:
            checks = [
                (self.num_differences, "positions differ"),
                (self.num_logprob_differences, "log-probabilities differ"),
                (figures["num_regret_tokens"], "tokens have regret"),
                (self.num_boundary_tokens, "tokens are outside a filter"),
            ]
            return [f"{count} {what}" for count, what in checks if count]
        found = []
        if figures["num_wrong_lengths"]:
            found.append(f"{figures['num_wrong_lengths']} outputs have the wrong length")
        if self.max_regret > max_regret:
            found.append(f"the largest regret is {self.max_regret:.4g}, above {max_regret:g}")
        if self.max_boundary_excess > max_regret:
            excess = self.max_boundary_excess
            found.append(f"a token is {excess:.4g} outside a filter, more than {max_regret:g}")
        return found


def _highest(parts: Sequence[Floats]) -> float:
    return max((float(part.max()) for part in parts if len(part)), default=0.0)
