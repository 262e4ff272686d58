"""From what was typed to configurations."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.api.llm import embedded_model
from paceline.build.default_drafts import default_speculative_config, drafts_of
from paceline.cli.demo import own_model, real_model
from paceline.cli.main import app
from paceline.cli.options import COMPARED_TOKENS, UNLIMITED, RunOptions
from paceline.cli.registry import LABORATORY, commands_of, load
from paceline.cli.settings import (
    engine_options,
    sampling_params,
    speculative_config,
)
from paceline.config import EngineConfig, Objective, environment_name
from paceline.config.speculative import without_memory
from paceline.core.errors import ConfigError
from paceline.loading.catalogue import embedded_ngram_model
from paceline.profiling.profile_steps import CONTEXTS, WIDTHS
from paceline_lab.quality.llama_peer import KV_TYPES
from paceline_lab.train.command import DraftOptions, LMOptions, config_values
from paceline_lab.train.configs import DraftTrainingConfig, HeadTrainingConfig, LMTrainingConfig
from paceline_lab.train.heads.command import HeadOptions
from paceline_lab.verify.quality_command import DEFAULT_TEXT_TOKENS, DEFAULT_WINDOW
from paceline_lab.verify.verification import DEFAULT_MAX_REGRET
from tests.cli.conftest import Result


def methods(**options: Any) -> list[str]:
    model = options.pop("model", "embedded")
    return [config.method for config in speculative_config(RunOptions(**options), model)]


def test_who_drafts_by_default() -> None:
    assert methods() == methods(model=embedded_model("target")) == ["suffix", "ngram_model"]
    assert [config.method for config in drafts_of("embedded")] == ["ngram_model", "draft_model"]
    assert methods(model="org/other") == ["suffix"]
    assert methods(no_speculation=True, method="prompt_lookup") == []


def test_help_names_who_drafts_by_default(cli: Callable[..., Result]) -> None:
    everyone, embedded = methods()
    for command in ("run", "serve", "simulate"):
        said = " ".join(cli(command, "--help").out.split())
        assert f"(default: {everyone}, plus {embedded} for the embedded model" in said
        assert "its draft model too" not in said


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run --threads -4", "--threads is -4; allowed"),
        ("run --max-num-seqs -4", "--max-num-seqs is -4; allowed"),
        (
            "run --max-num-batched-tokens 3",
            "--max-num-batched-tokens is 3, below --max-num-seqs (32)",
        ),
        ("run --objective foo", "--objective is 'foo'; allowed"),
        ("run --device foo", "--device 'foo' cannot be used"),
        ("run --top-p 2", "--top-p is 2.0; allowed"),
        ("run --repeat-penalty -9", "--repeat-penalty is -9.0; allowed"),
        ("run --stop=", "--stop holds ''; allowed"),
        ("run -k 900", "--num-speculative-tokens is 900; allowed"),
        ("run --method foo", "--method is 'foo'; allowed"),
        ("train lm -o x --steps 1 --grad-clip 0", "--grad-clip is 0.0; allowed"),
        (
            "train lm -o x --num-heads 5 --num-kv-heads 2",
            "--num-heads is 5, not a multiple of --num-kv-heads (2)",
        ),
        (
            "train draft embedded -o x --steps 1 --mask-token-id 3",
            "a draft has mask tokens only with parallel; leave --mask-token-id out",
        ),
    ],
)
def test_errors_name_the_options_that_were_typed(
    cli: Callable[..., Result], command: str, message: str
) -> None:
    """Not the settings that they set, whose names only programs know."""
    result = cli(*command.split(), *(["-p", "x"] if command.startswith("run") else []))
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--speculative-config", '{"method": "suffix", "num_speculative_tokens": 900}'),
            "num_speculative_tokens is 900",
        ),
        (("--speculative-config", '{"method": "self", "dtype": "int7"}'), "dtype is 'int7'"),
        (("--backend", "max_num_seqs"), "--backend is 'max_num_seqs'"),
    ],
)
def test_errors_about_json_and_values_keep_their_names(
    cli: Callable[..., Result], arguments: tuple[str, ...], message: str
) -> None:
    result = cli("run", "embedded", "-p", "x", *arguments)
    assert result.err.startswith(f"error: {message}; allowed")


@pytest.mark.parametrize("kind", ["lm", "draft", "head"])
def test_help_names_the_options_that_are_typed(cli: Callable[..., Result], kind: str) -> None:
    said = " ".join(cli("train", kind, "--help").out.split())
    assert "0 leaves the end to --max-minutes." in said
    assert "0 leaves the end to --steps." in said
    assert "`" not in said


def test_what_is_measured_again_and_again_remembers_nothing() -> None:
    configs = default_speculative_config("embedded")
    assert configs[0].suffix_decoding_max_cached_requests > 0
    forgetful = dataclasses.replace(configs[0], suffix_decoding_max_cached_requests=0)
    assert without_memory(configs) == (forgetful, *configs[1:])


def test_one_proposer() -> None:
    assert methods(method="ngram") == ["prompt_lookup"]
    (config,) = speculative_config(RunOptions(method="draft_model", draft=["a/b"]), "org/other")
    assert (config.method, config.model, config.use_heterogeneous_vocab) == (
        *("draft_model", "a/b"),
        True,
    )
    (config,) = speculative_config(RunOptions(method="draft_model"), "embedded")
    assert config.model == embedded_model("draft")


def test_drafts_join_those_that_draft_anyway(tmp_path: Path) -> None:
    usual = default_speculative_config("embedded")
    ngrams = embedded_ngram_model()
    found = speculative_config(RunOptions(draft=["some/draft", "other/draft", ngrams]), "embedded")
    assert found[: len(usual) - 1] == usual[:-1]
    assert [(each.method, each.model) for each in found[len(usual) - 1 :]] == [
        ("draft_model", "some/draft"),
        ("draft_model", "other/draft"),
        ("ngram_model", ngrams),  # once: the model brings it, and it is named
    ]
    assert found[-3].use_heterogeneous_vocab
    assert not engine_options(RunOptions(draft=["some/draft"]))["self_drafts"]
    assert engine_options(RunOptions(draft=[]))["self_drafts"]


def test_a_method_that_needs_a_draft_names_the_option() -> None:
    with pytest.raises(ConfigError, match=r"--method draft_model needs --draft: the draft's"):
        speculative_config(RunOptions(method="draft_model"), "org/other")


def test_depth_applies_to_all() -> None:
    found = speculative_config(RunOptions(num_speculative_tokens=3), "embedded")
    assert [config.num_speculative_tokens for config in found] == [3, 3]
    assert 3 not in [c.num_speculative_tokens for c in default_speculative_config("embedded")]
    both = '[{"method": "ngram"}, {"model": "DIR", "num_speculative_tokens": 7}]'
    options = RunOptions(speculative_config=both, num_speculative_tokens=3)
    assert [c.num_speculative_tokens for c in speculative_config(options, "embedded")] == [3, 3]


def test_a_folder_says_that_it_is_a_head(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"speculators_model_type": "eagle3"}')
    suffix, found = speculative_config(RunOptions(draft=[str(tmp_path)]), "org/other")
    assert suffix.method == "suffix"
    assert (found.method, found.max_tree_nodes) == ("eagle3", 16)
    for other, method in (
        ('{"model_type": "llama"}', "draft_model"),
        ('{"pard_token": 3}', "parallel_draft"),
        ("{", "draft_model"),
    ):
        config.write_text(other)
        assert methods(method=None, draft=[str(tmp_path)])[-1] == method


def test_an_mtp_layer_is_the_models_or_another_ones() -> None:
    for draft in (None, "some/model"):
        (config,) = speculative_config(
            RunOptions(method="mtp", draft=draft and [draft]), "org/other"
        )
        assert (config.method, config.model, config.max_tree_nodes) == ("mtp", draft, 16)


def test_heads_that_come_with_a_model_draft_for_it(tmp_path: Path) -> None:
    place = tmp_path / "speculators"
    place.mkdir()
    (place / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    kinds = [config.method for config in speculative_config(RunOptions(), str(tmp_path))]
    assert kinds == ["suffix", "eagle3"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"speculative_config": "{}", "method": "prompt_lookup"}, "--method"),
        ({"speculative_config": "{}", "draft": ["DIR"]}, "--draft"),
        ({"speculative_config": "{"}, "not JSON"),
        ({"speculative_config": '{"gamma": 4}'}, "allowed: method, model"),
        ({"speculative_config": '{"acceptance_threshold": 0.3}'}, "refused"),
        ({"method": "prompt_lookup", "draft": ["DIR"]}, "takes no --draft"),
        ({"method": "magic"}, "allowed:"),
        ({"method": "draft_model", "model": "org/other"}, "needs"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        methods(**options)


def test_options_reach_the_engine() -> None:
    options = RunOptions(
        dtype="float32",
        kv_cache_memory="1M",
        threads=3,
        max_num_seqs=5,
        enable_prefix_caching=False,
        strict=True,
        planner="fixed",
        objective='{"tpot_ms": 20}',
    )
    config = EngineConfig(**engine_options(options))
    assert config.num_threads == 3
    assert config.kv_cache_memory == 1 << 20
    assert (config.dtype, config.max_num_seqs, config.strict) == ("float32", 5, True)
    assert not config.enable_prefix_caching
    assert (config.planner, config.objective) == ("fixed", Objective("tpot", 20))
    with pytest.raises(ConfigError, match="max_num_seqs is 0"):
        EngineConfig(**engine_options(RunOptions(max_num_seqs=0)))


def test_defaults_are_those_of_the_engine() -> None:
    assert EngineConfig(**engine_options(RunOptions())) == EngineConfig()


def test_sampling() -> None:
    params = sampling_params(RunOptions(temperature=0.5, top_k=7, min_p=0.1, ignore_eos=True), 9)
    assert (params.temperature, params.top_k, params.min_p) == (0.5, 7, 0.1)
    assert (params.seed, params.ignore_eos) == (9, True)
    assert sampling_params(RunOptions(), 0).is_greedy
    assert sampling_params(RunOptions(), 0).max_tokens == COMPARED_TOKENS
    assert sampling_params(RunOptions(max_tokens=UNLIMITED), 0).max_tokens is None


def commands(command: Any, path: str = "paceline") -> list[tuple[str, Any]]:
    found = [(path, command)]
    for name, child in getattr(command, "commands", {}).items():
        found += commands(child, f"{path} {name}")
    return found


@pytest.mark.parametrize(
    ("path", "command"), commands(typer.main.get_command(app)), ids=lambda each: str(each)
)
def test_every_option_has_its_variable(path: str, command: Any) -> None:
    for parameter in command.params:
        longs = [text for text in parameter.opts if text.startswith("--")]
        if longs == ["--version"] or "--help" in longs:
            continue
        name = longs[0] if longs else parameter.name
        assert parameter.envvar == environment_name(name), f"{path} {name}"


@pytest.mark.parametrize(
    ("options", "config", "required"),
    [
        (LMOptions, LMTrainingConfig, {"output": "o"}),
        (DraftOptions, DraftTrainingConfig, {"output": "o", "target": "t"}),
        (HeadOptions, HeadTrainingConfig, {"output": "o", "target": "t", "traces": ("a",)}),
    ],
)
def test_training_options_are_the_configurations_fields(
    options: Any, config: Any, required: dict[str, Any]
) -> None:
    values = config_values(config, vars(options(**required, steps=1)))
    assert dataclasses.replace(config(**values), command="") == config(**required, steps=1)


@pytest.mark.parametrize(
    ("command", "own", "shared"),
    [("tune", "--prompts", "--dtype"), ("serve", "--host", "--method"), ("trace", "-o", "--dtype")],
)
def test_help_lists_a_commands_own_options_before_those_that_it_shares(
    cli: Callable[..., Result], command: str, own: str, shared: str
) -> None:
    shown = cli(command, "--help").out
    assert shown.index("\n  MODEL ") < shown.index(f"\n  {own}") < shown.index(f"\n  {shared} ")


STATED = {
    "max_num_seqs": EngineConfig().max_num_seqs,
    "max_regret": DEFAULT_MAX_REGRET,
    "llama_kv_type": KV_TYPES[0],
    "text_tokens": DEFAULT_TEXT_TOKENS,
    "window": DEFAULT_WINDOW,
    "widths": f"1-33, and coarser up to {WIDTHS[-1]}",
    "contexts": ",".join(map(str, CONTEXTS)),
    "repeat": "once",
    "max_step_ms": "the larger of 100 ms and four plain decode steps",
}
"""What stands for None, by options whose help has to spell it out."""


def test_a_help_text_states_the_default_that_the_code_has() -> None:
    """Typer writes defaults itself but for None; of those, numbers and names are compared."""
    subjects = real_model(), own_model("")
    (long, quick), (own, own_quick) = ((s.max_tokens, s.max_tokens // 2) for s in subjects)
    demo = f"{long}, or {quick} with --quick; {own} and {own_quick} with the embedded model"
    checked = set()
    for path, parameter in parameters(typer.main.get_command(app)):
        found = re.search(r"\(default: ([^)]*)\)", getattr(parameter, "help", None) or "")
        if found and any(map(str.isdigit, found[1])):
            limit = "what the context leaves" if path[-1] == "run" else COMPARED_TOKENS
            stated = {**STATED, "max_tokens": demo if path[-1] == "demo" else limit}
            wanted = stated | {"temperature": 0}
            assert (
                found[1].split("; with")[0] == str(wanted[str(parameter.name)]).split("; with")[0]
            ), (path, parameter.name)
            checked.add(parameter.name)
    assert checked == {*STATED, "max_tokens", "temperature"}


def test_engine_options_default_to_what_an_engine_does() -> None:
    assert EngineConfig(**engine_options(RunOptions())) == EngineConfig()


def parameters(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    path = (*path, str(command.name))
    for parameter in command.params:
        yield path, parameter
    for child in getattr(command, "commands", {}).values():
        yield from parameters(child, path)


def test_commands_that_make_chats_of_prompts_take_options_of_the_template() -> None:
    options = {command.options for group in LABORATORY for command in commands_of(group)}
    fields = {each: {field.name for field in dataclasses.fields(load(each))} for each in options}
    templated = {each for each, names in fields.items() if names & {"chat", "chat_template"}}
    assert len(templated) == 8
    assert not {each for each in templated if "default_chat_template_kwargs" not in fields[each]}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("run", "--threads", "x"), "'--threads': 'x' is not a whole number"),
        (("run", "--max-step-ms", "x"), "'--max-step-ms': 'x' is not a number"),
        (("run", "--repeat", "0"), "'--repeat': 0 is less than 1"),
    ],
)
def test_values_of_another_type_are_refused_in_plain_words(
    cli: Callable[..., Result], arguments: tuple[str, ...], problem: str
) -> None:
    result = cli(*arguments)
    assert result.code == 2
    assert f"Invalid value for {problem}" in result.err
