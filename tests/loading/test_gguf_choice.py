"""Which file a quantisation means."""

from __future__ import annotations

import pytest

from paceline.core.errors import ModelLoadError
from paceline.loading.gguf.choice import drafts_beside, files_of, tagged_files

SHARDS = tuple(f"big-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3))
NAMES = (
    "README.md",
    "tiny-Q4_K_M.gguf",
    "tiny-Q4_K_S.gguf",
    "tiny-IQ4_XS.gguf",
    "tiny-UD-Q4_K_XL.gguf",
    "mmproj-tiny-F16.gguf",
    "tiny.imatrix.gguf",
    "mtp-tiny-Q4_K_M.gguf",
    "eagle3-tiny-Q8_0.gguf",
    "BF16/tiny-BF16.gguf",
    *reversed(SHARDS),
)


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("SmolLM2-135M-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("Meta-Llama-3-8B-Instruct.Q5_K_S.gguf", "Q5_K_S"),
        ("qwen2.5-0.5b-instruct-q4_0.gguf", "Q4_0"),
        ("Phi-3-mini-4k-instruct-fp16.gguf", "FP16"),
        ("Phi-3-mini-4k-instruct-q4.gguf", "Q4"),
        ("gemma-3-270m-it-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("model-Q4_K_M-imat.gguf", "Q4_K_M"),
        ("Q8_0/model-Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("model-TQ1_0.gguf", "TQ1_0"),
        ("model.gguf", "MODEL"),
        ("Qwen3-0.6B.gguf", "QWEN3-0.6B"),
    ],
)
def test_the_quantisation_in_a_name(name: str, tag: str) -> None:
    (((found, *_), files),) = tagged_files([name])
    assert (found, files) == (tag, (name,))


@pytest.mark.parametrize(
    ("tag", "files"),
    [
        ("Q4_K_M", ("tiny-Q4_K_M.gguf",)),
        ("q4_k_s", ("tiny-Q4_K_S.gguf",)),
        ("UD-Q4_K_XL", ("tiny-UD-Q4_K_XL.gguf",)),
        ("BF16", ("BF16/tiny-BF16.gguf",)),
        ("tiny-iq4_xs", ("tiny-IQ4_XS.gguf",)),
        ("Q8_0", SHARDS),
    ],
)
def test_one_file_or_its_shards(tag: str, files: tuple[str, ...]) -> None:
    assert files_of(NAMES, tag, "org/tiny") == files


@pytest.mark.parametrize("tag", ["Q4", "Q4_K", "Q4_K_XL", "F16", ""])
def test_what_is_not_there_lists_what_is(tag: str) -> None:
    there = "BF16, Q8_0, IQ4_XS, Q4_K_M, Q4_K_S, UD-Q4_K_XL"
    with pytest.raises(ModelLoadError, match=f"org/tiny has no GGUF file of {tag}; there are "):
        files_of(NAMES, tag, "org/tiny")
    with pytest.raises(ModelLoadError) as error:
        files_of(NAMES, "Q2_K", "org/tiny")
    assert str(error.value).endswith(there)


def test_a_repository_without_gguf() -> None:
    with pytest.raises(ModelLoadError, match=r"has no GGUF file of Q4_0; it has no GGUF file of a"):
        files_of(["config.json", "mmproj-F16.gguf"], "Q4_0", "org/tiny")


def test_two_files_of_a_quantisation_are_told_apart_by_their_names() -> None:
    names = ("a-Q4_0.gguf", "b-Q4_0.gguf")
    with pytest.raises(ModelLoadError, match=r"several files of Q4_0; .*: a-Q4_0, b-Q4_0$"):
        files_of(names, "Q4_0", "org/tiny")
    assert files_of(names, "B-Q4_0", "org/tiny") == ("b-Q4_0.gguf",)


@pytest.mark.parametrize("gone", SHARDS)
def test_missing_shards(gone: str) -> None:
    with pytest.raises(ModelLoadError, match=f"lacks {gone}, one of 3 shards"):
        files_of([name for name in SHARDS if name != gone], "Q8_0", "org/tiny")


@pytest.mark.parametrize("name", ["../m-Q4_0.gguf", "/m-Q4_0.gguf", "a/../../m-Q4_0.gguf"])
def test_paths_that_lead_out_are_no_models(name: str) -> None:
    assert tagged_files([name]) == []


BESIDE = (
    "mtp-Qwen3.5-BF16.gguf",
    "mtp-Qwen3.5-9B-Q8_0.gguf",
    "MTP-Qwen3.5-9B-Q4_K_M-00002-of-00002.gguf",
    "mtp-Qwen3.5-4B-Q4_K_M.gguf",
    "dflash-Qwen3.5-9B-Q4_K_M.gguf",
    "dflash-Qwen3.5-9B-BF16.gguf",
    "eagle3-Llama-3-8B-F16.gguf",
    "dspark-Q8_0.gguf",
    "Qwen3.5-9B-mtp-Q4_K_M.gguf",
    "mtp-Qwen3.5-9B.txt",
)


@pytest.mark.parametrize(
    ("model", "drafts"),
    [
        ("Qwen3.5-9B-Q4_K_M.gguf", ["mtp-Qwen3.5-9B-Q8_0.gguf", "dflash-Qwen3.5-9B-Q4_K_M.gguf"]),
        ("Qwen3.5-9B.Q8_0.gguf", ["mtp-Qwen3.5-9B-Q8_0.gguf", "dflash-Qwen3.5-9B-BF16.gguf"]),
        ("qwen3.5-4b-q4_k_m-00001-of-00002.gguf", ["mtp-Qwen3.5-4B-Q4_K_M.gguf"]),
        ("Qwen3.5-2B-Q4_K_M.gguf", ["mtp-Qwen3.5-BF16.gguf"]),
        ("Llama-3-8B-Instruct-Q4_0.gguf", ["eagle3-Llama-3-8B-F16.gguf"]),
        ("Qwen3-9B-Q4_K_M.gguf", []),
    ],
)
def test_drafts_that_lie_beside_a_model(model: str, drafts: list[str]) -> None:
    assert drafts_beside(model, [model, *BESIDE]) == drafts
