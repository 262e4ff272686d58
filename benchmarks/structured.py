"""Wall time of structured output, plain and speculative, on the embedded models.

Both arms decode under the same grammars: nine JSON schemas, a regular expression and a choice. The
plain arm is an engine in which speculation was never configured; a second one is the control. The
arms take turns, outputs are compared token by token, and a speed-up is plain seconds over
speculative seconds. Compiling a grammar takes part in neither: it is cached after the warm-up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from harness import (
    CONTROL,
    PLAIN,
    Report,
    Row,
    Sample,
    Target,
    against_plain,
    among,
    arguments,
    chosen,
    identical_target,
    note,
    raw,
    take_turns,
)
from proposer_sets import DEFAULT, described
from speedup import TEMPERATURES, comparison, count, open_engines

from paceline import LLM, SamplingParams, StructuredOutputs
from paceline.build.default_drafts import default_speculative_config
from paceline.config.speculative import without_memory

Schema = dict[str, Any]


# --- shapes of output that programs ask models for ------------------------------------------------


def text(longest: int = 20, **more: Any) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": longest, **more}


def whole(low: int = 0, high: int = 1000) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def record(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def several(items: Schema, least: int = 1, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


FLAG: Schema = {"type": "boolean"}
DATE: Schema = {"type": "string", "format": "date"}

SECTION = record(heading=text(), keywords=several(text(10), 1, 4), page_numbers=several(whole()))
POINT = record(type=one_of("Point"), latitude=whole(-90, 90), longitude=whole(-180, 180))
FEATURE = record(id=whole(), geometry=POINT, visible=FLAG)
LABEL = one_of("PERSON", "ORGANISATION", "LOCATION", "DATE")
ENTITY = record(text=text(), label=LABEL, start_offset=whole(), end_offset=whole())

SCHEMAS: Mapping[str, Schema] = {
    "person": record(
        first_name=text(), last_name=text(), age=whole(0, 120), email=text(30), is_active=FLAG
    ),
    "invoice": record(
        invoice_number=text(12),
        issued_on=DATE,
        customer=record(name=text(), address=text(30)),
        lines=several(record(description=text(24), quantity=whole(1, 99), unit_price=whole())),
        currency=one_of("EUR", "USD", "GBP"),
        total_amount=whole(),
    ),
    "tool call": record(
        name=one_of("get_weather", "search_documents", "send_message"),
        arguments=record(location=text(), unit=one_of("celsius", "fahrenheit"), days=whole(1, 14)),
    ),
    "ticket": record(
        category=one_of("billing", "technical", "account", "shipping", "other"),
        priority=one_of("low", "normal", "high", "urgent"),
        sentiment=one_of("positive", "neutral", "negative"),
        language=one_of("en", "de", "fr", "es"),
        needs_human_review=FLAG,
        summary=text(40),
    ),
    "nested lists": record(title=text(), sections=several(SECTION, 2, 3)),
    "coordinates": record(type=one_of("FeatureCollection"), features=several(FEATURE, 2, 4)),
    "extraction": record(entities=several(ENTITY, 2, 4)),
    "settings": record(
        server=record(host=text(), port=whole(1, 9999), use_tls=FLAG),
        database=record(driver=one_of("sqlite", "postgresql"), pool_size=whole(1, 50), echo=FLAG),
        logging=record(level=one_of("debug", "info", "warning", "error"), to_file=FLAG),
    ),
    "review": record(
        product_id={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        rating=whole(1, 5),
        pros=several(text(24)),
        cons=several(text(24)),
        would_recommend=FLAG,
    ),
}

SHAPES: Mapping[str, StructuredOutputs] = {
    **{name: StructuredOutputs(json=schema) for name, schema in SCHEMAS.items()},
    "log line (regex)": StructuredOutputs(
        regex=r"\[2024-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z\] (INFO|WARNING|ERROR) "
        r"service=[a-z]{3,10} request_id=[0-9a-f]{8} status=[1-5]\d{2} duration_ms=\d{1,4}"
    ),
    "label (choice)": StructuredOutputs(
        choice=[
            "this message is about a delivery that is late",
            "this message is about a refund that was not paid",
            "this message is about an account that is locked",
            "this message is about something else",
        ]
    ),
}

PROMPTS: Sequence[str] = (
    "# The {shape} of the example, as the program prints it:\n",
    'def example_{name}():\n    """Return one {shape}."""\n    return ',
    "Write a {shape} for the test suite.\n\nAnswer: ",
)


def prompts(shape: str, count: int) -> list[str]:
    """Prompts that ask for a shape in different words."""
    name = shape.split(" (")[0]
    wordings = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    return [
        f"# Case {i + 1}\n" + wording.format(shape=name, name=name.replace(" ", "_"))
        for i, wording in enumerate(wordings)
    ]


WANTED = 1.5
CONFIGS: Mapping[str, Any] = {
    "grammar": {"method": "grammar"},
    # The grammar joins by itself. Prompts come again: nothing is drafted from earlier answers.
    DEFAULT: without_memory(default_speculative_config("embedded")),
}
ALL = "all shapes"


# --- the benchmark --------------------------------------------------------------------------------


def run_cell(
    arms: Mapping[str, LLM], shape: str, temperature: float, options: argparse.Namespace
) -> list[Sample]:
    """All arms on all prompts of one shape, in turns, one request at a time."""
    texts = prompts(shape, options.num_prompts)

    def generate(llm: LLM, item: int) -> Any:
        params = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=temperature,
            seed=item,
            structured_outputs=SHAPES[shape],
        )
        return [llm.generate(texts[item], params)]

    for llm in arms.values():
        generate(llm, 0)
    runs = {name: partial(generate, llm) for name, llm in arms.items()}
    samples = take_turns(runs, range(len(texts)), options.repeat, count)
    return [Sample(s.arm, (shape, s.item), s.repeat, s.seconds, s.facts, s.error) for s in samples]


def rows_of(samples: Sequence[Sample], label: Row) -> list[dict[str, Any]]:
    return [{**label, **against_plain(samples, arm)} for arm in (*CONFIGS, CONTROL)]


def run_all(arms: Mapping[str, LLM], options: argparse.Namespace, report: Report) -> None:
    for temperature in TEMPERATURES:
        together: list[Sample] = []
        for shape in options.shapes:
            label = {"shape": shape, "temperature": temperature}
            note(f"{shape}, temperature {temperature}")
            samples = run_cell(arms, shape, temperature, options)
            together += samples
            report.samples += [raw(sample, label) for sample in samples]
            report.results += rows_of(samples, label)
        report.results += rows_of(together, {"shape": ALL, "temperature": temperature})


def targets(results: Sequence[Row]) -> list[Target]:
    found = [
        Target(
            f"speed-up over all shapes, temperature {row['temperature']}",
            row.get("speedup", {}).get("value"),
            WANTED,
            "at least",
        )
        for row in results
        if row["shape"] == ALL and row["arm"] == DEFAULT
    ]
    return [*found, identical_target(results)]


def tables(results: Sequence[Row]) -> list[str]:
    """One row per shape and temperature: times against plain ones, and tokens per step."""
    keys = {"shape": "shape", "temperature": "temperature"}
    return [comparison(results, keys, ("tokens per step", f"{DEFAULT}/mean_acceptance_length", 2))]


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="folder of the target (default: the embedded one)")
    parser.add_argument("--shapes", type=among(SHAPES), default=list(SHAPES))
    parser.sized("--num-prompts", 6, 2, "of each shape")
    parser.add_argument("--max-tokens", type=int, default=160, help="per prompt (default: 160)")
    parser.sized("--repeat", 2, 1, "of every run")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    with ExitStack() as stack:
        arms = open_engines(options, CONFIGS, stack)
        config = {
            "model": arms[PLAIN].model,
            "dtype": arms[PLAIN].config.dtype,
            "prefix_caching": False,
            **chosen(options, "quick", "shapes", "num_prompts", "max_tokens", "repeat"),
            "proposers": {name: described(config) for name, config in CONFIGS.items()},
        }
        report = Report("structured", config)
        run_all(arms, options, report)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
