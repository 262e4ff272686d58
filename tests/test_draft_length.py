"""Speed against draft length: the drafts' sizes, what is summed up, and one short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.llm import embedded_model
from paceline.models.hf_config import config_from_hf
from paceline.workbench.profile_machine import Work
from tests.programs import FOLDER, ROOT, module


@pytest.mark.parametrize("size", ["0.5b", "tiny"])
def test_drafts_have_their_share_of_the_targets_bytes(size: str) -> None:
    inflate, models = module("inflate"), module("draft_length_models")

    def weights(role: str, shape: Any) -> int:
        config = json.loads((Path(embedded_model(role)) / "config.json").read_text())
        large = config_from_hf(inflate.inflated_config(config, shape))
        return Work.of(large, "int8", "float32").weight_bytes

    target = weights("target", inflate.PAIRS[size].target)
    for share, shape in models.DRAFTS[size].items():
        wanted = int(share.removeprefix("1/"))
        assert target / weights("draft", shape) == pytest.approx(wanted, rel=0.02)


def rows(speedups: Mapping[Any, float], draft: str = "1/9", text: str = "code") -> list[Any]:
    return [
        {
            "draft": draft,
            "text": text,
            "kind": "simulated",
            "K": length,
            "speedup": value,
            "tokens_per_second": 10 * value,
            "accepted_share": 0.5,
            "nodes_per_step": 1.5,
        }
        for length, value in speedups.items()
    ]


def test_the_crossover_lies_beyond_the_best_length() -> None:
    report = module("draft_length_report")
    # A cliff: narrow drafts are slower than plain decoding, wider ones are not.
    found = rows({0: 1.0, 1: 0.8, 2: 1.2, 3: 1.5, 4: 1.1, 8: 0.9, 16: 0.5, "planner": 1.4})
    ((curve, planner),) = report.curves(found).values()
    assert report.best_length(curve) == 3
    assert report.crossover(curve) == 8
    assert planner["speedup"] == 1.4
    ((always, _),) = report.curves(rows({0: 1.0, 4: 1.2, "planner": 1.0})).values()
    assert report.crossover(always) is None
    ((never, _),) = report.curves(rows({0: 1.0, 1: 0.9, "planner": 1.0})).values()
    assert (report.best_length(never), report.crossover(never)) == (0, 1)


def test_targets_and_tables() -> None:
    report = module("draft_length_report")
    found = rows({0: 1.0, 4: 2.0, "planner": 1.9}) + rows({0: 1.0, 4: 0.5, "planner": 0.98}, "1/5")
    values = [target.value for target in report.targets(found)]
    assert values == pytest.approx([(0.95 * 0.98) ** 0.5, 0.95, 0.98])
    point = {"draft": "1/9", "text": "code", "kind": "measured", "K": 4, "tokens_per_second": 21.0}
    point |= {"speedup": 2.2, "simulated_speedup": 2.0}
    found.append(point)
    assert report.targets(found)[-1].value == pytest.approx(0.1)
    summary, lengths, points = report.tables(found)
    first, second = (" ".join(line.split()) for line in summary.splitlines()[2:])
    assert first == "1/9 code 10.0 4 20.0 2.00 50% - 19.0 1.90 0.95 1.50"
    assert second == "1/5 code 10.0 0 10.0 1.00 - 4 9.8 0.98 0.98 1.50"
    assert lengths.splitlines()[3].split() == ["K", "=", "4", "20.0", "5.0"]
    assert points.splitlines()[-1].split()[-1] == "+10.0%"
    # A failed replay takes its pair out of the summary, and a failed run has no number.
    found[1] = {"error": "x", **{key: found[1][key] for key in ("draft", "text", "kind", "K")}}
    found[-1] = {"error": "broken", **{key: point[key] for key in ("draft", "text", "kind", "K")}}
    assert len(report.curves(found)) == 1
    assert report.targets(found)[-1].value is None
    assert "broken" in report.tables(found)[-1]


def test_a_page_shows_what_is_saved_and_fewer_lengths(tmp_path: Path) -> None:
    report, render = module("draft_length_report"), module("render")
    page = "<!-- begin: draft_length -->\n<!-- end: draft_length -->\n"
    assert render.rendered(page, tmp_path) == page, "nothing was saved"
    found = rows({**{length: 2.0 - length / 32 for length in range(33)}, "planner": 1.9})
    made = module("report").Report("draft_length", {"prompts": "public"}, results=found)
    made.targets = report.targets(found)
    file = tmp_path / "device" / "draft_length.json"
    file.parent.mkdir()
    file.write_text(json.dumps(made.document("cpu")))
    text = render.rendered(page, tmp_path)
    assert "public prompts" in text
    assert f"planner / best K, worst | {1.9 / 2:.2f}" in text
    lengths = [int(line.split()[2]) for line in text.splitlines() if line.startswith("K = ")]
    assert lengths == list(report.SHOWN)
    assert len(report.tables(found)[1].splitlines()) == 2 + 33 + 1
    assert render.rendered(text, tmp_path) == text


def test_only_decoding_is_timed() -> None:
    runs = module("draft_length_runs")

    def output(tokens: int, error: Exception | None = None) -> Any:
        return SimpleNamespace(token_ids=[1] * tokens, error=error)

    steps = [(1.0, []), (5.0, [output(1)]), (6.0, [output(3)]), (8.0, [output(2)])]
    served = SimpleNamespace(steps=steps)
    assert runs.decoding(served) == {"decode_seconds": 3.0, "decode_tokens": 5}
    steps.append((9.0, [output(0, ValueError("broken"))]))
    with pytest.raises(ValueError, match="broken"):
        runs.decoding(served)


@pytest.mark.parametrize(("length", "wanted"), [(0, (False, None)), (8, (True, 8))])
def test_a_length_is_asked_for_by_the_request(length: int, wanted: tuple[Any, ...]) -> None:
    options = SimpleNamespace(measured_tokens=4, temperature=0.0)
    wish = module("draft_length_runs").wish_of(length, options).speculative
    assert (wish.enabled, wish.num_speculative_tokens) == wanted


@pytest.mark.slow
def test_the_program(tmp_path: Path) -> None:
    sizes = "--size tiny --num-prompts 1 --max-tokens 8 --profile-seconds 0.01 --measured-tokens 4"
    command = [sys.executable, str(FOLDER / "draft_length.py"), "--quick", "--json", *sizes.split()]
    run = subprocess.run(
        [*command, "--repeat", "1", "--prompts", "embedded", "--traces", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert {row["draft"] for row in document["results"]} == {"1/28", "1/9", "1/5"}
    assert {row["kind"] for row in document["results"]} == {"simulated", "measured"}
    assert all(target["value"] is not None for target in document["targets"])
    assert str(ROOT) not in run.stdout
