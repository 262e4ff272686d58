"""The n-gram model that comes with the embedded target: its file, its prompts, its place."""

from __future__ import annotations

from pathlib import Path

from paceline.api.llm import LLM
from paceline.build.drafts import default_speculative_config
from paceline.cli.options import RunOptions
from paceline.cli.settings import speculative_config
from paceline.loading.catalogue import embedded_model, embedded_ngram_model
from paceline.proposers.ngram_model import read_tables
from paceline.request.sampling_params import SamplingParams
from paceline.text.tokenizer import Tokenizer
from tests.programs import module

MAX_BYTES = 4 << 20
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def"


def test_its_file_is_small_and_of_the_targets_vocabulary() -> None:
    file, tokenizer = embedded_ngram_model(), Tokenizer.from_folder(embedded_model("target"))
    tables = read_tables(file)
    tables.check_fits(file, tokenizer.vocab_size, tokenizer.fingerprint)
    assert (tables.vocab_size, tables.fingerprint) == (tokenizer.vocab_size, tokenizer.fingerprint)
    assert Path(file).stat().st_size <= MAX_BYTES


def test_the_default_drafts_by_it_and_changes_no_token() -> None:
    (config,) = (c for c in default_speculative_config("embedded") if c.method == "ngram_model")
    assert config.model == embedded_ngram_model()
    assert speculative_config(RunOptions(method="ngram_model"), "embedded")[0].model == config.model
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=1)
        with LLM("embedded", speculative_config=[], planner="fixed", strict=True) as llm:
            plain = llm.generate(PROMPT, params)
            llm.set_speculation(None)
            together = llm.generate(PROMPT, params)
        assert together.token_ids == plain.token_ids
        drafted = together.completions[0].counters.by_proposer
        assert drafted["ngram_model"].num_draft_tokens > 0


def test_no_prompt_that_it_learnt_from_is_a_benchmarks() -> None:
    prompts = module("research.ngram_prompts")
    known = "the quick brown fox jumps over the lazy dog"
    texts = [known[4:], "the quick brown fox sleeps over the lazy dog", "lazy dog"]
    assert prompts.without(texts, [known, "eight or nine words", "lazy dog"]) == texts[1:2]
    assert set(module("prompt_sets").load_prompts("embedded").kind("prose")) < set(
        prompts.benchmark_prompts()
    )


def test_prompts_are_pieces_of_lines_from_all_over_a_text() -> None:
    prompts = module("research.ngram_prompts")
    lines = [f"line {number} of a text that is long\n" for number in range(200)]
    pieces = prompts.cut("".join(lines), 12)
    assert len(pieces) > 9
    assert all(piece.startswith("line ") and len(piece) <= 400 for piece in pieces)
    assert all(piece in "".join(lines) for piece in pieces)
    numbers = [int(piece.split()[1]) for piece in pieces]
    assert numbers == sorted(set(numbers))
    assert numbers[0] < 20 < 150 < numbers[-1]
