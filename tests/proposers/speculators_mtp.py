"""Run by an interpreter that has the speculators package: a random MTP head, and what it says.

Reads a file with an embedding, token ids and hidden states; writes the head's folder, as that
package does, and the logits of two steps to a file.
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig


def main(layer: str, inputs: str, folder: str, outputs: str) -> None:
    given = load_file(inputs)
    config = MTPSpeculatorConfig(
        transformer_layer_config=json.loads(layer),
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=2)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="", architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = MTPDraftModel(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith("mtp_layers"):
                noise = torch.randn_like(weight)
                weight.copy_(2 * noise / weight.shape[-1] ** 0.5 if weight.ndim > 1 else 1 + noise)
    for part in (model.embed_tokens, model.lm_head):
        part.weight.data = given["embedding"].clone()
    model.save_pretrained(folder)
    positions = torch.arange(len(given["tokens"]))[None]
    with torch.no_grad():
        logits = model(given["tokens"][None], given["hidden"][None], position_ids=positions)[0]
    save_file({f"step{i}": each[0].contiguous() for i, each in enumerate(logits)}, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
