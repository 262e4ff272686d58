"""From configurations to proposers: what is built, what is left out, and what is said about it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cache.memory_needs import bytes_per_block
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigError, ModelLoadError, PacelineError
from paceline.loading.checkpoint import Checkpoint
from paceline.proposers import build_proposers
from paceline.proposers.base import TargetInfo
from tests.arrays import arrays
from tests.proposers.drive import make_request, propose
from tests.toy import TOY, VOCAB, toy_folder, toy_tensors

LOOKUP = SpeculativeConfig(method="prompt_lookup")
TARGET = TargetInfo(
    vocab_size=VOCAB,
    fingerprint=None,
    device="cpu",
    max_model_len=64,
    max_num_seqs=2,
    kv_bytes=1 << 20,
    backend="reference",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A draft model on disk."""
    return toy_folder(tmp_path)


def draft(folder: Path, **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", model=str(folder), dtype="float32", **options)


def test_proposers_come_in_the_order_of_their_configurations(folder: Path) -> None:
    configs = [draft(folder), LOOKUP]
    built = build_proposers(configs, TARGET, strict=True)
    assert [proposer.name for proposer in built] == ["draft_model", "prompt_lookup"]
    assert [proposer.config for proposer in built] == configs
    assert build_proposers([], TARGET, strict=True) == []


def test_a_loaded_draft_drafts(folder: Path) -> None:
    (proposer,) = build_proposers([draft(folder, min_accept_prob=0.0)], TARGET, strict=True)
    (tree,) = propose(proposer, make_request(1, [1, 2, 3]))
    tree.validate(VOCAB)
    assert len(tree) == 4


def num_served(*configs: SpeculativeConfig, **target: Any) -> list[int]:
    """How many requests of a block of KV each draft model has memory for."""
    built = build_proposers(configs, dataclasses.replace(TARGET, **target), strict=True)
    requests = [make_request(i, range(8)) for i in range(20)]
    return [sum(len(tree) > 0 for tree in propose(each, *requests, depth=4)) for each in built]


def test_kv_memory_is_shared_by_all_drafts_and_never_more_than_useful(folder: Path) -> None:
    block = bytes_per_block(TOY, "float32")  # one of them is reserved
    config = draft(folder)
    assert num_served(config, kv_bytes=7 * block) == [6]
    assert num_served(config, config, kv_bytes=7 * block) == [2, 2]
    assert num_served(config, kv_bytes=1000 * block) == [2 * 5]  # two of 64 tokens and a draft


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ({"vocab_size": VOCAB + 1}, ConfigError, f"has {VOCAB} tokens and the target {VOCAB + 1}"),
        ({"kv_bytes": 100}, ConfigError, "raise --kv-cache-memory"),
    ],
)
def test_a_draft_that_does_not_fit_is_left_out_or_refused(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    target: dict[str, Any],
    error: type[PacelineError],
    message: str,
) -> None:
    info = dataclasses.replace(TARGET, **target)
    built = build_proposers([draft(folder), LOOKUP], info, strict=False)
    assert [proposer.name for proposer in built] == ["prompt_lookup"]
    assert message in caplog.text
    assert str(folder) in caplog.text
    with pytest.raises(error, match=message):
        build_proposers([draft(folder), LOOKUP], info, strict=True)


def test_a_draft_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = draft(tmp_path / "nothing")
    assert build_proposers([config], TARGET, strict=False) == []
    assert "decoding goes on without" in caplog.text
    with pytest.raises(ModelLoadError):
        build_proposers([config], TARGET, strict=True)


def test_weights_that_do_not_fit_the_configuration(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"intermediate_size": 48}))
    assert build_proposers([draft(folder)], TARGET, strict=False) == []


def test_equal_sizes_are_not_equal_vocabularies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Tokens:
        fingerprint = "draft"

    def load(source: str, **options: Any) -> Checkpoint:
        assert options == {"with_tokenizer": True}
        return Checkpoint(TOY, arrays(toy_tensors()), Tokens(), "toy")  # type: ignore[arg-type]

    monkeypatch.setattr("paceline.proposers.draft_model.loading.load_checkpoint", load)
    config = SpeculativeConfig(method="draft_model", model="toy", dtype="float32")
    for fingerprint, count in (("draft", 1), ("target", 0)):
        info = dataclasses.replace(TARGET, fingerprint=fingerprint)
        assert len(build_proposers([config], info, strict=False)) == count
    assert f"toy has {VOCAB} tokens, and the target {VOCAB} other ones" in caplog.text


def test_the_registry_imports_no_model_code() -> None:
    code = (
        "import sys, paceline.proposers; from paceline.config.speculative import plugins\n"
        "plugins(); assert 'torch' not in sys.modules"
    )
    paths = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": paths})
