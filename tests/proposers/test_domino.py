"""Domino heads: DFlash heads whose logits a GRU over the drafted tokens corrects.

``PACELINE_SPECFORGE_PYTHON`` names an interpreter that has SpecForge (0.2), the reference.
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

from paceline.backends.resolve import resolve_ops
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.decoder import Decoder
from paceline.models.tensor_reader import TensorReader
from paceline.proposers.heads import _correction, _fusion
from paceline.proposers.heads.checkpoint import load_head
from tests.arrays import arrays
from tests.proposers.dflash import SIZE, as_original, dflash_config, dflash_tensors
from tests.proposers.drive import make_request, propose
from tests.proposers.heads import HIDDEN, TAPS, fresh_features, write_head
from tests.proposers.parallel_heads import (
    PlainDomino,
    as_domino,
    built,
    domino_config,
    domino_tensors,
    dspark_config,
    dspark_tensors,
    following,
)
from tests.proposers.test_parallel_speculators import ANCHORS, BACKENDS, ROWS, blocks
from tests.toy import TOY, VOCAB, toy_tensors

PYTHON = os.environ.get("PACELINE_SPECFORGE_PYTHON", "")
SCRIPT = Path(__file__).with_name("specforge_domino.py")
FORMS = {
    "usual": domino_config(),
    "shifted": domino_config(True),
    "behind a pure prefix": domino_config(prefix=2),
    "shifted behind a pure prefix": domino_config(True, prefix=1),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_is_that_of_plain_torch(form: str) -> None:
    config, tensors, seen = FORMS[form], domino_tensors(3), set()
    plain = PlainDomino(tensors, config, toy_tensors())
    drafter = following(built, config, tensors, num_speculative_tokens=8)
    request = make_request(1, [5, 9, 2, 7, 7, 30, 11])
    for step in range(6):
        (tree,) = propose(drafter, request)
        wanted = plain.chain(
            request.token_ids, fresh_features(request.token_ids[:-1]), SIZE - plain.first
        )
        assert tree.token_ids == wanted
        seen.update(wanted)
        request.token_ids += [*wanted[: step % 4], 3 + step]
    assert len(seen) > 3


def test_a_tree_holds_what_follows_each_of_its_paths() -> None:
    config, tensors = FORMS["usual"], domino_tensors(4)
    plain = PlainDomino(tensors, config, toy_tensors())
    shape = {"max_tree_nodes": 10, "max_branching": 3, "num_speculative_tokens": 4}
    drafter, branched = following(built, config, tensors, **shape), 0
    request = make_request(1, [5, 9, 2, 7, 7, 30, 11])
    features = fresh_features(request.token_ids[:-1])
    (tree,) = propose(drafter, request)
    assert len(tree) == 10
    paths = {-1: list[int]()}
    for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        paths[node] = [*paths[parent], token]
    for node, path in paths.items():
        below = [t for t, p in zip(tree.token_ids, tree.parents, strict=True) if p == node]
        if below:
            logits = plain.after(*plain.read(request.token_ids[-1], features, path))
            assert below == logits.topk(len(below)).indices.tolist()
        branched += len(below) > 1
    assert branched > 1


def test_names_of_early_checkpoints_are_known(tmp_path: Path) -> None:
    tensors = {
        ("logit_head." if name[:6] in ("prefix", "embed_") else "") + name: tensor
        for name, tensor in domino_tensors().items()
    }
    assert sum(name.startswith("logit_head.") for name in tensors) == 4
    write_head(tmp_path, as_domino(domino_config()), tensors)
    head = load_head(str(tmp_path))
    assert head.further is not None
    assert len(list(head.further)) == 4


@pytest.mark.parametrize(
    ("config", "tensors", "error", "told"),
    [
        (
            as_original(dflash_config(False)) | {"shift_label": True},
            dflash_tensors(own_ends=False),
            UnsupportedModelError,
            "shift_label",
        ),
        (
            dspark_config(False, projector_type="domino"),
            dspark_tensors(own_ends=False),
            UnsupportedModelError,
            "projector_type",
        ),
        (
            as_domino({**domino_config(), "domino": {"projector_type": "domino"}}),
            domino_tensors(),
            ModelLoadError,
            "emb_dim",
        ),
        (as_domino(domino_config()), dflash_tensors(own_ends=False), ModelLoadError, "prefix_gru"),
    ],
)
def test_what_is_no_whole_domino_head_is_refused(
    config: dict[str, Any], tensors: Any, error: type[Exception], told: str, tmp_path: Path
) -> None:
    write_head(tmp_path, config, tensors)
    with pytest.raises(error, match=told):
        corrected(tmp_path, resolve_ops("float32", "cpu", True, "reference"))


def corrected(folder: Path, ops: Any) -> tuple[Any, Decoder]:
    """The correction of a head, and its decoder with the toy's ends."""
    head: Any = load_head(str(folder))
    ends = {n: t for n, t in toy_tensors().items() if "embed_tokens" in n}
    tied = head.decoder.config.with_traits({"tie_embeddings": True})
    own = {n: head.decoder.tensors[n] for n in head.decoder.tensors}
    decoder = Decoder(tied, {**own, **arrays(ends)}, ops, 64)
    reader = TensorReader(head.further, head.decoder.config, ops)
    return _correction(reader, ops, head.block, decoder), decoder


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="PACELINE_SPECFORGE_PYTHON names no interpreter")
def test_specforge_computes_the_same(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    features = fresh_features(tokens.tolist(), TAPS).reshape(ROWS, len(TAPS) * HIDDEN)
    given = {
        "features": features,
        "input_ids": tokens,
        "anchors": torch.tensor(ANCHORS),
        "embedding": toy_tensors()["model.embed_tokens.weight"],
    }
    for form, config in FORMS.items():
        write_head(tmp_path / form / "head", as_domino(config), domino_tensors(5))
        save_file(given, tmp_path / form / "inputs")
    command = [PYTHON, str(SCRIPT), *(str(tmp_path / form) for form in FORMS)]
    subprocess.run(command, check=True, timeout=280)
    for form, config in FORMS.items():
        found = load_file(tmp_path / form / "logits")
        for backend in BACKENDS:
            check_logits(tmp_path / form / "head", given, found, backend)
        drafter = following(built, config, domino_tensors(5), num_speculative_tokens=SIZE - 1)
        for anchor, chain in zip(ANCHORS, found["tokens"].tolist(), strict=True):
            (tree,) = propose(drafter, make_request(anchor, tokens[: anchor + 1].tolist()))
            assert tree.token_ids == chain, form


def check_logits(folder: Path, given: Any, found: Any, backend: str) -> None:
    """Of all rows that predict, after the tokens of the chain that was found."""
    head, ops = load_head(str(folder)), resolve_ops("float32", "cpu", True, backend)
    assert head.block is not None
    correction, decoder = corrected(folder, ops)
    runner = ModelRunner(
        decoder, KVCache(ops.kv_memory(decoder.config, 200, "float32"), prefix_caching=False)
    )
    runner.taps = (TOY.num_layers + 1,)
    fuse, tokens = _fusion(head, ops, len(TAPS), HIDDEN), given["input_ids"]
    known = fuse(given["features"].view(ROWS, len(TAPS), HIDDEN).numpy())
    result = blocks(runner, tokens, known, SIZE)
    assert result.features is not None
    hidden = result.features[:, 0].reshape(len(ANCHORS), SIZE, HIDDEN)
    logits = result.logits.reshape(len(ANCHORS), SIZE, VOCAB)
    for index, anchor in enumerate(ANCHORS):
        read = [int(tokens[anchor]), *found["tokens"][index].tolist()]
        state = correction.first_state(read[0], hidden[index, : head.block.first_row])[None]
        for level, row in enumerate(range(head.block.first_row, SIZE)):
            ours = logits[index, row].copy()
            before = correction.rows_of([read[level]])
            latent, state = correction.latent(before, hidden[index, row : row + 1], state)
            if level >= correction.first_level:
                ours = correction.corrected(ours[None], latent)[0]
            assert np.abs(ours - found["logits"][index, row].numpy()).max() < 1e-4
