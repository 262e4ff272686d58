"""Shapes of output that programs ask models for: JSON schemas, a regular expression, a choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline import StructuredOutputs

Schema = dict[str, Any]


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
    "nested lists": record(
        title=text(),
        sections=several(
            record(heading=text(), keywords=several(text(10), 1, 4), page_numbers=several(whole())),
            2,
            3,
        ),
    ),
    "coordinates": record(
        type=one_of("FeatureCollection"),
        features=several(
            record(
                id=whole(),
                geometry=record(
                    type=one_of("Point"), latitude=whole(-90, 90), longitude=whole(-180, 180)
                ),
                visible=FLAG,
            ),
            2,
            4,
        ),
    ),
    "extraction": record(
        entities=several(
            record(
                text=text(),
                label=one_of("PERSON", "ORGANISATION", "LOCATION", "DATE"),
                start_offset=whole(),
                end_offset=whole(),
            ),
            2,
            4,
        ),
    ),
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
