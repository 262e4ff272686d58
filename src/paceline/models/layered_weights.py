"""The weights of layers that differ, out of a checkpoint: inputs of layers, several streams.

Knows no file and no arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.models.altup import AltUpEnds, AltUpLayer
from paceline.models.layer_inputs import LayerGate, LayerInputWeights
from paceline.models.tensor_reader import TensorReader
from paceline.tensors.arrays import floats as as_floats

LAYER_EMBEDDING = "model.embed_tokens_per_layer"


class LayeredReader(TensorReader):
    """Takes what Gemma 3n and 4 have beyond other decoders out of a checkpoint."""

    def layer_inputs(self) -> LayerInputWeights | None:
        """What the inputs of all layers are made of; None where layers have none."""
        c, inputs = self._config, self._config.layer_inputs
        if inputs is None:
            return None
        name, projection = LAYER_EMBEDDING, "model.per_layer_model_projection"
        return LayerInputWeights(
            self._end(name, inputs.vocab_size, self._ops.pack_embedding, inputs.total),
            self.linear([projection], projection, [inputs.total], c.hidden_size, bias=False),
            self.norm("model.per_layer_projection_norm.weight", inputs.width),
        )

    def altup(self) -> AltUpEnds | None:
        """What lies between the streams and the ends; None where there is one stream."""
        if self._config.altup is None:
            return None
        width, count = self._config.hidden_size, self._config.altup.streams - 1
        found = []
        for kind in ("altup_projections", "altup_unembed_projections"):
            names = [f"model.{kind}.{index}" for index in range(count)]
            found.append([self.linear([x], x, [width], width, bias=False) for x in names])
        return AltUpEnds(*found)

    def _altup(self, prefix: str) -> AltUpLayer:
        """Scores, coefficients and the linear of low rank of a layer."""
        c, altup = self._config, self._config.altup
        assert altup is not None
        width, streams, rank, p = c.hidden_size, altup.streams, altup.rank, prefix + "altup."

        def flat(name: str, *shape: int) -> Any:
            return self._ops.pack_vector(self.vector(f"{p}{name}.weight", *shape).reshape(-1))

        norm = as_floats(self.vector(p + "router_norm.weight", width)) / np.float32(width)
        name = p + "correct_output_scale"
        if not altup.scaled:  # checkpoints have it all the same
            self._used.add(name)
        left, right = prefix + "laurel.linear_left", prefix + "laurel.linear_right"
        return AltUpLayer(
            self._ops.pack_vector(norm),
            flat("modality_router", streams, width),
            flat("prediction_coefs", streams**2, streams),
            flat("correction_coefs", streams, streams),
            scale=self._ops.pack_vector(self.vector(name, width)) if altup.scaled else None,
            left=self.linear([left], left, [rank], width, bias=False),
            right=self.linear([right], right, [width], rank, bias=False),
            norm=self.norm(prefix + "laurel.post_laurel_norm.weight", width),
        )

    def _layer_scale(self, prefix: str) -> float:
        return float(as_floats(self.vector(prefix + "layer_scalar", 1))[0])

    def _gate(self, prefix: str) -> LayerGate:
        c, inputs = self._config, self._config.layer_inputs
        assert inputs is not None
        gate, projection = prefix + "per_layer_input_gate", prefix + "per_layer_projection"
        return LayerGate(
            self.linear([gate], gate, [inputs.width], c.hidden_size, bias=False),
            self.linear([projection], projection, [c.hidden_size], inputs.width, bias=False),
            self.norm(prefix + "post_per_layer_input_norm.weight", c.hidden_size),
        )
