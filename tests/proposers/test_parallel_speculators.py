"""Logits of random DFlash, DSpark and P-EAGLE heads as the speculators package computes them.

``PACELINE_SPECULATORS_PYTHON`` names an interpreter that has the package, which pins what it needs.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.backends.native.native import why_not_native
from paceline.backends.resolve import resolve_ops
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ForwardResult, ModelRunner
from paceline.models.backend import Ops
from paceline.models.decoder import Decoder
from paceline.models.tensor_reader import TensorReader
from paceline.proposers.heads import _fusion, _mask_input
from paceline.proposers.heads.checkpoint import HeadCheckpoint, load_head
from paceline.proposers.heads.markov import MARKOV_HEADS
from paceline.request.span import Span
from paceline.tensors.arrays import Floats
from tests.proposers.dflash import MASK, dflash_config, dflash_tensors, sliding_layers
from tests.proposers.drive import make_request, propose
from tests.proposers.heads import HIDDEN, TAPS, fresh_features, write_head
from tests.proposers.parallel_heads import (
    built,
    dflash2_config,
    dflash2_tensors,
    dspark_config,
    dspark_tensors,
    following,
    peagle_config,
    peagle_tensors,
)
from tests.proposers.test_heads import with_norms
from tests.toy import VOCAB

PYTHON = os.environ.get("PACELINE_SPECULATORS_PYTHON", "")
SCRIPT = Path(__file__).with_name("speculators_blocks.py")
ROWS = 40
ANCHORS = (1, 6, 7, 25, 31)
BACKENDS = ["reference", *([] if why_not_native() else ["native"])]
VERIFIED = {
    "speculators_config": {
        "algorithm": "peagle",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}],
        "verifier": {"name_or_path": None, "architectures": []},
    }
}
"""Without which the package reads no such head."""


def narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With a confidence head that reads a block's rows alone."""
    name = "confidence_head.proj.weight"
    return tensors | {name: tensors[name][:, :HIDDEN].contiguous()}


FORMS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "full": (dflash_config(), dflash_tensors(4)),
    # Sliding layers see the context up to the window before a block there, before a row here:
    # this window is wide enough for that to make no difference.
    "sliding": (dflash_config(**sliding_layers(window=64)), dflash_tensors(4)),
    "sliding and seeing ahead": (
        dflash_config(**sliding_layers(64), sliding_window_non_causal=True),
        dflash_tensors(4),
    ),
    "dspark": (dspark_config(), dspark_tensors(5)),
    "dspark behind the anchor": (dspark_config(sample_from_anchor=False), dspark_tensors(5)),
    **{
        f"dspark {markov}{where}": (
            dspark_config(markov_head_type=markov, block_size=8, sample_from_anchor=not where),
            dspark_tensors(8, markov=markov),
        )
        for markov in ("vanilla", "gated", "rnn")
        for where in ("", " behind the anchor")
    },
    "dspark whose confidence reads no token": (
        dspark_config(markov_head_type="gated", confidence_head_with_markov=False),
        narrow(dspark_tensors(9, markov="gated")),
    ),
    "dspark without confidence": (dspark_config(enable_confidence_head=False), dspark_tensors(5)),
    "dflash2": (dflash2_config(block_size=8), dflash2_tensors(5, own_ends=True)),
    "dflash2 from the anchor on": (
        dflash2_config(block_size=8, sample_from_anchor=True, conv_kernel_size=4),
        dflash2_tensors(6, own_ends=True, kernel=4),
    ),
    "dflash2, sliding": (
        dflash2_config(**sliding_layers(64), conv_kernel_size=1, selector_top_k=VOCAB),
        dflash2_tensors(7, own_ends=True, kernel=1),
    ),
    "peagle": (peagle_config(norm_before_residual=True, **VERIFIED), peagle_tensors(6)),
    "peagle with norms": (
        peagle_config(fc_norm=True, **VERIFIED),
        with_norms(peagle_tensors(7), **{f"fc_norm.{i}.weight": HIDDEN for i in range(3)}),
    ),
}
Files = dict[str, torch.Tensor]


def ours(folder: Path, given: Files, found: Files, backend: str) -> Floats:
    """Logits of the rows that the package found."""
    head, ops = load_head(str(folder)), resolve_ops("float32", "cpu", True, backend)
    decoder = Decoder(head.decoder.config, head.decoder.tensors, ops, 64)
    memory = ops.kv_memory(decoder.config, 200, "float32")
    runner = ModelRunner(decoder, KVCache(memory, prefix_caching=False))
    fuse, tokens = _fusion(head, ops, len(TAPS), HIDDEN), given["input_ids"][0]
    known = fuse(given["features"].view(ROWS, len(TAPS), HIDDEN).numpy())
    if head.kind == "peagle":
        mask = _mask_input(head, fuse, ops, len(TAPS), HIDDEN)
        return masks(runner, tokens, np.concatenate([known, mask]), found)
    assert head.block is not None
    if head.block.markov_rank:
        runner.taps = (decoder.config.num_layers + 1,)
    result = blocks(runner, tokens, known, head.block.size)
    if not head.block.markov_rank:
        return result.logits
    assert result.features is not None
    return after_tokens(head, ops, tokens, result.logits, result.features[:, 0])


def masks(runner: ModelRunner, tokens: torch.Tensor, inputs: Floats, found: Files) -> Floats:
    """Of masks behind every anchor, in the order of the rows that were found.

    Args:
        inputs: of all tokens, then that of a mask.
    """
    logits = []
    for anchor, depth in zip(found["anchor_pos"].tolist(), found["depth"].tolist(), strict=True):
        read = [*tokens[: anchor + 1].tolist(), *[MASK] * depth]
        runner.kv.open(0)
        assert runner.kv.reserve(0, len(read))
        rows = [*range(anchor + 1), *[-1] * depth]
        batch = runner.pack([Span.chunk(0, 0, read, sample=True)])
        logits.append(runner.forward(batch, inputs=inputs[rows]).logits)
        runner.kv.free(0)
    return np.concatenate(logits)


def after_tokens(
    head: HeadCheckpoint, ops: Ops, tokens: torch.Tensor, logits: Floats, hidden: Floats
) -> Floats:
    """What the Markov head or selector makes of the blocks' logits, after the text's own tokens."""
    assert head.block is not None
    assert head.further is not None
    reader = TensorReader(head.further, head.decoder.config, ops)
    markov = MARKOV_HEADS[head.block.markov_type](reader, ops, head.block)
    size, rows = head.block.size, []
    for index, anchor in enumerate(ANCHORS):
        state = np.zeros((1, markov.state_size), np.float32)
        for row in range(size):
            before = markov.rows_of([int(tokens[anchor + max(0, row - head.block.first_row)])])
            at = index * size + row
            latent, state = markov.latent(before, hidden[at : at + 1], state)
            rows.append(latent)
    return markov.corrected(markov.candidates(logits), np.concatenate(rows))


def blocks(runner: ModelRunner, tokens: torch.Tensor, known: Floats, size: int) -> ForwardResult:
    """Of the blocks of all anchors, whose rows are all sampled."""
    spans = []
    for anchor in ANCHORS:
        runner.kv.open(anchor)
        assert runner.kv.reserve(anchor, anchor)
        context = Span.chunk(anchor, 0, tokens[:anchor].tolist(), sample=False)
        runner.write_kv(runner.pack([context]), known[:anchor])
        runner.kv.commit(anchor, range(anchor))
        assert runner.kv.reserve(anchor, size)
        block = [int(tokens[anchor]), *[MASK] * (size - 1)]
        spans.append(Span(anchor, anchor, block, range(-1, size - 1), range(size)))
    return runner.forward(runner.pack(spans))


def check_chains(form: str, tokens: list[int], found: Files, backend: str) -> None:
    """The proposer drafts what the package says behind every anchor, as likely as it says."""
    dtype = "float32" if backend == "reference" else "native-float32"
    drafter = following(built, *FORMS[form], target=dtype, num_speculative_tokens=8)
    for index, anchor in enumerate(ANCHORS):
        request = make_request(anchor, tokens[: anchor + 1])
        (tree,) = propose(drafter, request)
        assert tree.token_ids == found["tokens"][index].tolist(), form
        if "said" in found:
            assert tree.accept_probs == pytest.approx(found["said"][index].tolist(), abs=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="PACELINE_SPECULATORS_PYTHON names no interpreter")
def test_speculators_computes_the_same(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    features = fresh_features(tokens.tolist(), TAPS).reshape(ROWS, len(TAPS) * HIDDEN)
    some = torch.zeros(1, ROWS).index_fill(1, torch.tensor(ANCHORS), 1.0)
    every = torch.ones(1, ROWS).index_fill(1, torch.tensor(0), 0.0)
    inputs = {"features": features[None], "input_ids": tokens[None]}
    for form, (config, tensors) in FORMS.items():
        write_head(tmp_path / form / "head", config, tensors)
        anchors = every if "peagle" in form else some
        save_file(inputs | {"anchors": anchors}, tmp_path / form / "inputs")
    command = [PYTHON, str(SCRIPT), *(str(tmp_path / form) for form in FORMS)]
    subprocess.run(command, check=True, timeout=280)
    for form in FORMS:
        found, given = (load_file(tmp_path / form / name) for name in ("logits", "inputs"))
        for backend in BACKENDS:
            logits = ours(tmp_path / form / "head", given, found, backend)
            wanted = found["logits"].numpy()
            kept = wanted > -np.inf
            assert (kept == (logits > -np.inf)).all(), form
            difference = np.abs(logits[kept] - wanted[kept]).max()
            print("largest difference of logits:", form, backend, difference)
            assert difference < 1e-4
            if "tokens" in found:
                check_chains(form, tokens.tolist(), found, backend)
