"""What a smaller head, fewer layers and narrower ones do to a draft: size, time and acceptance.

Every draft is cut out of the embedded one and distilled for the same number of steps on the
target's answers to one half of the prompts. Acceptance is counted on the other half, in an engine
whose output is compared with plain decoding. A draft step, one token's forward and the ranking of
its candidates, is timed in turns with that of the draft that was trained as long and not cut.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from draft_counts import counted
from draft_steps import FORWARDS, DraftStep, timed
from harness import Sample, arguments, note, pair_up, paired_ratio
from prompt_sets import SOURCES, load_prompts, spread
from proposer_sets import DEPTH
from report import Report, Target, number, table
from trace_sets import FOLDER, traced

from paceline.llm import embedded_model
from paceline.models.checkpoint import load_checkpoint
from paceline.training.configs import DraftTrainingConfig
from paceline.training.draft import train_draft

KINDS = ("code", "prose", "edit")
TEMPERATURES = (0.0, 0.8)
WHOLE = "not cut"
SEQ_LEN, BATCH = 256, 4
TRACED = 256
"""Tokens of each answer that is learnt."""


def variants() -> dict[str, dict[str, int]]:
    """Options of ``train draft``, by what tables say; half and less of every size."""
    shape = load_checkpoint(embedded_model("draft"), with_tokenizer=False).config
    vocab, mlp, hidden = shape.vocab_size, shape.intermediate_size, shape.hidden_size
    heads = [vocab // 2, vocab // 4, vocab // 8]
    return {
        WHOLE: {},
        **{f"head of {count} tokens": {"draft_vocab_size": count} for count in heads},
        f"{shape.num_layers // 2} of {shape.num_layers} layers": {
            "drop_layers": shape.num_layers - shape.num_layers // 2
        },
        f"feed-forward {mlp // 2} of {mlp}": {"mlp_width": mlp // 2},
        f"{shape.num_heads // 2} of {shape.num_heads} heads": {
            "drop_heads": shape.num_heads - shape.num_heads // 2
        },
        f"width {hidden * 3 // 4} of {hidden}": {"hidden_width": hidden * 3 // 4},
        f"width {hidden // 2} of {hidden}": {"hidden_width": hidden // 2},
        f"head of {heads[1]}, feed-forward {mlp // 2}": {
            "draft_vocab_size": heads[1],
            "mlp_width": mlp // 2,
        },
    }


def train(
    name: str, cuts: Mapping[str, int], traces: Sequence[Path], place: Path, steps: int
) -> Path:
    """The folder of a distilled draft."""
    began = time.perf_counter()
    folder = place / "-".join(f"{key}-{value}" for key, value in cuts.items() or [("whole", 0)])
    train_draft(
        DraftTrainingConfig(
            target=embedded_model("target"),
            init=embedded_model("draft"),
            output=str(folder),
            traces=tuple(map(str, traces)),
            held_out_tokens=0,
            seq_len=SEQ_LEN,
            batch_size=BATCH,
            steps=steps,
            warmup_steps=steps // 10,
            threads=1,
            eval_every=0,
            show_progress=False,
            **cuts,
        )
    )
    note(f"trained in {time.perf_counter() - began:.0f} s: {name}")
    return folder


def _chain(folder: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": DEPTH}


# --- the table ------------------------------------------------------------------------------------


def rows_of(
    steps: Mapping[str, DraftStep],
    folders: Mapping[str, Path],
    samples: Sequence[Sample],
    counts: Mapping[tuple[str, float], Mapping[str, Any]],
) -> list[dict[str, Any]]:
    rows = []
    for name, step in steps.items():
        config = step.runner.decoder.config
        row = {
            "draft": name,
            "file_bytes": (folders[name] / "model.safetensors").stat().st_size,
            "read_bytes": step.work.weight_bytes,
            "num_logits": config.num_logits,
        }
        for temperature in TEMPERATURES:
            here = [s for s in samples if s.item == temperature]
            ratio = paired_ratio(pair_up(here, name, WHOLE)) if name != WHOLE else None
            micro = sorted(s.seconds for s in here if s.arm == name and s.seconds is not None)
            row[f"at {temperature}"] = {
                "step_us": micro[len(micro) // 2] / FORWARDS * 1e6 if micro else None,
                "step_ratio": [ratio.value, ratio.low, ratio.high] if ratio else [1.0, 1.0, 1.0],
                **counts[name, temperature],
            }
        rows.append(row)
    return rows


def targets_of(rows: Sequence[Mapping[str, Any]]) -> list[Target]:
    cells = [row[f"at {temperature}"] for row in rows for temperature in TEMPERATURES]
    done = all("error" not in cell for cell in cells)
    prompts = sum(cell.get("prompts", 0) for cell in cells)
    share = sum(cell.get("identical", 0) for cell in cells) / prompts if done else None
    return [Target("share of outputs identical to plain decoding", share, 1.0, "at least")]


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    headers = ["draft", "file kB", "read kB"]
    headers += [f"{what}, T {t}" for what in ("step time", "length") for t in TEMPERATURES]
    lines = []
    for row in rows:
        cells = [row[f"at {temperature}"] for temperature in TEMPERATURES]
        sizes = [f"{row[key] / 1000:.0f}" for key in ("file_bytes", "read_bytes")]
        times = ["{:.2f} ({:.2f} to {:.2f})".format(*cell["step_ratio"]) for cell in cells]
        lengths = [number(cell.get("mean_acceptance_length")) for cell in cells]
        lines.append([row["draft"], *sizes, *times, *lengths])
    return [table(headers, lines)]


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    parser.add_argument(
        "--num-prompts", type=int, help="of each half and kind (default: 40, quick: 2)"
    )
    parser.add_argument(
        "--max-tokens", type=int, help="per counted answer (default: 64, quick: 32)"
    )
    parser.add_argument("--steps", type=int, help="of each distillation (default: 60, quick: 2)")
    parser.add_argument("--repeats", type=int, help="timed samples (default: 40, quick: 3)")
    parser.add_argument("--traces", type=Path, default=FOLDER, help="where answers are kept")
    options = parser.parse_args(argv)
    options.num_prompts = options.num_prompts or (2 if options.quick else 40)
    options.max_tokens = options.max_tokens or (32 if options.quick else 64)
    options.steps = options.steps or (2 if options.quick else 60)
    options.repeats = options.repeats or (3 if options.quick else 40)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    torch.set_num_threads(1)
    source = load_prompts(options.prompts)
    learnt, texts = [], []
    for kind in KINDS:
        halves = spread(source.kind(kind), 2 * options.num_prompts)
        learnt.append(traced(kind, halves[::2], TRACED, 0.8, options.traces))
        texts += spread(halves[1::2], max(1, options.num_prompts // 3))
    report = Report("pruned_drafts", _described(options, source.source, len(texts)))
    with tempfile.TemporaryDirectory() as place:
        folders = {
            name: train(name, cuts, learnt, Path(place), options.steps)
            for name, cuts in variants().items()
        }
        steps = {
            name: DraftStep(folder, options.device, TEMPERATURES)
            for name, folder in folders.items()
        }
        samples = timed(steps, TEMPERATURES, options.repeats)
        chains = {name: _chain(folder) for name, folder in folders.items()}
        for row in counted(options.device, texts, chains, TEMPERATURES, options.max_tokens):
            report.samples.append(row)
        counts = {(row["arm"], row["temperature"]): row for row in report.samples}
        report.samples += samples
        report.results = rows_of(steps, folders, samples, counts)
    report.targets = targets_of(report.results)
    return report.finish(options, tables(report.results))


def _described(options: argparse.Namespace, source: str, prompts: int) -> dict[str, Any]:
    names = ("num_prompts", "max_tokens", "steps", "repeats", "quick")
    return {
        **{name: getattr(options, name) for name in names},
        "prompts": source,
        "counted_prompts": prompts,
        "num_speculative_tokens": DEPTH,
        "variants": variants(),
    }


if __name__ == "__main__":
    sys.exit(main())
