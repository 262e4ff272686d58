"""Files of options: what they may hold, and who comes first."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cli.config_file import read_config_file, write_config_file
from paceline.cli.options import RunOptions, takes
from paceline.cli.profile import ProfileOptions
from paceline.core.errors import ConfigError
from paceline.core.installation import pip_install
from paceline_lab.trace.command import TraceOptions

Call = Callable[..., dict[str, Any]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Calls a command with a file of options, and gives the options that it would run with."""
    app, seen = typer.Typer(), {}
    for name, options in (
        ("run", RunOptions),
        ("trace", TraceOptions),
        ("profile", ProfileOptions),
    ):
        app.command(name)(takes(options, lambda found: seen.update(asdict(found))))

    def run(name: str, values: Any, *arguments: str) -> dict[str, Any]:
        monkeypatch.setenv("PACELINE_MODEL", "embedded")
        if "model" in values:
            monkeypatch.delenv("PACELINE_MODEL")
        path = tmp_path / "options.json"
        path.write_text(values if isinstance(values, str) else json.dumps(values))
        seen.clear()
        app([name, "--config", str(path), *arguments], standalone_mode=False)
        return dict(seen)

    return run


@pytest.fixture
def refusal(call: Call) -> Callable[..., str]:
    def run(name: str, values: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            call(name, values)
        return str(caught.value)

    return run


def test_every_option_can_be_given(call: Call) -> None:
    values: dict[str, Any] = {}
    for field in fields(RunOptions):
        kind = get_type_hints(RunOptions)[field.name]
        value = next(v for v in (not field.default, 7, 0.5, "text", ["text"]) if _is(v, kind))
        values[field.name.replace("_", "-")] = value
    del values["config"]
    values["embedded"] = False  # as a model is named
    values["default-chat-template-kwargs"] = "{}"
    found = call("run", values)
    path = found.pop("config")
    assert path.endswith("options.json")
    assert found == {key.replace("-", "_"): value for key, value in values.items()}


def _is(value: Any, kind: Any) -> bool:
    kinds = (kind, *getattr(kind, "__args__", ()))
    return type(value) in [getattr(each, "__origin__", each) for each in kinds]


def test_the_command_line_then_the_environment_then_the_file(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOP_K", "20")
    monkeypatch.setenv("PACELINE_THREADS", "2")
    file = {"threads": 1, "top_k": 10, "top-p": 0.5, "enable_prefix_caching": False, "seed": None}
    found = call("run", file, "--threads", "3")
    assert (found["threads"], found["top_k"], found["top_p"]) == (3, 20, 0.5)
    assert (found["enable_prefix_caching"], found["seed"], found["min_p"]) == (False, None, None)
    assert call("run", file, "--enable-prefix-caching")["enable_prefix_caching"] is True


def test_editors_of_windows_begin_a_file_with_a_mark(tmp_path: Path) -> None:
    for name in ("a.json", "a.yaml"):
        (tmp_path / name).write_text('{"threads": 1}', encoding="utf-8-sig")
        assert read_config_file(tmp_path / name) == {"threads": 1}


def test_the_environment_may_name_the_file(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_config_file(tmp_path / "other.json", {"max_tokens": 9})
    monkeypatch.setenv("PACELINE_CONFIG", str(tmp_path / "other.json"))
    assert call("run", {"max_tokens": 5})["max_tokens"] == 5
    app, seen = typer.Typer(), []
    app.command()(takes(RunOptions, seen.append))
    app([], standalone_mode=False)
    assert seen[0].max_tokens == 9


def test_options_of_templates_may_be_an_object(call: Call) -> None:
    found = call("run", {"default_chat_template_kwargs": {"enable_thinking": False}})
    assert json.loads(found["default_chat_template_kwargs"]) == {"enable_thinking": False}


def test_objects_where_the_command_line_takes_text(call: Call) -> None:
    proposers = [{"method": "prompt_lookup", "num_speculative_tokens": 4}]
    found = call(
        "run",
        {"speculative_config": proposers, "objective": {"tpot_ms": 20}, "kv_cache_memory": 4096},
    )
    assert json.loads(found["speculative_config"]) == proposers
    assert json.loads(found["objective"]) == {"tpot_ms": 20}
    assert found["kv_cache_memory"] == "4096"
    assert call("run", {"speculative_config": "[]"})["speculative_config"] == "[]"


def test_required_arguments_may_come_from_the_file(call: Call) -> None:
    found = call("trace", {"model": "DIR", "prompts": "P", "output": "O", "shard-size": 3})
    assert (found["model"], found["output"], found["shard_size"]) == ("DIR", "O", 3)


def test_one_file_serves_several_commands(call: Call, refusal: Callable[..., str]) -> None:
    shared = {"model": "DIR", "prompts": "P", "output": "O", "speculative_config": {}}
    assert "speculative_config" not in call("trace", shared)
    assert call("profile", {"import": "FILE", "temperature": 0.5})["import_file"] == "FILE"
    assert "did you mean dtype?" in refusal("trace", {"dtyp": "int8"})


WHO_DRAFTS = ("speculative_config", "method", "draft", "num_speculative_tokens", "no_speculation")


@pytest.mark.parametrize(
    ("file", "arguments", "expected"),
    [
        ({"speculative_config": {}}, ["--method", "ngram"], {"method": "ngram"}),
        ({"speculative_config": {}}, ["--draft", "D"], {"draft": ["D"]}),
        (
            {"speculative_config": {}},
            ["-k", "3"],
            {"speculative_config": "{}", "num_speculative_tokens": 3},
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2},
            ["--speculative-config", "[]"],
            {"speculative_config": "[]"},
        ),
        ({"method": "ngram"}, ["-k", "3"], {"method": "ngram", "num_speculative_tokens": 3}),
        ({"no_speculation": True}, ["--method", "ngram"], {"method": "ngram"}),
        ({"speculative_config": {}}, ["--no-speculation"], {"no_speculation": True}),
        (
            {"speculative_config": {}, "method": "ngram"},
            [],
            {"speculative_config": "{}", "method": "ngram"},
        ),
    ],
)
def test_a_stronger_source_replaces_what_says_the_same_differently(
    call: Call, file: dict[str, Any], arguments: list[str], expected: dict[str, Any]
) -> None:
    found = call("run", file, *arguments)
    assert {name: found[name] for name in WHO_DRAFTS if found[name]} == expected


def test_one_prompt_replaces_a_file_of_them(call: Call) -> None:
    found = call("run", {"prompts": "FILE"}, "-p", "text")
    assert (found["prompt"], found["prompts"]) == ("text", None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"threads": "1"}, "threads is '1'; it must be a whole number"),
        ({"threads": 1.0}, "threads is 1.0; it must be a whole number"),
        ({"threads": True}, "threads is True; it must be a whole number"),
        ({"threads": [1]}, "threads is [1]; it must be a whole number"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": False}, "temperature is False; it must be a number"),
        ({"strict": 1}, "strict is 1; it must be true or false"),
        ({"dtype": 8}, "dtype is 8; it must be text"),
        ({"kv_cache_memory": True}, "kv_cache_memory is True; it must be text"),
        ({"dtype": {}}, "dtype is {}; it must be text"),
        ({"repeat": 0}, "repeat is 0; it must be at least 1"),
        ({"threds": 1}, "unknown option 'threds' (did you mean threads?); allowed: backend"),
        ({"config": "FILE"}, "unknown option 'config'"),
        ({"help": True}, "unknown option 'help'"),
        ({"max-tokens": 1, "max_tokens": 1}, "has max_tokens twice"),
        ([1], "must hold one object"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_key(
    refusal: Callable[..., str], values: Any, message: str
) -> None:
    said = refusal("run", values)
    assert message in said
    assert "options.json" in said
    assert "\n" not in said


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe{")
    for name, problem in (("absent.json", "cannot read"), ("binary.json", "is not valid JSON")):
        with pytest.raises(ConfigError, match=problem):
            read_config_file(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot read"):
        read_config_file(tmp_path)


def test_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "options.yaml"
    path.write_text("max-tokens: 9\nspeculative_config:\n  - method: ngram\n")
    expected = {"max_tokens": 9, "speculative_config": [{"method": "ngram"}]}
    assert read_config_file(path) == expected
    for text in ("a: [", "a: !!python/object:os.system {}", "? {}\n: 1"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is not valid YAML"):
            read_config_file(path)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=re.escape(pip_install("pyyaml"))):
        read_config_file(path)


@settings(max_examples=15)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z]+(_[a-z]+)*", fullmatch=True),
        st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.floats(0, 1)),
    )
)
def test_what_is_written_is_read(tmp_path_factory: Any, values: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "written.json"
    write_config_file(path, values)
    assert read_config_file(path) == values


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "options.json"
    write_config_file(path, {"threads": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match=r"cannot write .*No space left"):
        write_config_file(path, {"threads": 2})
    assert read_config_file(path) == {"threads": 1}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="cannot write"):
        write_config_file(tmp_path / "absent" / "options.json", {})
    with pytest.raises(ConfigError, match="cannot write"):
        write_config_file(path / "options.json", {})
