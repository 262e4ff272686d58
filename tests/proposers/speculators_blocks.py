"""Run by an interpreter that has the speculators package: DFlash heads' logits by that package.

Of each folder that is named: reads the head in ``head`` and the file ``inputs``, and writes the
logits of every block to the file ``logits``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel


def main(folder: Path) -> None:
    given = load_file(folder / "inputs")
    config = SpeculatorModel.config_class.from_pretrained(folder / "head")
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder / "head", config=config).eval()
    count = given["input_ids"].shape[1]
    with torch.no_grad():  # the whole forward would go on to a loss
        _, logits, *_ = model._backbone_forward(
            hidden_states=given["features"],
            input_ids=given["input_ids"],
            loss_mask=given["anchors"],
            verifier_last_hidden_states=torch.zeros(1, count, model.hidden_size),
            document_ids=torch.zeros(1, count, dtype=torch.long),
            max_anchors=int(given["anchors"].sum()),
        )
    save_file({"logits": logits[0].contiguous()}, folder / "logits")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(Path(each))
