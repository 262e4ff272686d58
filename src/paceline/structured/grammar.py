"""From a structured output's specification to constraints. Owns the compiler, its limits and cache.

Compiling belongs into the caller's thread, never the engine's. Specifications are untrusted, and
the compiler cannot be interrupted: each is tried out first in a process of its own
(:mod:`paceline.structured.grammar_worker`), which is killed when it takes too long. Knows no
request and no draft.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.errors import BusyError, RequestError, ShapeError
from paceline.core.installation import install_command
from paceline.core.worker_process import WorkerSlot
from paceline.json_schema.normal_form import normal_form
from paceline.request.request import Constraint
from paceline.request.structured_outputs import JSON_STYLE, StructuredOutputs
from paceline.structured.constraint import Anything, MatcherConstraint
from paceline.structured.lark import quoted, source_of, tag_grammar
from paceline.structured.thoughts import AfterThoughts, Marks
from paceline.text.token_pieces import TokenNames, token_pieces
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MAX_CACHED = 64
"""Grammars that are kept, and refusals likewise; those used longest ago go first."""
MAX_MARKS = 4
"""Pairs of marks of thoughts whose tokens are kept."""
COMPILE_SECONDS = 0.4
"""Of processor time, first masks included."""
MASK_SECONDS = 0.1
"""Of processor time: longest that one step of the engine may wait for a grammar."""
DEADLINE_SECONDS = 10.0
"""For both, however busy the machine is."""
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 100_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Of the compiler and of each mask; as it names them. A state takes one or two kilobytes."""
_PLACE = re.compile(r"^at \d+\(\d+\): | \d+ \| .*", re.DOTALL)
"""Where in a grammar its compiler stopped, and the lines around that place."""
_MEANINGS = (
    ("NoExtensionBias", "no text matches it"),
    ("Regex is empty", "no text matches an expression in it, with its lengths and format"),
    ("lookarounds not supported", "\\b is not supported, ^ and $ only at an expression's ends"),
    ("Too many items", "it allows too much at once, or leads back to itself without end"),
)
"""Of the compiler's messages, those that say little to whoever wrote a schema or an expression."""


_GAP = {"lark_grammar": "%llguidance {}\nstart: GAP @answer\nGAP: /[ \\t\\r\\n]{0,4}/\n"}


class GrammarCompiler:
    """Compiles and caches the grammars of one model. May be called from several threads.

    Args:
        tokenizer: of the model, None where it has none.
        vocab_size: width of its logits.
        eos_token_ids: tokens that end a text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = [i for i in eos_token_ids if 0 <= i < vocab_size]
        self._lock = threading.Lock()
        self._tables: _Tables | RequestError | None = None
        self._compiled = functools.lru_cache(MAX_CACHED)(self._compile)
        self._marks = functools.lru_cache(MAX_MARKS)(self._make_marks)

    def constraints(self, spec: StructuredOutputs, count: int) -> Sequence[Constraint]:
        """As many constraints that know nothing of each other.

        Raises:
            RequestError: the specification is malformed or too complex, the model has no tokenizer
                or no token that ends a text, or ``llguidance`` is not installed.
        """
        after = spec.after
        if after is None:
            return [self._constraint(spec) for _ in range(count)]
        marks = self._marks(after.opening, after.closing)
        spelling = _spelling(self._ready_tables().lookup)
        return [
            AfterThoughts(
                marks,
                self._constraint(spec, has_gap=True),
                None if after.opened else self._constraint(spec),
                spelling,
                after.budget,
                may_end=spec.free,
            )
            for _ in range(count)
        ]

    def _constraint(
        self, spec: StructuredOutputs, has_gap: bool = False
    ) -> MatcherConstraint | Anything:
        """A constraint, which lets white space come first if it ``has_gap``."""
        if spec.free:
            return Anything(self._vocab_size)
        matcher = self._matcher(spec, has_gap).deep_copy()
        return MatcherConstraint(matcher, self._ready_tables().lookup, self._eos)

    def _matcher(self, spec: StructuredOutputs, has_gap: bool) -> LLMatcher:
        compiled = self._compiled(spec.kind, spec.source, has_gap)
        if isinstance(compiled, ShapeError):
            # Whoever asks for what a program composed has not seen the grammar.
            reason = _PLACE.sub("", compiled.reason) if spec.composed else compiled.reason
            raise ShapeError(compiled.field, compiled.problem, reason)
        return compiled

    def _compile(self, kind: str, source: str, has_gap: bool) -> LLMatcher | ShapeError:
        """A matcher at its beginning, or what is wrong with the specification. ``RequestError``
        where the trial did not end well, which another one may, and ``BusyError`` where the machine
        had no time.
        """
        tables = self._ready_tables()
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar_text(kind, source, tables.names)
        except ShapeError as error:
            return error
        except ValueError as error:
            return _refusal(kind, str(error))
        if has_gap:
            grammar = _with_gap(grammar)
        request = {"grammar": grammar, "seconds": COMPILE_SECONDS, "mask_seconds": MASK_SECONDS}
        reply = tables.trial.ask(json.dumps(request) + "\n", DEADLINE_SECONDS)
        if "ok" not in reply:
            refusal = _refusal(kind, str(reply.get("error")))
            if reply.get("late"):
                raise BusyError(f"{refusal}; try again")
            if reply.get("retry"):
                raise refusal
            return refusal
        limits = LLParserLimits(**LIMITS)
        matcher = LLMatcher(tables.lookup, grammar, log_level=0, limits=limits)
        return _refusal(kind, matcher.get_error()) if matcher.is_error() else matcher

    def _make_marks(self, opening: Sequence[str], closing: Sequence[str]) -> Marks:
        return Marks(opening, closing, self._ready_tables().vocabulary.pieces, self._eos)

    def prepare(self) -> None:
        """Make the tables of the vocabulary, where they can be made, before a grammar needs them.

        No other thread of Python runs meanwhile: a second where tokens are very many. The process
        that tries grammars out starts then, and is not waited for.
        """
        with suppress(RequestError):  # whoever asks for a grammar is told
            threading.Thread(target=self._ready_tables().trial.start, daemon=True).start()

    def close(self) -> None:
        """End the process that tries grammars out."""
        if isinstance(self._tables, _Tables):
            self._tables.trial.close()

    def _ready_tables(self) -> _Tables:
        """Make the tables at the first call, or wait for whoever makes them. Where they cannot be
        made, each call raises the same ``RequestError``.
        """
        with self._lock:
            if self._tables is None:
                try:
                    self._tables = self._make_tables()
                except RequestError as error:
                    self._tables = error
        if isinstance(self._tables, RequestError):
            raise type(self._tables)(*self._tables.args)
        return self._tables

    def _make_tables(self) -> _Tables:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ShapeError("", "needs the package llguidance", install_command()) from error
        if self._tokenizer is None or not self._eos:
            what = "tokenizer" if self._tokenizer is None else "token that ends a text"
            raise ShapeError("", f"needs a {what}, and the model has none")
        try:
            vocabulary = GrammarVocabulary(self._tokenizer, self._vocab_size, self._eos)
            lookup = LLTokenizer(vocabulary, self._vocab_size, self._eos)  # type: ignore[arg-type]
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            raise ShapeError(
                "", "cannot be used with this model's tokenizer", str(error)
            ) from error
        names = TokenNames.of(self._tokenizer, self._vocab_size, self._eos)
        greeting = {
            "tokens": " ".join([token.hex() for token in vocabulary.tokens]),
            "special": vocabulary.special_token_ids,
            "eos": self._eos,
            "limits": LIMITS,
        }
        script = Path(__file__).with_name("grammar_worker.py")
        trial = WorkerSlot(script, json.dumps(greeting) + "\n")
        return _Tables(vocabulary, lookup, names, trial)


PANIC = "PanicException"
"""What the library raises where an assertion of its own fails; it is no ``Exception``."""


class _Tables(NamedTuple):
    """What every grammar of a model needs: the vocabulary, also as the compiler looks it up, the
    names by which a grammar may ask for tokens, and the process that tries grammars out.
    """

    vocabulary: GrammarVocabulary
    lookup: LLTokenizer
    names: TokenNames
    trial: WorkerSlot


def _refusal(kind: str, problem: str) -> ShapeError:
    detail = " ".join(problem.replace("<non-verbose/>", "").split())[:300]
    meaning = next((plain for sign, plain in _MEANINGS if sign in detail), None)
    if meaning is not None:
        detail = f"{meaning} ({detail})"
    return ShapeError(kind, "cannot be used", detail)


def _grammar_text(kind: str, source: str, tokens: TokenNames) -> str:
    """The specification in the compiler's own language: JSON that lists grammars."""
    from llguidance import LLMatcher

    match kind:
        case "json" | "json_object":
            schema = normal_form(json.loads(source)) if source else {"type": "object"}
            text = json.dumps(schema)
            return LLMatcher.grammar_from_json_schema(text, defaults=JSON_STYLE)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case "structural_tag":
            return tag_grammar(source, tokens)
        case "choice":
            choices = " | ".join(map(quoted, json.loads(source)))
            grammar = {"lark_grammar": f"start: {choices}"}
        case _:
            grammar = source_of(source, tokens)
    return json.dumps({"grammars": [grammar]})


def _with_gap(grammar: str) -> str:
    document = json.loads(grammar)
    first, *rest = document["grammars"]
    return json.dumps({**document, "grammars": [_GAP, {**first, "name": "answer"}, *rest]})


def _spelling(tokenizer: LLTokenizer) -> Callable[[bytes], list[int]]:
    """Tokens that write some bytes: greedily, since no special token is meant."""

    def tokens(text: bytes) -> list[int]:
        try:
            known, cut = text.decode(), b""
        except UnicodeDecodeError as error:  # a character that the next token completes
            known, cut = text[: error.start].decode(), text[error.start :]
        whole: list[int] = tokenizer.greedy_tokenize(known)
        return whole + (tokenizer.tokenize_bytes(cut) if cut else [])

    return tokens


class GrammarVocabulary:
    """Has the attributes by which ``LLTokenizer`` knows a vocabulary, and encodes what is forced.

    The compiler could read a ``tokenizer.json``. Told what each token writes, it makes the same
    tables of the 262,144 tokens of Gemma 3 in half the time, during which no other thread of Python
    runs, and in two fifths of the memory (llguidance 1.9.1).

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
