"""Run by an interpreter that has the speculators package: a head's logits by that package.

Reads the head's folder and a file of inputs, and writes the logits of every step to a file.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel


def main(folder: str, inputs: str, outputs: str) -> None:
    given = load_file(inputs)
    config = SpeculatorModel.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    told = config.speculators_config
    if told is None or told.verifier.name_or_path is None:  # it is looked for all the same
        kind = SpeculatorModel.registered_model_class_from_config(config)
        kind.load_verifier_weights = lambda self: None
    model = SpeculatorModel.from_pretrained(folder, config=config).eval()
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out[0].clone()))
    count = given["input_ids"].shape[1]
    with torch.no_grad():
        model(
            hidden_states=given["features"],
            input_ids=given["input_ids"],
            document_ids=torch.zeros(1, count, dtype=torch.long),
            ttt_steps=3,
        )
    save_file({f"step{i}": each for i, each in enumerate(logits)}, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
