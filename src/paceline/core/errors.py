"""Every error a user of Paceline can cause, in one tree. Owns no behaviour.

Catch :class:`PacelineError` for all of them. Each message says what was wrong, what is allowed and,
where there is something to do, what to do.
"""

from typing import Self


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose.

    Attributes:
        param: the field or setting that is at fault, if it is a particular one.
        code: what a program can tell the error by.
    """

    param: str | None = None
    code: str | None = None

    def __init__(self, message: str = "", param: str | None = None) -> None:
        super().__init__(message)
        if param is not None:
            self.param = param

    @classmethod
    def of(cls, param: str, problem: str) -> Self:
        """The error of a field or setting; the problem is the rest of a sentence about it."""
        return cls(f"{param} {problem}", param)


class ConfigError(PacelineError, ValueError):
    """An engine option, a flag or a speculative configuration is not acceptable."""


class RequestError(PacelineError, ValueError):
    """One request asks for something that cannot be served; its neighbours are unaffected."""


class ShapeError(RequestError):
    """What an output must match is malformed, too large, or cannot be used.

    Args:
        field: of ``structured_outputs``, empty for all of it.
        problem: what is wrong, as the rest of a sentence about the field.
        reason: why, where that is another sentence.
    """

    def __init__(self, field: str, problem: str, reason: str = "") -> None:
        super().__init__(param=f"structured_outputs.{field}" if field else "structured_outputs")
        self.args = (field, problem, reason)  # an error is unpickled by calling its class with them
        self.field, self.problem, self.reason = field, problem, reason

    def __str__(self) -> str:
        return f"{self.param} {self.problem}" + (f": {self.reason}" if self.reason else "")


class ContextLengthError(RequestError):
    """The prompt, or the prompt plus ``max_tokens``, does not fit into the model's context."""

    code = "context_length_exceeded"


class UnknownAdapterError(RequestError):
    """A request asks for an adapter that is not loaded."""

    param = "model"
    code = "model_not_found"


class NoFimTokensError(RequestError):
    """The model's vocabulary has no tokens by which it could be asked to fill a gap."""

    code = "no_fim_tokens"


class BusyError(RequestError):
    """The machine had no time for what a request needs; another try may find it."""

    code = "busy"


class ModelLoadError(PacelineError):
    """A checkpoint, a configuration or a tokenizer could not be read."""


class NoAdapterError(ModelLoadError):
    """There is no adapter at a path."""


class UnsupportedModelError(ModelLoadError):
    """The checkpoint is well formed but describes a model that Paceline does not run."""


class FetchError(ModelLoadError):
    """A model of the catalogue could not be fetched, or may be only when it is asked for."""


class ModelUnavailableError(ModelLoadError):
    """A server cannot load a model that a request asks for; its other models serve on."""

    param = "model"
    code = "model_load_failed"


class ModelTooLargeError(ModelUnavailableError):
    """A model needs more memory than a server may use for models."""

    code = "model_too_large"


class TemplateError(RequestError):
    """A chat template is missing, failed, or went past its limits of time or output."""


class ProposerError(PacelineError):
    """A proposer raised, or returned a tree that is not one. The engine decodes on without it."""


class RequestFailedError(PacelineError):
    """The forward pass or the sampler failed for one request, which ends with what it had."""

    code = "request_failed"


class StageError(PacelineError):
    """A part of the model that lies in another process is lost, or failed in this step."""


class UnservableRequestError(RequestFailedError):
    """What the request itself demands leaves no token, or its grammar passed a limit."""

    code = "unservable_request"


class SlowReaderError(PacelineError):
    """The client of a stream left too much of it unread; the request was ended."""

    code = "slow_reader"


class AnswerTooLargeError(PacelineError):
    """An answer in one body took too much memory before it was complete; the request was ended."""

    code = "answer_too_large"


class EngineClosedError(PacelineError):
    """The engine was closed, or died, before or while the request was served."""

    code = "engine_closed"


class EngineDeadError(EngineClosedError):
    """The process of the engine died, or its step failed; a server starts another one."""

    code = "engine_dead"


class TrainingError(PacelineError):
    """Training data or options cannot be used, or a checkpoint does not fit them."""


class TraceError(PacelineError):
    """A trace on disk is damaged, or is of another model or other settings."""


class ProfileError(PacelineError):
    """A cost table or the file of one is damaged, or is of another machine, model or version."""


class BenchmarkError(PacelineError):
    """The server that is measured is not there, or does not answer what a benchmark asks."""
