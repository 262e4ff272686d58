"""Every error a user of Paceline can cause, in one tree. Owns no behaviour.

Catch :class:`PacelineError` for all of them. Each message says what was wrong, what is allowed and,
where there is something to do, what to do.
"""


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose."""


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
        super().__init__(field, problem, reason)
        self.field, self.problem, self.reason = field, problem, reason

    def __str__(self) -> str:
        subject = f"structured_outputs.{self.field}" if self.field else "structured_outputs"
        return f"{subject} {self.problem}" + (f": {self.reason}" if self.reason else "")


class ContextLengthError(RequestError):
    """The prompt, or the prompt plus ``max_tokens``, does not fit into the model's context."""


class UnknownAdapterError(RequestError):
    """A request asks for an adapter that is not loaded."""


class NoFimTokensError(RequestError):
    """The model's vocabulary has no tokens by which it could be asked to fill a gap."""


class BusyError(RequestError):
    """The machine had no time for what a request needs; another try may find it."""


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


class ModelTooLargeError(ModelUnavailableError):
    """A model needs more memory than a server may use for models."""


class TemplateError(RequestError):
    """A chat template is missing, failed, or went past its limits of time or output."""


class ProposerError(PacelineError):
    """A proposer raised, or returned a tree that is not one. The engine decodes on without it."""


class RequestFailedError(PacelineError):
    """The forward pass or the sampler failed for one request, which ends with what it had."""


class StageError(PacelineError):
    """A part of the model that lies in another process is lost, or failed in this step."""


class UnservableRequestError(RequestFailedError):
    """What the request itself demands leaves no token, or its grammar passed a limit."""


class SlowReaderError(PacelineError):
    """The client of a stream left too much of it unread; the request was ended."""


class AnswerTooLargeError(PacelineError):
    """An answer in one body took too much memory before it was complete; the request was ended."""


class EngineClosedError(PacelineError):
    """The engine was closed, or died, before or while the request was served."""


class EngineDeadError(EngineClosedError):
    """The process of the engine died, or its step failed; a server starts another one."""


class TrainingError(PacelineError):
    """Training data or options cannot be used, or a checkpoint does not fit them."""


class TraceError(PacelineError):
    """A trace on disk is damaged, or is of another model or other settings."""


class ProfileError(PacelineError):
    """A cost table or the file of one is damaged, or is of another machine, model or version."""


class BenchmarkError(PacelineError):
    """The server that is measured is not there, or does not answer what a benchmark asks."""
