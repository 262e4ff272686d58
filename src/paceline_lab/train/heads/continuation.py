"""``continue_head``: a head is trained further on its user's answers, and replaced only with proof.

Owns what the old head's files say of the training, the replay that compares both heads, and the
exchange of their folders. Knows no loss and no loop: the training is
:func:`~paceline_lab.train.heads.train.train_head`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from paceline.api.llm import LLM
from paceline.api.outputs import GenerationOutput
from paceline.config.speculative import SpeculativeConfig
from paceline.core.errors import ConfigError, TrainingError
from paceline.core.files import exchange_folders, read_json, whole_folder, write_text
from paceline.loading.checkpoint import load_checkpoint
from paceline.loading.quantised.methods import split_quantisation
from paceline.loading.safetensors_files import SafetensorsFolder
from paceline.models.families.fields import Fields
from paceline.models.heads import DFLASH, EAGLE3, MTP
from paceline.models.threads import cores
from paceline.request.sampling_params import SamplingParams
from paceline.request.traces import Trace, read_meta
from paceline_lab.bootstrap import ratio_interval
from paceline_lab.trace.requests import trace_params
from paceline_lab.train.card import HeadTrainingResult, ReplayedGain
from paceline_lab.train.configs import HEAD_KINDS, PACKED_BITS, HeadTrainingConfig
from paceline_lab.train.heads.features import split_prompts
from paceline_lab.train.heads.train import read_folders, train_head

LEAST_PROMPTS = 10
"""Of a replay: an interval from fewer says little."""
HELD_OUT_SHARE = 5
"""At most one in so many tokens of the traces is held out."""
REQUESTS_AT_ONCE = 8
EMBEDDING = "embed_tokens.weight"
_TAPS = {EAGLE3: "eagle_aux_hidden_state_layer_ids", DFLASH: "aux_hidden_state_layer_ids"}


@dataclass(frozen=True, slots=True)
class ContinuedHead:
    """What came of it.

    Attributes:
        result: of the training; its gain is what the heads were compared by.
        head: the folder, with the new head where that was adopted.
        previous: where the old head is kept; None where it stayed.
    """

    result: HeadTrainingResult
    head: Path
    previous: Path | None


def continue_head(config: HeadTrainingConfig) -> ContinuedHead:
    """Train the head that ``config.continue_from`` names further, and adopt it if it is better.

    Both heads draft for the held-out requests, which are answered by the engine itself with the
    sampling of the traces. Answers do not depend on drafts, and both heads cost the same per step,
    so the ratio of the steps that the engine takes is the gain. The new head is adopted if the
    lower end of its 95 % interval is above 1. Interrupted at any moment before that, the same call
    continues.

    Raises:
        ConfigError: no folder of a head is named.
        TrainingError: the head cannot be trained further or replaced, or there are too few traces.
        TraceError: as :func:`~paceline_lab.train.heads.train.train_head`.
    """
    head = _head_folder(config)
    work = head.with_name(f".{head.name}.continued")
    training = _training(config, head, work / head.name)
    traces = _traces(training)
    share = sum(len(trace.token_ids) for trace, _ in traces) // HELD_OUT_SHARE
    training = replace(training, held_out_tokens=min(training.held_out_tokens, share))
    requests = _held_out(training, traces)
    _drop_other(work, _key(training, [trace for trace, _ in traces], head))
    result = train_head(training, partial(_replayed, training, requests, head))
    gain = result.gain
    assert gain is not None
    previous = _adopt(head, result.folder) if gain.is_proven else None
    shutil.rmtree(work, ignore_errors=True)
    return ContinuedHead(replace(result, folder=head), head, previous)


def _head_folder(config: HeadTrainingConfig) -> Path:
    assert config.continue_from is not None
    head = Path(os.path.expanduser(config.continue_from)).resolve()
    if not (head / "config.json").is_file():
        raise ConfigError(
            f"{config.continue_from} is no folder of a head: it has no config.json. Name one that "
            "paceline train head wrote, or a copy of another in the speculators format",
            "continue_from",
        )
    if not os.access(head.parent, os.W_OK):
        raise TrainingError.of(
            "continue_from",
            f"is {head}, and {head.parent} cannot be written, where the new head would take its "
            "place: copy the head to another folder",
        )
    return head


def _key(config: HeadTrainingConfig, traces: Sequence[Trace], head: Path) -> str:
    """Tells apart trainings that do not continue one another."""
    weights = [(file.name, file.stat().st_mtime_ns) for file in sorted(head.glob("*.safetensors"))]
    digest = xxhash.xxh3_128(repr((config.fixed_options(), weights)).encode())
    for trace in traces:
        digest.update(np.array([trace.prompt_len, *trace.token_ids], "<i4").tobytes())
    return digest.hexdigest()


def _drop_other(work: Path, key: str) -> None:
    """Remove what a training with other options or traces left when it was interrupted."""
    file = work / "key"
    if not file.is_file() or file.read_text(encoding="utf-8") != key:
        shutil.rmtree(work, ignore_errors=True)
        write_text(file, key, TrainingError, make_folder=True)


# --- the training --------------------------------------------------------------------------------


def _training(config: HeadTrainingConfig, head: Path, output: Path) -> HeadTrainingConfig:
    """The options of the training: what the head's files say, and few of the machine's threads."""
    raw, quantisation = split_quantisation(read_json(head / "config.json"), head)
    fields = Fields(raw)
    kind = fields.get("speculators_model_type")
    if kind not in HEAD_KINDS:
        raise TrainingError.of(
            "continue_from",
            f"is {head}, whose configuration says speculators_model_type = {str(kind)[:40]!r}; "
            f"heads that can be trained further are {', '.join(HEAD_KINDS)}",
        )
    said: dict[str, Any] = {"kind": kind, "weights_dtype": _precision(raw, quantisation, head)}
    if kind != MTP:
        said["taps"] = tuple(fields.get(_TAPS[kind]) or ())
        said["draft_vocab_size"] = fields.integer("draft_vocab_size", 1, 1 << 20)
        said["with_embedding"] = EMBEDDING in SafetensorsFolder(head)
    if kind == DFLASH:
        layers = Fields(fields.mapping("transformer_layer_config"))
        said["num_layers"] = layers.integer("num_hidden_layers", 1, 16)
        said["block_size"] = fields.integer("block_size", 2, 64)
    verifier = Fields(Fields(fields.mapping("speculators_config")).mapping("verifier"))
    return replace(
        config,
        continue_from=None,
        init=str(head),
        output=str(output),
        overwrite=True,
        verifier=str(verifier.get("name_or_path") or ""),
        threads=config.threads or max(1, cores() // 2),
        **said,
    )


def _precision(raw: Mapping[str, Any], quantisation: Mapping[str, Any] | None, head: Path) -> str:
    """That in which the head is written, in which the new one is written too."""
    if quantisation is None:
        return "float32" if raw.get("dtype") == "float32" else "bfloat16"
    bits = {
        group.get("weights", {}).get("num_bits")
        for group in dict(quantisation.get("config_groups") or {}).values()
    }
    names = [name for name, number in PACKED_BITS.items() if bits == {number}]
    if not names:
        raise TrainingError(
            f"{head} is quantised in a way in which no head is written; allowed: "
            f"{', '.join(PACKED_BITS)}, and weights that are not quantised"
        )
    return names[0]


# --- the proof -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Request:
    """A held-out request, and which prompt it has of those that are held out."""

    prompt: list[int]
    params: SamplingParams
    group: int


def _traces(config: HeadTrainingConfig) -> list[tuple[Trace, Mapping[str, Any]]]:
    """All traces, in the order of the training, and what their folders say."""
    folders = read_folders(config, load_checkpoint(config.target))
    metas = [read_meta(folder) for folder in config.traces]
    return [(t, meta) for group, meta in zip(folders, metas, strict=True) for t in group]


def _held_out(
    config: HeadTrainingConfig, traces: Sequence[tuple[Trace, Mapping[str, Any]]]
) -> list[_Request]:
    """The requests that :func:`train_head` keeps apart."""
    only = [trace for trace, _ in traces]
    _, held = split_prompts(only, config.held_out_tokens, config.seed)
    groups: dict[bytes, int] = {}
    requests = [_request(*traces[number], groups) for number in held]
    if len(groups) < LEAST_PROMPTS:
        raise TrainingError.of(
            "held_out_tokens",
            f"is {config.held_out_tokens}, which keeps {len(groups)} prompts of {len(traces)} "
            f"traces apart; at least {LEAST_PROMPTS} are needed to compare the heads: hold out "
            f"more, or trace more prompts (at most a fifth of their tokens is held out)",
        )
    return requests


def _request(trace: Trace, meta: Mapping[str, Any], groups: dict[bytes, int]) -> _Request:
    prompt = trace.token_ids[: trace.prompt_len]
    params = replace(trace_params(trace, meta), max_tokens=len(trace.output_token_ids))
    return _Request(prompt.tolist(), params, groups.setdefault(prompt.tobytes(), len(groups)))


def _replayed(
    config: HeadTrainingConfig, requests: Sequence[_Request], old: Path, new: Path
) -> ReplayedGain:
    """Both heads on the same requests; those with one prompt are drawn together."""
    before, after = (_answered(config, requests, folder) for folder in (old, new))
    num_groups = 1 + max(request.group for request in requests)
    steps, tokens, kept = np.zeros((2, num_groups)), 0, 0
    for request, ours, theirs in zip(requests, before, after, strict=True):
        if ours.token_ids == theirs.token_ids:  # always, where the kernels are reproducible
            for arm, output in enumerate((ours, theirs)):
                steps[arm, request.group] += output.completions[0].counters.num_steps
            tokens, kept = tokens + len(ours.token_ids), kept + 1
    if 2 * kept < len(requests):
        raise TrainingError(
            f"{len(requests) - kept} of {len(requests)} requests were answered differently with "
            "the two heads, so that their steps cannot be compared; kernels that are not "
            "reproducible do that"
        )
    low, high = ratio_interval(steps, np.sum)
    old_steps, new_steps = (int(arm.sum()) for arm in steps)
    return ReplayedGain(num_groups, kept, tokens, old_steps, new_steps, low, high)


def _answered(
    config: HeadTrainingConfig, requests: Sequence[_Request], head: Path
) -> list[GenerationOutput]:
    """The requests with chains of one head, all of which are verified, whatever a step costs."""
    depth = config.eval_steps
    if config.kind == DFLASH:
        depth = min(depth, config.block_size - 1)
    chains = SpeculativeConfig(
        config.kind,
        model=str(head),
        num_speculative_tokens=depth,
        max_tree_nodes=0,
        max_branching=1,
        min_accept_prob=0.0,
    )
    with LLM(
        config.target,
        speculative_config=[chains],
        planner="fixed",
        strict=True,
        device=config.device,
        num_threads=config.threads,
        max_num_seqs=REQUESTS_AT_ONCE,
        enable_prefix_caching=False,
    ) as llm:
        outputs = llm.generate([r.prompt for r in requests], [r.params for r in requests])
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs


# --- the exchange --------------------------------------------------------------------------------


def _adopt(head: Path, new: Path) -> Path:
    """Put the new head in the old one's place, of which a copy is beside it before that."""
    previous = head.with_name(f"{head.name}.previous")
    if previous.exists():
        shutil.rmtree(previous)
    with whole_folder(previous, TrainingError) as partial_copy:
        shutil.copytree(head, partial_copy, dirs_exist_ok=True)
    exchange_folders(head, new, TrainingError)
    return previous
