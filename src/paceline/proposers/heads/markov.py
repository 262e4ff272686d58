"""What block heads make of the tokens before a node: the Markov and confidence heads of DSpark,
Domino's correction and DFlash 2's selector.

The Markov heads are those of the original repository (deepseek-ai/DeepSpec) and of the speculators
package (0.9, ``speculators.models.dspark``). All have a row of ``markov_w1`` for the token before
the one that is predicted, make a vector of low rank, and add ``markov_w2`` times it to the logits.
The vector is

* ``vanilla``: that row;
* ``gated``: that row, each number weighed by a sigmoid of the block row's hidden state and of it
  (``gate_proj``);
* ``rnn``: what a recurrence over the rows of the block puts out (``joint_proj``), whose state
  depends on all tokens of the path before.

Domino is DFlash with a correction in place of a Markov head (SpecForge 0.2,
``specforge.modeling.draft.domino``): a GRU reads the embeddings of the block's tokens from the
anchor on, and its state with the block row's hidden state goes through two linears, the second of
which gives what is added to the logits. The first levels may go without.

The *selector* of DFlash 2 (speculators 0.9, ``speculators.models.dflash2``, after the original
repository, z-lab/dflash) chooses among the ``selector_top_k`` likeliest tokens of a row alone. It
adds to the logit of each the product of three vectors of low rank: the row of
``predecessor_codebook`` for the token before, the row's hidden state through
``hidden_projection``, and the token's row of ``successor_codebook``.

The confidence head is one linear over the block row's hidden state and, usually, that row of
``markov_w1``. Its sigmoid says how likely the head's own choice there is to be accepted. Knows no
trees; :mod:`paceline.proposers.heads.blocks` keeps the states of nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from paceline.models.backend import Ops
from paceline.models.tensor_reader import TensorReader
from paceline.proposers.heads.checkpoint import (
    CONFIDENCE,
    GRU,
    MARKOV,
    PROJECTION,
    SELECTOR,
    SELECTS,
    Block,
)
from paceline.tensors.arrays import Floats, floats


class Correction(ABC):
    """What is added to a block's logits for the tokens before: a Markov head, or Domino's."""

    reads_hidden = False
    """Whether it reads the hidden states of the block's rows."""
    state_size = 0
    """Numbers that it hands from a row of the block to the next one."""
    first_level = 0
    """Drafted tokens at the beginning of a block to whose logits nothing is added."""

    @abstractmethod
    def rows_of(self, tokens: Sequence[int]) -> Floats:
        """What it has of the tokens before, ``[len(tokens), width]``."""

    @abstractmethod
    def latent(self, before: Floats, hidden: Floats, states: Floats) -> tuple[Floats, Floats]:
        """The vectors of rows of a block, and what each hands to the row after it.

        Args:
            before: of the tokens before, as :meth:`rows_of` gives them.
            hidden: of the rows, after the last norm, ``[rows, hidden_size]``; not read where
                :attr:`reads_hidden` is false.
            states: what was handed to them, ``[rows, state_size]``.

        Returns:
            ``[rows, rank]`` and ``[rows, state_size]``.
        """

    def candidates(self, logits: Floats) -> Floats:
        """The logits of a block's rows, -inf where a token cannot be chosen."""
        return logits

    @abstractmethod
    def corrected(self, logits: Floats, latent: Floats) -> Floats:
        """Logits of rows, ``[rows, columns]``, out of what :meth:`candidates` gave of them."""

    def first_state(self, anchor: int, skipped: Floats) -> Floats:
        """What is handed to the first row that predicts, ``[state_size]``.

        Args:
            anchor: the token that the block begins with.
            skipped: hidden states of the rows before that one, ``[rows, hidden_size]``.
        """
        return np.zeros(self.state_size, np.float32)


class Markov(Correction):
    """A Markov head of type ``vanilla``, and what all types share.

    Args:
        reader: of its tensors.
        ops: computes its linears.
        block: names its rank.

    Raises:
        ModelLoadError: a tensor is missing or of another shape.
    """

    def __init__(self, reader: TensorReader, ops: Ops, block: Block) -> None:
        self._ops, self._rank = ops, block.markov_rank
        self._hidden_size = reader.config.hidden_size
        self._before = self._table(reader, f"{MARKOV}.markov_w1.weight")
        self._after = reader.single(f"{MARKOV}.markov_w2", reader.config.num_logits, self._rank)

    def _table(self, reader: TensorReader, name: str) -> Floats:
        """A row of low rank for each token."""
        table = reader.floats(name, reader.config.vocab_size, self._rank)
        return floats(table).copy()

    def rows_of(self, tokens: Sequence[int]) -> Floats:
        return self._before[list(tokens)]

    def latent(self, before: Floats, hidden: Floats, states: Floats) -> tuple[Floats, Floats]:
        return before, states

    def corrected(self, logits: Floats, latent: Floats) -> Floats:
        corrected: Floats = logits + self._ops.linear(latent, self._after)
        return corrected


class GatedMarkov(Markov):
    """A Markov head of type ``gated``; see :class:`Markov`."""

    reads_hidden = True

    def __init__(self, reader: TensorReader, ops: Ops, block: Block) -> None:
        super().__init__(reader, ops, block)
        width = self._hidden_size + self._rank
        self._gate = reader.single(f"{MARKOV}.gate_proj", self._rank, width, bias=True)

    def latent(self, before: Floats, hidden: Floats, states: Floats) -> tuple[Floats, Floats]:
        gate = sigmoid(self._ops.linear(_joined(hidden, before), self._gate))
        return gate * before, states


class RecurrentMarkov(Markov):
    """A Markov head of type ``rnn``; see :class:`Markov`."""

    reads_hidden = True

    def __init__(self, reader: TensorReader, ops: Ops, block: Block) -> None:
        super().__init__(reader, ops, block)
        self.state_size = self._rank
        width = 2 * self._rank + self._hidden_size
        self._joint = reader.single(f"{MARKOV}.joint_proj", 3 * self._rank, width, bias=True)

    def latent(self, before: Floats, hidden: Floats, states: Floats) -> tuple[Floats, Floats]:
        joint = self._ops.linear(_joined(states, before, hidden), self._joint)
        gate, candidate, output = np.split(joint, 3, axis=1)
        kept = sigmoid(gate)
        return np.tanh(output), kept * states + (1 - kept) * np.tanh(candidate)

    def first_state(self, anchor: int, skipped: Floats) -> Floats:
        """See :class:`Correction`; skipped rows read the anchor as the token before."""
        state: Floats = np.zeros((1, self.state_size), np.float32)
        for row in skipped[:, None]:
            _, state = self.latent(self.rows_of([anchor]), row, state)
        first: Floats = state[0]
        return first


class Domino(Correction):
    """Domino's correction; see the module's docstring.

    Args:
        reader: of its tensors.
        ops: computes its linears.
        block: names its sizes.
        embedded: tokens to their embedding, ``[tokens, hidden_size]``, as the block's rows read it.

    Raises:
        ModelLoadError: a tensor is missing or of another shape.
    """

    reads_hidden = True

    def __init__(
        self,
        reader: TensorReader,
        ops: Ops,
        block: Block,
        embedded: Callable[[Sequence[int]], Floats],
    ) -> None:
        shape, self._ops, self._embedded = reader.config, ops, embedded
        self.state_size, self.first_level = block.gru_width, block.first_corrected
        width, gates = shape.hidden_size, 3 * block.gru_width
        self._read = reader.single(f"{GRU}.ih", gates, width)
        self._kept = reader.single(f"{GRU}.hh", gates, block.gru_width)
        self._inner = reader.single(f"{PROJECTION}.0", block.markov_rank, width + block.gru_width)
        self._outer = reader.single(f"{PROJECTION}.2", shape.num_logits, block.markov_rank)

    def rows_of(self, tokens: Sequence[int]) -> Floats:
        return self._embedded(tokens)

    def latent(self, before: Floats, hidden: Floats, states: Floats) -> tuple[Floats, Floats]:
        read = np.split(self._ops.linear(before, self._read), 3, axis=1)
        kept = np.split(self._ops.linear(states, self._kept), 3, axis=1)
        reset, update = (sigmoid(read[i] + kept[i]) for i in range(2))
        states = (1 - update) * np.tanh(read[2] + reset * kept[2]) + update * states
        inner = self._ops.linear(_joined(hidden, states), self._inner)
        return inner * sigmoid(inner), states

    def corrected(self, logits: Floats, latent: Floats) -> Floats:
        corrected: Floats = logits + self._ops.linear(latent, self._outer)
        return corrected


class Selector(Markov):
    """DFlash 2's, whose rank is the block's ``markov_rank``; see :class:`Markov`."""

    reads_hidden = True

    def __init__(self, reader: TensorReader, ops: Ops, block: Block) -> None:
        self._ops, self._rank = ops, block.markov_rank
        self._top_k = min(block.top_k, reader.config.num_logits)
        self._before = self._table(reader, f"{SELECTOR}.predecessor_codebook")
        self._successors = self._table(reader, f"{SELECTOR}.successor_codebook")
        name = f"{SELECTOR}.hidden_projection"
        self._projection = reader.single(name, self._rank, reader.config.hidden_size)

    def candidates(self, logits: Floats) -> Floats:
        best = np.argpartition(logits, -self._top_k, axis=1)[:, -self._top_k :]
        kept = np.full_like(logits, -np.inf)
        np.put_along_axis(kept, best, np.take_along_axis(logits, best, axis=1), axis=1)
        return kept

    def latent(self, before: Floats, hidden: Floats, states: Floats) -> tuple[Floats, Floats]:
        projected = self._ops.linear(np.ascontiguousarray(hidden), self._projection)
        return before * projected, states

    def corrected(self, logits: Floats, latent: Floats) -> Floats:
        rows, tokens = (logits != -np.inf).nonzero()
        scores = logits.copy()
        scores[rows, tokens] += (latent[rows] * self._successors[tokens]).sum(axis=1)
        return scores


MARKOV_HEADS: dict[str, type[Markov]] = {
    "vanilla": Markov,
    "gated": GatedMarkov,
    "rnn": RecurrentMarkov,
    SELECTS: Selector,
}
"""By ``markov_head_type``, and DFlash 2's."""


class Confidence:
    """A confidence head.

    Args:
        reader: of its tensors.
        ops: computes its linear.
        block: says what it reads.

    Raises:
        ModelLoadError: a tensor is missing or of another shape.
    """

    def __init__(self, reader: TensorReader, ops: Ops, block: Block) -> None:
        self._ops, self._reads_token = ops, block.confidence_reads_token
        width = reader.config.hidden_size + block.markov_rank * self._reads_token
        bias = reader.has(f"{CONFIDENCE}.proj.bias")
        self._proj = reader.float_linear(
            [f"{CONFIDENCE}.proj"], f"{CONFIDENCE}.proj", [1], width, bias
        )

    def __call__(self, hidden: Floats, before: Floats | None) -> Floats:
        """How likely the likeliest token of each row is to be accepted, ``[rows]``.

        Args:
            hidden: of rows of a block, after the last norm, ``[rows, hidden_size]``.
            before: of the tokens before, as :meth:`Markov.rows_of` gives them; None where there is
                no Markov head.
        """
        parts = [hidden] if before is None or not self._reads_token else [hidden, before]
        inputs = _joined(*parts)
        return sigmoid(self._ops.linear(inputs, self._proj))[:, 0]


def sigmoid(x: Floats) -> Floats:
    """Of each number, without overflow."""
    result: Floats = 0.5 * (1 + np.tanh(0.5 * x))
    return result


def _joined(*parts: Floats) -> Floats:
    return np.ascontiguousarray(np.concatenate(parts, axis=1))
