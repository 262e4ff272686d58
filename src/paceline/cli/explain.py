"""``paceline explain`` and ``paceline run --explain``: one prompt, step by step.

The verdict comes first. A step is a few lines: where the text stands, who was asked, the candidate
tree with what became of each node, why it ends where it does, and what the step took. Steps in a
row that have no candidates are one line. A table of the proposers comes last.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.cli.options import ExplainOptions, RunOptions
from paceline.cli.profile import numbers
from paceline.cli.prompts import Prompt, asked_prompt, encoder_of
from paceline.cli.report import banner, engine_facts
from paceline.cli.settings import engine_options, sampling_params, speculative_config
from paceline.cli.terminal import DIM, PALETTE, RESET, Screen, printable, table, wants_colour
from paceline.config import SpeculativeConfig
from paceline.core.checks import check_output
from paceline.core.errors import ConfigError
from paceline.profiling.chrome_trace import write_trace
from paceline.profiling.explain import (
    MAX_STEPS,
    Cut,
    NodeRecord,
    ProposerSummary,
    StepRecord,
    cost_error,
    summarise,
)
from paceline.profiling.explain_run import Explanation, explain
from paceline.request.request import Constraint
from paceline.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.text.tokenizer import Tokenizer


Texts = Callable[[int], str]
"""From a token id to its text."""


def explain_command(options: ExplainOptions) -> int:
    """The work of ``paceline explain``."""
    from paceline.profiling.plots import check_plot

    wanted = numbers("--steps", options.steps, 1, MAX_STEPS)
    if options.plot is not None:  # before minutes are spent
        check_plot(options.plot)
    speculative = speculative_config(options, options.model)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    asked = asked_prompt(options.prompt, options.question)
    if not asked:
        raise ConfigError("explain needs a prompt: give one after MODEL, with -p, or by a pipe")
    params, prompt = sampling_params(options, seed), Prompt(asked)
    return explain_prompt(options, prompt, params, speculative, wanted, options.plot)


def explain_prompt(
    options: ExplainOptions | RunOptions,
    prompt: Prompt,
    params: SamplingParams,
    speculative: tuple[SpeculativeConfig, ...],
    wanted: Sequence[int] = (),
    plot: str | None = None,
) -> int:
    """Answer a prompt and show its steps, as the options say; returns the exit code.

    Args:
        params: with a seed.
        wanted: numbers of the steps that are shown, from 1; none is all.
        plot: the file to draw into.
    """
    from paceline.api.llm import LLM
    from paceline.profiling.plots import plot_steps

    if not speculative:
        raise ConfigError("explain needs speculation: leave out --no-speculation")
    if options.trace is not None:
        check_output(options.trace)
    with LLM(options.model, speculative_config=speculative, **engine_options(options)) as llm:
        screen = Screen(llm.proposers, json=options.json)
        screen.note(banner(llm))
        encoder = encoder_of(llm.tokenizer, options)
        ids, constraints = encoder.encode(prompt.content), _constraints(llm, params)
        with screen.progress("answering", 2 * (params.max_tokens or 0)) as advance:
            run = llm.call(lambda engine: explain(engine, ids, params, advance, constraints))
        pieces = token_texts(llm.tokenizer, run)
        _show(run, llm, pieces, wanted, screen)
        if plot is not None:
            texts = ["".join(pieces[run.emitted_by(record)]) for record in run.records]
            title = f"How {llm.model} answered, step by step"
            plot_steps(run.records, texts, plot, title, next(verdict_lines(run)))
        if options.trace is not None:
            runs = {"speculative": run.speculative.steps, "plain": run.plain.steps}
            write_trace(options.trace, runs)
        if options.json:
            settings = {"seed": params.seed, "temperature": params.temperature}
            screen.document(_document(run, llm, pieces) | settings)
    return 0


def _constraints(llm: LLM, params: SamplingParams) -> Sequence[Constraint]:
    """One for each of the two runs; none where the answer may be anything."""
    from paceline.structured.grammar import GrammarCompiler

    if params.structured_outputs is None:
        return ()
    shape = llm.checkpoint.config
    compiler = GrammarCompiler(llm.tokenizer, shape.vocab_size, shape.eos_token_ids)
    try:
        return compiler.constraints(params.structured_outputs, 2)
    finally:
        compiler.close()


def token_texts(tokenizer: Tokenizer, run: Explanation) -> list[str]:
    """What each token of the answer adds to its text."""
    from paceline.text.detokenizer import IncrementalDecoder

    decoder = IncrementalDecoder(tokenizer, run.prompt_token_ids)
    pieces = [decoder.push(token_id) for token_id in run.token_ids]
    if pieces:
        pieces[-1] += decoder.flush()
    return pieces


def _show(
    run: Explanation, llm: LLM, pieces: Sequence[str], wanted: Sequence[int], screen: Screen
) -> None:
    prompt, text_of = llm.tokenizer.decode(run.prompt_token_ids), _readable(llm.tokenizer)
    view = StepView(run, prompt, pieces, text_of, wants_colour(screen.out), _expert_bytes(llm))
    for line in verdict_lines(run):
        screen.say(line)
    screen.say("")
    for line in view.lines(wanted):
        screen.say(line)
    last = run.records[-1].index + 1
    if wanted and wanted[-1] > last:
        screen.note(f"the last step is step {last}: there is no step {wanted[-1]}")
    screen.say("")
    for line in summary_lines(run):
        screen.say(line)


def _expert_bytes(llm: LLM) -> float:
    from paceline.profiling.machine import Work

    checkpoint, config = llm.checkpoint, llm.config
    work = Work.of(checkpoint.config, config.dtype, config.kv_cache_dtype, checkpoint.num_bytes)
    return work.expert_bytes


def _readable(tokenizer: Tokenizer) -> Texts:
    """Texts of single tokens; those that are no text of their own by their names."""

    def text(token_id: int) -> str:
        decoded = tokenizer.decode([token_id], skip_special_tokens=False)
        is_partial = not decoded or "\ufffd" in decoded
        return (tokenizer.id_to_token(token_id) or decoded) if is_partial else decoded

    return text


def _document(run: Explanation, llm: LLM, pieces: Sequence[str]) -> dict[str, Any]:
    text_of = _readable(llm.tokenizer)
    return {
        **engine_facts(llm),
        "verdict": list(verdict_lines(run)),
        "planner": llm.config.planner,
        "objective": asdict(llm.config.objective),
        "num_prompt_tokens": len(run.prompt_token_ids),
        "token_ids": run.token_ids,
        "text": "".join(pieces),
        "expert_bytes": _expert_bytes(llm),
        "identical": run.is_identical,
        "speedup": run.speedups[-1] if run.speedups else None,
        "cost_error": cost_error(run.records),
        "proposers": [asdict(each) for each in summarise(run.records)],
        "steps": [
            _step(record, "".join(pieces[run.emitted_by(record)]), text_of)
            for record in run.records
        ],
    }


def _step(record: StepRecord, text: str, text_of: Texts) -> dict[str, Any]:
    document = asdict(record) | {"shape": record.shape._asdict(), "text": text}
    for part in document["requests"]:
        for node in part["nodes"]:
            node["text"] = text_of(node["token_id"])
    return document


TAIL = 60
"""Characters of the text so far that are shown."""
MAX_CUT = 4
"""Nodes of a step that are shown although they were cut."""
GREEN = PALETTE[0]
CUT_WORDS = {
    Cut.DEPTH: "too deep",
    Cut.PROBABILITY: "too unlikely",
    Cut.COUNT: "no room",
    Cut.COST: "not worth it",
    Cut.FAIRNESS: "too slow for others",
    Cut.DROPPED: "not run",
}


def one_line(text: str) -> str:
    """Text of a model on one line, without power over the terminal."""
    return printable(text.replace("\n", "\\n").replace("\t", "\\t"))


@dataclass(frozen=True)
class StepView:
    """The lines of each step.

    Attributes:
        prompt: its text.
        pieces: what each token of the answer added to the text.
        token_text: of single tokens.
        coloured: whether lines may hold colours.
        expert_bytes: of one expert of one layer, where there are experts.
    """

    run: Explanation
    prompt: str
    pieces: Sequence[str]
    token_text: Texts
    coloured: bool
    expert_bytes: float = 0.0

    def lines(self, wanted: Sequence[int]) -> Iterator[str]:
        """Lines of the steps with these numbers (from 1), of all where there are none."""
        yield self._paint("path  node  token, proposer and what became of it", DIM)
        plain: list[StepRecord] = []
        for record in self.run.records:
            if wanted and record.index + 1 not in wanted:
                continue
            if record.num_decoding and not record.nodes:
                plain.append(record)
                continue
            yield from self._plain(plain)
            plain.clear()
            yield from self._step(record)
        yield from self._plain(plain)

    def _plain(self, records: Sequence[StepRecord]) -> Iterator[str]:
        """One line for steps without candidates."""
        if not records:
            return
        first, last = records[0].index + 1, records[-1].index + 1
        milliseconds = sum(record.total_ms for record in records) / len(records)
        num_asked = sum(any(asked.num_asked for asked in record.asks) for record in records)
        asked = f"asked in vain in {num_asked}" if num_asked else "no proposer was asked"
        name = f"step {first}" if first == last else f"steps {first}-{last}"
        added = "".join(map(self._added, records))
        asked += _from_disk(records)
        yield (
            f"{name}: plain, {asked}; {milliseconds:.2f} ms each{self._pace(records[-1])}; "
            f'+{sum(record.num_emitted for record in records)} "{one_line(added)}"'
        )

    def _step(self, record: StepRecord) -> Iterator[str]:
        head = f"step {record.index + 1}"
        if not record.num_decoding:
            yield f"{head}: {record.shape.rows} rows of the prompt in {record.total_ms:.2f} ms"
            return
        yield self._paint(f'{head}  "{one_line(self._text_before(record))}"', DIM)
        yield from (f"  {line}" for line in _asks(record))
        for part in record.requests:
            yield from (f"  {line}" for line in self._tree(part.nodes))
        yield f"  {_ending(record)}"
        predicted = "" if record.predicted_ms is None else f"{record.predicted_ms:.2f} predicted, "
        experts = record.shape.experts
        measured = f"{record.forward_ms:.2f} ms measured"
        if experts:
            megabytes = experts * self.expert_bytes / 1e6
            measured += f" ({experts} experts read, {megabytes:.1f} MB)"
        measured += _from_disk([record])
        yield (
            f"  forward {predicted}{measured}, step {record.total_ms:.2f}"
            f'{self._pace(record)}; +{record.num_emitted} "{one_line(self._added(record))}"'
        )

    def _added(self, record: StepRecord) -> str:
        return "".join(self.pieces[self.run.emitted_by(record)])

    def _text_before(self, record: StepRecord) -> str:
        """The end of the text that the step continued."""
        start = self.run.emitted_by(record).start
        text = self.prompt[-TAIL:] + "".join(self.pieces[max(0, start - TAIL) : start])
        return text[-TAIL:]

    def _pace(self, record: StepRecord) -> str:
        """The speed so far against plain decoding, which a run has from its second token on."""
        count = self.run.emitted_by(record).stop - 1
        speedups = self.run.speedups
        known = 0 < count <= len(speedups)
        return f", {speedups[count - 1]:.2f}x plain so far" if known else ""

    def _tree(self, nodes: Sequence[NodeRecord]) -> Iterator[str]:
        """Nodes that ran or were right, the best that were cut, and how many others were."""
        left_out = [i for i, node in enumerate(nodes) if node.cut and not node.is_right]
        hidden = sorted(left_out, key=lambda i: -nodes[i].path_prob)[MAX_CUT:]
        for i in _depth_first(nodes):
            if i not in hidden:
                yield self._node(nodes[i])
        if hidden:
            counts = Counter(cut for i in hidden if (cut := nodes[i].cut))
            said = ", ".join(f"{count} {CUT_WORDS[cut]}" for cut, count in counts.items())
            yield self._paint(f"... and {said}", DIM)

    def _node(self, node: NodeRecord) -> str:
        token = "  " * (node.depth - 1) + f'"{one_line(self.token_text(node.token_id))}"'
        line = f"{node.path_prob:5.2f} {node.accept_prob:5.2f}  {token:<28} {node.origin}: "
        if node.cut is not None:
            missed = ", but was right" if node.is_right else ""
            return self._paint(f"{line}{CUT_WORDS[node.cut]}{missed}", DIM)
        if node.is_accepted:
            return self._paint(f"{line}accepted", GREEN)
        return line + ("not reached" if node.is_right is None else "rejected")

    def _paint(self, line: str, colour: str) -> str:
        return f"{colour}{line}{RESET}" if self.coloured else line


def _from_disk(records: Sequence[StepRecord]) -> str:
    """What a step read from disk, on average; nothing where all weights are in memory."""
    megabytes = sum(record.disk_bytes for record in records) / len(records) / 1e6
    if not megabytes:
        return ""
    waited = sum(record.disk_ms for record in records) / len(records)
    return f", {megabytes:.1f} MB from disk, for which it waited {waited:.1f} ms"


def _asks(record: StepRecord) -> Iterator[str]:
    """Who was asked at which price, and who was not."""
    for asked in record.asks:
        if not asked.num_asked:
            yield f"{asked.origin} was passed over"
            continue
        line = f"{asked.origin} drafted {asked.num_nodes} in {asked.milliseconds:.2f} ms"
        prices = {"for the first node": asked.node_price, "per level": asked.level_price}
        wanted = [f"{price:.3f} {what}" for what, price in prices.items() if price]
        yield f"{line}; tokens it had to bring: {', '.join(wanted)}" if wanted else line


def _ending(record: StepRecord) -> str:
    """How many candidates were verified, and why not more."""
    said = f"{record.num_verified} of {len(record.nodes)} nodes verified"
    cuts = Counter(node.cut for node in record.nodes if node.cut is not None)
    after = record.next_node
    if after is not None:
        said += f": the next would bring {after[0]:.3f} tokens and cost {after[1]:.3f}"
    others = [
        f"{n} {CUT_WORDS[cut]}" for cut, n in cuts.items() if after is None or cut != Cut.COST
    ]
    return "; ".join([said, *others])


def _depth_first(nodes: Sequence[NodeRecord]) -> list[int]:
    """Parents before children, likelier siblings first."""
    children: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(i)
    order: list[int] = []
    stack = [-1]
    while stack:
        at = stack.pop()
        order.append(at)
        stack += sorted(children.get(at, ()), key=lambda i: nodes[i].path_prob)
    return order[1:]


def verdict_lines(run: Explanation) -> Iterator[str]:
    """What speculation did for the answer, in one sentence or two."""
    steps, plain_steps = run.speculative.arm().steps, run.plain.arm().steps
    took = f"{len(run.token_ids)} tokens took {steps} steps"
    if not run.is_identical:
        yield f"{took}; output DIFFERENT from plain decoding's"
        return
    took += f" instead of {plain_steps} after the prompt"
    yield f"{took}: {run.claim().sentence()}; output identical to plain decoding's"
    summaries = summarise(run.records)
    if checked := sum(each.num_verified for each in summaries):
        right = {each.origin: each.num_accepted for each in summaries if each.num_accepted}
        said = ", ".join(f"{count} of {origin}" for origin, count in right.items())
        total = sum(right.values())
        yield f"{checked} drafted tokens were checked, {total} accepted{said and f' ({said})'}"


def summary_lines(run: Explanation) -> Iterator[str]:
    """The proposers as a table, and how well the cost of steps was predicted."""
    summaries = summarise(run.records)
    if summaries:
        yield table([_cells(each) for each in summaries])
    error = cost_error([record for record in run.records if record.num_decoding])
    if error is not None:
        yield f"forwards took as long as predicted, within {error:.0%} (median)"


def _cells(summary: ProposerSummary) -> dict[str, str]:
    return {
        "proposer": summary.origin,
        "asked": str(summary.num_asked),
        "passed over": str(summary.num_passed_over),
        "ms": f"{summary.milliseconds:.1f}",
        "drafted": str(summary.num_drafted),
        "candidates": str(summary.num_candidates),
        "verified": str(summary.num_verified),
        "accepted": str(summary.num_accepted),
        "labelled": str(summary.num_labelled),
        "expected": f"{summary.expected:.1f}",
        "right": str(summary.num_right),
    }
