"""How many requests of a hybrid model run at once, and what is said where they are fewer."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from paceline.backends.rows.reference import ReferenceOps
from paceline.build.build import DRAFT_SHARE, open_states
from paceline.cache import memory_needs
from paceline.config import EngineConfig
from paceline.models.layer_sizes import DELTA, Recurrent
from tests.toy import TOY, suffix_config

SIZES = {"heads": 4, "groups": 4, "key_dim": 64, "value_dim": 64}
SHAPE = replace(TOY, recurrent=Recurrent(DELTA, (True, True), kernel=4, **SIZES))
WANTED = 40


def lanes(budget: int, drafts: int) -> int:
    config = EngineConfig(max_num_seqs=WANTED, speculative=(suffix_config(),))
    states, num_bytes = open_states(SHAPE, config, ReferenceOps("float32"), budget, drafts)
    assert states is not None
    assert 0 < num_bytes <= budget - drafts
    return states.memory.num_lanes


@pytest.mark.parametrize("share", [0, DRAFT_SHARE])
def test_a_warning_says_how_much_memory_is_enough(
    share: int, caplog: pytest.LogCaptureFixture
) -> None:
    def drafts(budget: int) -> int:
        return budget // share if share else 0

    some = lanes(8 << 20, drafts(8 << 20))
    assert 1 < some < WANTED
    (warned,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert f"at most {some} requests run at once, not {WANTED} (--max-num-seqs): of 8 MB" in warned
    (said,) = re.findall(r"--kv-cache-memory (\d+)M is enough", warned)
    caplog.clear()
    enough = int(said) << 20
    assert lanes(enough, drafts(enough)) == WANTED
    assert not caplog.records
    less = enough - (2 << 20)
    assert lanes(less, drafts(less)) < WANTED


def test_memory_that_keeps_files_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_needs, "memory", lambda: (9 << 30, 5 << 30))
    assert memory_needs.free_memory() == 5 << 30
    monkeypatch.setattr(memory_needs, "memory", lambda: (None, None))
    assert 0 < memory_needs.free_memory() != 5 << 30
