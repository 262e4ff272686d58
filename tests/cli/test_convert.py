"""``paceline convert``: the embedded models, packed, say what they say unpacked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.api.llm import embedded_model
from paceline.backends.native.native import why_not_native
from paceline.config import PACKED_DTYPES
from tests.cli.conftest import Result
from tests.disks import full_disk

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
Cli = Callable[..., Result]
PROMPT = "def add(a, b):\n    "
PARAMS = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_the_embedded_pair(tmp_path: Path, cli: Cli, dtype: str) -> None:
    """Target and draft from packed folders: the same tokens, and the same drafts accepted."""
    for role in ("target", "draft"):
        result = cli("convert", embedded_model(role), tmp_path / role, "--dtype", dtype)
        assert result.code == 0, result.err
        assert f"as {dtype}, " in result.out

    def run(target: str, draft: str, **options: Any) -> Any:
        speculative = {"method": "draft_model", "model": draft, **options}
        with LLM(
            target,
            dtype=options.get("dtype", "auto"),
            strict=True,
            num_threads=1,
            planner="fixed",  # whose counters do not depend on the clock
            kv_cache_memory=64 << 20,
            speculative_config=speculative,
        ) as llm:
            assert llm.config.dtype == dtype
            return llm.generate(PROMPT, PARAMS)

    before = run(embedded_model("target"), embedded_model("draft"), dtype=dtype)
    after = run(str(tmp_path / "target"), str(tmp_path / "draft"))
    assert after.token_ids == before.token_ids
    assert after.completions[0].counters == before.completions[0].counters


def test_what_it_says_to_mistakes(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    draft = embedded_model("draft")
    for arguments, words in (
        (
            (draft, tmp_path / "a", "--dtype", "float8"),
            "allowed: auto, float32, bfloat16, float16, file, int8, int4",
        ),
        ((draft, tmp_path / "full"), "not an empty folder"),
        ((tmp_path / "nothing", tmp_path / "a"), "no model"),
        ((draft, tmp_path / "full" / "a" / "b"), "cannot write"),
    ):
        result = cli("convert", *arguments)
        assert result.code == 2
        assert words in result.err
        assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, cli: Cli, exists: bool) -> None:
    folder = tmp_path / "packed"
    if exists:
        folder.mkdir()
    with full_disk():
        result = cli("convert", embedded_model("draft"), folder)
    assert result.code == 2
    assert result.err.startswith(f"error: cannot write {folder}: ")
    assert result.err.count("\n") == 1
    assert list(tmp_path.rglob("*")) == ([folder] if exists else [])
    assert cli("convert", embedded_model("draft"), folder).code == 0
