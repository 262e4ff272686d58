"""Foreign measurements: read as their authors mean them, and refused by line where they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ProfileError
from paceline.profiling.profile_store import import_tables


def run(pl: float, t_tg: float, pp: Any = 128, tg: int = 64, **more: Any) -> str:
    """A line as llama-batched-bench writes it."""
    rest = {"n_kv_max": 8192, "n_batch": 2048, "n_ubatch": 512, "is_pp_shared": 0, "n_threads": 8}
    sizes = {"pp": pp, "tg": tg, "pl": pl, "n_kv": 1}
    speeds = {"t_pp": 0.5, "speed_pp": 1.0, "speed_tg": 1.0, "t": 0.5 + t_tg, "speed": 1.0}
    return json.dumps({**rest, **sizes, **speeds, "t_tg": t_tg, **more})


def imported(tmp_path: Path, *lines: str) -> Any:
    path = tmp_path / "bench.jsonl"
    path.write_text("\n".join(lines))
    return import_tables(path)


def test_batched_bench(tmp_path: Path) -> None:
    lines = ["", run(1, 0.64), run(2, 0.704), run(8, 1.28), "", run(1, 1.28, pp=1024), ""]
    (table,) = imported(tmp_path, *lines)
    assert (table.name, table.is_relative) == ("bench", False)
    assert table.contexts == [128 + 32, 1024 + 32]
    assert [table.milliseconds(w, 160) for w in (1, 2, 8)] == pytest.approx([10, 11, 20])
    assert table.milliseconds(1, 1056) == pytest.approx(20)
    assert table.cost_ratio(8, 160) == pytest.approx(2.0)


def test_repeated_runs_count_by_their_median(tmp_path: Path) -> None:
    (table,) = imported(tmp_path, run(1, 0.64), run(1, 6.4), run(1, 0.704))
    assert table.milliseconds(1) == pytest.approx(11)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([run(1, 1.0), "main: n_kv_max = 8192"], "line 2: not JSON"),
        ([run(1, 1.0), run(2, 1.0)[:-9]], "line 2: not JSON"),
        ([run(1, 1.0), "[1]"], "line 2: a run must be a JSON object"),
        ([run(1, 1.0), "", run(0, 1.0)], "line 3: pl is 0"),
        ([run(1, 1.0), run(2, 1.0, tg=0)], "line 2: tg is 0"),
        ([run(1, 0.0)], "line 1: t_tg is 0.0"),
        ([run(1, -1.0)], "line 1: t_tg is -1.0"),
        ([run(1, float("nan"))], "line 1: t_tg is nan"),
        ([run(1.5, 1.0)], "line 1: pl is 1.5"),
        ([run(True, 1.0)], "line 1: pl is True"),
        ([run(1, 1.0, pp="8")], "line 1: pp is '8'"),
        ([run(1, 1.0, is_tg_separate=1)], "line 1: is_tg_separate"),
        (['{"pp": 1, "pl": 1}'], "line 1: tg, t_tg is missing"),
        ([run(2, 1.0)], "no run with pl 1 at context 160"),
        ([], "no run with pl 1"),
        (["[" * 100_000], "line 1: not"),
    ],
)
def test_malformed_runs(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        imported(tmp_path, *lines)


# --- curves --------------------------------------------------------------------------------------

CURVE = {"name": "GPU", "cost_ratio": [1.0, 0.99, 1.5], "tokens_per_second_at_1": 20.0}


def curves(tmp_path: Path, *items: Any) -> Any:
    return imported(tmp_path, json.dumps({"source": "here", "curves": list(items)}, indent=1))


def test_curves(tmp_path: Path) -> None:
    absolute = {**CURVE, "draft_step_ratio": 0.1}
    relative = {"name": "CPU", "cost_ratio": [1, 3], "draft_step_ratio": None}
    draft = {**CURVE, "name": "both", "draft_step_ratio": 0.2, "draft_cost_ratio": [1.0, 0.9]}
    found = {table.name: table for table in curves(tmp_path, absolute, relative, draft)}
    assert list(found) == ["GPU", "GPU: draft", "CPU", "both", "both: draft"]
    gpu = found["GPU"]
    assert [gpu.milliseconds(w) for w in (1, 2, 3)] == pytest.approx([50, 49.5, 75])
    assert found["GPU: draft"].milliseconds(1) == pytest.approx(5)
    assert (found["CPU"].is_relative, gpu.is_relative) == (True, False)
    assert found["CPU"].milliseconds(2) == 3
    assert found["both: draft"].milliseconds(2) == pytest.approx(9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "no name"),
        ({}, "a curve 'GPU' before"),
        ({"cost_ratio": None}, "cost_ratio must be a list"),
        ({"cost_ratio": []}, "cost_ratio must be a list"),
        ({"cost_ratio": [1.0, 0.0]}, "cost_ratio of width 2 is 0.0"),
        ({"cost_ratio": [1.0, "x"]}, "cost_ratio of width 2 is 'x'"),
        ({"tokens_per_second_at_1": 0}, "tokens_per_second_at_1 is 0"),
        ({"draft_step_ratio": float("inf")}, "draft_step_ratio is inf"),
        ({"name": "x" * 1000}, "name must have"),
    ],
)
def test_malformed_curves(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=f"curve 2: .*{message}"):
        curves(tmp_path, CURVE, {**CURVE, **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"curves": []}', "there is no curve"),
        ('{"curves": [\n{"name": \n]}', "line 3: not JSON"),
        ('{"curves": [\n{"name": "a", "cost_ratio": [1]}\n', "not JSON"),
        ('{"curves": [\n{"name": "a", "cost_ratio": [1]},\n5]}', "curve 2: a curve must be"),
    ],
)
def test_malformed_files_of_curves(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        imported(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("binary", "missing", "."):
        with pytest.raises(ProfileError, match="cannot be read"):
            import_tables(tmp_path / name)


def test_published_curves(shared_data: Path) -> None:
    path = shared_data / "cost_curves.json"
    published = json.loads(path.read_text())["curves"]
    found = {table.name: table for table in import_tables(path)}
    for curve in published:
        table = found[curve["name"]]
        ratios = [table.cost_ratio(width) for width in range(1, len(curve["cost_ratio"]) + 1)]
        assert ratios == pytest.approx(curve["cost_ratio"])
        if curve["draft_step_ratio"]:
            step = found[f"{table.name}: draft"].milliseconds(1)
            assert step / table.milliseconds(1) == pytest.approx(curve["draft_step_ratio"])
