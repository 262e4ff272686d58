"""How much of what each proposer drafts the target takes, alone and merged, on six kinds of text.

Replays count: a fixed number of nodes in every step, chosen by calibrated estimates, on answers
that plain decoding gave. Counts do not depend on the machine's speed. In an engine with real drafts
the same answers have to come out, token for token.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from harness import Report, Sample, Target, among, arguments, note, number, run_sample, table
from prompt_sets import NAMES, PromptSets, load_prompts, spread
from proposer_sets import described, draft_model
from research.node_budget import NodeBudget, Reliability
from structured import SCHEMAS, prompts
from trace_sets import FOLDER, MAX_MODEL_LEN, answer_params, traced

from paceline import LLM, SamplingParams, StructuredOutputs
from paceline.api.llm import embedded_model
from paceline.config import EngineConfig, SpeculativeConfig, parse_speculative_config
from paceline.engine.engine import Engine
from paceline.planner.cost import prior_table
from paceline.request.engine_stats import SpeculationCounters
from paceline.request.traces import Trace, read_traces
from paceline_lab.simulate.replay import ReplayResult
from paceline_lab.simulate.setup import open_simulator
from paceline_lab.simulate.simulator import Simulator
from paceline_lab.train.ngram.train import NgramTrainingConfig, train_ngram

TRAINED = "trained on the answers to the other prompts"
"""What tables say in place of the file of an n-gram model that a benchmark trains."""
SINGLE = ("prompt_lookup", "suffix", "suffix of the request", "ngram_model", "draft_model")
MERGED = "suffix + ngram_model + draft_model"
EVERY = "prompt_lookup + suffix + ngram_model + draft_model"
MERGERS = ("suffix + ngram_model", "suffix + draft_model", "ngram_model + draft_model")
NODES = 16
"""At which all of them are compared."""
SIZES = (4, 8, 16, 32)
"""At which :data:`SIZED` are compared."""
SIZED = ("ngram_model", "draft_model")
DRAFT_DEPTH = 8
"""Forwards of a draft model for one tree."""

TEMPERATURES = (0.0, 0.8)
PUBLIC = ("humaneval", "mt_bench", "spec_bench", "edits", "prose")
JSON = "json"


def suffix(**options: Any) -> dict[str, Any]:
    """Suffix automata over the request and over those before it, as trees."""
    return {"method": "suffix", **options}


def trees_of(nodes: int, ngram: str = TRAINED) -> dict[str, dict[str, Any]]:
    """Every proposer by itself with trees of so many nodes, left for the planner to cut."""
    size = {"max_tree_nodes": nodes, "max_branching": 4, "min_accept_prob": 0.001}
    deep = {"num_speculative_tokens": nodes, **size}
    forwards = min(nodes, DRAFT_DEPTH)
    return {
        "prompt_lookup": {"method": "prompt_lookup", **deep},
        "suffix": suffix(**deep),
        "suffix of the request": suffix(suffix_decoding_max_cached_requests=0, **deep),
        "ngram_model": {"method": "ngram_model", "model": ngram, **deep},
        "draft_model": {**draft_model(forwards), **size},
    }


def for_acceptance(nodes: int = NODES, ngram: str = TRAINED) -> dict[str, list[dict[str, Any]]]:
    """Every proposer by itself, pairs, and all at once; no name has a comma."""
    single = trees_of(nodes, ngram)
    names = (*SINGLE, *MERGERS, MERGED, EVERY)
    return {name: [single[part] for part in name.split(" + ")] for name in names}


@dataclass(frozen=True, slots=True)
class Cell:
    """A set of prompts at a temperature.

    Attributes:
        learnt, judged: folders of the answers to the two halves.
        params: of the answers that judge.
    """

    name: str
    temperature: float
    learnt: Path
    judged: Path
    params: Sequence[SamplingParams]

    @property
    def label(self) -> dict[str, str | float]:
        return {"set": self.name, "temperature": self.temperature}

    def answers(self, count: int) -> list[Trace]:
        """``count`` of those that judge, at equal distances."""
        return spread(list(read_traces(self.judged)), count)


def cells_of(options: argparse.Namespace, source: PromptSets) -> list[Cell]:
    """Every set at every temperature, answered."""
    found = []
    for name in [*(PUBLIC if source.source == "public" else source.sets), JSON]:
        if options.sets and name not in options.sets:
            continue
        texts, grammars = _texts(name, source, 2 * options.num_prompts)
        found += [_cell(options, name, t, texts, grammars) for t in TEMPERATURES]
    return found


def _texts(name: str, source: PromptSets, count: int) -> tuple[list[str], list[StructuredOutputs]]:
    if name != JSON:
        return spread(source.sets[name], count), []
    pairs = list(islice(_json(count), count))
    return [text for text, _ in pairs], [grammar for _, grammar in pairs]


def _json(count: int) -> Iterator[tuple[str, StructuredOutputs]]:
    """The schemas in turns, each twice in other words, so that it is in both halves."""
    turns = -(-count // (2 * len(SCHEMAS)))
    texts = {name: prompts(name, 2 * turns) for name in SCHEMAS}
    for turn in range(turns):
        for name, schema in SCHEMAS.items():
            for text in texts[name][2 * turn : 2 * turn + 2]:
                yield text, StructuredOutputs(json=schema)


def _cell(
    options: argparse.Namespace,
    name: str,
    temperature: float,
    texts: Sequence[str],
    grammars: Sequence[StructuredOutputs],
) -> Cell:
    length = options.max_tokens
    learnt, judged = (
        traced(name, texts[at::2], length, temperature, options.traces, grammars[at::2])
        for at in (0, 1)
    )
    params = answer_params(len(texts[1::2]), length, temperature, grammars[1::2])
    return Cell(name, temperature, learnt, judged, params)


ORDER, MAX_BYTES = 4, 32 << 20
ANY_COST = 1.0
"""Of a draft model's step: fixed numbers of nodes go by no cost."""


@dataclass(slots=True)
class Outcome:
    """A replay, and how reliable its estimates were."""

    counters: SpeculationCounters
    planner: NodeBudget


def train(cells: Sequence[Cell], file: Path) -> str:
    """The n-gram model of all answers that do not judge."""
    note("training the n-gram model")
    folders = tuple(str(cell.learnt) for cell in cells)
    train_ngram(
        NgramTrainingConfig(
            output=str(file), traces=folders, order=ORDER, max_bytes=MAX_BYTES, held_out_tokens=0
        )
    )
    return str(file)


def opened(cell: Cell, device: str) -> Simulator:
    config = EngineConfig(device=device, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
    drafts = parse_speculative_config([trees_of(max(SIZES))["draft_model"]])
    target = embedded_model("target")
    costs = {"table": prior_table(), "draft_table": ANY_COST}
    return open_simulator(cell.judged, target, config, drafts, **costs).simulator


def run_arm(simulator: Simulator, configs: Sequence[SpeculativeConfig], nodes: int) -> Outcome:
    planner = NodeBudget(nodes)
    result = simulator.run(configs, lambda cost, objective: planner)
    return Outcome(_counters(result), planner)


def _counters(result: ReplayResult) -> SpeculationCounters:
    total = SpeculationCounters()
    for trace in result.traces:
        total.add(trace.counters)
    return total


def sizes_of(arms: Sequence[str]) -> list[tuple[str, int]]:
    """Every arm with the number of nodes at which all are compared, some with others too."""
    others = [(name, nodes) for name in SIZED if name in arms for nodes in SIZES if nodes != NODES]
    return [(name, NODES) for name in arms] + others


def replayed(cell: Cell, ngram: str, arms: Sequence[str], device: str) -> list[Sample]:
    """A sample per arm and number of nodes; its facts are the outcome."""
    simulator = opened(cell, device)

    def run(name: str, nodes: int) -> Outcome:
        configs = parse_speculative_config(for_acceptance(nodes, ngram)[name])
        return run_arm(simulator, configs, nodes)

    return [
        run_sample(name, nodes, partial(run, name, nodes), lambda outcome: {"outcome": outcome})
        for name, nodes in sizes_of(arms)
    ]


def row_of(sample: Sample, label: Mapping[str, Any]) -> dict[str, Any]:
    row = {**label, "proposer": sample.arm, "nodes": sample.item}
    if sample.failed:
        return {**row, "error": sample.error}
    outcome: Outcome = sample.facts["outcome"]
    return {
        **row,
        **ratios(outcome.counters),
        "reliability": outcome.planner.chosen_by.ratios(),
    }


def ratios(total: SpeculationCounters) -> dict[str, Any]:
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "accepted_per_node": total.acceptance_rate,
        "nodes_per_step": total.num_draft_tokens / total.num_steps if total.num_steps else 0.0,
        "by_proposer": {
            name: [own.num_draft_tokens, own.num_accepted_tokens]
            for name, own in total.by_proposer.items()
        },
    }


def raw(sample: Sample, label: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a sample: its counters; no time, because none is claimed."""
    kept = {"arm": sample.arm, "nodes": sample.item, **label, "error": sample.error}
    return kept if sample.failed else kept | {"counters": asdict(sample.facts["outcome"].counters)}


def over_all(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Per arm the calibration of what was chosen by, and of each proposer's part, over all sets."""
    rows, samples = [], [sample for sample in samples if sample.item == NODES]
    for arm in dict.fromkeys(sample.arm for sample in samples):
        parts: dict[str, Reliability] = {}
        chosen_by = Reliability()
        for sample in samples:
            if sample.arm == arm and not sample.failed:
                planner = sample.facts["outcome"].planner
                chosen_by.add(planner.chosen_by.labels)
                for name, own in planner.own.items():
                    parts.setdefault(name, Reliability()).add(own.labels)
        row = {"proposer": arm, "set": "all", "reliability": chosen_by.ratios()}
        rows.append(row | {"parts": {name: own.ratios() for name, own in parts.items()}})
    return rows


BATCH = 8


def open_llm(device: str) -> LLM:
    return LLM(
        embedded_model("target"),
        speculative_config="[]",
        device=device,
        max_num_seqs=BATCH,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        strict=True,
    )


def answered(
    llm: LLM, cell: Cell, configs: Sequence[Any], nodes: int, count: int
) -> dict[str, Any]:
    """How many of the answers are those of plain decoding, token for token."""

    def install(engine: Engine) -> None:
        engine.drafting.planner = NodeBudget(nodes)

    traces = cell.answers(count)
    prompts = [trace.token_ids[: trace.prompt_len].tolist() for trace in traces]
    try:
        llm.set_speculation(list(configs))
        llm.call(install)
        outputs = llm.generate(prompts, [cell.params[trace.prompt_index] for trace in traces])
        for output in outputs:
            if output.error is not None:
                raise output.error
    except Exception as error:
        note(f"{cell.name}: failed: {error!r}")
        return {"identical": 0, "prompts": len(traces), "error": repr(error)}
    pairs = zip(outputs, traces, strict=True)
    same = sum(list(o.token_ids) == trace.output_token_ids.tolist() for o, trace in pairs)
    return {"identical": same, "prompts": len(traces)}


Row = Mapping[str, Any]
LENGTH = "mean_acceptance_length"
LOOKUP, SUFFIX = "prompt_lookup", "suffix of the request"
MAX_ERROR = 0.05


def by_cell(results: Sequence[Row]) -> dict[tuple[str, float], dict[str, Row]]:
    """The rows of each set and temperature at equal nodes, by proposer."""
    found: dict[tuple[str, float], dict[str, Row]] = {}
    for row in results:
        if "temperature" in row and row.get("nodes") == NODES:
            found.setdefault((row["set"], row["temperature"]), {})[row["proposer"]] = row
    return found


def gains(results: Sequence[Row], arm: str, others: Sequence[str]) -> list[float] | None:
    """Acceptance length of an arm over that of the best of others, for each cell."""
    found = []
    for rows in by_cell(results).values():
        lengths = {name: row.get(LENGTH) for name, row in rows.items()}
        if not lengths.get(arm) or not all(lengths.get(name) for name in others):
            return None
        found.append(lengths[arm] / max(lengths[name] for name in others))
    return found


def targets(results: Sequence[Row]) -> list[Target]:
    found = []
    merged = gains(results, MERGED, SINGLE)
    best = "merged tree / best single proposer of each set"
    mean = sum(merged) / len(merged) if merged else None
    found.append(Target(f"{best}: mean over the sets", mean, 1.10, "at least"))
    found.append(Target(f"{best}: least", min(merged) if merged else None, 0.98, "at least"))
    suffix = gains(results, SUFFIX, [LOOKUP])
    least = min(suffix) if suffix else None
    found.append(Target("suffix of the request / prompt lookup: least", least, 1.0, "at least"))
    found += [
        Target(
            f"expected calibration error: {row['proposer']}",
            row["reliability"].get("calibration_error"),
            MAX_ERROR,
        )
        for row in results
        if row["set"] == "all"
    ]
    engine = [row for row in results if "identical" in row]
    total = sum(row["prompts"] for row in engine)
    share = sum(row["identical"] for row in engine) / total if total else None
    if any("error" in row for row in engine):
        share = None
    name = "share of outputs identical to plain decoding"
    return [*found, Target(name, share, 1.0, "at least")]


def tables(results: Sequence[Row]) -> list[str]:
    cells = by_cell(results)
    arms = list(dict.fromkeys(name for rows in cells.values() for name in rows))
    lengths, shares = [], []
    for (name, temperature), rows in cells.items():
        head = [name, temperature]
        lengths.append([*head, *(number(rows.get(arm, {}).get(LENGTH)) for arm in arms)])
        lengths[-1].append(number(_gain(rows)))
        share = (number(rows.get(arm, {}).get("accepted_per_node")) for arm in arms)
        shares.append([*head, *share])
    columns = [str(at) for at in range(1, len(arms) + 1)]
    best = f"{arms.index(MERGED) + 1} / best of 1 to {len(SINGLE)}" if MERGED in arms else ""
    return [
        "\n".join(f"{at}: {arm}" for at, arm in enumerate(arms, start=1)),
        table(["acceptance length", "temperature", *columns, best], lengths),
        table(["accepted per node", "temperature", *columns], shares),
        table(["length, mean of the sets", "temperature", *map(str, SIZES)], _sizes(results)),
        table(
            ["calibration", "labels", "error", "log-loss", "of its parts"], _reliability(results)
        ),
        table(["in the engine", "identical to plain decoding"], _identity(results)),
    ]


def _gain(rows: Mapping[str, Row]) -> float | None:
    found = gains(list(rows.values()), MERGED, SINGLE)
    return found[0] if found else None


def _sizes(results: Sequence[Row]) -> list[list[str]]:
    """Of proposers with several numbers of nodes: a line per temperature."""
    lines = []
    for name in SIZED:
        rows = [row for row in results if row.get("proposer") == name and LENGTH in row]
        for temperature in dict.fromkeys(row["temperature"] for row in rows):
            line = [name, number(temperature, 1)]
            for nodes in SIZES:
                here = [
                    row[LENGTH]
                    for row in rows
                    if row["nodes"] == nodes and row["temperature"] == temperature
                ]
                line.append(number(sum(here) / len(here) if here else None))
            lines.append(line)
    return lines


def _reliability(results: Sequence[Row]) -> list[list[str]]:
    lines = []
    for row in results:
        if row["set"] != "all":
            continue
        found, parts = row["reliability"], row["parts"]
        own = "  ".join(
            f"{name} {number(parts[name].get('calibration_error'), 3)}" for name in parts
        )
        error, loss = (number(found.get(key), 3) for key in ("calibration_error", "log_loss"))
        lines.append([row["proposer"], str(found["labels"]), error, loss, own])
    return lines


def _identity(results: Sequence[Row]) -> list[list[str]]:
    """Per arm over all sets; a failure is shown in place of a count."""
    lines = []
    rows = [row for row in results if "identical" in row]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        errors = [row["error"] for row in own if "error" in row]
        count = f"{sum(row['identical'] for row in own)}/{sum(row['prompts'] for row in own)}"
        lines.append([arm, errors[0] if errors else count])
    return lines


CHECKED = ("draft_model", MERGED)
"""Run in the engine as well."""


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument("--sets", type=among((*NAMES, JSON)), help="only these sets of prompts")
    known = for_acceptance()
    parser.add_argument("--proposers", type=among(known), default=list(known))
    parser.sized("--num-prompts", 16, 2, "that judge a set")
    parser.sized("--max-tokens", 128, 48, "per prompt")
    parser.add_argument("--traces", type=Path, default=FOLDER, help="where answers are kept")
    return parser.parse_args(argv)


def config_of(options: argparse.Namespace, source: str) -> dict[str, Any]:
    return {
        "model": "embedded target",
        "prompts": source,
        "quick": options.quick,
        "num_prompts": options.num_prompts,
        "max_tokens": options.max_tokens,
        "nodes": NODES,
        "ngram_model": {"order": ORDER, "max_bytes": MAX_BYTES, "learnt_prompts": "as many others"},
        "suffix": "knows earlier answers of the same set and temperature; no prompt comes twice",
        "json": "answered under its schemas; replays know nothing of them",
        "proposers": {name: described(c) for name, c in for_acceptance().items()},
    }


def run_replays(
    options: argparse.Namespace, cells: Sequence[Cell], ngram: str, report: Report
) -> None:
    everything: list[Sample] = []
    for cell in cells:
        note(f"replaying: {cell.name}, temperature {cell.temperature}")
        samples = replayed(cell, ngram, options.proposers, options.device)
        report.samples += [raw(sample, cell.label) for sample in samples]
        report.results += [row_of(sample, cell.label) for sample in samples]
        everything += samples
    report.results += over_all(everything)


def run_engine(
    options: argparse.Namespace, cells: Sequence[Cell], ngram: str, report: Report
) -> None:
    configs = for_acceptance(NODES, ngram)
    arms = [name for name in CHECKED if name in options.proposers]
    with open_llm(options.device) as llm:
        for cell in cells:
            note(f"in the engine: {cell.name}, temperature {cell.temperature}")
            for name in arms:
                row = answered(llm, cell, configs[name], NODES, max(1, options.num_prompts // 4))
                report.results.append({**cell.label, "arm": name, **row})
                if "error" in row:
                    report.samples.append({"arm": name, **cell.label, "error": row["error"]})


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    source = load_prompts(options.prompts)
    cells = cells_of(options, source)
    with tempfile.TemporaryDirectory() as place:
        ngram = train(cells, Path(place) / "answers.ngram")
        report = Report("acceptance", config_of(options, source.source))
        run_replays(options, cells, ngram, report)
        run_engine(options, cells, ngram, report)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
