"""Options of a server, checked once. Knows no engine and no framework."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.config.template_options import check_template_options
from paceline.core.checks import check_choice, check_number
from paceline.core.errors import ConfigError
from paceline.request.sampling_params import POOLINGS

DEFAULT_PORT = 8000
OPEN_PATHS = ("/health", "/readyz", "/livez", "/ping")
"""What is answered without a key, and however many connections there are."""
LEAST_STEP_TIMEOUT = 600.0
TOOL_CALL_PARSERS = (
    *("auto", "apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31"),
    *("deepseek_v32", "deepseek_v4", "ernie45", "functionary_v31", "functiongemma", "gemma4"),
    *("gigachat3", "glm45", "glm47", "granite", "granite4", "hermes", "hunyuan_a13b", "hy_v3"),
    *("internlm", "jamba", "kimi_k2", "kimi_k3", "lfm2", "llama", "llama3_json", "llama4_json"),
    *("llama4_pythonic", "longcat", "mimo", "minicpm5", "minimax_m2", "mistral"),
    *("nemotron_json", "olmo3", "openai", "phi4_mini_json", "pythonic", "qwen3_coder"),
    *("qwen3_xml", "seed_oss", "smollm3", "step3p5", "xlam"),
)
REASONING_PARSERS = (
    *("auto", "none", "apertus", "cohere_command3", "cohere_command4", "deepseek_r1"),
    *("deepseek_v3", "ernie45", "exaone", "gemma4", "glm45", "glm47", "granite", "holo2"),
    *("hunyuan_a13b", "hy_v3", "kimi_k2", "kimi_k3", "mimo", "minimax_m2", "minimax_m3"),
    *("mistral", "nemotron_v3"),
    *("olmo3", "openai_gptoss", "qwen3", "seed_oss", "smollm3", "step3", "step3p5"),
)
_HOST = re.compile(r"[a-zA-Z0-9_-]+(\.[a-zA-Z0-9_-]+)*")
_METRICS_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How a server listens, whom it answers and how much it takes on.

    Attributes:
        port: 0 takes a free one.
        served_model_names: names under which requests ask for the model, the first in answers;
            empty: the model's own.
        api_keys: a request needs one of them; empty: none.
        allowed_origins: browsers may call from pages of these origins, or of any with ``*``.
        allowed_hosts: names that requests may call the server by, besides those that
            :mod:`paceline.server.http.security` allows by itself; ``*`` is any.
        max_queue: unfinished samples beyond those that the engine runs at once.
        request_timeout: seconds from a request's arrival to its last token; 0 is no limit.
        receive_timeout: seconds in which a request's headers have to arrive, and then its body.
        hang_timeout: seconds without a sign of life from the engine's process after which it is
            ended, and started again.
        max_engine_restarts: most engines in a row that are started after one died or hung; then the
            server ends.
        drain_timeout: seconds that requests in flight get when the server is told to end.
        max_body_bytes: of one request.
        stream_interval: seconds within which the pieces of an answer are sent together; its first
            and its last go at once, and with 0 so does every one.
        metrics_prefix: of the names of metrics; ``vllm`` suits dashboards made for vLLM.
        tool_call_parser: how the model writes tool calls; ``auto`` asks its chat template.
        reasoning_parser: how the model marks its thoughts, by vLLM's names; ``auto`` asks its chat
            template, ``none`` takes everything for the answer.
        default_chat_template_kwargs: options of chat templates that hold where a request says
            nothing else.
        pooling: of embeddings whose requests do not say; one of
            :data:`~paceline.request.sampling_params.POOLINGS`. None is the model's own.
        memory_budget: bytes that all loaded models together may take.
        max_loaded_models: how many may be loaded at once.
        keep_alive: seconds after which an idle model is unloaded, where its last request did not
            say.
        allow_runtime_lora_updating: requests may load and unload adapters.

    Raises:
        ConfigError: a value is not acceptable.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_queue: int = 256
    request_timeout: float = 1800.0
    receive_timeout: float = 30.0
    hang_timeout: float = 60.0
    max_engine_restarts: int = 5
    drain_timeout: float = 30.0
    max_body_bytes: int = 8 << 20
    stream_interval: float = 0.02
    metrics_prefix: str = "paceline"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    pooling: str | None = None
    memory_budget: float = math.inf
    max_loaded_models: float = math.inf
    keep_alive: float = math.inf
    allow_runtime_lora_updating: bool = False

    def __post_init__(self) -> None:
        check_number("port", self.port, 0, 65535)
        check_number("max_queue", self.max_queue, 0, 1 << 20)
        check_number("request_timeout", self.request_timeout, 0, 1e9, float)
        check_number("receive_timeout", self.receive_timeout, 1e-3, 1e6, float)
        check_number("hang_timeout", self.hang_timeout, 1, 1e9, float)
        check_number("max_engine_restarts", self.max_engine_restarts, 0, 1 << 20)
        check_number("drain_timeout", self.drain_timeout, 0, 1e9, float)
        check_number("stream_interval", self.stream_interval, 0, 10, float)
        check_number("memory_budget", self.memory_budget, 1, math.inf, float)
        check_number("max_loaded_models", self.max_loaded_models, 1, math.inf, float)
        check_number("keep_alive", self.keep_alive, 0, math.inf, float)
        check_number("max_body_bytes", self.max_body_bytes, 1, 1 << 40)
        for key in self.api_keys:
            if not key or not key.isascii() or key != key.strip():
                raise ConfigError(
                    "an API key is empty, or has characters that a header cannot carry; allowed "
                    "are ASCII characters without spaces around them"
                )
        if not all(self.served_model_names):
            raise ConfigError("a served model name is empty; give one, or leave the option out")
        for host in self.allowed_hosts:
            if host != "*" and not _HOST.fullmatch(host):
                raise ConfigError(
                    f"an allowed host is {host!r}; allowed: names such as llm.example.org, "
                    "without http:// and without a port, and *"
                )
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ConfigError(
                f"metrics_prefix is {self.metrics_prefix!r}; allowed: letters, digits and _"
            )
        check_choice("tool_call_parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        check_choice("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLINGS)
        check_template_options(self.default_chat_template_kwargs)

    @property
    def timeout(self) -> float | None:
        """``request_timeout``, or None where there is no limit."""
        return self.request_timeout or None

    @property
    def step_timeout(self) -> float | None:
        """Seconds that a step of the engine may take, which no request of it would outlast.

        None where there is no limit.
        """
        return self.timeout and max(self.timeout, LEAST_STEP_TIMEOUT)
