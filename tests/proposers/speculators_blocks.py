"""Run by an interpreter that has the speculators package: logits of several tokens at once by it.

Of each folder that is named: reads the DFlash, DSpark or P-EAGLE head in ``head`` and the file
``inputs``, and writes the logits of all rows to the file ``logits``, of P-EAGLE also which anchor
and depth each row has.
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

    def loss(logits: torch.Tensor, *_: Any, **more: Any) -> tuple[None, dict[str, Any]]:
        """In place of the package's, which is all that training makes of the logits."""
        rows = {name: more[name] for name in ("anchor_pos", "depth") if name in more}
        found.update(rows, logits=logits[0].contiguous())
        return None, {}

    sys.modules[type(model).__module__].compute_metrics = loss  # type: ignore[attr-defined]
    with torch.no_grad():
        model(
            hidden_states=given["features"],
            input_ids=given["input_ids"],
            loss_mask=given["anchors"],
            verifier_last_hidden_states=torch.zeros(1, count, model.hidden_size),
            document_ids=torch.zeros(1, count, dtype=torch.long),
            max_anchors=int(given["anchors"].sum()),
        )
    save_file(found, folder / "logits")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(Path(each))
