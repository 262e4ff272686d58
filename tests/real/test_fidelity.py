"""Real files say what their weights say in float32, but for activations that are rounded to 8 bits.

Bounds are a little above what llama.cpp's own rounding of activations makes of the same files:
``benchmarks/fidelity.py`` compares the two.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from paceline.api.llm import LLM
from paceline_lab.quality.quality import Window, engine_arm, score
from tests.real.conftest import RealModel

pytestmark = pytest.mark.real
TOKENS = 384


@pytest.mark.parametrize(("name", "most"), [("smollm2", 0.008), ("gemma3-270m", 0.015)])
def test_the_files_own_numbers(real_model: RealModel, name: str, most: float) -> None:
    path = str(real_model(name))
    text = (files("paceline") / "engine" / "engine.py").read_text(encoding="utf-8")

    def logits(dtype: str) -> tuple[Window, np.ndarray]:
        options: dict[str, Any] = {"dtype": dtype, "max_num_seqs": 1, "kv_cache_memory": 64 << 20}
        with LLM(path, speculative_config=[], **options) as llm:
            assert llm.tokenizer is not None
            window = Window(llm.tokenizer.encode(text)[:TOKENS], 1)
            found = np.zeros((len(window.targets), llm.checkpoint.config.vocab_size), np.float32)
            llm.call(lambda engine: engine_arm(engine, window, found))
        return window, found

    window, exact = logits("float32")
    assert llm_dtype(path) == "file"
    scored = score(window.targets, logits("auto")[1], exact)
    count = len(window.targets)
    assert scored.kl.mean() < most
    assert scored.num_agreed > 0.93 * count


def llm_dtype(path: str) -> str:
    with LLM(path, max_num_seqs=1, kv_cache_memory=16 << 20) as llm:
        return str(llm.config.dtype)
