"""What drafts without forwards are worth on a chat model, by replays of its answers.

``--write-prompts`` writes the questions of MT-bench and Spec-Bench that the n-gram model has not
learnt; ``paceline trace`` answers them, greedily and sampled. Replays count: a fixed number of
nodes in every step, chosen by calibrated estimates, one request after another. Beside them stands
what the target's own distribution would be worth as a draft that does not know the noise.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report, arguments, note, number, paired_ratio, table
from numpy.typing import NDArray
from prompt_sets import load_prompts
from research.node_budget import NodeBudget

from paceline.build.default_drafts import drafts_of
from paceline.config import EngineConfig, parse_speculative_config
from paceline.loading.checkpoint import load_checkpoint
from paceline.planner.cost import CostModel, prior_table
from paceline.proposers import build_proposers
from paceline.proposers.ngram_model import context_key, read_tables
from paceline.request.traces import Trace, read_meta, read_traces
from paceline_lab.simulate.replay import replay
from paceline_lab.simulate.simulator import ANY_TARGET

Row = dict[str, Any]
SETS = ("mt_bench", "spec_bench")
MOST_PROMPT_TOKENS = 900
NODES = (1, 3, 5, 8, 40)
"""The last one is all that is drafted: the most that a better choice among it could bring."""
AT = 5
"""At which files are compared."""
BRANCHING, DEPTH = 4, 8
BOTH = "suffix + ngram_model"
NO_NOISE, TRUE = f"{BOTH}, without the noise", "the target's distribution, without the noise"


def questions(model: str, file: str, learnt: bool = False) -> list[str]:
    """Those whose answers an n-gram model did not learn, or did, by the template's tokens."""
    tokenizer, known = load_checkpoint(model).tokenizer, set(read_tables(file).prompts.tolist())
    assert tokenizer is not None
    found = []
    for text in dict.fromkeys(text for name in SETS for text in load_prompts("public").sets[name]):
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        tokens = tokenizer.encode(rendered, add_special_tokens=False)
        if len(tokens) < MOST_PROMPT_TOKENS and (context_key(tokens) in known) == learnt:
            found.append(text)
    return found


@dataclass(frozen=True, slots=True)
class Arm:
    """Proposers, and whether they are told how the answers were sampled."""

    name: str
    configs: Sequence[Mapping[str, Any]]
    nodes: Sequence[int] = NODES
    knows_noise: bool = True


def arms_of(files: Mapping[str, str], own: str, nodes: Sequence[int] = NODES) -> list[Arm]:
    suffix = {"method": "suffix"}

    def ngram(file: str) -> dict[str, Any]:
        return {"method": "ngram_model", "model": file}

    return [
        Arm("suffix", [suffix], nodes),
        Arm("ngram_model", [ngram(own)], nodes),
        Arm(BOTH, [suffix, ngram(own)], nodes),
        Arm(NO_NOISE, [suffix, ngram(own)], nodes, knows_noise=False),
        *(Arm(f"{BOTH}: {name}", [suffix, ngram(file)], [AT]) for name, file in files.items()),
    ]


def replayed(
    traces: Sequence[Trace], meta: Mapping[str, Any], arm: Arm, nodes: int
) -> dict[str, Any]:
    """Counts of a replay."""
    if not arm.knows_noise:
        meta = {**meta, "params": {**meta["params"], "temperature": 0.0}}
    planner = NodeBudget(nodes)
    result = replay(
        traces,
        meta,
        [build_proposers([c], ANY_TARGET, strict=True)[0] for c in _parsed(arm.configs)],
        planner,
        CostModel(prior_table(), learns=False),
        config=EngineConfig(max_num_seqs=1, max_model_len=meta["params"]["max_model_len"]),
    )
    emitted = [trace.emitted for trace in result.traces]
    reliability = planner.chosen_by.ratios()
    del reliability["bins"]
    return {
        "steps": sum(map(len, emitted)),
        "tokens": sum(map(sum, emitted)),
        "answers": [[len(counts), sum(counts)] for counts in emitted],
        "draft_tokens": result.total("num_draft_tokens"),
        **reliability,
    }


def _parsed(configs: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
    return parse_speculative_config([dict(each) for each in configs])


# --- the target's own distribution ----------------------------------------------------------------


def distributions(trace: Trace, temperature: float) -> NDArray[np.float64]:
    """Of each place of an answer over its likeliest tokens ``[places, k]``."""
    scores = trace.top_logprobs.astype(np.float64) / temperature
    probs: NDArray[np.float64] = np.exp(scores - scores.max(1, keepdims=True))
    return probs / probs.sum(1, keepdims=True)


def true_length(traces: Sequence[Trace], temperature: float, nodes: int) -> dict[str, Any]:
    """Counts with the likeliest trees by the target's own distribution.

    What it would say beside the answer is not recorded: there it stands for a random place's.
    """
    dice = np.random.default_rng(0)
    known = [distributions(trace, temperature) for trace in traces]
    anywhere = np.concatenate(known)
    steps = tokens = 0
    for trace, probs in zip(traces, known, strict=True):
        answer, at = trace.output_token_ids, 0
        while at < len(answer):
            accepted, order = 0, itertools.count()
            heap = [(-1.0, next(order), 0, True)]
            for _ in range(nodes + 1):  # the root is one
                if not heap:  # the answer ends
                    break
                minus, _, depth, is_right = heapq.heappop(heap)
                place = at + depth
                accepted = max(accepted, depth) if is_right else accepted
                if place >= len(answer) or depth == DEPTH:
                    continue
                row = probs[place] if is_right else anywhere[dice.integers(len(anywhere))]
                for rank in np.argsort(-row, kind="stable")[:BRANCHING].tolist():
                    right = is_right and int(trace.top_ids[place, rank]) == int(answer[place])
                    heapq.heappush(heap, (minus * row[rank], next(order), depth + 1, right))
            count = min(accepted + 1, len(answer) - at)
            at, tokens, steps = at + count, tokens + count, steps + 1
    return {"steps": steps, "tokens": tokens}


# --- the report -----------------------------------------------------------------------------------


def rows_of(folder: Path, arms: Sequence[Arm], nodes: Sequence[int] = NODES) -> list[Row]:
    """A row per arm and number of nodes; ``answers`` are the steps and tokens of each."""
    meta, traces = read_meta(folder), list(read_traces(folder))
    temperature = float(meta["params"]["temperature"])
    rows = []
    for arm in arms:
        if not arm.knows_noise and not temperature:
            continue
        for count in arm.nodes:
            note(f"temperature {temperature}: {arm.name}, {count} nodes")
            rows.append(row(temperature, arm.name, count, replayed(traces, meta, arm, count)))
    for each in rows:
        if each["arm"].startswith(f"{BOTH}: "):
            each["over_own"] = over_own(each, rows)
    for count in [n for n in nodes if n != NODES[-1]] if temperature else ():
        rows.append(row(temperature, TRUE, count, true_length(traces, temperature, count)))
    return rows


def row(temperature: float, arm: str, nodes: int, counts: Mapping[str, Any]) -> Row:
    row = {"temperature": temperature, "arm": arm, "nodes": nodes, **counts}
    return row | {"mean_acceptance_length": counts["tokens"] / counts["steps"]}


def over_own(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """The length with a file over that with the model's own, by the steps of the same answers."""
    (own,) = (each for each in rows if each["arm"] == BOTH and each["nodes"] == row["nodes"])
    steps = zip(own["answers"], row["answers"], strict=True)
    return asdict(paired_ratio([[(ours[0], its[0])] for ours, its in steps]))


def samples_of(rows: Sequence[Row]) -> list[Row]:
    """The rows' counts of single answers, which are taken out of them."""
    return [
        {**{key: row[key] for key in ("temperature", "arm", "nodes")}, "answers": answers}
        for row in rows
        if (answers := row.pop("answers", None))
    ]


def tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per temperature and arm, a column per number of nodes."""
    lines: dict[tuple[float, str], dict[int, Mapping[str, Any]]] = {}
    for row in results:
        lines.setdefault((row["temperature"], row["arm"]), {})[row["nodes"]] = row
    cells = []
    for (temperature, arm), found in lines.items():
        lengths = [number(found.get(nodes, {}).get("mean_acceptance_length")) for nodes in NODES]
        errors = found.get(AT, {})
        cells.append([arm, temperature, *lengths, number(errors.get("calibration_error"), 3)])
        cells[-1].append(number(errors.get("log_loss"), 3))
    columns = [*map(str, NODES[:-1]), "all drafted", f"error at {AT}", "log-loss"]
    return [table(["acceptance length at so many nodes", "temperature", *columns], cells)]


def named(text: str) -> tuple[str, str]:
    """An option's value: a name, an equals sign, a file."""
    name, _, file = text.partition("=")
    if not file:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE")
    return name, file


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True, help="the chat model: a folder or a GGUF file")
    parser.add_argument("--own", help="its n-gram model (default: the one that it brings)")
    parser.add_argument("--write-prompts", type=Path, help="write the questions here, and end")
    parser.add_argument("--learnt", action="store_true", help="write those that it has learnt")
    parser.add_argument("--traces", type=Path, action="append", default=[], help="may be repeated")
    parser.add_argument("--ngram", type=named, action="append", default=[], help="NAME=FILE")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, choices=NODES)
    options = parser.parse_args(argv)
    own = options.own or next(
        str(each.model) for each in drafts_of(options.model) if each.method == "ngram_model"
    )
    if options.write_prompts:
        texts = questions(options.model, own, options.learnt)
        lines = (json.dumps({"messages": [{"role": "user", "content": t}]}) + "\n" for t in texts)
        options.write_prompts.write_text("".join(lines), encoding="utf-8")
        print(f"{len(texts)} prompts")
        return 0
    nodes = sorted({*options.nodes, AT})
    arms = arms_of(dict(options.ngram), own, nodes)
    report = Report("chat_drafts", {"model": Path(options.model).stem, "at": AT})
    for folder in options.traces:
        rows = rows_of(folder, arms, nodes)
        report.samples += samples_of(rows)
        report.results += rows
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
