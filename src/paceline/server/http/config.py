"""Options of a server, checked once. Knows no engine and no framework."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.config.template_options import check_template_options
from paceline.core.checks import check_settings, number, one_of, optional, setting, whole
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

    Raises:
        ConfigError: a value is not acceptable.
    """

    host: str = setting(
        "127.0.0.1", "Address to listen on; 0.0.0.0 means all addresses of this machine."
    )
    port: int = setting(DEFAULT_PORT, "Port to listen on; 0 chooses a free one.", whole(0, 65535))
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = setting((), "Key that clients must send.")
    allowed_origins: tuple[str, ...] = setting(
        (), "Origin whose pages may call the server from a browser, or * for any."
    )
    allowed_hosts: tuple[str, ...] = setting(
        (), "Further host name that requests may use, such as that of a proxy, or * for any."
    )
    max_queue: int = setting(
        256,
        "Maximum number of samples that wait; further requests get status 429.",
        whole(0, 1 << 20),
    )
    request_timeout: float = setting(
        1800.0, "Maximum seconds per request; 0 is no limit.", number(0, 1e9)
    )
    receive_timeout: float = setting(
        30.0,
        "Seconds within which the headers of a request must arrive, and again as many for its "
        "body.",
        number(1e-3, 1e6),
    )
    hang_timeout: float = setting(
        60.0,
        "Seconds without a sign of life after which the engine is restarted.",
        number(1, 1e9),
    )
    max_engine_restarts: int = setting(
        5,
        "How often an engine that died is restarted before the server gives up.",
        whole(0, 1 << 20),
    )
    drain_timeout: float = setting(
        30.0, "Seconds that running requests get to finish when the server stops.", number(0, 1e9)
    )
    max_body_bytes: int = setting(
        8 << 20, "Maximum size of a request, e.g. 512K or 8M.", whole(1, 1 << 40)
    )
    stream_interval: float = setting(
        0.02,
        "Combine tokens that come within this time into one event of a stream; 0 sends every step.",
        number(0, 10),
    )
    metrics_prefix: str = setting(
        "paceline", "Prefix of the metrics' names; vllm makes dashboards for vLLM work."
    )
    tool_call_parser: str = setting(
        "auto",
        "Format in which the model writes tool calls: auto, hermes, llama, qwen3_coder, "
        "mistral, ...",
        one_of(TOOL_CALL_PARSERS),
    )
    reasoning_parser: str = setting(
        "auto",
        "Format in which the model marks its thoughts: auto, none, deepseek_r1, granite, "
        "mistral, ...",
        one_of(REASONING_PARSERS),
    )
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    pooling: str | None = setting(
        None,
        f"How hidden states become the embedding of a text: {', '.join(POOLINGS)} "
        "(default: what the model's files say, or else mean).",
        optional(one_of(POOLINGS)),
    )
    memory_budget: float = setting(
        math.inf,
        "Memory for all loaded models together, e.g. 8GiB or 50%. The least recently used model "
        "is unloaded to make room (default with several models: four fifths of the machine's "
        "memory).",
        number(1, math.inf),
    )
    max_loaded_models: float = setting(
        math.inf, "Maximum number of models loaded at once.", number(1, math.inf)
    )
    keep_alive: float = setting(
        math.inf,
        "How long an idle model stays loaded, in seconds or as 5m or 1h30m; -1 means forever.",
        number(0, math.inf),
    )
    allow_runtime_lora_updating: bool = setting(
        False, "Let requests load and unload adapters from folders on this machine."
    )

    def __post_init__(self) -> None:
        check_settings(self)
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
            raise ConfigError.of(
                "metrics_prefix", f"is {self.metrics_prefix!r}; allowed: letters, digits and _"
            )
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
