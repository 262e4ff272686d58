"""``train_draft``: a small draft with the target's vocabulary, distilled on the target's own text.

Owns the recipe; the loop, the data, the files and the figures are its neighbours'.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from paceline.backends.rows.rows import Rows
from paceline.core.errors import TrainingError
from paceline.core.files import whole_file
from paceline.loading.fetching import model_path
from paceline.models.weights import check_whole_head
from paceline_lab.train.acceptance import (
    Acceptance,
    OwnText,
    generate_documents,
    measure_acceptance,
    write_own_text,
)
from paceline_lab.train.card import DraftTrainingResult, draft_card
from paceline_lab.train.checkpoint import remove_state
from paceline_lab.train.configs import DraftTrainingConfig
from paceline_lab.train.data import (
    TokenDocuments,
    read_answers,
    read_documents,
    sample_documents,
    split_held_out,
    tokenize,
)
from paceline_lab.train.lm import fingerprint, separator_id, training_data
from paceline_lab.train.model_files import (
    TrainableModel,
    check_output,
    load_model,
    load_tokenizer,
    new_model,
    save_model,
)
from paceline_lab.train.ops import TrainingOps, differentiable_decoder
from paceline_lab.train.parallel import (
    MASK_TOKEN,
    ChainAcceptance,
    make_parallel,
    measure_chains,
    parallel_loss,
)
from paceline_lab.train.surgery import cut_model, frequent_tokens, prune_head, special_tokens
from paceline_lab.train.trainer import (
    DecoderTask,
    Loss,
    ProgressDisplay,
    computing_on,
    distillation_loss,
    resolve_dtype,
    run_training,
    spent,
)

GENERATED = "generated.npz"


def train_draft(config: DraftTrainingConfig) -> DraftTrainingResult:
    """Distil a draft and write it in the Hugging Face layout.

    Interrupted at any moment, the same call continues where the last saved state was.

    Raises:
        TrainingError: texts, sizes, vocabularies, a saved state or the output folder cannot be
            used.
        TraceError: traces are damaged, or of another model.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    check_output(config.output, config.overwrite)
    target = load_model(config.target)
    check_whole_head(config.target, target.config)
    model = _initial_draft(config, target)
    documents = _documents(config, target)
    train, held_out = split_held_out(documents, config.held_out_tokens, config.seed)
    with computing_on(config.device):
        return _distilled(
            config, target.to(config.device), model.to(config.device), documents, train, held_out
        )


def _distilled(
    config: DraftTrainingConfig,
    target: TrainableModel,
    model: TrainableModel,
    documents: TokenDocuments,
    train: TokenDocuments,
    held_out: TokenDocuments,
) -> DraftTrainingResult:
    folder, teacher = Path(config.output), _decoder(config, target)
    with ProgressDisplay(config.show_progress, "train draft") as display:
        text = _own_text(config, teacher, held_out)
        names = fingerprint(config, documents, model)
        written = _generated(config, teacher, train, folder / GENERATED, names, display)
        read = sample_documents(train, config.text_tokens, config.seed)
        both = TokenDocuments.of([*read, *written])
        model = _head_cut(config, model, target, both)
        before = _acceptance(config, model, teacher, text)
        display.note(f"acceptance before: {before}")
    data = training_data(both, held_out, config, separator_id(target))
    task = DecoderTask(model, data, _loss(config, model, teacher), config)
    progress = run_training(task, config, names, "train draft")
    after = _acceptance(config, model, teacher, text)
    chains = _chains(config, model, text)
    with ProgressDisplay(config.show_progress, "train draft") as display:
        display.note(f"acceptance after: {after}")
    result = DraftTrainingResult(
        **spent(config, model, progress), before=before, after=after, chains=chains
    )
    card = draft_card(config, result, model.config, len(read.tokens), len(written.tokens))
    save_model(folder, model, model_path(config.target), config.weights_dtype, card, config.init)
    remove_state(folder)
    (folder / GENERATED).unlink(missing_ok=True)
    return result


def _initial_draft(config: DraftTrainingConfig, target: TrainableModel) -> TrainableModel:
    if config.init is None:
        model = new_model(config.shape, target.config.vocab_size, separator_id(target), config.seed)
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        special = {name: target.raw[name] for name in names if name in target.raw}
        model = TrainableModel({**model.raw, **special}, model.params)
    else:
        model = _cut_draft(config, config.init, target)
    if config.parallel:
        model = make_parallel(model, load_tokenizer(config.target), config.mask_token_id)
    return model


def _cut_draft(config: DraftTrainingConfig, init: str, target: TrainableModel) -> TrainableModel:
    model = cut_model(load_model(init), **config.cuts)
    if model.config.vocab_size != target.config.vocab_size:
        raise TrainingError(
            f"{init} has a vocabulary of {model.config.vocab_size}, the target one of "
            f"{target.config.vocab_size}; a draft needs the target's"
        )
    if load_tokenizer(init).get_vocab() != load_tokenizer(config.target).get_vocab():
        raise TrainingError(f"{init} has another tokenizer than {config.target}")
    return model


def _head_cut(
    config: DraftTrainingConfig, model: TrainableModel, target: TrainableModel, seen: TokenDocuments
) -> TrainableModel:
    if not config.draft_vocab_size:
        return model
    special = special_tokens(load_tokenizer(config.target), target.config)
    size, count = model.config.vocab_size, config.draft_vocab_size
    return prune_head(model, frequent_tokens(seen.tokens, size, count, special))


def _loss(config: DraftTrainingConfig, model: TrainableModel, teacher: Rows) -> Loss:
    if not config.parallel:
        return distillation_loss(teacher)
    mask_token, num_tokens = model.raw[MASK_TOKEN], config.num_speculative_tokens
    return parallel_loss(teacher, mask_token, num_tokens)


def _documents(config: DraftTrainingConfig, target: TrainableModel) -> TokenDocuments:
    texts = read_documents(config.text, config.exclude, config.stdlib)
    documents = list(tokenize(texts, load_tokenizer(config.target)))
    for folder in config.traces:
        documents += read_answers(folder, target.config.vocab_size)
    return TokenDocuments.of(documents)


def _decoder(config: DraftTrainingConfig, model: TrainableModel) -> Rows:
    """A decoder for inference, long enough for training windows, generation and evaluation."""
    generated = config.generate_prompt_tokens + config.generate_new_tokens
    measured = config.eval_prompt_tokens + config.eval_new_tokens
    length = max(config.seq_len + 1, generated, measured)
    ops = TrainingOps(resolve_dtype(config))
    with torch.no_grad():
        return differentiable_decoder(model.config, model.tensors, ops, length)


def _own_text(
    config: DraftTrainingConfig, teacher: Rows, held_out: TokenDocuments
) -> OwnText | None:
    length = config.eval_prompt_tokens
    beginnings = [d[:length] for d in held_out if len(d) >= length][: config.eval_prompts]
    if not beginnings:
        return None
    prompts = torch.as_tensor(np.stack(beginnings)).long()
    return write_own_text(teacher, prompts, config.eval_new_tokens, config.seed)


def _acceptance(
    config: DraftTrainingConfig, model: TrainableModel, teacher: Rows, text: OwnText | None
) -> Acceptance | None:
    if text is None:
        return None
    return measure_acceptance(_decoder(config, model), teacher, text, config.seed)


def _chains(
    config: DraftTrainingConfig, model: TrainableModel, text: OwnText | None
) -> ChainAcceptance | None:
    if text is None or not config.parallel:
        return None
    mask_token, num_tokens = model.raw[MASK_TOKEN], config.num_speculative_tokens
    draft = _decoder(config, model)
    return measure_chains(draft, text.greedy, text.prompt_tokens, mask_token, num_tokens)


def _generated(
    config: DraftTrainingConfig,
    teacher: Rows,
    train: TokenDocuments,
    path: Path,
    names: str,
    display: ProgressDisplay,
) -> TokenDocuments:
    """The target's own continuations, kept in ``path`` until the run is finished.

    A file whose key is not ``names`` is of another run and is written anew.
    """
    total = config.generate_tokens
    if not total:
        return TokenDocuments.of([])
    if path.is_file():
        with np.load(path, allow_pickle=False) as arrays:
            if str(arrays["key"]) == names:
                return TokenDocuments(arrays["tokens"], arrays["offsets"])
    written = generate_documents(
        teacher,
        train,
        tokens=total,
        prompt_tokens=config.generate_prompt_tokens,
        new_tokens=config.generate_new_tokens,
        temperatures=config.generate_temperatures,
        batch_size=config.generate_batch,
        seed=config.seed,
        report=lambda done: display.note(f"the target wrote {done:,} of {total:,} tokens"),
    )
    with whole_file(path, TrainingError) as partial, partial.open("wb") as file:
        np.savez(file, tokens=written.tokens, offsets=written.offsets, key=np.array(names))
    return written
