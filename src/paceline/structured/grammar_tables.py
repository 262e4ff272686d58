"""What every grammar of a model needs, made once: the tables of its vocabulary, the names of its
tokens, and the process that tries grammars out. Knows no grammar.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import RequestError
from paceline.core.installation import install_command
from paceline.core.worker_process import WorkerSlot
from paceline.structured.grammar_vocabulary import GrammarVocabulary
from paceline.text.token_pieces import TokenNames
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

PANIC = "PanicException"
"""What the library raises where an assertion of its own fails; it is no ``Exception``."""


@dataclass(frozen=True, slots=True)
class Tables:
    """
    Attributes:
        lookup: the vocabulary as the compiler of grammars looks it up.
        names: by which a grammar may ask for tokens.
        trial: the process that tries grammars out; it starts with the first one, or before.
    """

    vocabulary: GrammarVocabulary
    lookup: LLTokenizer
    names: TokenNames
    trial: WorkerSlot


class TablesOnce:
    """The tables of one model. May be asked by several threads.

    Args:
        tokenizer: of the model, None where it has none.
        vocab_size: width of its logits.
        eos_token_ids: tokens within it that end a text.
        limits: of the compiler, as it names them, for the process that tries grammars out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: Mapping[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._limits = dict(limits)
        self._lock = threading.Lock()
        self._made: Tables | RequestError | None = None

    def get(self) -> Tables:
        """Make the tables at the first call, or wait for whoever makes them.

        No other thread of Python runs while they are made: a second where tokens are very many.

        Raises:
            RequestError: the model has no tokenizer, no token that ends a text or an odd
                vocabulary, or ``llguidance`` is not installed; it is not tried again.
        """
        with self._lock:
            if self._made is None:
                try:
                    self._made = self._make()
                except RequestError as error:
                    self._made = error
            made = self._made
        if isinstance(made, RequestError):
            raise RequestError(str(made))
        return made

    def prepare(self) -> None:
        """Make the tables before they are needed, where they can be made.

        The process that tries grammars out starts meanwhile, and is not waited for.
        """
        with suppress(RequestError):  # whoever asks for a grammar is told
            threading.Thread(target=self.get().trial.start, daemon=True).start()

    def close(self) -> None:
        """End the process that tries grammars out."""
        if isinstance(self._made, Tables):
            self._made.trial.close()

    def _make(self) -> Tables:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise RequestError(
                f"structured_outputs needs the package llguidance: {install_command()}"
            ) from error
        if self._tokenizer is None or not self._eos:
            what = "tokenizer" if self._tokenizer is None else "token that ends a text"
            raise RequestError(f"structured_outputs needs a {what}, and the model has none")
        try:
            vocabulary = GrammarVocabulary(self._tokenizer, self._vocab_size, self._eos)
            lookup = LLTokenizer(vocabulary, self._vocab_size, self._eos)  # type: ignore[arg-type]
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            raise RequestError(
                f"structured_outputs cannot be used with this model's tokenizer: {error}"
            ) from error
        names = TokenNames.of(self._tokenizer, self._vocab_size, self._eos)
        script = Path(__file__).with_name("grammar_worker.py")
        return Tables(vocabulary, lookup, names, WorkerSlot(script, self._greeting(vocabulary)))

    def _greeting(self, vocabulary: GrammarVocabulary) -> str:
        """What the process that tries grammars out has to know at its start."""
        first = {
            "tokens": " ".join([each.hex() for each in vocabulary.tokens]),
            "special": vocabulary.special_token_ids,
            "eos": self._eos,
            "limits": self._limits,
        }
        return json.dumps(first) + "\n"
