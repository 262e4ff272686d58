"""A model's vocabulary as the compiler of grammars takes it. Knows no grammar.

The compiler could read a ``tokenizer.json``. Told what each token writes, it makes the same tables
of the 262,144 tokens of Gemma 3 in half the time, during which no other thread of Python runs, and
in two fifths of the memory (llguidance 1.9.1).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.text.token_pieces import token_pieces
from paceline.text.tokenizer import Tokenizer


class GrammarVocabulary:
    """Has the attributes by which ``LLTokenizer`` knows a vocabulary, and encodes what is forced.

    Args:
        eos_token_ids: tokens that end a text; at least one.

    Attributes:
        pieces: what each token writes into an answer; empty where it writes nothing.
        tokens: the same, with a name for those that write nothing.
        special_token_ids: tokens that no text of a grammar is written in: special ones, the unknown
            one, and added ones whose texts are in angle brackets. A grammar can name them.

    Raises:
        ConfigError: the vocabulary does not say what its tokens write.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.pieces = [piece or b"" for piece in token_pieces(tokenizer, vocab_size)]
        self.tokens = [
            piece or (tokenizer.id_to_token(token_id) or "").encode("utf-8", "replace")
            for token_id, piece in enumerate(self.pieces)
        ]
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        unknown = tokenizer.unk_token_id
        marks = tokenizer.mark_ids() | ({unknown} if unknown is not None else set())
        self.special_token_ids = sorted(i for i in marks if i < vocab_size)
        self._encode = tokenizer.encoder_within(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """The usual tokens of a text in the middle of an answer.

        Where the text spells a special token, this is not that token. With it, as the compiler
        itself encodes by a ``tokenizer.json``, it would refuse what it forced.
        """
        return self._encode(text)
