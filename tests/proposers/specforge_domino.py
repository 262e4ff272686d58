"""Run by an interpreter that has SpecForge: what its Domino drafts behind anchors, and its logits.

Of each folder that is named: reads the head in ``head`` and the file ``inputs``, and writes the
greedy chain behind every anchor, and the logits of all rows of its block, to the file ``logits``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from specforge.modeling.draft.domino import DominoDraftModel


@torch.no_grad()
def main(folder: Path) -> None:
    given = load_file(folder / "inputs")
    model, told = DominoDraftModel.from_pretrained(
        folder / "head", attn_implementation="eager", output_loading_info=True
    )
    assert not told["missing_keys"], told
    assert not told["unexpected_keys"], told
    embedding, tokens = given["embedding"], given["input_ids"]
    target = SimpleNamespace(
        lm_head=lambda hidden: hidden @ embedding.T,
        model=SimpleNamespace(embed_tokens=lambda ids: embedding[ids]),
    )
    chains, logits = [], []
    for anchor in given["anchors"].tolist():
        block = torch.full((1, model.block_size), model.mask_token_id)
        block[0, 0] = tokens[anchor]
        hidden = model.eval()(
            position_ids=torch.arange(anchor + model.block_size)[None],
            noise_embedding=embedding[block],
            target_hidden=given["features"][None, :anchor],
        )
        chains.append(model._sample_draft_tokens(target, hidden, block)[0])
        read = torch.cat([block[0, :1], chains[-1]])
        logits.append(
            model.apply_logits_head(
                target.lm_head(hidden)[None],
                prev_token_embeddings=embedding[read][None, None],
                hidden_states=hidden[None],
            )[0, 0]
        )
    save_file({"tokens": torch.stack(chains), "logits": torch.stack(logits)}, folder / "logits")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(Path(each))
