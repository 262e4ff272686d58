"""A mixture in an engine: each step's experts are counted and priced, and no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.backends.native.native import why_not_native
from paceline.build.build import build_engine
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.planner.cost_table import StepShape
from paceline.request.sampling_params import SamplingParams
from tests.models.reference import save_model
from tests.text.vocabularies import byte_level_json, save_tokenizer

LAYERS, NUMBER, PER_TOKEN = 2, 8, 3
BACKENDS = ["reference", *(["native"] if why_not_native() is None else [])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model("olmoe", tmp_path)
    save_tokenizer(tmp_path, byte_level_json(), eos_token="<|end|>")
    return tmp_path


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, backend: str, **config: Any
) -> tuple[Any, list[StepShape], list[list[int]]]:
    """An engine after two requests, the shapes of its steps, and what they answered."""
    built = build_engine(str(folder), EngineConfig(backend=backend, dtype="float32", **config))
    engine = built.engine
    shapes: list[StepShape] = []
    observe = engine.cost.observe

    def noted(shape: StepShape, milliseconds: float) -> None:
        shapes.append(shape)
        observe(shape, milliseconds)

    monkeypatch.setattr(engine.cost, "observe", noted)
    for seed in range(2):
        params = SamplingParams(max_tokens=20, temperature=0.0, seed=seed, ignore_eos=True)
        engine.add_request([9 + seed, 8, 7] * 5, params)
    requests = list(engine.requests.values())
    while engine.has_work:
        engine.step()
    return engine, shapes, [request.token_ids for request in requests]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_step_of_a_mixture_says_what_it_read(
    monkeypatch: pytest.MonkeyPatch, folder: Path, backend: str
) -> None:
    drafts = (SpeculativeConfig("prompt_lookup", num_speculative_tokens=3),)
    _, _, plain = run(monkeypatch, folder, backend)
    engine, shapes, answers = run(monkeypatch, folder, backend, speculative=drafts, planner="fixed")
    assert answers == plain
    assert len(shapes) > 2
    assert any(shape.rows > shape.requests for shape in shapes if shape.rows == shape.samples)
    for shape in shapes:
        least = LAYERS * PER_TOKEN
        assert least <= shape.experts <= min(least * shape.rows, LAYERS * NUMBER)
    assert engine.stats().num_experts_read == sum(shape.experts for shape in shapes)
    experts = engine.cost.table.experts
    assert experts is not None
    assert (experts.layers, experts.number, experts.per_token) == (LAYERS, NUMBER, PER_TOKEN)
