"""The benchmark of heads: prompts that no head was trained on, and a run with a random head."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.api.llm import embedded_model
from paceline.config import SpeculativeConfig
from paceline.config.speculative import without_memory
from paceline.loading.checkpoint import load_checkpoint
from tests.programs import module
from tests.proposers.heads import head_config, head_tensors, write_head

heads, report = module("heads"), module("heads")


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A random one for the embedded target, with the target's own ends."""
    target = load_checkpoint(embedded_model("target")).config
    tensors = head_tensors(own_ends=False, target=target)
    config = head_config(own_ends=False, target=target, eagle_aux_hidden_state_layer_ids=[0, 2, 4])
    return write_head(tmp_path / "head", config, tensors)


# Prompts


class Words:
    """A tokenizer: ids are places in a text."""

    vocab_size = 5

    def decode(self, ids: list[int]) -> str:
        return " ".join(("user", "What is", "two\nand", "TWO?", "answer")[i] for i in ids)


def compressed(path: Path, *rows: dict[str, Any]) -> Path:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_a_prompt_that_the_head_was_trained_on_is_left_out(tmp_path: Path) -> None:
    answers = compressed(tmp_path / "a.gz", {"prompt_ids": [0, 1, 2, 3, 4], "token_ids": [0]})
    texts = compressed(tmp_path / "b.gz", {"prompt": "Write a poem."}, {"prompt": "Sing"})
    trained = heads.trained_text([answers, texts], Words())
    asked = ["what is two  and two?", "Write a poem.", "Write a longer poem.", "What is three?"]
    assert heads.held_out(asked, trained) == asked[2:]
    assert heads.held_out(asked, heads.trained_text([], Words())) == asked


def test_prompts_do_not_run_into_each_other(tmp_path: Path) -> None:
    texts = compressed(tmp_path / "b.gz", {"prompt": "Write a"}, {"prompt": "poem."})
    assert heads.held_out(["Write a poem."], heads.trained_text([texts], Words()))


def test_token_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    answers = compressed(tmp_path / "a.gz", {"prompt_ids": [0, 5], "token_ids": []})
    with pytest.raises(ValueError, match="--trained-on"):
        heads.trained_text([answers], Words())


# Arms


def test_the_arms_differ_in_who_drafts_and_in_what_shape() -> None:
    head = SpeculativeConfig("eagle3", "head", 5, max_tree_nodes=16, max_branching=4)
    ngrams = SpeculativeConfig("ngram_model", "file")
    arms = heads.proposers(head, [head, ngrams])
    assert [c.method for c in arms[report.MERGED]] == ["suffix", "eagle3", "ngram_model"]
    assert [c.method for c in arms[report.TEXTS]] == ["suffix", "ngram_model"]
    assert report.NGRAM not in heads.proposers(head, [head])
    (chain,), (tree,) = arms[report.NODES], arms[report.TREE]
    assert (chain.tree_nodes, chain.max_branching) == (tree.tree_nodes, 1)
    lengths = [arms[name][0].num_speculative_tokens for name in report.CHAINS]
    assert lengths == list(report.CHAINS.values())
    assert all(own == without_memory(own) for own in arms.values())


# Rows


def sample(arm: str, seconds: float = 1.0, ids: tuple[int, ...] = (1, 2), **facts: Any) -> Any:
    counted = dict.fromkeys(module("harness").COUNTED, 1) | {"output_tokens": len(ids)}
    counted |= {"token_ids": [list(ids)], "reached": [2, 1], "accepted": [1]}
    return module("harness").Sample(arm, 0, 0, seconds, counted | facts)


SECONDS = {"plain": 2.0, report.SUFFIX: 1.6, report.TREE: 1.0, report.NODES: 1.5}
CHAINS = dict(zip(report.CHAINS, (1.3, 1.1, 1.2, 1.4), strict=True))
ALL = {**SECONDS, **CHAINS, report.MERGED: 0.8}


def rows(*samples: Any) -> list[dict[str, Any]]:
    arms = [each.arm for each in samples]
    found: list[dict[str, Any]] = report.rows_of(report.checked(samples), arms)
    return found


def test_the_tree_meets_the_fastest_chain_and_merged_drafts_the_best_single_ones() -> None:
    found = rows(*(sample(arm, seconds) for arm, seconds in ALL.items()))
    ratios = {
        row["kind"]: (row["other"], row["speedup"]["value"]) for row in found if "kind" in row
    }
    assert ratios == {
        report.EQUAL_NODES: (report.NODES, 1.5),
        report.EQUAL_TIME: ("chain of 3", 1.1),
        report.BEST_SINGLE: (report.TREE, 1.25),
    }
    (tree,) = (row for row in found if row.get("arm") == report.TREE)
    assert tree["speedup"]["value"] == 2.0
    assert tree["accepted_share"] == [0.5, 0.0]
    targets = {target.name: target.value for target in report.targets(found, inflated=False)}
    assert targets[f"tree over chain, {report.EQUAL_TIME}, geometric mean"] == pytest.approx(1.1)


def test_other_token_ids_than_plain_decodings_fail_the_run() -> None:
    good = [sample(arm, seconds) for arm, seconds in ALL.items() if arm != report.TREE]
    found = rows(*good, sample(report.TREE, 1.0, (1, 3)))
    errors = {row.get("arm") or row["kind"] for row in found if "error" in row}
    assert errors == {report.TREE, report.EQUAL_NODES, report.EQUAL_TIME, report.BEST_SINGLE}
    targets = {target.name: target.value for target in report.targets(found, inflated=False)}
    assert targets[f"merged over the {report.BEST_SINGLE}, least"] is None


def test_llama_cpp_may_say_something_else_and_is_compared_by_the_token() -> None:
    peer = sample(report.PEER, 6.0, (1, 2, 3, 4))
    found = rows(*(sample(arm, seconds) for arm, seconds in ALL.items()), peer)
    ratios = {
        row["ours"]: row["speedup"]["value"] for row in found if row.get("kind") == report.PEER
    }
    assert ratios == {"plain": 1.5, report.MERGED: pytest.approx(3.75)}


# The whole program


@pytest.mark.slow
def test_the_program_runs_and_its_results_can_be_shown(
    head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "device" / "heads-embedded.json"
    command = ["--quick", "--model", "embedded", "--head", str(head), "--prompts", "embedded"]
    command += ["--sets", "code,prose", "--max-tokens", "8", "--output", str(file), "--trained-on"]
    assert heads.main(command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["benchmark"] == "heads-embedded"
    assert document["num_failed"] == 0
    assert document["config"]["used"] == {"code": 1, "prose": 1}
    busy = {row["arm"] for row in document["results"] if row["set"] == report.BUSY}
    assert busy == {report.SUFFIX, report.TREE, report.MERGED, module("harness").CONTROL}
    arms = {row["arm"] for row in document["results"] if "arm" in row}
    assert {report.SUFFIX, report.TREE, report.MERGED, *report.CHAINS} < arms
    assert all(row["identical"] for row in document["results"] if "arm" in row)
    assert "chain of 3" in module("render").block("heads", tmp_path)


def test_a_model_without_a_head_is_told_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        heads.options_of(["--model", "embedded"])
    assert "--head" in capsys.readouterr().err
