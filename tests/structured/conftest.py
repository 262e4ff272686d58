"""What several tests of grammars need: the tokenizer of the embedded model."""

from __future__ import annotations

import pytest

from paceline.loading.catalogue import embedded_model
from paceline.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(embedded_model("target"))
