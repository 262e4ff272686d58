"""What may be claimed of a speed-up: recorded rounds, and rounds that are made up."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.machine import Load, current_load
from paceline.core.speedup import ASSUMED_NOISE, Arm, Claim, Round, claim


def arm(seconds: float, steps: int, drafted: int = 0) -> Arm:
    """Of one request."""
    return Arm(seconds, steps, steps, drafted)


def recorded(plain: tuple[float, int], speculative: tuple[float, int, int]) -> Round:
    return Round(arm(*plain), arm(*speculative))


def one(ratio: float, steps: int = 40, length: float = 2.5, plain: float = 1.0) -> Round:
    """A round whose plain step takes ``ratio`` times as long as a speculative one.

    Args:
        steps: speculative ones.
        length: of acceptance.
        plain: seconds.
    """
    plain_steps = int(steps * length)
    return Round(arm(plain, plain_steps), arm(plain * steps / plain_steps / ratio, steps, 50))


def many(count: int, deviation: float, seed: int, typical: float = 0.85) -> list[list[Round]]:
    """Rounds of prompts of all lengths, drafted well and badly, three of each."""
    dice, found = random.Random(seed), []
    for _ in range(count):
        steps, length, plain = dice.randint(8, 60), dice.uniform(1.0, 5.0), dice.uniform(0.2, 5.0)
        shares = [typical * dice.lognormvariate(0.0, deviation) for _ in range(3)]
        found.append([one(share, steps, length, plain) for share in shares])
    return found


def test_a_claim_is_no_more_than_the_steps_allow() -> None:
    # The page said "1.66x the speed" of one pair at 1.13 tokens per step.
    found = claim([[recorded((2.49, 68), (1.5, 60, 40))]])
    assert found.allowed == pytest.approx(68 / 60)
    assert found.untold is not None  # 1.46 times what is possible
    # Within what a clock may be off by, the claim stops where the steps do.
    found = claim([[recorded((1.2, 68), (1.0, 60, 40))]])
    assert (found.value, found.high) == (found.allowed, found.allowed)
    assert found.sentence().endswith(f"{68 / 60:.2f}x)")
    for seed in range(20):
        found = claim(many(4, 0.2, seed, typical=1.0))
        assert found.low <= found.value <= found.allowed


def test_what_was_not_drafted_made_nothing_faster() -> None:
    # Recorded on a busy machine: 1.07 times as fast, without a draft.
    rounds = [recorded((1.07, 100), (1.0, 100, 0)) for _ in range(5)]
    found = claim([rounds])
    assert found.sentence() == "about as fast as plain decoding: nothing was drafted"
    assert (found.value, found.is_certain) == (1.0, True)


@pytest.mark.parametrize(
    ("speculative", "sentence"),
    [
        ((2.00, 2.02, 1.98, 2.01), "2.00x faster (1.97x to 2.02x)"),
        ((4.00, 4.04, 3.96, 4.02), "about as fast as plain decoding (0.99x to 1.01x)"),
        ((3.96, 3.50, 3.97, 4.05), "about as fast as plain decoding (0.93x to 1.15x)"),
        ((5.00, 5.05, 4.95, 5.02), "slower: 0.80x the speed of plain decoding (0.79x to 0.81x)"),
    ],
)
def test_sentences(speculative: tuple[float, ...], sentence: str) -> None:
    rounds = [recorded((4.0, 100), (seconds, 40, 90)) for seconds in speculative]
    assert claim([rounds]).sentence() == sentence


def test_one_round_is_trusted_only_so_far() -> None:
    found = claim([[recorded((4.0, 100), (3.7, 40, 90))]])
    assert found.sentence() == "about as fast as plain decoding (0.98x to 1.19x)"
    assert found.high / found.value == pytest.approx(1 + ASSUMED_NOISE)
    assert not found.is_certain


def test_a_busy_machine_is_told_of() -> None:
    found = claim([[recorded((4.0, 100), (5.06, 40, 90))]])
    assert found.sentence(Load(0.4, 2)) == found.sentence() == found.sentence(None)
    assert found.sentence(Load(3.1, 2)).endswith(
        "; the machine was already busy (load 3.1 on 2 cores): measure again when it is idle"
    )


def test_certainty_ends_a_measurement() -> None:
    rounds = [one(0.85 + noise) for noise in (0.0, 0.004, -0.004)]
    assert not claim([rounds[:2]]).is_certain
    assert claim([rounds]).is_certain
    assert not claim([[one(0.85), one(0.95), one(0.75)]]).is_certain


@pytest.mark.parametrize("count", [1, 2, 3, 12, 60])
def test_rounds_of_a_quiet_machine_tell_a_speedup(count: int) -> None:
    for seed in range(20):
        assert claim(many(count, 0.05, seed)).untold is None
        assert claim(many(count, 0.05, seed, typical=0.3)).untold is None  # dear drafts


def test_intervals_hold_the_truth() -> None:
    held = 0
    for seed in range(100):
        prompts = many(4, 0.1, seed)
        found = claim(prompts)
        plain = sum(each.plain.seconds for rounds in prompts for each in rounds)
        quiet = sum(each.plain.seconds / each.allowed for rounds in prompts for each in rounds)
        held += found.low <= 0.85 * plain / quiet <= found.high
    assert held >= 90


def test_prompts_that_are_drafted_well_and_badly_are_no_noise() -> None:
    prompts = [[one(1.0, length=1.0)] * 3, [one(0.8, length=4.0)] * 3, [one(0.6, length=6.0)] * 3]
    assert claim(prompts).is_certain


@pytest.mark.parametrize("rounds", [[one(21.2)], [one(0.9), one(21.2)], [one(1.4)] * 5])
def test_more_than_the_steps_that_were_saved_is_impossible(rounds: list[Round]) -> None:
    said = claim([rounds]).sentence()
    assert said.startswith("the speed-up could not be measured: ")
    assert said.endswith(", so the machine must have been busy; measure again")


def test_one_arm_that_was_held_up_in_a_round_of_many() -> None:
    def held_up(held: Arm) -> Arm:
        return replace(held, seconds=held.seconds + 60)

    for seed in range(20):
        for change in ("plain", "speculative"):
            prompts = many(12, 0.05, seed)
            disturbed = prompts[seed % 12][0]
            prompts[seed % 12][0] = replace(
                disturbed, **{change: held_up(getattr(disturbed, change))}
            )
            assert claim(prompts).untold is not None


def test_rounds_that_contradict_each_other() -> None:
    assert claim([[one(0.9), one(0.2)]]).untold is not None
    assert claim([[one(0.9), one(0.65)]]).untold is None


def test_requests_that_run_at_once_are_bound_by_the_longest_or_by_all() -> None:
    # Rows are free: a long request that is drafted well decides alone.
    found = Round(Arm(2.0, 250, 200), Arm(0.5, 100, 50, 150))
    assert found.allowed == 4.0
    # Rows cost as much as steps: the steps of all decide.
    found = Round(Arm(2.0, 200, 100), Arm(1.25, 125, 100, 75))
    assert found.allowed == 1.6


def test_what_was_not_measured_says_nothing() -> None:
    nothing, something = arm(0.0, 0), arm(1.0, 1)
    for rounds in ([], [Round(nothing, something), Round(something, nothing)]):
        assert claim([rounds]) == Claim(untold="nothing was measured")


def test_the_load_of_a_machine(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    assert current_load(2, tmp_path) is None
    (tmp_path / "proc/loadavg").write_text("1.26 0.80 0.61 3/120 4711\n")
    found = current_load(2, tmp_path)
    assert found is not None
    assert (str(found), found.is_busy) == ("load 1.3 on 2 cores", True)
    assert not Load(1.26, 4).is_busy
