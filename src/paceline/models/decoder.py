"""One decoder for the Llama family tree. Families differ only in :class:`ModelConfig`'s flags.

Owns the packed weights of a model. All arithmetic is the backend's
(:mod:`paceline.models.backend`), all bookkeeping is the caller's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.models.backend import Ops
from paceline.models.config import ModelConfig
from paceline.models.decoder_reader import DecoderReader
from paceline.models.layer_sizes import RopeConfig
from paceline.models.rope import RotaryTable
from paceline.models.tensor_reader import TensorReader
from paceline.models.weights import Ends, Layer
from paceline.tensors.arrays import give_back_freed
from paceline.tensors.placement import Placement
from paceline.tensors.stored import StoredTensors


class Decoder:
    """Packed weights of all layers, of what comes before them, and of the head behind them.

    Args:
        config: the family's flags and sizes.
        tensors: arrays of weights under their Hugging Face names, or packed ones
            (:mod:`paceline.disk.packed_folder`); for training, tensors of torch.
        ops: the device backend, which also decides the arithmetic's precision.
        max_len: positions that there can be; fixes length-dependent rotary scaling.
        lent: another decoder's embedding and head, of the same backend, which stand in for those
            that ``tensors`` has not. They are shared, not copied.

    Attributes:
        in_use: keeps the files of ``tensors`` from being removed where they could be.
        entry: how rows take hidden states in; None where they are tokens alone.
        pruned_head: which token each column of the logits is; None where column i is token i.
        places: what is added to the embedding at each position; None where nothing is.
        stream: brings weights that do not stay in memory (:mod:`paceline.disk.streaming`); None
            where all stay.
        placement: which ones these are; None where all stay.
        layer_inputs: what the inputs of layers are made of; None where they have none.
        altup: what several residual streams are made of and become; None where there is one.

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the configuration says.
        UnsupportedModelError: a tensor is of a type that is no weight, or has no use.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Any],
        ops: Ops,
        max_len: int,
        lent: Ends | None = None,
    ) -> None:
        self.config = config
        self.ops = ops
        stored = tensors if isinstance(tensors, StoredTensors) else None
        self.stream: Any = stored.stream if stored else None
        self.placement: Placement | None = stored.placement if stored else None
        self.in_use: object = stored.in_use if stored else None
        self.max_len = max_len
        packing = TensorReader(tensors, config, ops)
        reader = DecoderReader(packing)
        self.embedding, self.head = reader.ends_or_lent(lent) if lent else reader.ends()
        self.pruned_head = reader.pruned_head()
        self.places = reader.places(max_len)
        self.layer_inputs = reader.layer_inputs()
        self.altup = reader.altup()
        self.entry = reader.entry()
        self.layers = [reader.layer(i) for i in range(config.num_layers)]
        last_norm = "model.norm.weight"
        self.norm = packing.norm(last_norm, config.hidden_size) if config.last_norm else None
        packing.check_all_used()
        packing.log_rounding()
        give_back_freed()
        local, still = config.positions.local_rope, config.positions.still_rope
        self.rope = self._table(config.positions.rope)
        self.local_rope = self._table(local) if local else self.rope
        self.still_rope = RotaryTable(still, 0, max_len, ops) if still else None

    def with_layers(self, layers: Sequence[Layer], ops: Ops) -> Decoder:
        """A decoder of other layers, at most as many, between the same embedding and head.

        Nothing is copied: it shares these, the norm and the rotary tables.

        Args:
            ops: the backend that packed ``layers``, of this one's kind.
        """
        other = copy.copy(self)
        other.config = self.config.first_layers(len(layers))
        other.layers, other.ops = list(layers), ops
        if ops is not self.ops:  # what others packed is in memory
            other.stream = other.placement = None
        return other

    @property
    def ends(self) -> Ends:
        return Ends(self.embedding, self.head, self.config)

    def rotary(self, layer: int) -> RotaryTable | None:
        """What a layer's heads are rotated by, if only in no dimension; None: by nothing."""
        if not self.config.positions.is_rotated(layer):
            return self.still_rope
        return self.local_rope if self.config.attention.is_sliding(layer) else self.rope

    def _table(self, rope: RopeConfig) -> RotaryTable:
        ahead = self.config.positions.ahead
        return RotaryTable(rope, self.config.head_dim, self.max_len, self.ops, ahead)

    def reach(self, length: int) -> None:
        """Be ready for positions below ``length``; those of earlier calls stay."""
        self.rope.reach(length)
        self.local_rope.reach(length)
