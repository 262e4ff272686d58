"""Drafts beside a model: which are found, and what is left out."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.api.llm import LLM
from paceline.build.default_drafts import bundled_drafts, default_speculative_config
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.config.speculative import HEAD_METHODS
from paceline.core.errors import ConfigError
from paceline.loading.catalogue import embedded_model, embedded_ngram_model, users_catalogue
from paceline.loading.checkpoint import load_checkpoint
from paceline.request.sampling_params import SamplingParams
from tests.loading.catalogues import isolate, name_models
from tests.proposers.heads import head_config, head_tensors, write_head


def write(folder: Path, config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return folder


def test_a_model_without_drafts_has_none(tmp_path: Path) -> None:
    assert bundled_drafts(str(write(tmp_path, {}))) == ()
    assert bundled_drafts("org/name") == ()
    assert bundled_drafts("x" * 300) == ()  # no file can be called so


def test_a_path_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"x")
    write(tmp_path / "a.speculators" / "head", HEADS["eagle3"])
    assert len(bundled_drafts("~/a.gguf")) == 1


def test_drafts_lie_in_the_folder_or_in_folders_of_it(tmp_path: Path) -> None:
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    config = {"speculators_config": {"proposal_methods": methods}}
    one = write(tmp_path / "speculators" / "a", config)
    two = write(tmp_path / "speculators" / "b", {"speculators_model_type": "independent"})
    (tmp_path / "speculators" / "notes").mkdir()
    assert bundled_drafts(str(tmp_path)) == (
        SpeculativeConfig("draft_model", str(one), num_speculative_tokens=3),
        SpeculativeConfig("draft_model", str(two)),
    )
    top = write(tmp_path / "speculators", {"model_type": "llama"})
    assert bundled_drafts(str(tmp_path))[0].model == str(top)
    suffix, *drafts = default_speculative_config(str(tmp_path))
    assert suffix.method == "suffix"
    assert len(drafts) == 3


def test_a_name_of_the_catalogue_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(monkeypatch, tmp_path)
    name_models('[mine]\npath = "model"\ndrafts = ["draft"]')
    folder = users_catalogue().parent
    beside = write(folder / "model" / "speculators", {"model_type": "llama"})
    draft = write(folder / "draft", {"model_type": "llama"})
    found = [config.model for config in bundled_drafts("mine")]
    assert found == [str(beside), str(draft)]
    assert [config.model for config in bundled_drafts(str(folder / "model"))] == [str(beside)]


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id"])
def test_parallel_drafts_are_run_as_such(tmp_path: Path, key: str) -> None:
    place = write(tmp_path / "speculators" / "a", {key: 7})
    (draft,) = bundled_drafts(str(tmp_path))
    assert draft == parse_speculative_config({"method": "parallel_draft", "model": str(place)})[0]
    write(place, {key: None})
    assert [draft.method for draft in bundled_drafts(str(tmp_path))] == ["draft_model"]


def test_a_bundled_parallel_draft_drafts(tmp_path: Path) -> None:
    place = tmp_path / "target" / "speculators" / "pard"
    shutil.copytree(embedded_model("target"), tmp_path / "target")
    shutil.copytree(embedded_model("draft"), place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "pard_token": 3}))
    model = str(tmp_path / "target")
    with LLM(model, speculative_config=bundled_drafts(model)) as llm:
        assert llm.proposers == ("parallel_draft",)


HEADS: dict[str, dict[str, Any]] = {
    **{method: {"speculators_model_type": method} for method in HEAD_METHODS},
    "original eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
    "original peagle": {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 3},
    "original dflash": {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"},
    "original dflash2": {"architectures": ["DFlash2DraftModel"], "model_type": "qwen3"},
    "original dspark": {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"},
}


@pytest.mark.parametrize("layout", HEADS)
def test_heads_are_run_as_such(tmp_path: Path, layout: str) -> None:
    place = write(tmp_path / "speculators" / "a", HEADS[layout])
    method = layout.split()[-1]
    wanted = parse_speculative_config({"method": method, "model": str(place)})
    assert bundled_drafts(str(tmp_path)) == wanted
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    write(place, HEADS[layout] | {"speculators_config": {"proposal_methods": methods}})
    assert [draft.num_speculative_tokens for draft in bundled_drafts(str(tmp_path))] == [3]


def test_drafts_may_lie_beside_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"x")
    (tmp_path / "b").mkdir()
    for name in ("a", "b"):
        write(tmp_path / f"{name}.speculators" / "head", HEADS["eagle3"])
        model = tmp_path / ("a.gguf" if name == "a" else name)
        (draft,) = bundled_drafts(str(model))
        assert draft.model == str(tmp_path / f"{name}.speculators" / "head")
    write(tmp_path / "c.speculators" / "head", HEADS["eagle3"])
    assert bundled_drafts(str(tmp_path / "c")) == ()  # as a hub id, which is not there


@pytest.mark.parametrize("fits", [True, False])
def test_a_bundled_head_drafts_or_is_left_out_and_said(
    tmp_path: Path, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(embedded_model("target"), tmp_path / "target")
    shape = load_checkpoint(embedded_model("target")).config
    layers = [2, 4, 5] if fits else [2, 4, 9]
    fields = head_config(False, shape, eagle_aux_hidden_state_layer_ids=layers)
    tensors = head_tensors(own_ends=False, target=shape)
    write_head(tmp_path / "target" / "speculators" / "head", fields, tensors)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    model = str(tmp_path / "target")
    with LLM(model) as llm:
        assert llm.proposers == (("suffix", "eagle3") if fits else ("suffix",))
        (drafted,) = llm.generate(["def f(x):"], params)
    with LLM(model, speculative_config=[]) as llm:
        (plain,) = llm.generate(["def f(x):"], params)
    assert drafted.text == plain.text
    assert ("made for another target" in caplog.text) != fits
    if not fits:
        with pytest.raises(ConfigError, match="0 to 8"):
            LLM(model, strict=True)


def test_files_of_ngrams(tmp_path: Path) -> None:
    place = tmp_path / "speculators"
    (place / "chat").mkdir(parents=True)
    for path in (place / "b.ngram", place / "a.ngram", place / "chat" / "model.ngram"):
        shutil.copy(embedded_ngram_model(), path)
    drafts = bundled_drafts(str(tmp_path))
    names = [place / "a.ngram", place / "b.ngram", place / "chat" / "model.ngram"]
    assert [draft.model for draft in drafts] == [str(name) for name in names]
    wanted = {"method": "ngram_model", "model": str(names[0])}
    assert drafts[:1] == parse_speculative_config(wanted)
    with LLM("embedded", speculative_config=drafts[:1]) as llm:
        assert llm.proposers == ("ngram_model",)


def test_ngrams_of_another_program_have_to_be_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "speculators" / "chat"
    place.mkdir(parents=True)
    (place / "model.bin").write_bytes(b"x")
    assert bundled_drafts(str(tmp_path)) == ()
    assert f"--import-uzu {place / 'model.bin'} -o {place / 'model.ngram'}" in caplog.text
    caplog.clear()
    shutil.copy(embedded_ngram_model(), place / "model.ngram")
    assert len(bundled_drafts(str(tmp_path))) == 1
    assert not caplog.text


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"speculators_model_type": "mlp_speculator"}, "heads of type eagle3"),
        ("{", "Expecting"),
        ("[]", "not an object"),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 99}]}}, "99"),
    ],
)
def test_what_does_not_run_is_left_out_and_said(
    tmp_path: Path, config: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "speculators", config)
    with caplog.at_level(logging.WARNING):
        assert bundled_drafts(str(tmp_path)) == ()
    assert reason in caplog.text
