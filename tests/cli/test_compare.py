"""``paceline run --compare``: verdicts that follow from what was measured."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.api.llm import LLM
from paceline.api.outputs import Completion, GenerationOutput
from paceline.cli.compare import ArmComparison, Pair, compare, comparison_table, verdict
from paceline.cli.report import Figures
from paceline.cli.settings import NO_MEMORY
from paceline.core.machine import Load
from paceline.core.speedup import Arm, Round
from paceline.request.engine_stats import SpeculationCounters
from paceline.request.sampling_params import SamplingParams
from tests.cli.conftest import Result

Cli = Callable[..., Result]
QUICK = ("-p", "def add(a, b):", "--max-tokens", "8", "--repeat", "1")


def output() -> GenerationOutput:
    return GenerationOutput([1], [Completion(0)])


def comparison(plain: float, speculative: float, *differing: int) -> ArmComparison:
    one = Figures(plain, 100, 100, longest_steps=100)
    first = Pair(0, one, Figures(speculative, 100, 40, 30, 90, 60, 40))
    second = Pair(1, one, Figures(speculative, 100, 50, 30, 90, 60, 50))
    for pair in (first, second):
        pair.outputs = [output()]
        pair.rounds = [Round(pair.plain.arm, pair.speculative.arm)] * 3
        pair.differing = {index for index in differing if index == pair.first_prompt}
    return ArmComparison([first, second])


@pytest.mark.parametrize(
    ("measured", "promised", "sentence"),
    [
        (comparison(4.2, 2.0), True, "identical output, 2.10x faster (2.10x to 2.10x)"),
        (
            comparison(2.0, 2.0),
            True,
            "identical output, about as fast as plain decoding (1.00x to 1.00x)",
        ),
        (
            comparison(1.0, 2.0),
            True,
            "identical output, slower: 0.50x the speed of plain decoding (0.50x to 0.50x)",
        ),
        (
            comparison(4.0, 2.0, 1),
            True,
            "DIFFERENT output for 1 of 2 prompts, 2.00x faster (2.00x to 2.00x)",
        ),
        (
            comparison(1.0, 2.0, 0, 1),
            False,
            "DIFFERENT output for 2 of 2 prompts (this path promises identity up to rounding), "
            "slower: 0.50x the speed of plain decoding (0.50x to 0.50x)",
        ),
    ],
)
def test_verdict(measured: ArmComparison, promised: bool, sentence: str) -> None:
    assert verdict(measured, promised) == sentence


def test_a_speedup_that_noise_made_is_not_claimed() -> None:
    measured = comparison(106.0, 2.0)
    for pair in measured.pairs:
        pair.rounds = [Round(Arm(106.0, 100, 100), Arm(2.0, 40, 40, 90))]
    said = verdict(measured, True)
    assert said == (
        "identical output, and the speed-up could not be measured: a plain step took 21.2 times as "
        "long as a speculative one, which does more work, so the machine must have been busy; "
        "measure again"
    )


def test_tables() -> None:
    measured = comparison(4.0, 2.0, 1)
    assert comparison_table(measured).splitlines()[2:] == [
        "1              25.0               50.0     2.00x               2.50        yes",
        "2              25.0               50.0     2.00x               2.00         NO",
    ]


def test_compare(cli: Cli) -> None:
    # The fixed planner drafts whatever the clock says.
    options = ("--temperature", "0.8", "--planner", "fixed")
    result = cli("run", *QUICK[:4], *options, "--compare", "--repeat", "2", "--json")
    document = result.document
    assert result.code == 0
    assert document["identical"] is True
    assert ("could not be measured" in result.err) == (document["disturbed"] is not None)
    assert (document["claim"] is None) == (document["disturbed"] is not None)
    assert document["repeat"] == 2
    assert document["plain"]["output_tokens"] == document["speculative"]["output_tokens"] == 16
    ratio = document["plain"]["seconds"] / document["speculative"]["seconds"]
    assert document["speedup"] == pytest.approx(ratio)
    assert document["speculative"]["num_draft_tokens"] > 0
    assert "identical output" in result.err
    # The second time, no answer of the first one is drafted from.
    suffix = next(c for c in document["speculative_config"] if c["method"] == "suffix")
    assert suffix["suffix_decoding_max_cached_requests"] == 0
    assert NO_MEMORY in result.err


class Arms:
    """Two engines that answer at once by what is written down, and a clock that they move."""

    def __init__(self, plain_seconds: list[float], speculative_seconds: list[float]) -> None:
        self.now, self.asked = 0.0, list[str]()
        self._seconds = {"plain": iter(plain_seconds), "speculative": iter(speculative_seconds)}

    def clock(self) -> float:
        return self.now

    def engine(self, name: str, steps: int, drafted: int) -> Any:
        def generate(prompts: list[list[int]], params: Any, **options: Any) -> Any:
            if params.__class__ is list:  # else it is the warm-up
                self.asked.append(f"{name} {prompts[0][0]}")
                self.now += next(self._seconds[name])
            counters = SpeculationCounters(num_steps=steps, num_draft_tokens=drafted)
            completion = Completion(0, token_ids=[1] * 10, counters=counters)
            return [GenerationOutput(prompt, [completion]) for prompt in prompts]

        return SimpleNamespace(generate=generate)

    def compared(
        self, monkeypatch: pytest.MonkeyPatch, prompts: int, **options: Any
    ) -> ArmComparison:
        monkeypatch.setattr("paceline.cli.report.time.perf_counter", self.clock)
        ids = [[index] for index in range(prompts)]
        plain, speculative = self.engine("plain", 10, 0), self.engine("speculative", 5, 12)
        params = SamplingParams(max_tokens=10, temperature=0.0)
        return compare(plain, speculative, ids, params, clock=self.clock, **options)


def test_the_arm_that_begins_alternates_over_prompts_and_over_repetitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arms = Arms([2.0] * 4, [1.0] * 4)
    assert arms.compared(monkeypatch, 2, repeat=2).repetitions == 2
    assert [name[:2] + name[-1] for name in arms.asked] == [
        *("pl0", "sp0", "sp1", "pl1"),
        *("sp0", "pl0", "pl1", "sp1"),
    ]


def test_short_answers_are_repeated_until_the_speedup_is_certain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Arms([0.2] * 9, [0.11] * 9).compared(monkeypatch, 1, repeat=None)
    assert found.repetitions == 3
    assert found.claim.sentence() == "1.82x faster (1.82x to 1.82x)"
    noisy = [0.10, 0.14, 0.11, 0.13] * 3
    assert Arms([0.2] * 12, noisy).compared(monkeypatch, 1, repeat=None).repetitions == 12
    found = Arms([0.2] * 12, noisy).compared(monkeypatch, 1, repeat=None, patience=1.4)
    assert found.repetitions == 4


def test_a_verdict_says_that_other_programs_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.compare.current_load", lambda cores: Load(3.1, 2))
    found = Arms([0.2] * 3, [0.25] * 3).compared(monkeypatch, 1, repeat=3)
    assert verdict(found, True) == (
        "identical output, slower: 0.80x the speed of plain decoding (0.80x to 0.80x); the machine "
        "was already busy (load 3.1 on 2 cores): measure again when it is idle"
    )
    assert found.facts()["load"] == {"average": 3.1, "cores": 2}


def test_long_answers_are_not_repeated_past_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Arms([30.0], [16.0]).compared(monkeypatch, 1, repeat=None)
    assert found.repetitions == 1
    assert found.claim.sentence() == "1.88x faster (1.70x to 2.00x)"


def differ(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[int]], object]) -> None:
    """Change what the speculative arm says."""
    generate = LLM.generate

    def altered(self: LLM, *args: Any, **options: Any) -> Any:
        outputs = generate(self, *args, **options)
        if self.config.speculative:
            change(outputs[0].completions[0].token_ids)
        return outputs

    monkeypatch.setattr(LLM, "generate", altered)


@pytest.mark.parametrize("change", [lambda ids: ids.pop(), lambda ids: ids.append(ids.pop() ^ 1)])
def test_a_difference_is_an_exit_code(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, change: Callable[[list[int]], object]
) -> None:
    differ(monkeypatch, change)
    result = cli("run", *QUICK, "--compare", "--json")
    assert result.code == 1
    assert result.document["identical"] is False
    assert "DIFFERENT output for 1 of 1 prompts" in result.err


def test_a_difference_where_identity_is_not_promised(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    differ(monkeypatch, lambda ids: ids.pop())
    start = LLM.__init__

    def unpromising(self: LLM, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        self.promises_identity = False

    monkeypatch.setattr(LLM, "__init__", unpromising)
    result = cli("run", *QUICK, "--compare", "--json")
    assert (result.code, result.document["identical"]) == (0, False)
    assert "up to rounding" in result.err


def test_groups_run_at_once(cli: Cli, tmp_path: Any) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One"}\n{"prompt": "Two"}\n{"prompt": "Three"}\n')
    arguments = (
        "--prompts",
        str(path),
        "--max-tokens",
        "3",
        "--max-num-seqs",
        "2",
        "--repeat",
        "1",
    )
    result = cli("run", *arguments, "--compare", "--json")
    assert result.document["num_prompts"] == 3
    rows = [line.split()[0] for line in result.err.splitlines()]
    assert rows[rows.index("------") + 1 :][:2] == ["1-2", "3"]
