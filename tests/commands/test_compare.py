"""``paceline run --compare``: verdicts that follow from what was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.commands.compare import Comparison, Pair, comparison_table, verdict
from paceline.commands.report import Figures
from paceline.commands.resolve import NO_MEMORY
from paceline.llm import LLM
from paceline.outputs import Completion, GenerationOutput
from tests.commands.conftest import Result

Cli = Callable[..., Result]
QUICK = ("-p", "def add(a, b):", "--max-tokens", "8")


def output() -> GenerationOutput:
    return GenerationOutput([1], [Completion(0)])


def comparison(plain: float, speculative: float, *differing: int) -> Comparison:
    first = Pair(0, Figures(plain, 100, 100), Figures(speculative, 100, 40, 30, 90, 60))
    second = Pair(1, Figures(plain, 100, 100), Figures(speculative, 100, 50, 30, 90, 60))
    for pair in (first, second):
        pair.outputs = [output()]
        pair.differing = {index for index in differing if index == pair.first_prompt}
    return Comparison([first, second])


@pytest.mark.parametrize(
    ("measured", "promised", "sentence"),
    [
        (comparison(4.2, 2.0), True, "identical output, 2.10x faster"),
        (comparison(2.0, 2.0), True, "identical output, as fast as plain decoding"),
        (comparison(1.0, 2.0), True, "identical output, slower: 0.50x the speed of plain decoding"),
        (comparison(4.0, 2.0, 1), True, "DIFFERENT output for 1 of 2 prompts, 2.00x faster"),
        (
            comparison(1.0, 2.0, 0, 1),
            False,
            "DIFFERENT output for 2 of 2 prompts (this path promises identity up to rounding), "
            "slower: 0.50x the speed of plain decoding",
        ),
    ],
)
def test_verdict(measured: Comparison, promised: bool, sentence: str) -> None:
    assert verdict(measured, promised) == sentence


def test_a_speedup_that_noise_made_is_not_claimed() -> None:
    measured = comparison(106.0, 2.0)
    for pair in measured.pairs:
        pair.rounds = [(Figures(106.0, num_steps=100), Figures(2.0, num_steps=40))]
    said = verdict(measured, True)
    assert said == (
        "identical output, and no speed-up can be told, the machine was busy: a plain step took "
        "21.2 times as long as a speculative one, which does more; measure again"
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
    result = cli("run", *QUICK, *options, "--compare", "--repeat", "2", "--json")
    document = result.document
    assert result.code == 0
    assert document["identical"] is True
    assert ("no speed-up can be told" in result.out) == (document["disturbed"] is not None)
    assert document["plain"]["output_tokens"] == document["speculative"]["output_tokens"] == 16
    ratio = document["plain"]["seconds"] / document["speculative"]["seconds"]
    assert document["speedup"] == pytest.approx(ratio)
    assert document["speculative"]["num_draft_tokens"] > 0
    assert "identical output" in result.err
    # The second time, no answer of the first one is drafted from.
    assert {c["suffix_decoding_max_cached_requests"] for c in document["speculative_config"]} == {0}
    assert NO_MEMORY in result.err


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
    arguments = ("--prompts", str(path), "--max-tokens", "3", "--max-num-seqs", "2")
    result = cli("run", *arguments, "--compare", "--json")
    assert result.document["num_prompts"] == 3
    rows = [line.split()[0] for line in result.err.splitlines()]
    assert rows[rows.index("------") + 1 :][:2] == ["1-2", "3"]
