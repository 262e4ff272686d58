"""A tiny Gemma 4 target that has learnt a language, and an assistant that has learnt the target.

Every token of the language follows from the third last one, so that a draft needs the keys and
values of the right positions, and its hidden states carry what it drafted before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.models.reference import make_model
from tests.proposers.assistants import make_assistant

LAG, LENGTH, DEPTH = 3, 24, 3
FIRST, LAST = 4, 40
SIZES = {"vocab_size": LAST, "vocab_size_per_layer_input": LAST, "initializer_range": 0.05}


def texts(count: int, seed: int) -> torch.Tensor:
    """Tokens ``[count, LENGTH]``."""
    following = FIRST + torch.randperm(LAST - FIRST, generator=torch.Generator().manual_seed(1))
    columns = [
        *torch.randint(FIRST, LAST, (LAG, count), generator=torch.Generator().manual_seed(seed))
    ]
    while len(columns) < LENGTH:
        columns.append(following[columns[-LAG] - FIRST])
    return torch.stack(columns, dim=1)


def steps(model: Any, count: int, lr: float) -> Any:
    """Of an optimiser, to be taken after each loss's gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr, weight_decay=0.0)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, count, pct_start=0.1)

    def step(loss: torch.Tensor) -> None:
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        plan.step()

    return step


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), tokens.flatten())


def trained_target(count: int = 500) -> Any:
    model = make_model("gemma4", **SIZES).train()
    step = steps(model, count, 3e-3)
    for seed in range(count):
        tokens = texts(48, seed)
        logits = model(tokens[:, :-1]).logits
        step(loss_of(logits[:, LAG - 1 :], tokens[:, LAG:]))
    return model.eval()


def trained_assistant(target: Any, count: int = 600) -> Any:
    model = make_assistant("gemma4", vocab_size=LAST).train()
    step = steps(model, count, 3e-3)
    embedding, ends = target.get_input_embeddings(), torch.Generator().manual_seed(2)
    for seed in range(count):
        tokens = texts(96, seed)
        end = int(torch.randint(LAG, LENGTH - DEPTH, (), generator=ends))  # of the last known token
        with torch.no_grad():
            known = target(tokens[:, :end], output_hidden_states=True, return_shared_kv_states=True)
            embedded = embedding(tokens)
        hidden, logits = known.hidden_states[-1][:, -1:], []
        shared = dict(known.shared_kv_states)
        for depth in range(DEPTH):
            at = end + depth
            said = model(
                inputs_embeds=torch.cat((embedded[:, at : at + 1], hidden), dim=-1),
                position_ids=torch.tensor([[end]]),
                shared_kv_states=shared,
            )
            hidden = said.last_hidden_state
            logits.append(said.logits)
        step(loss_of(torch.cat(logits, dim=1), tokens[:, end + 1 : end + 1 + DEPTH]))
    return model.eval()


def write_pair(folder: Path) -> tuple[Path, Path]:
    """The folders of the target and of its assistant."""
    target = trained_target()
    assistant = trained_assistant(target)
    places = folder / "target", folder / "assistant"
    for model, place in zip((target, assistant), places, strict=True):
        model.save_pretrained(place)
    return places
