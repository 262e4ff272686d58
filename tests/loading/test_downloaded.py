"""Models that Ollama and LM Studio have downloaded: their names, and files that cannot be used."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ModelLoadError
from paceline.loading.catalogue import downloaded_models, find_downloaded
from paceline.loading.checkpoint import load_checkpoint
from paceline.request.sampling_params import FROM_CARD, sampling_defaults
from tests.loading.catalogues import isolate, name_models
from tests.loading.gguf_writing import convert, tokenizer_metadata
from tests.text.vocabularies import byte_fallback_json

DIGEST = "0123456789abcdef" * 4
OFFICIAL = "registry.ollama.ai/library/llama3.2/3b"
MODEL = "application/vnd.ollama.image.model"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    convert("llama", path, metadata=tokenizer_metadata(json.loads(byte_fallback_json()), "llama"))
    return path.read_bytes()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolate(monkeypatch, tmp_path)
    return tmp_path


def put_ollama(
    home: Path, content: bytes, place: str = OFFICIAL, digest: str = DIGEST, **more: Any
) -> tuple[Path, Path]:
    """A manifest and its blob."""
    root = home / "ollama"
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    layer = {"mediaType": MODEL, "digest": f"sha256:{digest}", "size": len(content)}
    layers = [layer, {"mediaType": "text"}, *more.pop("layers_behind", ())]
    document = {"schemaVersion": 2, "layers": layers, **more}
    manifest = root / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps(document))
    return manifest, blob


def put_layer(home: Path, kind: str, said: bytes) -> dict[str, Any]:
    """A blob that says something of a model; the manifest's line for it."""
    digest = hashlib.sha256(said).hexdigest()
    blob = home / "ollama" / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(said)
    media = f"application/vnd.ollama.image.{kind}"
    return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(said)}


def put_lm_studio(home: Path, name: str, content: bytes, root: str = ".lmstudio/models") -> Path:
    path = home / "home" / root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def names() -> list[str]:
    return [entry.name for entry in downloaded_models()]


# Ollama


@pytest.mark.parametrize("name", ["ollama:llama3.2:3b", "llama3.2:3b"])
def test_an_ollama_model_loads_by_its_name(home: Path, content: bytes, name: str) -> None:
    _, blob = put_ollama(home, content)
    checkpoint = load_checkpoint(name)
    assert checkpoint.name == "ollama:llama3.2:3b"
    entry = find_downloaded(name)
    assert entry is not None
    assert (entry.place, entry.size) == (blob, len(content))


def test_parameters_of_an_ollama_model_are_its_sampling(home: Path, content: bytes) -> None:
    """A Modelfile's ``PARAMETER`` lines, above Ollama's own defaults."""
    said = b'{"stop": ["<eos>"], "temperature": 0.1, "repeat_penalty": 1.1}'
    put_ollama(home, content, layers_behind=[put_layer(home, "params", said)])
    found = load_checkpoint("llama3.2:3b")
    assert found.card == {"temperature": 0.1, "top_k": 40, "top_p": 0.9}
    assert sampling_defaults(found.generation, found.card).source == FROM_CARD


SYSTEM = b"You are a pirate."
EXAMPLES = b'[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ahoy"}]'


def test_messages_of_a_modelfile_stand_before_each_chat(home: Path, content: bytes) -> None:
    """Ollama 0.12.6, ``ChatHandler``: ``SYSTEM`` gives way to a system message of the chat."""
    layers = [put_layer(home, "system", SYSTEM), put_layer(home, "messages", EXAMPLES)]
    put_ollama(home, content, layers_behind=layers)
    tokenizer = load_checkpoint("llama3.2:3b").tokenizer
    assert tokenizer is not None
    tokenizer.set_chat_template("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    question = {"role": "user", "content": "Who?"}
    examples = "user:Hi;assistant:Ahoy;user:Who?;"
    assert tokenizer.apply_chat_template([question]) == f"system:You are a pirate.;{examples}"
    own = {"role": "system", "content": "Be brief."}
    assert tokenizer.apply_chat_template([own, question]) == f"system:Be brief.;{examples}"


@pytest.mark.parametrize("said", [b"{}", b"[1]", b"["])
def test_damaged_messages_of_a_modelfile_are_one_sentence(
    home: Path, content: bytes, said: bytes
) -> None:
    put_ollama(home, content, layers_behind=[put_layer(home, "messages", said)])
    with pytest.raises(ModelLoadError, match="sha256-"):
        load_checkpoint("llama3.2:3b")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("registry.ollama.ai/library/gemma3/latest", "gemma3:latest"),
        ("registry.ollama.ai/someone/gemma3/1b", "someone/gemma3:1b"),
        ("hf.co/org/tiny-GGUF/Q4_K_M", "hf.co/org/tiny-GGUF:Q4_K_M"),
        ("example.org/library/x/1", "example.org/library/x:1"),
    ],
)
def test_names_are_those_that_ollama_lists(
    home: Path, content: bytes, place: str, name: str
) -> None:
    put_ollama(home, content, place)
    assert names() == [f"ollama:{name}"]
    assert find_downloaded(name) == find_downloaded(f"ollama:{name}")


def test_the_latest_is_meant_where_no_tag_is_given(home: Path, content: bytes) -> None:
    put_ollama(home, content, "registry.ollama.ai/library/gemma3/latest")
    for name in ("gemma3", "ollama:gemma3"):
        assert find_downloaded(name) is not None
    assert find_downloaded("gemma4") is None


def test_ollamas_own_folder_is_the_default(
    home: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_ollama(home, content)
    (home / "home" / ".ollama").mkdir(parents=True)
    (home / "ollama").rename(home / "home" / ".ollama" / "models")
    assert find_downloaded("llama3.2:3b") is None
    monkeypatch.delenv("OLLAMA_MODELS")
    assert find_downloaded("llama3.2:3b") is not None


def test_an_older_blob(home: Path, content: bytes) -> None:
    _, blob = put_ollama(home, content)
    older = blob.rename(blob.with_name(f"sha256:{DIGEST}"))
    entry = find_downloaded("ollama:llama3.2:3b")
    assert entry is not None
    assert entry.place == older


def test_an_unknown_name_lists_those_that_are_there(home: Path, content: bytes) -> None:
    with pytest.raises(ModelLoadError, match="nothing is in"):
        load_checkpoint("ollama:nothing")
    put_ollama(home, content)
    with pytest.raises(ModelLoadError, match=r"'ollama:nothing'; there are ollama:llama3.2:3b$"):
        load_checkpoint("ollama:nothing")


def layers(*kinds: str, digest: object = f"sha256:{DIGEST}") -> dict[str, Any]:
    return {"layers": [{"mediaType": kind, "digest": digest} for kind in kinds]}


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"layers": "none"}, "has 0 models"),
        ({"layers": [1, None]}, "has 0 models"),
        (layers(MODEL, MODEL), "has 2 models"),
        (layers(MODEL, "application/vnd.ollama.image.adapter"), "has an adapter"),
        (layers(MODEL, digest="sha256:../../../etc/passwd"), "without a SHA-256"),
        (layers(MODEL, digest=None), "without a SHA-256"),
        (layers(MODEL, digest="sha256:" + "f" * 64), "is not there: ollama pull"),
    ],
)
def test_manifests_that_cannot_be_used(
    home: Path, content: bytes, document: dict[str, Any], told: str, caplog: Any
) -> None:
    put_ollama(home, content, **document)
    with pytest.raises(ModelLoadError, match=told):
        load_checkpoint("ollama:llama3.2:3b")
    put_ollama(home, content, "registry.ollama.ai/library/good/1", "f" * 63 + "0")
    with caplog.at_level(logging.WARNING):
        assert names() == ["ollama:good:1"]
    assert "ollama:llama3.2:3b is not listed" in caplog.text


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff", b" " * (2 << 20), b"[" * 100_000])
def test_damaged_manifests(home: Path, content: bytes, text: bytes) -> None:
    manifest, _ = put_ollama(home, content)
    manifest.write_bytes(text)
    with pytest.raises(ModelLoadError):
        find_downloaded("ollama:llama3.2:3b")


def test_an_incomplete_blob_is_told(home: Path, content: bytes) -> None:
    _, blob = put_ollama(home, content)
    blob.write_bytes(content[:-1])
    with pytest.raises(ModelLoadError, match=f"bytes, not {len(content)}: ollama pull again"):
        load_checkpoint("llama3.2:3b")


@pytest.mark.parametrize("which", [0, 1])
def test_links_that_lead_out_are_not_followed(home: Path, content: bytes, which: int) -> None:
    path = put_ollama(home, content)[which]
    path.symlink_to(path.rename(home / "elsewhere"))
    with pytest.raises(ModelLoadError):
        find_downloaded("ollama:llama3.2:3b")


# LM Studio


@pytest.mark.parametrize("root", [".lmstudio/models", ".cache/lm-studio/models"])
def test_a_model_of_lm_studio_loads_by_its_name(home: Path, content: bytes, root: str) -> None:
    put_lm_studio(home, "org/tiny-GGUF/tiny-F32.gguf", content, root)
    put_lm_studio(home, "org/tiny-GGUF/mmproj-F16.gguf", content, root)
    assert names() == ["lmstudio:org/tiny-GGUF:F32"]
    asked = ("lmstudio:org/tiny-GGUF:F32", "lmstudio:org/tiny-GGUF", "org/tiny-GGUF:f32")
    for name in asked:
        assert load_checkpoint(name).config.architecture == "llama"


def test_shards_are_one_model(home: Path) -> None:
    folder = put_lm_studio(home, "org/tiny/x", b"").parent
    convert("llama", folder / "tiny-F32.gguf", shard_tensors=8)
    assert names() == ["lmstudio:org/tiny:F32"]
    assert load_checkpoint("lmstudio:org/tiny:F32").tensors["model.norm.weight"].ndim == 1


def test_several_files_need_a_quantisation(home: Path, content: bytes) -> None:
    for name in ("a-Q4_0", "b-Q4_0", "b-F16"):
        put_lm_studio(home, f"org/tiny/{name}.gguf", content)
    there = ["A-Q4_0", "F16", "B-Q4_0"]
    assert names() == [f"lmstudio:org/tiny:{tag}" for tag in there]
    with pytest.raises(ModelLoadError, match="has 3 models; add one: A-Q4_0, B-F16, B-Q4_0"):
        find_downloaded("lmstudio:org/tiny")
    with pytest.raises(ModelLoadError, match="no GGUF file of Q8_0"):
        find_downloaded("lmstudio:org/tiny:Q8_0")
    assert find_downloaded("org/tiny:Q8_0") is None  # which the hub may have
    with pytest.raises(ModelLoadError, match=r"no model 'lmstudio:org/other'; there are "):
        find_downloaded("lmstudio:org/other")


def test_a_link_out_of_lm_studios_folder_is_no_model(home: Path, content: bytes) -> None:
    path = put_lm_studio(home, "org/tiny/tiny-F32.gguf", content)
    path.symlink_to(path.rename(home / "elsewhere"))
    assert names() == []
    with pytest.raises(ModelLoadError):
        find_downloaded("lmstudio:org/tiny:F32")


# Both


def test_a_name_that_both_have_is_ambiguous(home: Path, content: bytes) -> None:
    put_lm_studio(home, "org/tiny/tiny-F32.gguf", content)
    put_ollama(home, content, "registry.ollama.ai/org/tiny/F32")
    with pytest.raises(ModelLoadError, match="may be ollama:org/tiny:F32 or lmstudio:org/tiny:F32"):
        load_checkpoint("org/tiny:F32")


def test_the_catalogue_comes_first(home: Path, content: bytes) -> None:
    put_ollama(home, content, "registry.ollama.ai/library/mine/latest")
    other = home / "other.gguf"
    other.write_bytes(content)
    name_models(f'[mine]\npath = "{other}"')
    assert load_checkpoint("mine").name == "mine"


@pytest.mark.parametrize("name", ["", "/a/b", "../x", "a:b:c", "a/b", "x" * 5000, "a\0b", "~/x"])
def test_other_names_are_none(name: str) -> None:
    assert find_downloaded(name) is None
