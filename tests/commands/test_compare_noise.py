"""When no speed-up can be told: the rule on rounds that are made up."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paceline.commands.compare_noise import Round, why_disturbed
from paceline.commands.report import Figures


def one(ratio: float, steps: int = 40, length: float = 2.5, plain: float = 1.0) -> Round:
    """A round whose plain step takes ``ratio`` times as long as a speculative one.

    Args:
        steps: speculative ones.
        length: of acceptance.
        plain: seconds.
    """
    plain_steps = int(steps * length)
    speculative = plain * steps / plain_steps / ratio
    return Figures(plain, num_steps=plain_steps), Figures(speculative, num_steps=steps)


def many(count: int, deviation: float, seed: int, typical: float = 0.85) -> list[Round]:
    """Rounds of prompts of all lengths, drafted well and badly."""
    dice = random.Random(seed)
    return [
        one(
            typical * dice.lognormvariate(0.0, deviation),
            steps=dice.randint(8, 60),
            length=dice.uniform(1.0, 5.0),
            plain=dice.uniform(0.2, 5.0),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 12, 60])
def test_rounds_of_a_quiet_machine_tell_a_speedup(count: int) -> None:
    for seed in range(50):
        assert why_disturbed(many(count, 0.05, seed)) is None
        assert why_disturbed(many(count, 0.05, seed, typical=0.3)) is None  # dear drafts


def test_prompts_that_are_drafted_well_and_badly_are_no_noise() -> None:
    rounds = [one(1.0, length=1.0), one(0.8, length=4.0), one(0.6, length=6.0)] * 2
    assert max(plain.seconds / drafted.seconds for plain, drafted in rounds) > 3.5
    assert why_disturbed(rounds) is None


@pytest.mark.parametrize("rounds", [[one(21.2)], [one(0.9), one(21.2)], [one(1.4)] * 5])
def test_more_than_the_steps_that_were_saved_is_impossible(rounds: list[Round]) -> None:
    said = why_disturbed(rounds)
    assert said is not None
    assert said.endswith("times as long as a speculative one, which does more")


def test_one_arm_that_was_held_up_in_a_round_of_many() -> None:
    for seed in range(20):
        quiet = many(12, 0.05, seed)
        for place, (plain, drafted) in enumerate(quiet):
            for held_up in (
                (replace(plain, seconds=plain.seconds + 60), drafted),
                (plain, replace(drafted, seconds=drafted.seconds + 60)),
            ):
                assert why_disturbed([*quiet[:place], held_up, *quiet[place + 1 :]]) is not None


def test_rounds_that_contradict_each_other() -> None:
    said = why_disturbed([one(0.9), one(0.2)])
    assert said == (
        "a plain step took 0.20 to 0.90 times as long as a speculative one, from round to round"
    )
    assert why_disturbed([one(0.9), one(0.6)]) is None


def test_what_was_not_measured_says_nothing() -> None:
    assert why_disturbed([]) is None
    nothing, something = Figures(), Figures(1.0, num_steps=1)
    assert why_disturbed([(nothing, something), (something, nothing)]) is None
