"""The benchmarks' common parts, and that each benchmark runs and ends with its JSON line."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.programs import FOLDER, ROOT, module


def options(tmp_path: Path, **values: Any) -> argparse.Namespace:
    found = {"device": "cpu", "json": False, "output": None, "save": False}
    return argparse.Namespace(**found | values)


# Samples


def test_an_arm_that_raises_is_a_failed_sample_and_no_number() -> None:
    harness = module("harness")

    def fail(item: object) -> int:
        raise RuntimeError("broken")

    arms = {"good": lambda item: item, "bad": fail}
    samples = harness.take_turns(arms, [1, 2], 1, lambda result: {"tokens": result})
    bad = [sample for sample in samples if sample.arm == "bad"]
    assert [sample.failed for sample in bad] == [True, True]
    assert all(sample.seconds is None and not sample.facts for sample in bad)
    assert "broken" in bad[0].error
    assert all(sample.seconds >= 0 for sample in samples if sample.arm == "good")


def test_a_result_that_cannot_be_counted_is_a_failed_sample() -> None:
    sample = module("harness").run_sample("arm", 0, lambda: None, lambda result: result["tokens"])
    assert sample.failed
    assert sample.seconds is None


def test_turns_alternate() -> None:
    arms = {"a": lambda item: None, "b": lambda item: None}
    samples = module("harness").take_turns(arms, ["x", "y"], 2, lambda result: {})
    assert "".join(sample.arm for sample in samples) == "abbaabba"
    assert [sample.item for sample in samples] == list("xxyyxxyy")


# Statistics


def sample(arm: str, item: int, repeat: int, seconds: float | None) -> Any:
    error = "broken" if seconds is None else None
    return module("harness").Sample(arm, item, repeat, seconds, {}, error)


def test_ratio_of_known_durations() -> None:
    ratio = module("harness").paired_ratio([[(2.0, 1.0), (2.0, 1.0)], [(4.0, 2.0), (4.0, 2.0)]])
    assert (ratio.value, ratio.low, ratio.high, ratio.median) == (2.0, 2.0, 2.0, 2.0)
    assert ratio.pairs == 4


def test_interval_contains_the_ratio_and_widens_with_noise() -> None:
    harness = module("harness")
    quiet = harness.paired_ratio([[(2.0, 1.0), (2.02, 1.0)]] * 3)
    noisy = harness.paired_ratio([[(2.0, 1.0), (3.0, 1.0), (1.5, 1.0)]] * 3)
    assert quiet.low <= quiet.value <= quiet.high
    assert noisy.low <= noisy.value <= noisy.high
    assert noisy.high - noisy.low > quiet.high - quiet.low


def test_ratio_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no pair"):
        module("harness").paired_ratio([[], []])


def test_pairs_leave_out_turns_with_a_failure() -> None:
    samples = [
        *(sample("plain", 0, repeat, 2.0) for repeat in (0, 1)),
        sample("fast", 0, 0, None),
        sample("fast", 0, 1, 1.0),
    ]
    assert module("harness").pair_up(samples, "plain", "fast") == [[(2.0, 1.0)]]


# Targets


@pytest.mark.parametrize(
    ("value", "bound", "met"),
    [
        (1.5, "at least", True),
        (1.49, "at least", False),
        (1.5, "at most", True),
        (1.51, "at most", False),
        (None, "at most", False),
        (None, "at least", False),
        (float("nan"), "at least", False),
    ],
)
def test_targets(value: float | None, bound: str, met: bool) -> None:
    target = module("harness").Target("name", value, 1.5, bound)
    assert target.met is met
    document = json.loads(json.dumps(target.to_json(), allow_nan=False))
    assert document["met"] is met
    assert {"name", "value", "target"} <= document.keys()


def test_an_unknown_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        module("harness").Target("name", 1.0, 1.5, "around")


def test_a_failed_sample_leaves_its_target_without_a_value() -> None:
    speedup = module("speedup")
    key = {"kind": "code", "requests": 1, "temperature": 0.0}
    samples = [sample(module("harness").PLAIN, 0, 0, 2.0), sample(speedup.DEFAULT, 0, 0, None)]
    row = module("harness").against_plain(samples, speedup.DEFAULT)
    assert row == {"arm": speedup.DEFAULT, "error": "broken"}
    assert [target.value for target in speedup.targets([{**key, **row}])] == [None, None]


def test_the_overhead_target_is_judged_on_the_real_forward() -> None:
    rows = [
        {
            "case": "greedy, prompt_lookup",
            "requests": 3,
            "forward": forward,
            "host_us_with_draft": x,
        }
        for forward, x in (("real", 181.0), ("scripted", 90.0))
    ]
    targets = module("step_overhead").targets(rows)
    assert [(t.value, t.target, t.met) for t in targets] == [(181.0, 180.0, False)]


def test_a_drafted_step_of_a_larger_model_is_compared_with_a_plain_one() -> None:
    benchmark = module("step_overhead")
    row = {"requests": 1, "forward": "real"}
    phases = {"phases_with_draft_us": {"plan": 30.0, "propose": 70.0}}
    drafted = {**row, "case": benchmark.DRAFTED, "host_us_with_draft": 161.0, **phases}
    plain = {**row, "case": benchmark.PLAIN, "host_us": 40.0}
    (target,) = benchmark.targets([drafted, plain])
    assert (target.value, target.target, target.met) == (121.0, 120.0, False)
    assert benchmark.targets([plain]) == []
    assert "| 70 |" in benchmark.tables([drafted, plain])[1]


# The report


def test_the_json_line_is_last_and_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = module("harness")
    file = tmp_path / "deep" / "out.json"
    found = report.Report("name", {"quick": True}, [sample("a", 0, 0, 1.0)], [{"row": 1}])
    found.targets = [report.Target("t", 1.0, 2.0)]
    assert found.finish(options(tmp_path, output=file), ["a table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert "a table" in lines
    assert json.loads(file.read_text()) == document
    assert document["targets"] == [
        {"name": "t", "value": 1.0, "target": 2.0, "bound": "at most", "met": True}
    ]
    wanted = {"benchmark", "device", "commit", "date", "machine", "config", "results", "samples"}
    assert wanted <= document.keys()
    assert str(ROOT) not in lines[-1]


def test_with_json_there_is_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = module("harness").Report("name", {}, [sample("a", 0, 0, None)])
    assert found.finish(options(tmp_path, json=True), ["a table"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0])["num_failed"] == 1


# Prompts


def test_embedded_prompts_serve_where_the_public_ones_are_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TEST_DATA", str(tmp_path / "absent"))
    prompts = module("prompt_sets").load_prompts()
    assert prompts.source == "embedded"
    assert all(prompts.kind(kind) for kind in ("code", "prose", "edit"))


def test_public_prompts(shared_data: Path) -> None:
    prompts = module("prompt_sets").load_prompts("public")
    assert {"humaneval", "mt_bench", "spec_bench", "gsm8k"} < prompts.sets.keys()
    assert all(text.strip() for texts in prompts.sets.values() for text in texts)
    assert all(len(texts) >= 4 for texts in prompts.sets.values())


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(ValueError, match="embedded"):
        module("prompt_sets").load_prompts("private")


def test_spread_reaches_through_the_whole_set() -> None:
    spread = module("prompt_sets").spread
    assert spread(range(10), 3) == [0, 3, 6]
    assert spread(range(2), 5) == [0, 1]


def test_configurations_name_no_folder_of_this_machine() -> None:
    sets, acceptance = module("proposer_sets"), module("research.acceptance")
    configs = [*acceptance.for_acceptance().values(), *sets.for_speedup().values()]
    assert str(ROOT) not in json.dumps([sets.described(config) for config in configs])


# Pages


def test_render_fills_and_checks_a_page(tmp_path: Path) -> None:
    render, page = module("render"), tmp_path / "page.md"
    page.write_text("before\n<!-- begin: speedup -->\nstale\n<!-- end -->\nafter\n")
    arguments = ["--results", str(tmp_path), str(page)]
    assert render.main(["--check", *arguments]) == 1
    assert "stale" in page.read_text()
    assert render.main(arguments) == 0
    assert render.main(["--check", *arguments]) == 0
    text = page.read_text()
    assert render.NOTHING.strip() in text
    assert "stale" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")


@pytest.mark.parametrize("end", ["<!-- end -->", "<!-- end: speedup -->"])
def test_render_leaves_an_empty_block_empty_without_results(tmp_path: Path, end: str) -> None:
    page = f"<!-- begin: speedup -->\n{end}\n"
    assert module("render").rendered(page, tmp_path) == page


def test_render_puts_the_latest_results_of_models_side_by_side(tmp_path: Path) -> None:
    row = {"kind": "code", "temperature": 0.0, "requests": 1, "arm": "default", "identical": True}
    row |= {"plain_tokens_per_second": 100.0, "tokens_per_second": 150.0}

    def save(model: str, device: str, date: str, ratio: float) -> None:
        document = {"benchmark": f"speedup-{model}", "device": device, "date": date}
        interval = {"value": ratio, "low": 1.0, "high": 2.0}
        control = {**row, "arm": "plain again", "speedup": {"value": 0.99, "low": 0.9, "high": 1.1}}
        document["results"] = [{**row, "speedup": interval}, control]
        (tmp_path / device).mkdir(exist_ok=True)
        (tmp_path / device / f"speedup-{model}.json").write_text(json.dumps(document))

    def shown() -> list[str]:
        return module("render").block("gains", tmp_path).strip().splitlines()

    save("smollm2", "a", "2026-11-02", 1.5)
    save("smollm2", "b", "2026-11-01", 1.75)
    save("gemma3", "b", "2026-11-01", 1.25)
    save("inflated", "b", "2026-11-01", 3.0)
    lines = shown()
    assert lines[0] == "| speed-up | Gemma 3 270M, b | SmolLM2-135M-Instruct, a |"
    assert lines[2] == "| code | 1.25 (1.00 to 2.00) | 1.50 (1.00 to 2.00) |"
    assert lines[-1] == "| control (code) | 0.99 (0.90 to 1.10) | 0.99 (0.90 to 1.10) |"
    assert lines[3] == "| prose | - | - |"
    save("smollm2", "b", "2026-11-03", 1.75)
    assert shown()[0] == "**b**"


def test_render_refuses_unknown_markers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step_overhead"):
        module("render").block("coffee", tmp_path)


def test_pages_show_the_results_that_are_saved() -> None:
    assert module("render").main(["--check"]) == 0


def test_the_pages_of_results_are_rendered() -> None:
    pages = module("render").PAGES
    assert {ROOT / "README.md", ROOT / "docs/results/speed.md"} <= set(pages)


# Whole programs


def names_of(program: Path) -> str:
    return ".".join(program.relative_to(FOLDER).with_suffix("").parts)


PROGRAMS = {names_of(each): each for each in [*FOLDER.glob("*.py"), *FOLDER.glob("research/*.py")]}


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_every_program_finds_what_it_imports(name: str) -> None:
    """Within functions too: a benchmark that takes hours should not end with an ImportError."""
    tree = ast.parse(PROGRAMS[name].read_text(encoding="utf-8"))
    imports = [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and each.module]
    try:
        module(name)
        found = [(each, module(str(each.module))) for each in imports]
    except ModuleNotFoundError as error:
        if str(error.name).split(".")[0] in {"paceline", "research", *PROGRAMS}:
            raise
        pytest.skip(f"{error.name} is not installed")
    for each, source in found:
        missing = [alias.name for alias in each.names if not hasattr(source, alias.name)]
        assert not missing, f"{each.module} has no {', '.join(missing)}"


EMBEDDED = ("--prompts", "embedded")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("step_overhead", [*EMBEDDED, "--requests", "1,2", "--steps", "5"]),
        (
            "research/acceptance",
            [*EMBEDDED, "--num-prompts", "1", "--max-tokens", "8", "--sets", "code"],
        ),
        (
            "speedup",
            [*EMBEDDED, "--num-prompts", "1", "--max-tokens", "8", "--kinds", "code"],
        ),
        ("structured", ["--num-prompts", "1", "--max-tokens", "32", "--shapes", "label (choice)"]),
    ],
)
def test_benchmark_runs_and_its_results_can_be_shown(
    tmp_path: Path, name: str, arguments: list[str]
) -> None:
    program = FOLDER / f"{name}.py"
    file = tmp_path / "device" / f"{program.stem}.json"
    command = [sys.executable, str(program), "--quick"]
    run = subprocess.run(
        [*command, *arguments, "--output", str(file)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", FOLDER)))},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout.splitlines()[-1])
    assert document["benchmark"] == program.stem
    assert document["num_failed"] == 0
    assert document["samples"]
    assert str(ROOT) not in run.stdout
    identical = [t for t in document["targets"] if "identical" in t["name"]]
    assert all(target["met"] for target in identical)
    assert "| ---" in module("render").block(program.stem, tmp_path)


# Options


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("speedup", "--prompts embedded --kinds WRONG", "'WRONG'; allowed: code, prose, edit"),
        ("speedup", "--prompts embedded --kinds mt_bench", "'mt_bench'; allowed: code, prose"),
        ("speedup", "--proposers WRONG", "allowed: prompt_lookup, draft_model, default"),
        ("speedup", "--model x --proposers suffix", "allowed: prompt_lookup, draft_model"),
        ("speedup", "--model x --proposers default", "are for the embedded model"),
        ("ablation", "--mechanisms WRONG", "'WRONG' is unknown; allowed: exploring proposers"),
        ("fidelity", "x.gguf --made WRONG", "'WRONG' is unknown; allowed: wide, outliers"),
        ("fidelity", "x.gguf --dtypes WRONG", "'WRONG' is unknown; allowed: auto, file"),
        ("heads", "--sets WRONG", "'WRONG' is unknown; allowed: code, prose, edit, humaneval"),
        ("never_slower", "--workloads WRONG", "'WRONG' is unknown; allowed: code, mt_bench"),
        ("never_slower", "--concurrency 3", "'3' is unknown; allowed: 1, 2, 4"),
        ("never_slower", "--quick --workloads code --concurrency 32", "no cell has these"),
        ("never_slower_replayed", "--pairs WRONG", "allowed: embedded, inflated"),
        ("never_slower_replayed", "--workloads WRONG", "allowed: code, mt_bench"),
        ("never_slower_replayed", "--concurrency 3", "allowed: 1, 2, 4"),
        ("research.acceptance", "--sets WRONG", "allowed: code, prose, edit"),
    ],
)
def test_a_wrong_name_is_told_with_those_that_are_allowed(
    capsys: pytest.CaptureFixture[str], program: str, arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        module(program).options_of(arguments.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


# Serving


def test_a_way_of_serving_that_failed_has_no_number() -> None:
    serving = module("serving_overhead")
    good = sample(serving.INSIDE, (1, 1), 0, 1.0)
    samples = [good, sample(serving.HTTP, (1, 1), 0, None)]
    row = serving.summary(samples, serving.HTTP, (1, 1))
    assert row["error"] == "broken"
    assert "ratio" not in row
    options = argparse.Namespace(concurrency=[1], max_tokens=1)
    assert [target.value for target in serving.targets([row], options)] == [None, None, None]


@pytest.mark.slow
def test_serving_overhead_runs() -> None:
    command = [sys.executable, str(FOLDER / "serving_overhead.py"), "--quick", "--json"]
    smaller = ["--repeat", "1", "--max-tokens", "4", "--concurrency", "1,3"]
    run = subprocess.run([*command, *smaller], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert [row["identical"] for row in document["results"]] == [True] * 9


@pytest.mark.parametrize(
    ("vendor", "family", "model", "name"),
    [
        ("AuthenticAMD", 25, 17, " (Zen 4)"),
        ("AuthenticAMD", 25, 1, " (Zen 3)"),
        ("AuthenticAMD", 26, 2, " (Zen 5)"),
        ("AuthenticAMD", 23, 49, " (Zen 2)"),
        ("AuthenticAMD", 23, 1, ""),
        ("GenuineIntel", 6, 143, ""),
    ],
)
def test_processors_of_one_name_are_told_apart(
    vendor: str, family: int, model: int, name: str
) -> None:
    text = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: AMD\n"
    assert module("harness").zen(text) == name
