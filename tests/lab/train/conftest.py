"""A toy language model, trained once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.models.threads import set_num_threads
from paceline_lab.train.lm import LMTrainingResult, train_lm
from tests.lab.train.toy_text import lm_config, write_corpus


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_num_threads(1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> LMTrainingResult:
    folder = tmp_path_factory.mktemp("models") / "toy-target"
    return train_lm(lm_config(corpus, folder, steps=60, command="paceline train lm ..."))
