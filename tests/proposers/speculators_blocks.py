"""Run by an interpreter that has the speculators package: logits of several tokens at once by it.

Of each folder that is named: reads the DFlash, DSpark or P-EAGLE head in ``head`` and the file
``inputs``, and writes the logits of all rows to the file ``logits``, of P-EAGLE also which anchor
and depth each row has, of DSpark the greedy chain behind every anchor with the confidences. Of
DFlash 2 the logits are the selector's, -inf of tokens that it does not choose among.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel


def main(folder: Path) -> None:
    given = load_file(folder / "inputs")
    config = SpeculatorModel.config_class.from_pretrained(folder / "head")
    config.transformer_layer_config._attn_implementation = "eager"
    told = config.speculators_config
    if told is None or told.verifier.name_or_path is None:  # P-EAGLE looks for it all the same
        kind = SpeculatorModel.registered_model_class_from_config(config)
        kind.load_verifier_weights = lambda self: None
    model = SpeculatorModel.from_pretrained(folder / "head", config=config).eval()
    torch.manual_seed(0)  # which rows of P-EAGLE there are is drawn
    count, found = given["input_ids"].shape[1], dict[str, torch.Tensor]()

    def loss(
        logits: torch.Tensor | None = None, *_: Any, **more: Any
    ) -> tuple[None, dict[str, Any]]:
        """In place of the package's, which is all that training makes of the logits."""
        rows = {name: more[name] for name in ("anchor_pos", "depth") if name in more}
        logits = more["unary_logits"] if logits is None else logits
        found.update(rows, logits=logits[0].contiguous())
        return None, {}

    sys.modules[type(model).__module__].compute_metrics = loss  # type: ignore[attr-defined]
    backbone, rows = getattr(model, "_backbone_forward", None), []

    def kept(*args: Any, **more: Any) -> Any:
        result = backbone(*args, **more)
        rows.extend((*result[:2], result[-1]))
        return result

    if backbone is not None:
        model._backbone_forward = kept
    with torch.no_grad():
        model(
            hidden_states=given["features"],
            input_ids=given["input_ids"],
            loss_mask=given["anchors"],
            verifier_last_hidden_states=torch.zeros(1, count, model.hidden_size),
            document_ids=torch.zeros(1, count, dtype=torch.long),
            max_anchors=int(given["anchors"].sum()),
        )
        anchors = given["input_ids"][0, given["anchors"][0] > 0]
        if getattr(model, "markov_head", None) is not None:
            found.update(chains(model, *rows[:2], anchors))
        if getattr(model, "candidate_selector", None) is not None:
            hidden, unary, at = rows
            before = model._predecessor_ids(given["input_ids"], at).flatten()
            ids, scores = model.candidate_selector.select(unary[0], hidden[0], before)
            logits = torch.full_like(unary[0], -torch.inf).scatter(1, ids, scores)
            found.update(selected(model, hidden, unary, anchors), logits=logits)
    save_file(found, folder / "logits")


def chains(
    model: Any, hidden: torch.Tensor, base: torch.Tensor, anchors: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The likeliest token after each of a block's tokens, and what the confidence head says."""
    config = model.config
    shape = len(anchors), config.block_size
    hidden, base = hidden.view(*shape, -1), base.view(*shape, -1)
    before = anchors[:, None].repeat(1, config.block_size)
    tokens, said = [], []
    first = 0 if config.sample_from_anchor else 1
    for row in range(first, config.block_size):
        read = model.markov_head.prev_embeddings(before)
        bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        best = (base + bias)[:, row].argmax(dim=-1)
        tokens.append(best if model.d2t is None else best + model.d2t[best])
        if model.confidence_head is not None:
            inputs = [hidden] + [read] * config.confidence_head_with_markov
            said.append(model.confidence_head(torch.cat(inputs, dim=-1))[:, row].sigmoid())
        if row + 1 < config.block_size:
            before[:, row + 1] = tokens[-1]
    chain = {"tokens": torch.stack(tokens, dim=1)}
    return chain | ({"said": torch.stack(said, dim=1)} if said else {})


def selected(
    model: Any, hidden: torch.Tensor, unary: torch.Tensor, anchors: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The token that DFlash 2's selector chooses after each of a block's tokens."""
    shape, tokens = (len(anchors), model.config.block_size, -1), [anchors]
    for row in range(0 if model.config.sample_from_anchor else 1, model.config.block_size):
        known = (x.view(shape)[:, row] for x in (unary, hidden))
        ids, scores = model.candidate_selector.select(*known, tokens[-1])
        tokens.append(ids.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0])
    return {"tokens": torch.stack(tokens[1:], dim=1)}


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(Path(each))
