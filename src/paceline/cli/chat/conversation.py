"""A conversation with a model: answers and remembers, within the model's context.

Owns the turns; knows nothing of what is typed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.api.outputs import Completion
from paceline.cli.options.prompts import Encoder
from paceline.cli.terminal.display import Screen, answer_line, cut_line
from paceline.cli.terminal.report import Figures
from paceline.cli.terminal.streaming import stream_answer
from paceline.core.errors import ContextLengthError
from paceline.request.sampling_params import SamplingParams
from paceline.server.chat.harmony import words_of

if TYPE_CHECKING:
    from paceline.api.llm import LLM

WAYS_ON = (
    "/clear starts a new conversation, /drop drops the oldest turns, and /set drop does that by "
    "itself from here on"
)
ROOM = 4
"""Turns are dropped until such a part of the context is free for the answer."""


@dataclass(slots=True)
class Conversation:
    """Turns, and how they are held.

    Attributes:
        messages: questions and answers so far.
        unanswered: the last question, where it found no room.
        shows_figures: whether a line of them follows each answer.
        keeps_typed: whether what is typed is kept for later sessions.
        drops: whether the oldest turns go when the context is full.
        last: figures of the last answer.
        all: figures of all of them.
    """

    llm: LLM
    encoder: Encoder
    params: SamplingParams
    screen: Screen
    lora: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    unanswered: str | None = None
    shows_figures: bool = True
    keeps_typed: bool = True
    drops: bool = False
    last: Figures = field(default_factory=Figures)
    all: Figures = field(default_factory=Figures)

    @property
    def context(self) -> int:
        """Tokens that the model holds."""
        tokens: int | None = self.llm.config.max_model_len
        assert tokens is not None
        return tokens

    def ask(self, text: str) -> None:
        """Answer a message, and remember both.

        Raises:
            RequestError: it cannot be answered.
        """
        prompt = self._prompt(text)
        figures = Figures()
        try:
            answer = stream_answer(
                self.llm, prompt, self.params, self.screen, figures, True, self.lora
            )
        except ContextLengthError:
            if not self.messages:
                raise
            self.unanswered = text
            self.screen.note(f"the context of {self.context} tokens is full: {WAYS_ON}")
            return
        self.unanswered = None
        (completion,) = answer.completions
        self._count(completion, figures)
        if self.encoder.uses_chat:
            self.messages += [_question(text), _answer(words_of(answer.text))]

    def make_room(self, text: str | None) -> int:
        """Drop the oldest turns until a part of the context is free behind what is said.

        Args:
            text: the next message, if there is one.

        Returns:
            How many turns went.
        """
        most = self.context - self.context // ROOM
        next_one = [] if text is None else [_question(text)]
        before = len(self.messages)
        while self.messages and len(self.encoder.encode([*self.messages, *next_one])) > most:
            del self.messages[:2]
        return (before - len(self.messages)) // 2

    def _prompt(self, text: str) -> list[int]:
        if not self.encoder.uses_chat:
            return self.encoder.encode(text)
        if self.drops and (dropped := self.make_room(text)):
            self.screen.note(f"dropped the oldest {counted(dropped)}")
        return self.encoder.encode([*self.messages, _question(text)])

    def _count(self, completion: Completion, figures: Figures) -> None:
        self.last = figures
        self.all.add_figures(figures)
        cut = cut_line(completion, self.params, self.context)
        if cut is not None:
            is_full = self.encoder.uses_chat and len(completion.token_ids) != self.params.max_tokens
            self.screen.note(f"{cut}: {WAYS_ON}" if is_full else cut)
        if self.shows_figures:
            self.screen.note(answer_line(figures, completion.time_to_first_token))


def counted(turns: int) -> str:
    return f"{turns} turn{'s' * (turns != 1)}"


def _question(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
