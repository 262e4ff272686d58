"""Entries: how a head, which drafts from a target's hidden states, takes them in with its tokens.

In most kinds each row is a token and a vector of ``hidden_size`` floats (its *input*). Token
embedding and input, each through its own norm where the kind has one, are joined to a row of twice
the width:

* ``eagle3`` (EAGLE-3): layer 0's queries, keys and values read the joined row, and the residual
  stream is the input, or with ``norm_before_residual`` the input after its norm;
* ``mtp`` (multi-token prediction of DeepSeek, GLM, Qwen): a linear makes the joined row the
  residual stream, and all layers are ordinary;
* ``eagle`` (EAGLE-1 and 2): the same, but neither the joined row nor layer 0 nor the head has a
  norm.

In the kind ``residual`` the input is the residual stream itself: layers before these, elsewhere,
have read the token.

In the kind ``dflash`` (DFlash) rows are tokens alone, and an input stands for a position by itself:
every layer's keys and values read it unchanged (:meth:`Decoder.write_kv
<paceline.models.decoder.Decoder.write_kv>`), and rows of tokens come after it. Spans of tokens are
*blocks*, all of which every row sees.

Owns which weights a kind has; knows no arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.models.config import RESIDUAL, ModelConfig

if TYPE_CHECKING:
    from paceline.models.weights import WeightReader

TOKEN_NORM, INPUT_NORM, JOIN = "model.enorm.weight", "model.hnorm.weight", "model.eh_proj"
"""Of the kind ``mtp``, as DeepSeek's checkpoints name them."""
EAGLE3_TOKEN_NORM = "model.layers.0.input_layernorm.weight"
EAGLE3_INPUT_NORM = "model.layers.0.hidden_norm.weight"


@dataclass(frozen=True, slots=True)
class Entry:
    """Packed weights; where ``join`` is None, layer 0 reads the joined row. Norms may be None."""

    token_norm: Any
    input_norm: Any
    join: Any


def read_entry(reader: WeightReader, config: ModelConfig) -> Entry | None:
    """The weights of a decoder's entry; None where its rows are tokens alone."""
    if config.entry.kind in ("", "dflash"):
        return None
    if config.entry.kind == RESIDUAL:
        return Entry(None, None, None)
    width = config.hidden_size
    if config.entry.kind == "eagle3":
        token_norm = reader.norm(EAGLE3_TOKEN_NORM, width)
        return Entry(token_norm, reader.norm(EAGLE3_INPUT_NORM, width), None)
    join = reader.linear([JOIN], JOIN, [width], 2 * width, config.entry.bias)
    if config.entry.kind == "eagle":
        return Entry(None, None, join)
    return Entry(reader.norm(TOKEN_NORM, width), reader.norm(INPUT_NORM, width), join)
