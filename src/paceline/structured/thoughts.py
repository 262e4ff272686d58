"""A constraint that holds for what follows a model's thoughts. Owns where the thoughts end.

Thoughts are free: any token may follow there but one that ends the text, since the answer is still
to come. Marks are found in the bytes that tokens write, so a mark may span several tokens, and one
token may end the thoughts and begin the answer. Thoughts that have a budget of tokens are closed by
force when it is spent, at the end of a character. Where a path stands depends on the committed
tokens and the path alone. Knows no grammar library: the answer's own constraints are handed in.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from paceline.request.request import Constraint
from paceline.request.span import ROOT, DraftTree
from paceline.structured.constraint import everything
from paceline.text.detokenizer import unfinished_tag


class TextStage(enum.Enum):
    """Where a text stands."""

    BEGIN = enum.auto()  # it may still prove to be an opening mark
    THOUGHTS = enum.auto()
    ANSWER = enum.auto()


class _State(NamedTuple):
    """Behind some tokens.

    ``text`` is all of it at the beginning, and in thoughts the end that may begin a closing mark.
    ``answer`` are tokens that the answer's constraint takes; at the beginning, those that it takes
    if there are no thoughts. ``thought`` says whether thoughts came before it. ``num_tokens`` are
    those of the thoughts, and ``num_open`` bytes that the last character of these lacks.
    """

    place: TextStage
    text: bytes = b""
    answer: Sequence[int] = ()
    thought: bool = True
    num_tokens: int = 0
    num_open: int = 0


class AnswerConstraint(Constraint, Protocol):
    """The constraint of an answer that thoughts may precede."""

    def takes(self, path: Sequence[int]) -> bool:
        """Whether the text of the path may follow, in whatever tokens it is spelled."""
        ...


class AfterThoughts:
    """The constraint of a request: for the methods see
    :class:`~paceline.request.request.Constraint`.

    Args:
        marks: of the thoughts.
        answer: holds from the end of the thoughts on.
        direct: holds if there are none; None where the prompt ends inside of thoughts.
        tokenize: tokens, of whatever spelling, that write some bytes.
        budget: most tokens of thoughts; None is any number.
        may_end: thoughts may end the text, since nothing has to follow them.
    """

    def __init__(
        self,
        marks: Marks,
        answer: AnswerConstraint,
        direct: AnswerConstraint | None,
        tokenize: Callable[[bytes], list[int]],
        budget: int | None = None,
        may_end: bool = False,
    ) -> None:
        self._marks = marks
        self._budget = budget
        self._free = everything(len(marks.pieces)) if may_end else marks.free
        self._answer = answer
        self._direct = direct
        self._tokenize = tokenize
        self._state = _State(TextStage.THOUGHTS if direct is None else TextStage.BEGIN)
        self._begins: dict[tuple[int, ...], bool] = {(): True}  # what an answer may begin with

    @property
    def place(self) -> TextStage:
        """Where the committed tokens end."""
        return self._state.place

    @property
    def is_complete(self) -> bool:
        return self._state.place is TextStage.ANSWER and self._inner(self._state).is_complete

    def advance(self, token_id: int) -> None:
        state = self._next(self._state, token_id)
        if state.place is TextStage.ANSWER:
            for token in state.answer:
                self._inner(state).advance(token)
            state = state._replace(answer=[])
        self._state = state

    def mask(self, path: Sequence[int]) -> bytes:
        within = self._within_answer(path)
        return self._mask(self._behind(path)) if within is None else within[0].mask(within[1])

    def legal(self, tree: DraftTree) -> DraftTree:
        if self._state.place is TextStage.ANSWER:
            return self._inner(self._state).legal(tree)
        states, masks = {ROOT: self._state}, dict[int, bytes]()
        for node, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
            if parent in states:
                if parent not in masks:
                    masks[parent] = self._mask(states[parent])
                if _allows(masks[parent], token):
                    states[node] = self._next(states[parent], token)
        del states[ROOT]
        return tree if len(states) == len(tree) else tree.select(sorted(states))

    def certain(self, path: Sequence[int]) -> int | None:
        within = self._within_answer(path)
        return self._forced(self._behind(path)) if within is None else within[0].certain(within[1])

    def usual(self, path: Sequence[int]) -> int | None:
        within = self._within_answer(path)
        return None if within is None else within[0].usual(within[1])

    def alternatives(self, path: Sequence[int], most: int) -> list[int]:
        within = self._within_answer(path)
        return [] if within is None else within[0].alternatives(within[1], most)

    def _within_answer(self, path: Sequence[int]) -> tuple[Constraint, Sequence[int]] | None:
        """The answer's constraint and its part of the path; None where no answer has begun."""
        if self._state.place is TextStage.ANSWER:
            return self._inner(self._state), path
        state = self._behind(path)
        return (self._inner(state), state.answer) if state.place is TextStage.ANSWER else None

    def _inner(self, state: _State) -> Constraint:
        return self._answer if state.thought or self._direct is None else self._direct

    def _behind(self, path: Sequence[int]) -> _State:
        state = self._state
        for token in path:
            state = self._next(state, token)
        return state

    def _next(self, state: _State, token: int) -> _State:
        if state.place is TextStage.ANSWER:
            return state._replace(answer=[*state.answer, token])
        if token in self._marks.eos_token_ids:
            return state
        piece = self._marks.pieces[token]
        text, num_tokens = state.text + piece, state.num_tokens + 1
        if state.place is TextStage.BEGIN:
            opened = next((mark for mark in self._marks.opening if text.startswith(mark)), None)
            if opened is None:
                is_open = any(mark.startswith(text) for mark in self._marks.opening)
                place = TextStage.BEGIN if is_open else TextStage.ANSWER
                return _State(place, text, [*state.answer, token], thought=False)
            text = text[len(opened) :]
            num_tokens = 1 if text else 0
        num_open = _num_open(state.num_open, piece)
        return self._thinking(text)._replace(num_tokens=num_tokens, num_open=num_open)

    def _thinking(self, text: bytes) -> _State:
        closing = self._marks.closing
        ends = [(text.find(mark), mark) for mark in closing if mark in text]
        if ends:
            at, mark = min(ends)
            return _State(TextStage.ANSWER, answer=self._tokenize(text[at + len(mark) :]))
        return _State(TextStage.THOUGHTS, text[len(text) - unfinished_tag(text, closing) :])

    def _mask(self, state: _State) -> bytes:
        match state.place:
            case TextStage.ANSWER:
                return self._inner(state).mask(state.answer)
            case TextStage.THOUGHTS:
                return self._mask_of_thoughts(state)
            case TextStage.BEGIN:
                return self._mask_of_beginning(state)

    def _forced(self, state: _State) -> int | None:
        """The token of the closing mark that has to follow, once the budget of thoughts is spent;
        None where something else may.
        """
        is_spent = self._budget is not None and state.num_tokens >= self._budget
        if state.place is not TextStage.THOUGHTS or not is_spent or state.num_open:
            return None
        mark = next(each for each in self._marks.closing if each.startswith(state.text))
        return self._marks.spellings.get(mark[len(state.text) :])

    def _mask_of_thoughts(self, state: _State) -> bytes:
        forced = self._forced(state)
        if forced is not None:
            return (1 << forced).to_bytes(len(self._free), "little")
        closers = self._marks.closers
        text = state.text
        likely = [t for at in range(len(text) + 1) for t in closers.get(text[at:], ())]
        bad = [token for token in likely if not self._may_begin(self._next(state, token))]
        if not bad:
            return self._free
        bits = bytearray(self._free)
        for token in bad:
            bits[token // 8] &= ~(1 << token % 8)
        return bytes(bits)

    def _mask_of_beginning(self, state: _State) -> bytes:
        assert self._direct is not None
        bits = bytearray(len(self._free))
        if self._direct.takes(state.answer):
            direct = self._direct.mask(state.answer)[: len(bits)]
            bits[: len(direct)] = direct
        for token in self._marks.openers.get(state.text, ()):
            if self._may_begin(self._next(state, token)):
                bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def _may_begin(self, state: _State) -> bool:
        """Whether the answer, if one has begun behind thoughts, may begin so."""
        if state.place is not TextStage.ANSWER:
            return True
        begin = tuple(state.answer)
        if begin not in self._begins:
            self._begins[begin] = self._answer.takes(begin)
        return self._begins[begin]


def _num_open(before: int, piece: bytes) -> int:
    """Bytes missing of the last character behind this piece, where ``before`` were missing."""
    left = before
    for byte in piece:
        if byte & 0xC0 == 0x80:
            left = max(0, left - 1)
        else:
            left = 0 if byte < 0xC0 else 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
    return left


def _allows(mask: bytes, token: int) -> bool:
    return token < 8 * len(mask) and bool(mask[token // 8] >> token % 8 & 1)


class Marks:
    """The marks of thoughts as bytes, and the tokens of a vocabulary that matter to them.

    Args:
        pieces: what each token writes; empty where it writes nothing.
        eos_token_ids: tokens that end a text.

    Attributes:
        free: the mask of thoughts.
        closers: tokens that can complete a closing mark and write more, by the part of it before
            them.
        openers: tokens that can go on with an opening mark, by the part of it before them.
        spellings: the longest token that a closing mark can go on with, by the part of it that is
            to come.
    """

    def __init__(
        self,
        opening: Iterable[str],
        closing: Iterable[str],
        pieces: Sequence[bytes],
        eos_token_ids: Iterable[int],
    ) -> None:
        self.opening = tuple(mark.encode() for mark in opening)
        self.closing = tuple(mark.encode() for mark in closing)
        self.pieces = pieces
        self.eos_token_ids = frozenset(eos_token_ids)
        free = bytearray(everything(len(pieces)))
        for token in self.eos_token_ids:
            free[token // 8] &= ~(1 << token % 8)
        self.free = bytes(free)
        self.closers = _closers(self.closing, pieces)
        self.openers = _openers(self.opening, pieces)
        self.spellings = _spellings(self.closing, pieces)


def _closers(marks: Sequence[bytes], pieces: Sequence[bytes]) -> dict[bytes, list[int]]:
    rests = {(mark[:at], mark[at:]) for mark in marks for at in range(len(mark))}
    closers: dict[bytes, list[int]] = {}
    for token, piece in enumerate(pieces):
        for before, rest in rests:
            at = piece.find(rest)
            if at >= 0 and len(piece) > len(rest) and (at == 0 or not before):
                closers.setdefault(before, []).append(token)
    return closers


def _openers(marks: Sequence[bytes], pieces: Sequence[bytes]) -> dict[bytes, list[int]]:
    openers: dict[bytes, list[int]] = {}
    for token, piece in enumerate(pieces):
        for mark in marks if piece else ():
            for at in range(len(mark)):
                if piece.startswith(mark[at:]) or mark.startswith(piece, at):
                    openers.setdefault(mark[:at], []).append(token)
    return openers


def _spellings(marks: Sequence[bytes], pieces: Sequence[bytes]) -> dict[bytes, int]:
    first_token = {piece: token for token, piece in reversed([*enumerate(pieces)])}
    spellings = dict[bytes, int]()
    for rest in {mark[at:] for mark in marks for at in range(len(mark))}:
        begins = (rest[:length] for length in range(len(rest), 0, -1))
        token = next((first_token[begin] for begin in begins if begin in first_token), None)
        if token is not None:
            spellings[rest] = token
    return spellings
