"""The catalogue: our names, a user's, and which mistakes in a user's file are told how."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.loading.catalogue import catalogue, find_entry, similar_name, users_catalogue
from tests.loading.catalogues import entry_text, isolate, name_models


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolate(monkeypatch, tmp_path)
    return tmp_path


def test_ours_have_a_free_licence_or_say_where_their_terms_are() -> None:
    assert list(catalogue()) == ["smollm2", "gemma3-270m", "embedded"]
    smollm2, gemma, embedded = catalogue().values()
    assert (embedded.licence, embedded.is_here) == ("Apache-2.0", True)
    assert (smollm2.licence, smollm2.terms) == ("Apache-2.0", "")
    assert str(smollm2) == "SmolLM2-135M-Instruct, Q4_1 (98 MB, Apache-2.0)"
    assert gemma.licence == "Gemma Terms of Use"
    assert gemma.terms.startswith("https://")
    assert gemma.terms in str(gemma)


def test_fetched_models_lie_in_the_cache_by_their_content(folder: Path) -> None:
    entry = find_entry("smollm2")
    assert entry is not None
    assert entry.place.parent == folder / "cache" / "paceline" / "models"
    assert entry.sha256[:12] in entry.place.name
    assert not entry.is_here


def test_a_user_adds_names_and_replaces_ours(folder: Path) -> None:
    assert users_catalogue() == folder / "config" / "paceline" / "models.toml"
    name_models(entry_text(), entry_text("smollm2"), '[mine]\npath = "~/mine"')
    assert list(catalogue()) == ["smollm2", "gemma3-270m", "embedded", "tiny", "mine"]
    assert catalogue()["smollm2"].title == "A tiny model"
    assert catalogue()["mine"].place == Path.home() / "mine"


def test_a_path_is_relative_to_the_file_that_says_it(folder: Path) -> None:
    name_models('[mine]\npath = "models/mine.gguf"\ndrafts = ["heads/mine", "~/other"]')
    entry = find_entry("mine")
    assert entry is not None
    own = folder / "config" / "paceline" / "heads" / "mine"
    assert entry.drafts == (str(own), str(Path.home() / "other"))
    assert entry.place == folder / "config" / "paceline" / "models" / "mine.gguf"
    assert str(entry) == "mine"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[tiny", "is not valid TOML"),
        ("tiny = 3", "[tiny]: an entry is a table"),
        ('["../up"]\npath = "x"', "a name has lower-case letters"),
        ('["org/name"]\npath = "x"', "a name has lower-case letters"),
        (entry_text(colour='"red"'), "[tiny]: unknown key 'colour'; allowed: drafts, licence, "),
        (entry_text(size="0"), "size is 0; it must be the number of bytes"),
        (entry_text(size="true"), "size is True"),
        (entry_text(size='"98 MB"'), "size is '98 MB'"),
        (entry_text(sha256="ABC"), "64 hexadecimal digits"),
        (entry_text(packages='"tiny-model==1.0"'), "a list of packages with their versions"),
        (entry_text(drafts='"head"'), "drafts is 'head'; it must be a list of folders"),
        (entry_text(drafts="[]"), "a list of folders"),
        (entry_text(drafts="[3]"), "a list of folders"),
        (entry_text(packages="[]"), "a list of packages with their versions"),
        (entry_text(packages='["tiny-model"]'), "a list of packages with their versions"),
        (entry_text(packages='["--index-url=x==1"]'), "a list of packages with their versions"),
        (entry_text(packages='["a @ file:///x==1"]'), "a list of packages with their versions"),
        (entry_text(licence='" "'), "licence is ' '; it must be a text"),
        (entry_text(path='"x"'), "leave out packages"),
        ('[tiny]\ntitle = "x"', "no packages; an entry has either path, or all of packages, "),
    ],
)
def test_a_malformed_entry_is_told(text: str, problem: str) -> None:
    path = name_models(text)
    with pytest.raises(ConfigError) as error:
        catalogue()
    assert problem in str(error.value)
    assert str(path) in str(error.value)


def test_a_file_that_cannot_be_read_is_told() -> None:
    name_models("").unlink()
    users_catalogue().mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        catalogue()


def test_what_can_be_no_name_does_not_read_the_users_file() -> None:
    name_models("[malformed")
    assert find_entry("org/name") is None
    assert find_entry("./model.gguf") is None
    assert similar_name("org/smollm2") == ""


@pytest.mark.parametrize("said", ["smolm2", "SmolLM2", "smollm-2"])
def test_the_name_that_was_meant(said: str) -> None:
    assert find_entry(said) is None
    assert similar_name(said) == " (did you mean smollm2?)"


def test_a_name_may_have_its_models_sampling() -> None:
    name_models('[mine]\npath = "m.gguf"\nsampling = { temperature = 0.6, top_k = 20 }')
    entry = find_entry("mine")
    assert entry is not None
    assert entry.sampling == {"temperature": 0.6, "top_k": 20}
    for wrong in ("{}", "{ temperature = -1 }", "{ heat = 1 }", "0.5"):
        name_models(f'[mine]\npath = "m.gguf"\nsampling = {wrong}')
        with pytest.raises(ConfigError, match="must be a table of sampling parameters"):
            catalogue()
