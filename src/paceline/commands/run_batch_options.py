"""The options of ``paceline run-batch``. Imports nothing slow: its ``--help`` reads them."""

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
class RunBatchOptions(EngineOptions, SpeculationOptions):
    """Options of ``paceline run-batch``."""

    file: Annotated[
        str | None,
        argument("FILE", help="Requests, one JSON object a line, in OpenAI's batch format."),
    ] = None
    input_file: Annotated[str | None, option("-i", "--input-file", help="The same as FILE.")] = None
    output_file: Annotated[
        str | None,
        option(
            "-o",
            "--output-file",
            help="Answers (default: FILE with .out.jsonl); those that are there are kept.",
        ),
    ] = None
    model: Annotated[
        str | None,
        option("--model", help="Folder, GGUF file, name or hub id (default: the embedded model)."),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        option("--served-model-name", help="What requests call the model (default: its own name)."),
    ] = None
    chat_template: ChatTemplate = None
    json: Annotated[bool, option("--json", help="End stdout with a line of JSON.")] = False
