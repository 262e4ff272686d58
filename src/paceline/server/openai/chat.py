"""``POST /v1/chat/completions``: the next message of a conversation. Owns the order of its parts.

What a chat asks for and how its text is read is :mod:`paceline.server.chat`'s.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from paceline.core.errors import RequestError
from paceline.request.structured_outputs import ThoughtMarks
from paceline.server.chat.answer_parts import TokenPlaces
from paceline.server.chat.answer_requirements import AnswerRequirements
from paceline.server.chat.choice_stream import ChatChoice, ChatLogprobs, joined
from paceline.server.chat.harmony import Harmony
from paceline.server.chat.prompt import prompt_text, thoughts_of, with_defaults, wrapping_of
from paceline.server.chat.response_formats import blamed, shape_param
from paceline.server.engine_process.client import Answers
from paceline.server.engine_process.messages import Piece
from paceline.server.engine_process.tokens import OriginTokens, prompt_logprobs
from paceline.server.hosting.answering import Answering, encode, received, respond
from paceline.server.hosting.serving import EncodedPrompt, Serving
from paceline.server.http.errors import ApiError
from paceline.server.http.openapi import posts
from paceline.server.http.sse import EVENTS, Deadline
from paceline.server.protocol.chat import ChatCompletionRequest, MessageToolCall
from paceline.server.protocol.completions import UsageBody
from paceline.server.protocol.generation import UNENFORCED
from paceline.server.protocol.sampling import answer_limit, sampling_params, truncated

router = APIRouter()


class ChatResponseMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoiceBody(BaseModel):
    index: int
    message: ChatResponseMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None


class ChatCompletionResponse(BaseModel):
    """What a chat is answered with; events of a stream have ``delta`` in place of ``message``."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoiceBody]
    usage: UsageBody | None


@posts(
    router,
    ChatCompletionRequest,
    "/v1/chat/completions",
    "/chat/completions",
    answer=ChatCompletionResponse,
    events=EVENTS,
)
async def chat_completions(request: Request) -> Response:
    serving, body, deadline = await received(request, ChatCompletionRequest)
    return await respond(request, ServedChat(serving, body, deadline))


async def num_prompt_tokens(serving: Serving, body: ChatCompletionRequest) -> int:
    """How long the prompt of a chat is; the model is loaded for that."""
    body = with_defaults(body, serving.config.default_chat_template_kwargs)
    async with serving.using():
        text = await asyncio.to_thread(prompt_text, serving.tokenizer, body, serving.formats)
        token_ids = await encode(serving, text, add_special_tokens=False)
        info = serving.client.info
        return len(truncated(token_ids, body.truncate_prompt_tokens, info, body.limit))


class ServedChat(Answering[ChatCompletionRequest]):
    """A chat while it is served."""

    kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    operation = "chat"
    _only_words_have_logprobs = False

    # Once the conversation is rendered.
    _token_ids: list[int]
    _requirements: AnswerRequirements

    def __init__(self, serving: Serving, body: ChatCompletionRequest, deadline: Deadline) -> None:
        body = with_defaults(body, serving.config.default_chat_template_kwargs)
        super().__init__(serving, body, deadline)
        self._choices: dict[int, ChatChoice] = {}

    async def _prepare(self) -> list[EncodedPrompt]:
        serving, body = self._serving, self.body
        tokenizer = serving.tokenizer
        if not tokenizer.has_chat_template:
            raise ApiError(
                400,
                "the model has no chat template, so it does not know conversations; send a text "
                "to /v1/completions, or start the server with --chat-template",
                code="no_chat_template",
            )
        text = await asyncio.to_thread(prompt_text, tokenizer, body, serving.formats)
        requirements = await self._required(text)
        if requirements.unenforced:
            self.headers[UNENFORCED] = ", ".join(requirements.unenforced)
        info = serving.client.info
        token_ids = await encode(serving, text, add_special_tokens=False)
        token_ids = truncated(token_ids, body.truncate_prompt_tokens, info, body.limit)
        limit = answer_limit(
            len(token_ids),
            body.limit,
            info,
            is_cut=body.is_cut_to_context,
            name=body.called(body.limit_name),
        )
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = sampling_params(
            body,
            info,
            tokenizer,
            max_tokens=limit,
            structured=requirements.grammar,
            logprobs=logprobs,
            more_stops=() if body.ignore_eos else tokenizer.chat_stops,
        )
        self._token_ids, self._requirements = token_ids, requirements
        return [EncodedPrompt(token_ids, params)]

    async def _required(self, prompt: str) -> AnswerRequirements:
        """What holds for the answer to a prompt; schemas are looked at where nobody waits."""
        body, formats = self.body, self._serving.formats
        thoughts: ThoughtMarks | Harmony | None
        if formats.is_harmony:
            thoughts = Harmony.behind(prompt)
        else:
            thoughts = thoughts_of(formats.thoughts, body, prompt)
        wrapping = wrapping_of(formats.thoughts, prompt)
        read = functools.partial(AnswerRequirements.of, body, formats.tools, thoughts, wrapping)
        has_schemas = bool(body.tools) or shape_param(body) is not None
        return await self._serving.schemas.run(read) if has_schemas else read()

    def _blamed(self, error: RequestError) -> Exception:
        return blamed(error, self._requirements.param)

    async def _parts(self, answers: Answers, piece: Piece) -> list[dict[str, Any]]:
        self._usage.take(piece)
        begin = list[dict[str, Any]]()
        choice = self._choices.get(piece.sample)
        if choice is None:
            choice = self._choices[piece.sample] = self._choice(piece.sample)
            begin.append(choice.begin())
        parts = choice.take(piece)
        self._usage.take_thoughts(choice.new_thoughts)
        return begin + parts

    def _choice(self, index: int) -> ChatChoice:
        body, serving = self.body, self._serving
        logprobs = None
        if body.logprobs:
            logprobs = ChatLogprobs(serving.texts, only_words=self._only_words_have_logprobs)
        origins = None
        if body.return_origins:
            origins = OriginTokens(serving.tokenizer, self._token_ids)
        parser, places = self._requirements.parser(), None
        if parser.may_think or (logprobs is not None and logprobs.only_words):
            places = TokenPlaces(serving.tokenizer, self._token_ids)
        return ChatChoice(index, parser, places, logprobs, origins, body.return_token_ids)

    def _joined(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return joined(parts)

    def _opening(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._token_ids} if self.body.return_token_ids else {}

    async def _extra(self, answers: Answers) -> dict[str, Any]:
        extra = self._opening()
        count = self.body.prompt_logprobs
        if count is not None:
            # Twenty for each token of a long prompt take their time.
            entries, texts = answers.prompt_logprobs[0], self._serving.texts
            documents = await asyncio.to_thread(prompt_logprobs, entries, texts, count)
            extra["prompt_logprobs"] = documents
        return extra
