"""What an engine tells of itself when it has started. Owns the reading of it; knows no process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import RequestError
from paceline.policy.cost_points import StepShape
from paceline.sampling_params import SamplingParams
from paceline.server.messages import SAMPLING_DEFAULTS, EngineInfo

log = logging.getLogger(__name__)
CURVE_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def engine_info(engine: Any) -> EngineInfo:
    """What an :class:`~paceline.llm.LLM` says of itself."""
    config, checkpoint = engine.config, engine.checkpoint

    def inside(inner: Any) -> dict[str, Any]:
        shapes = [StepShape(rows, 0, 0, rows, 1) for rows in CURVE_ROWS]
        return {
            "vocab_size": inner.vocab_size,
            "kv_blocks_total": inner.kv.pool.num_blocks - 1,
            "block_size": inner.kv.block_size,
            "cost_curve": tuple((shape.rows, inner.cost.predict(shape)) for shape in shapes),
            "has_profile": inner.cost.has_profile,
        }

    info = EngineInfo(
        model=checkpoint.name,
        max_model_len=config.max_model_len,
        dtype=config.dtype,
        backend=engine.backend,
        promises_identity=engine.promises_identity,
        proposers=engine.proposers,
        max_num_seqs=config.max_num_seqs,
        generation_defaults=usable_defaults(checkpoint.generation),
        **engine.call(inside),
    )
    # A prompt with its answer has to fit into the KV cache, which can be smaller than the context.
    held = info.kv_blocks_total * info.block_size
    return replace(info, max_model_len=min(info.max_model_len, held))


def usable_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the makers' defaults that requests can have; of the others the log tells."""
    usable = {}
    for name in SAMPLING_DEFAULTS:
        value = given.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            log.warning("the model's generation_config.json is not followed there: %s", error)
        else:
            usable[name] = value
    return usable
