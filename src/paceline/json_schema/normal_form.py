"""The form of a schema that everything which compiles or reads one starts from."""

from __future__ import annotations

import functools
from typing import Any

from paceline.json_schema.dialects import in_plain_words
from paceline.json_schema.objects import with_closed_objects
from paceline.json_schema.references import with_plain_references


def normal_form(schema: Any) -> Any:
    """A schema with plain references and closed objects, in the words of JSON Schema alone.

    The normal form of a normal form is itself, but for definitions that nothing refers to.
    """
    steps = with_plain_references, in_plain_words, with_closed_objects
    return functools.reduce(lambda found, step: step(found), steps, schema)
