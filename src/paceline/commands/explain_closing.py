"""What an explained run comes to, in the lines below its steps. Knows no engine and no text."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.commands.display import table
from paceline.workbench.explain_run import Explanation
from paceline.workbench.explain_summary import ProposerSummary, cost_error, summarise

FEW_TOKENS = 32
"""Tokens below which it is said what the closing ratio was measured on."""
SUMMARY_HEADERS = (
    "proposer",
    "asked",
    "passed over",
    "ms",
    "drafted",
    "candidates",
    "verified",
    "accepted",
    "labelled",
    "expected",
    "right",
    "error",
)


def summary_lines(run: Explanation) -> Iterator[str]:
    """The proposers as a table, and the run in a few sentences."""
    summaries = summarise(run.records)
    if summaries:
        yield table(SUMMARY_HEADERS, [_cells(each) for each in summaries])
    if run.num_dropped:
        yield f"The first {run.num_dropped} steps were not kept and are in no figure but the last."
    decoding = [record for record in run.records if record.num_decoding]
    emitted = sum(record.num_emitted for record in decoding)
    line = f"{emitted} tokens in {len(decoding)} steps"
    error = cost_error(decoding)
    if error is not None:
        line += f"; forwards take what was predicted within {error:.0%} (median)"
    yield line
    speedups = run.speedups()
    if speedups:
        same = "identical to" if run.is_identical else "DIFFERENT from"
        yield f"{speedups[-1]:.2f} times as fast as plain decoding, output {same} its"
        if len(speedups) < FEW_TOKENS:
            yield _measured(run)


def _measured(run: Explanation) -> str:
    """What the ratio of a short answer is the ratio of."""
    plain, speculative = run.plain.elapsed_ms(), run.speculative.elapsed_ms()
    count = min(len(plain), len(speculative))
    return (
        f"measured: {plain[count - 1]:.1f} ms plainly, {speculative[count - 1]:.1f} ms "
        f"speculatively for {count} tokens, each run once; below {FEW_TOKENS} tokens the ratio "
        "says little, for the drafts that are tried out first weigh much in it"
    )


def _cells(summary: ProposerSummary) -> list[str]:
    return [
        summary.origin,
        str(summary.num_asked),
        str(summary.num_passed_over),
        f"{summary.milliseconds:.1f}",
        str(summary.num_drafted),
        str(summary.num_candidates),
        str(summary.num_verified),
        str(summary.num_accepted),
        str(summary.num_labelled),
        f"{summary.expected:.1f}",
        str(summary.num_right),
        f"{summary.calibration_error:.2f}",
    ]
