"""``/tokenize`` and ``/detokenize`` answer llama.cpp's requests with what its server answers."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.loading.checkpoint import load_checkpoint
from paceline.text.tokenizer import Tokenizer
from tests.real.conftest import RealModel
from tests.server.asgi import application, post
from tests.server.fakes import FakeEngine

pytestmark = pytest.mark.real
MARKED = "<|im_start|>user\n"
MIXED = ["Hello", 12, "world"]
SMOLLM2 = [
    ({"content": "Hello world"}, [19556, 905]),
    ({"content": "Hello world", "add_special": True}, [19556, 905]),
    ({"content": MARKED}, [1, 4093, 198]),
    ({"content": MARKED, "parse_special": False}, [44, 108, 306, 79, 3738, 108, 46, 4093, 198]),
    ({"content": MIXED}, [19556, 12, 6693]),
    (
        {"content": "Hi 😀 é", "with_pieces": True},
        [
            {"id": 26843, "piece": "Hi"},
            {"id": 40303, "piece": [32, 240, 159, 152]},
            {"id": 218, "piece": [128]},
            {"id": 26411, "piece": " é"},
        ],
    ),
]
GEMMA3 = [
    ({"content": "Hello world"}, [9259, 1902]),
    ({"content": "Hello world", "add_special": True}, [2, 9259, 1902]),
    ({"content": MIXED}, [9259, 12, 12392]),
    ({"content": MIXED, "add_special": True}, [2, 9259, 12, 12392]),
    (
        {"content": " Hello", "add_special": True, "with_pieces": True},
        [{"id": 2, "piece": "<bos>"}, {"id": 26352, "piece": " Hello"}],
    ),
]
"""What the server of llama.cpp b11549 answers."""
TEXTS = {"smollm2": {(1, 2, 3): "<|im_start|><|im_end|><repo_name>", (26843, 40303): "Hi \ufffd"}}
TEXTS["gemma3-270m"] = {(1, 2, 3): "<eos><bos><unk>", (10979, 163543): "Hi 😀"}


def tokenizer_of(real_model: RealModel, name: str) -> Tokenizer:
    tokenizer = load_checkpoint(str(real_model(name))).tokenizer
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(("name", "cases"), [("smollm2", SMOLLM2), ("gemma3-270m", GEMMA3)])
def test_they_answer_as_llama_cpp(
    name: str, cases: list[tuple[Any, Any]], real_model: RealModel
) -> None:
    app = application(FakeEngine(tokenizer=tokenizer_of(real_model, name)))
    for asked, tokens in cases:
        assert post(app, "/tokenize", asked).json() == {"tokens": tokens}, asked
    for ids, text in TEXTS[name].items():
        assert post(app, "/detokenize", {"tokens": list(ids)}).json()["content"] == text
