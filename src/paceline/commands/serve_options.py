"""The options of ``paceline serve``. Imports nothing slow: its ``--help`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.commands.options import (
    ChatTemplate,
    EngineOptions,
    SpeculationOptions,
    argument,
    option,
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServeOptions(EngineOptions, SpeculationOptions):
    """Options of ``paceline serve``."""

    model: Annotated[
        str | None,
        argument("MODEL", help="Folder, GGUF file, name or hub id (default: the embedded model)."),
    ] = None
    host: Annotated[
        str, option("--host", help="Address to listen on; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1"
    port: Annotated[int, option("--port", help="Port to listen on; 0 takes a free one.")] = 8000
    served_model_name: Annotated[
        list[str] | None,
        option(
            "--served-model-name",
            help="Name of the model in requests; may be given several times (default: MODEL).",
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        option("--api-key", help="Answer only who brings this key; may be given several times."),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        option(
            "--allowed-origins",
            help="Let browsers call from pages of this origin; may be given several times, * is "
            "any.",
        ),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        option(
            "--allowed-hosts",
            help="Answer requests to this name too, for a proxy; may be given several times, * is "
            "any.",
        ),
    ] = None
    max_queue: Annotated[
        int, option("--max-queue", help="Most samples that wait; beyond them requests get a 429.")
    ] = 256
    max_body_size: Annotated[
        str, option("--max-body-size", help="Most bytes of one request, e.g. 512K or 8M.")
    ] = "8M"
    request_timeout: Annotated[
        float, option("--request-timeout", help="Seconds for one request; 0 is no limit.")
    ] = 1800.0
    receive_timeout: Annotated[
        float,
        option(
            "--receive-timeout",
            help="Seconds for a request's headers to arrive, and as many for its body.",
        ),
    ] = 30.0
    hang_timeout: Annotated[
        float,
        option(
            "--hang-timeout",
            help="Seconds without a sign of life after which the engine is started again.",
        ),
    ] = 60.0
    max_engine_restarts: Annotated[
        int,
        option(
            "--max-engine-restarts",
            help="Most engines that are started one after another dies; then the server ends.",
        ),
    ] = 5
    drain_timeout: Annotated[
        float,
        option("--drain-timeout", help="Seconds for requests in flight when the server ends."),
    ] = 30.0
    stream_interval_ms: Annotated[
        float,
        option(
            "--stream-interval-ms",
            help="Send what comes within this time as one event of a stream; 0 sends every step.",
        ),
    ] = 20.0
    metrics_prefix: Annotated[
        str,
        option("--metrics-prefix", help="Of metrics' names; vllm suits dashboards made for it."),
    ] = "paceline"
    chat_template: ChatTemplate = None
    tool_call_parser: Annotated[
        str,
        option("--tool-call-parser", help="How the model writes tool calls: auto, hermes, llama."),
    ] = "auto"
    reasoning_parser: Annotated[
        str, option("--reasoning-parser", help="Tell thoughts from answers: auto, none.")
    ] = "auto"
