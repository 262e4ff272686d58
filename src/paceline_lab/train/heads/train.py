"""``train_head``: a head that drafts from its target's hidden states.

Owns the recipe; the loop and its state are the other trainings'.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from paceline.backends.resolve import is_cpu
from paceline.build.build import open_runner, resolve_config
from paceline.cache.model_runner import ModelRunner
from paceline.config import EngineConfig
from paceline.core.errors import TraceError, TrainingError
from paceline.core.files import write_text
from paceline.loading.checkpoint import Checkpoint, load_checkpoint, model_fingerprint
from paceline.models.config import ModelConfig
from paceline.request.traces import Trace, read_meta, read_traces
from paceline_lab.train.acceptance import DepthAcceptance
from paceline_lab.train.card import HeadTrainingResult, ReplayedGain, head_card
from paceline_lab.train.checkpoint import remove_state
from paceline_lab.train.configs import HeadTrainingConfig
from paceline_lab.train.data import TokenDocuments
from paceline_lab.train.heads.features import (
    FeatureRows,
    Packs,
    ReadRows,
    make_features,
    num_wanted,
    split_prompts,
)
from paceline_lab.train.heads.initial import (
    HEAD,
    TOKEN_FLAGS,
    LiveFeatures,
    TargetWeights,
    continued,
    default_taps,
    vocabulary_maps,
)
from paceline_lab.train.heads.kinds import Kind, kind_of, speculators_config
from paceline_lab.train.heads.losses import (
    SLICE,
    SLICE_ON_GPU,
    AcceptanceCount,
    TrainableHead,
    head_loss,
)
from paceline_lab.train.lm import fingerprint
from paceline_lab.train.model_files import CARD, TrainableModel, check_output, save_model
from paceline_lab.train.ops import TrainingOps
from paceline_lab.train.surgery import frequent_tokens
from paceline_lab.train.trainer import (
    ProgressDisplay,
    computing_on,
    resolve_dtype,
    run_training,
    spent,
)

Tensor = torch.Tensor
FEATURES = "features"
TITLE = "train head"
SAMPLE = 16
"""Traces from whose features an initial head may learn what they are like."""


def train_head(
    config: HeadTrainingConfig, compare: Callable[[Path], ReplayedGain] | None = None
) -> HeadTrainingResult:
    """Train a head and write it in the speculators format.

    Interrupted at any moment, the same call continues where the last saved state was.

    Args:
        compare: is given the folder of the written head, and says what it gains over another; the
            result and the card say it, too.

    Raises:
        TrainingError: traces, sizes, a saved state or the output folder cannot be used.
        TraceError: traces are damaged, or of another model.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = check_output(config.output, config.overwrite)
    target = load_checkpoint(config.target)
    folders = read_folders(config, target)
    traces = [trace for each in folders for trace in each]
    train, held_out = split_prompts(traces, config.held_out_tokens, config.seed)
    taps = _taps(config, target)
    if not train:
        raise TrainingError.of(
            "held_out_tokens", f"is {config.held_out_tokens}, which leaves no trace to train on"
        )
    with computing_on(config.device):
        features = _features(config, target, taps, folders)
        sample = features(train[:SAMPLE]).features.cpu()
    kind = kind_of(config, target, traces)
    model = _initial(config, kind, target, taps, [traces[i] for i in train], sample)
    documents = TokenDocuments.of([trace.token_ids for trace in traces])
    with computing_on(config.device):
        model = model.to(config.device)
        task = _Task(config, kind, target, model, traces, features, train, held_out)
        before = task.acceptance()
        progress = run_training(task, config, fingerprint(config, documents, model), TITLE)
        after = task.acceptance()
    result = HeadTrainingResult(**spent(config, model, progress), before=before, after=after)
    answers = sum(len(traces[i].logprobs) for i in train)
    card = head_card(config, result, kind.layers, kind.recipe, answers)
    if config.with_embedding:
        embedding = {"embed_tokens.weight": TargetWeights(target).embedding}
        model = TrainableModel(model.raw, {**model.params, **embedding}, model.fixed)
    save_model(folder, model, None, config.weights_dtype, card)
    if compare is not None:
        result = replace(result, gain=compare(folder))
        card = head_card(config, result, kind.layers, kind.recipe, answers)
        write_text(folder / CARD, card, TrainingError)
    remove_state(folder)
    if not config.features:
        shutil.rmtree(folder / FEATURES, ignore_errors=True)
    return result


def read_folders(config: HeadTrainingConfig, target: Checkpoint) -> list[list[Trace]]:
    """The traces with an answer of two tokens or more, by folder."""
    known, by_folder = model_fingerprint(target), list[list[Trace]]()
    for folder in config.traces:
        said = read_meta(folder).get("model_fingerprint")
        vocabulary = target.config.vocab_size
        traces = [trace for trace in read_traces(folder) if num_wanted(trace) > 0]
        if said not in (None, known) or any(t.token_ids.max() >= vocabulary for t in traces):
            raise TraceError(
                f"{folder} has answers of another model than {config.target}; trace the prompts "
                "with this one"
            )
        by_folder.append(traces)
    return by_folder


def _taps(config: HeadTrainingConfig, target: Checkpoint) -> tuple[int, ...]:
    layers, taps = target.config.num_layers, config.taps
    if not taps:
        return default_taps(config.kind, layers)
    if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= layers:
        raise TrainingError.of(
            "taps",
            f"are {', '.join(map(str, taps))}; allowed: ascending numbers from 0 to {layers}, the "
            f"layers of {config.target}",
        )
    return taps


def _initial(
    config: HeadTrainingConfig,
    kind: Kind,
    target: Checkpoint,
    taps: tuple[int, ...],
    traces: Sequence[Trace],
    sample: Tensor,
) -> TrainableModel:
    c, columns = target.config, config.num_columns
    token_ids = _columns(traces, min(columns, c.vocab_size), c)
    raw = speculators_config(
        target,
        config.verifier or config.target,
        kind.layers,
        len(token_ids),
        config.kind,
        kind.depth,
        kind.description(taps),
    )
    params = kind.params(TargetWeights(target), token_ids, sample)
    fixed = vocabulary_maps(token_ids, c.vocab_size) if columns else {}
    fresh = TrainableModel(raw, params, fixed)
    return continued(Path(config.init), fresh) if config.init else fresh


def _columns(traces: Sequence[Trace], count: int, c: ModelConfig) -> Tensor:
    """The tokens of the head's own output matrix, the most frequent of the answers, ascending."""
    if not count:
        return torch.empty(0, dtype=torch.int64)
    answers = np.concatenate([trace.output_token_ids for trace in traces])
    return torch.from_numpy(frequent_tokens(answers, c.vocab_size, count, c.eos_token_ids))


def _features(
    config: HeadTrainingConfig,
    target: Checkpoint,
    taps: tuple[int, ...],
    folders: Sequence[Sequence[Trace]],
) -> ReadRows:
    if not is_cpu(config.device) and not config.features:
        traces = [trace for each in folders for trace in each]
        weights = TargetWeights(target)
        return LiveFeatures(weights, traces, taps, resolve_dtype(config), config.device)
    place = Path(config.features or Path(config.output) / FEATURES)
    total = sum(map(len, folders))
    with ProgressDisplay(config.show_progress, TITLE) as display, torch.device("cpu"):
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
    kind: Kind
    target: Checkpoint
    model: TrainableModel
    traces: Sequence[Trace]
    features: ReadRows
    train: Sequence[int]
    held: Sequence[int]

    def __post_init__(self) -> None:
        size = self.config.seq_len
        self._packs = self._of(self.train, size)
        self._held = self._of(self.held, size) if self.held else None
        self._held_packs = len(self._held.epoch(0)) if self._held else 0
        weights, c = TargetWeights(self.target), self.target.config
        device = self.config.device
        self._embedding = weights.embedding.to(device)
        self._lent = None if HEAD in self.params else weights.head.to(device)
        beyond = max(self.kind.depth, self.config.eval_steps)
        self._length = max(len(trace.token_ids) for trace in self.traces) + beyond
        flags = self.model.fixed.get(TOKEN_FLAGS, torch.ones(c.vocab_size, dtype=torch.bool))
        self._column_of = torch.where(flags, flags.cumsum(0) - 1, -1)

    def _of(self, numbers: Sequence[int], size: int) -> Packs:
        chosen = [self.traces[i] for i in numbers]

        def read(which: Sequence[int]) -> FeatureRows:
            return self.features([numbers[i] for i in which])

        return Packs(chosen, read, size, self.config.seed)

    @property
    def params(self) -> Mapping[str, Tensor]:
        return self.model.params

    @property
    def _matrix(self) -> Tensor:
        return self.params[HEAD] if self._lent is None else self._lent

    def loss(self, start: int, count: int) -> Tensor:
        batch = self._packs.take(start, count)
        generator = torch.Generator().manual_seed(self.config.seed + start)
        return head_loss(
            self._head(),
            self._matrix,
            batch,
            self._column_of,
            self.kind.depth,
            self.config.step_decay,
            self.kind.chosen(batch, generator),
            SLICE if is_cpu(self.config.device) else SLICE_ON_GPU,
        )

    def _head(self) -> TrainableHead:
        ops = TrainingOps(resolve_dtype(self.config))
        return self.kind.head(self.params, self._embedding, ops, self._length)

    def held_out(self, windows: int | None) -> tuple[float, str] | None:
        counted = self._count(windows)
        if counted is None:
            return None
        return counted.loss(self.config.step_decay), str(counted.shares)

    def acceptance(self) -> DepthAcceptance | None:
        counted = self._count(None)
        return counted.shares if counted else None

    @torch.no_grad()
    def _count(self, windows: int | None) -> AcceptanceCount | None:
        if self._held is None:
            return None
        steps = min(self.config.eval_steps, self.kind.most)
        counted, head = AcceptanceCount(steps), self._head()
        for number in range(min(windows or self._held_packs, self._held_packs)):
            counted.add(head, self._matrix, self._held.take(number, 1), self._column_of)
        return counted
