"""DSPy: a signature with a choice, answered as JSON. Prints one JSON line.

Runs in an environment of its own: ``python dspy_predict.py URL KEY MODEL``.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import dspy
from asking import ASKED, MESSAGES, WORDS

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["reader", "writer"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


class Guess(dspy.Signature):
    """Who begins a text like this?"""

    text: str = dspy.InputField()
    kind: Literal["reader", "writer"] = dspy.OutputField()


def main(url: str, key: str, model: str) -> None:
    lm = dspy.LM(
        f"openai/{model}", api_base=f"{url}/v1", api_key=key, cache=False, num_retries=0, **ASKED
    )
    (text,) = lm(messages=MESSAGES)
    # DSPy sends a schema to models alone that litellm has in its list; for others it hopes.
    form = {"type": "json_schema", "json_schema": {"name": "guess", "schema": SCHEMA}}
    lm.kwargs["extra_body"] = {"response_format": form}
    dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
    guess = dspy.Predict(Guess)(text=WORDS)
    print(json.dumps({"text": text if isinstance(text, str) else text["text"], "kind": guess.kind}))


if __name__ == "__main__":
    main(*sys.argv[1:])
