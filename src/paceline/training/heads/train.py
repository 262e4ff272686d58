"""``train_head``: a head that drafts from its target's hidden states.

Owns the recipe; the loop and its state are the other trainings'.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from paceline.config import EngineConfig
from paceline.engine.build import open_runner, resolve_config
from paceline.errors import TraceError, TrainingError
from paceline.models.checkpoint import Checkpoint, load_checkpoint
from paceline.models.fingerprint import model_fingerprint
from paceline.runtime.model_runner import ModelRunner
from paceline.traces import Trace, read_meta, read_traces
from paceline.training.card import HeadTrainingResult, head_card
from paceline.training.checkpoint import remove_state
from paceline.training.configs import HeadTrainingConfig
from paceline.training.data import TokenDocuments
from paceline.training.heads.batches import Batch, Packs, num_wanted
from paceline.training.heads.eagle3 import Eagle3
from paceline.training.heads.features import FeatureFiles, make_features
from paceline.training.heads.initial import (
    HEAD,
    TargetWeights,
    default_taps,
    embedding_param,
    frequent_tokens,
    initial_params,
    layer_config,
    speculators_config,
    vocabulary_maps,
)
from paceline.training.heads.losses import AcceptanceCount, DepthAcceptance, unrolled_loss
from paceline.training.lm import fingerprint
from paceline.training.model_files import TrainableModel, check_output, save_model
from paceline.training.ops import TrainingOps
from paceline.training.progress import ProgressDisplay
from paceline.training.trainer import resolve_dtype, run_training, spent

Tensor = torch.Tensor
FEATURES = "features"
TITLE = "train head"


def train_head(config: HeadTrainingConfig) -> HeadTrainingResult:
    """Train a head and write it in the speculators format.

    Interrupted at any moment, the same call continues where the last saved state was.

    Raises:
        TrainingError: traces, sizes, a saved state or the output folder cannot be used.
        TraceError: traces are damaged, or of another model.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = check_output(config.output, config.overwrite)
    target = load_checkpoint(config.target)
    folders = _traces(config, target)
    traces = [trace for each in folders for trace in each]
    train, held_out = split_prompts(traces, config.held_out_tokens, config.seed)
    taps = _taps(config, target)
    model = _initial(config, target, taps, [traces[i] for i in train])
    features = _features(config, target, taps, folders)
    task = _Task(config, target, model, traces, features, train, held_out)
    documents = TokenDocuments.of([trace.token_ids for trace in traces])
    before = task.acceptance(None)
    progress = run_training(task, config, fingerprint(config, documents, model), TITLE)
    after = task.acceptance(None)
    result = HeadTrainingResult(**spent(config, model, progress), before=before, after=after)
    answers = sum(len(traces[i].logprobs) for i in train)
    card = head_card(config, result, layer_config(target.config), answers)
    if config.with_embedding:
        model = TrainableModel(model.raw, {**model.params, **embedding_param(target)}, model.fixed)
    save_model(folder, model, None, config.weights_dtype, card)
    remove_state(folder)
    if not config.features:
        shutil.rmtree(folder / FEATURES)
    return result


def _traces(config: HeadTrainingConfig, target: Checkpoint) -> list[list[Trace]]:
    """The traces with an answer of two tokens or more, by folder."""
    known, found = model_fingerprint(target), list[list[Trace]]()
    for folder in config.traces:
        said = read_meta(folder).get("model_fingerprint")
        vocabulary = target.config.vocab_size
        traces = [trace for trace in read_traces(folder) if num_wanted(trace) > 0]
        if said not in (None, known) or any(t.token_ids.max() >= vocabulary for t in traces):
            raise TraceError(
                f"{folder} has answers of another model than {config.target}; trace the prompts "
                "with this one"
            )
        found.append(traces)
    return found


def split_prompts(
    traces: Sequence[Trace], held_out_tokens: int, seed: int
) -> tuple[list[int], list[int]]:
    """Numbers of the traces to train on and of those held out; no prompt is in both.

    Prompts are taken in an order of the seed until their traces have ``held_out_tokens`` tokens.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for number, trace in enumerate(traces):
        by_prompt.setdefault(trace.token_ids[: trace.prompt_len].tobytes(), []).append(number)
    groups = list(by_prompt.values())
    order = np.random.default_rng((seed, 0x5E1D)).permutation(len(groups))
    held: list[int] = []
    left = held_out_tokens
    for index in order:
        if left <= 0:
            break
        held += groups[index]
        left -= sum(len(traces[i].token_ids) for i in groups[index])
    taken = set(held)
    return [i for i in range(len(traces)) if i not in taken], sorted(held)


def _taps(config: HeadTrainingConfig, target: Checkpoint) -> tuple[int, ...]:
    layers = target.config.num_layers
    taps = config.taps or default_taps(layers)
    if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= layers:
        raise TrainingError(
            f"taps are {', '.join(map(str, taps))}; allowed are ascending numbers from 0 to "
            f"{layers}, the layers of {config.target}"
        )
    return taps


def _initial(
    config: HeadTrainingConfig, target: Checkpoint, taps: tuple[int, ...], traces: Sequence[Trace]
) -> TrainableModel:
    weights, c = TargetWeights(target), target.config
    token_ids = frequent_tokens(traces, config.draft_vocab_size, c.vocab_size, c.eos_token_ids)
    verifier = config.verifier or config.target
    raw = speculators_config(target, verifier, taps, len(token_ids), config.num_steps)
    params = initial_params(weights, len(taps), token_ids, config.seed)
    return TrainableModel(raw, params, vocabulary_maps(token_ids, c.vocab_size))


def _features(
    config: HeadTrainingConfig,
    target: Checkpoint,
    taps: tuple[int, ...],
    folders: Sequence[Sequence[Trace]],
) -> FeatureFiles:
    place = Path(config.features or Path(config.output) / FEATURES)
    total = sum(map(len, folders))
    with ProgressDisplay(config.show_progress, TITLE) as display:
        return make_features(
            folders,
            partial(_runner, config, target),
            taps,
            place,
            model_fingerprint(target),
            lambda done: display.note(f"features of {done} of {total} traces"),
        )


def _runner(config: HeadTrainingConfig, target: Checkpoint) -> ModelRunner:
    settings = EngineConfig(num_threads=config.threads or None, enable_prefix_caching=False)
    resolved, ops = resolve_config(settings, target)
    return open_runner(target, resolved, ops)[0]


@dataclass
class _Task:
    """A head on packs of traces."""

    config: HeadTrainingConfig
    target: Checkpoint
    model: TrainableModel
    traces: Sequence[Trace]
    features: FeatureFiles
    train: Sequence[int]
    held: Sequence[int]

    def __post_init__(self) -> None:
        size = self.config.seq_len
        self._packs = self._of(self.train, size)
        self._held = self._of(self.held, size) if self.held else None
        self._held_packs = len(self._held.epoch(0)) if self._held else 0
        self._embedding = TargetWeights(self.target).embedding
        c = self.target.config
        self._layer = layer_config(c)
        self._length = max(len(trace.token_ids) for trace in self.traces) + self.config.num_steps
        ids = self.model.fixed["t2d"].nonzero().squeeze(1)
        self._column_of = torch.full((c.vocab_size,), -1)
        self._column_of[ids] = torch.arange(len(ids))

    def _of(self, numbers: Sequence[int], size: int) -> Packs:
        chosen = [self.traces[i] for i in numbers]
        return Packs(chosen, lambda i: self.features(numbers[i]), size, self.config.seed)

    @property
    def params(self) -> Mapping[str, Tensor]:
        return self.model.params

    def loss(self, start: int, count: int) -> Tensor:
        batch = self._packs.take(start, count)
        return unrolled_loss(
            self._head(),
            self.params[HEAD],
            batch,
            self._column_of,
            self.config.num_steps,
            self.config.step_decay,
            self._continued(batch, start),
        )

    def _continued(self, batch: Batch, start: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.config.seed + start)
        drawn = torch.rand(len(batch.wanted), generator=generator)
        return ((drawn < self.config.deep_share) & (batch.left > 0)).nonzero().squeeze(1)

    def _head(self) -> Eagle3:
        ops = TrainingOps(resolve_dtype(self.config.dtype))
        return Eagle3(self._layer, self.params, self._embedding, ops, self._length)

    def held_out(self, windows: int | None) -> tuple[float, str] | None:
        counted = self._count(windows)
        if counted is None:
            return None
        return counted.loss(self.config.step_decay), str(counted.shares)

    def acceptance(self, windows: int | None) -> DepthAcceptance | None:
        counted = self._count(windows)
        return counted.shares if counted else None

    @torch.no_grad()
    def _count(self, windows: int | None) -> AcceptanceCount | None:
        if self._held is None:
            return None
        counted, head = AcceptanceCount(self.config.eval_steps), self._head()
        for number in range(min(windows or self._held_packs, self._held_packs)):
            counted.add(head, self.params[HEAD], self._held.take(number, 1), self._column_of)
        return counted
