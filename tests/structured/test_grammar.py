"""Specifications to constraints: what is compiled, cached and refused, and how soon."""

from __future__ import annotations

import builtins
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from paceline.core.errors import BusyError, RequestError, ShapeError
from paceline.core.installation import install_command
from paceline.core.worker_process import WorkerSlot
from paceline.request.structured_outputs import StructuredOutputs
from paceline.structured import grammar
from paceline.structured.grammar import GrammarCompiler
from paceline.text.tokenizer import Tokenizer
from tests.children import HAS_PROC, kill_once_asked, running

pytest.importorskip("llguidance")
FRESH = itertools.count(13)
"""Lengths of expressions that no test has tried before."""
finds_processes = pytest.mark.skipif(not HAS_PROC, reason="processes are found in /proc")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    made.constraints(StructuredOutputs(regex="a"), 1)  # its process has started
    yield made
    made.close()


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: Any, text: str) -> bool:
    (constraint,) = compiler.constraints(spec, 1)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not constraint.mask(())[token // 8] >> token % 8 & 1:
            return False
        constraint.advance(token)
    return bool(constraint.mask(())[0] & 1)  # the end may follow


ODD = ['say "no"', "back\\slash", "line\nbreak", "\\d+", "é ü", "a|b"]


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (StructuredOutputs(json={"type": "integer"}), ["-12"], ["1.5", '"1"']),
        (StructuredOutputs(json='{"enum": ["x", 3]}'), ['"x"', "3"], ["x"]),
        (StructuredOutputs(json_object=True), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "{"]),
        (StructuredOutputs(regex=r"\d{3}-[x-z]+"), ["123-xyz"], ["12-x", "123-"]),
        (StructuredOutputs(choice=ODD), ODD, ["say", "5", "a", "b"]),
        (StructuredOutputs(grammar='start: "x" start | "y"'), ["y", "xxy"], ["xx", "yy"]),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutputs) else "",
)
def test_every_kind(
    compiler: GrammarCompiler, tokenizer: Tokenizer, spec: Any, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert accepts(compiler, tokenizer, spec, text), text
    for text in bad:
        assert not accepts(compiler, tokenizer, spec, text), text


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('root ::= "yes" | "no" [0-9]{2,3}', ["yes", "no12"], ["no1", "y"]),
        ('root ::= item+ # list\nitem ::= "- " [a-z]+ "\\n"', ["- a\n- b\n"], ["-a"]),
        ('root ::= "caf\\u00e9" | "(" root ")"', ["café", "(café)"], ["cafe", "("]),
    ],
)
def test_gbnf(
    compiler: GrammarCompiler, tokenizer: Tokenizer, source: str, good: list[str], bad: list[str]
) -> None:
    spec = StructuredOutputs(grammar=source)
    assert [text for text in good if not accepts(compiler, tokenizer, spec, text)] == []
    assert [text for text in bad if accepts(compiler, tokenizer, spec, text)] == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('root ::= "a"\nx ::= (', r"grammar cannot be used: .*Expected '\)' at line 2"),
        ("root ::= x", "Rule 'x' not found"),
        ('x ::= "a"', "no 'root' rule"),
        ("root ::= " + "(" * 20_000, "cannot be used"),
    ],
)
def test_what_is_wrong_with_gbnf(compiler: GrammarCompiler, source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        compiler.constraints(StructuredOutputs(grammar=source), 1)


def test_nobody_is_told_a_place_in_a_grammar_that_was_composed(compiler: GrammarCompiler) -> None:
    broken = {"type": "grammar", "grammar": "start: x"}
    messages = []
    for is_composed in (False, True):
        spec = StructuredOutputs(structural_tag={"format": broken}, composed=is_composed)
        with pytest.raises(ShapeError) as refused:
            compiler.constraints(spec, 1)
        messages.append(refused.value.reason)
    assert re.match(r"at \d+\(\d+\): ", messages[0])
    assert not re.search(r"\d+\(\d+\)| \d+ \| ", messages[1])


def test_compiled_once_and_forgotten_in_turn(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    honest = WorkerSlot.ask

    def noted(slot: WorkerSlot, line: str, seconds: float) -> dict[str, Any]:
        tried.append(line)
        return honest(slot, line, seconds)

    monkeypatch.setattr(WorkerSlot, "ask", noted)
    monkeypatch.setattr(grammar, "MAX_CACHED", 2)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    for pattern in ("one", "one", "two", "one", "three", "one", "two"):
        compiler.constraints(StructuredOutputs(regex=pattern), 1)
    names = ("one", "two", "three")
    assert [name for line in tried for name in names if name in line] == [
        "one",
        "two",
        "three",
        "two",
    ]
    for _ in range(2):  # refusals are kept too
        with pytest.raises(RequestError):
            compiler.constraints(StructuredOutputs(regex="("), 1)
    assert len(tried) == 5
    compiler.close()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(depth: int, keyword: str) -> dict[str, Any]:
    refs = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**refs, f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": {"json": nested(200)},
    "deep text": {"json": "[" * 30000},
    "deep but allowed": {"json": nested(30)},
    "remote": {"json": {"$ref": "https://example.com/schema.json"}},
    "file": {"json": {"$ref": "file:///etc/hosts"}},
    "own tail": {"json": {"$ref": "#"}},
    "many items": {"json": {"type": "array", "minItems": 10**9, "items": {"type": "string"}}},
    "long string": {"json": {"type": "string", "minLength": 10**7}},
    "multiple": {"json": {"type": "integer", "multipleOf": 999_983}},
    "range": {"json": {"type": "number", "minimum": 1e-300, "maximum": 1e300}},
    "many properties": {
        "json": {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(3000)}}
    },
    "long constant": {"json": {"const": "x" * 60000}},
    "any of": {"json": doubling(25, "anyOf")},
    "all of": {"json": doubling(25, "allOf")},
    "not": {"json": {"not": {"type": "string"}}},
    "not a schema": {"json": {"type": 7}},
    "counts": {"regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"},
    "one count": {"regex": "a{1000000}"},
    "exponential": {"regex": "(.*a.{20}){3}"},
    "brackets": {"regex": "(" * 2000 + ")" * 2000},
    "back reference": {"regex": r"(a)\1"},
    "unicode": {"regex": r"(\p{L}|\w|\d){500}"},
    "nothing": {"regex": "[^\\x00-\\U0010FFFF]"},
    "repeated rules": {"grammar": 'start: "a"{1000000}'},
    "ambiguous": {"grammar": 'start: s\ns: s s s | s s | "a" |'},
    "empty lines": {"grammar": "\n" * 65_000},
    "endless": {"grammar": "start: start"},
    "deep rules": {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
    "import": {"grammar": "%import ../../secrets.X\nstart: X"},
    "long choices": {"choice": ["a" * 60000]},
}


def masks(compiler: GrammarCompiler, options: dict[str, Any]) -> Iterator[bytes]:
    """The first masks of a specification, each after the lowest token that the one before allows.

    Raises:
        RequestError: it is refused.
    """
    (constraint,) = compiler.constraints(StructuredOutputs(**options), 1)
    for _ in range(10):
        yield constraint.mask(())
        allowed = int.from_bytes(constraint.mask(()), "little")
        token = (allowed & -allowed).bit_length() - 1
        if token <= 0:
            return
        constraint.advance(token)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_specifications_are_refused_or_used(compiler: GrammarCompiler, name: str) -> None:
    problem = ""
    try:
        assert any(masks(compiler, HOSTILE[name]))
    except RequestError as error:
        problem = str(error)
    assert len(problem) < 500
    assert problem == "" or "structured_outputs" in problem


@pytest.mark.timing
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_specifications_end_soon(compiler: GrammarCompiler, name: str) -> None:
    """Refused in time, or as quick as any other."""
    began, slowest = time.perf_counter(), 0.0
    with suppress(RequestError):
        before = time.process_time()
        for _ in masks(compiler, HOSTILE[name]):
            slowest = max(slowest, time.process_time() - before)
            before = time.process_time()
    assert time.perf_counter() - began < grammar.DEADLINE_SECONDS + 1.0
    assert slowest < 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": r"[^\s\S]"}, "structured_outputs.regex cannot be used: no text matches it ("),
        ({"json": {"type": "string", "pattern": "^a$", "minLength": 5}}, "no text matches an expr"),
        ({"regex": r"\bfoo"}, "\\b is not supported, ^ and $ only at an expression's ends"),
    ],
)
def test_refusals_are_said_in_words(
    compiler: GrammarCompiler, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        compiler.constraints(StructuredOutputs(**options), 1)


def test_after_a_killed_trial_the_next_one_works(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match=r"processor time|too long|ended"):
        compiler.constraints(StructuredOutputs(regex="b{1000000}"), 1)
    assert compiler.constraints(StructuredOutputs(regex="b{10}"), 3)


@finds_processes
def test_a_busy_machine_refuses_no_grammar(compiler: GrammarCompiler) -> None:
    """Time in which the trial does not run counts for nothing."""
    pid = worker(compiler)
    os.kill(pid, signal.SIGSTOP)
    goes_on = threading.Timer(2 * grammar.COMPILE_SECONDS, os.kill, [pid, signal.SIGCONT])
    goes_on.start()
    assert compiler.constraints(StructuredOutputs(regex="c{11}"), 1)
    goes_on.join()


@finds_processes
def test_a_trial_that_did_not_end_says_nothing_of_the_next(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = StructuredOutputs(regex="d{12}")
    pid = worker(compiler)
    os.kill(pid, signal.SIGSTOP)
    killer = threading.Thread(target=kill_once_asked, args=(pid,))
    killer.start()
    with pytest.raises(RequestError, match="its process ended"):
        compiler.constraints(good, 1)
    killer.join()
    os.kill(worker(compiler), signal.SIGSTOP)
    with monkeypatch.context() as late:
        late.setattr(grammar, "DEADLINE_SECONDS", 0.3)
        with pytest.raises(BusyError, match=r"longer than .*; try again"):
            compiler.constraints(good, 1)
    with monkeypatch.context() as slow:
        slow.setattr(grammar, "MASK_SECONDS", -1.0)  # a coarse clock may say that it took none
        with pytest.raises(RequestError, match="too long"):
            compiler.constraints(good, 1)
    assert compiler.constraints(good, 1)


def worker(compiler: GrammarCompiler) -> int:
    """The process that tries grammars out; it has started."""
    compiler.constraints(StructuredOutputs(regex=f"e{{{next(FRESH)}}}"), 1)
    (pid,) = running("grammar_worker.py")
    return pid


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": None}, "needs a tokenizer"),
        ({"eos_token_ids": []}, "needs a token that ends a text"),
        ({"eos_token_ids": [9999]}, "needs a token that ends a text"),
    ],
)
def test_models_that_cannot(tokenizer: Tokenizer, options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"tokenizer": tokenizer, "vocab_size": 4096, "eos_token_ids": [0]}
    given |= options
    with pytest.raises(RequestError, match=message):
        GrammarCompiler(**given).constraints(StructuredOutputs(regex="a"), 1)


def test_without_the_library(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = builtins.__import__

    def no_library(name: str, *rest: Any, **more: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return honest(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_library)
    with pytest.raises(RequestError, match=re.escape(install_command())):
        GrammarCompiler(tokenizer, 4096, [0]).constraints(StructuredOutputs(regex="a"), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "regex, choice"),
        ({"json": "{"}, "no JSON schema"),
        ({"json": 3}, "must be a JSON schema"),
        ({"json": {"a": float("nan")}}, "no JSON schema"),
        ({"json": nested(80)}, "deeper than"),
        ({"json": {"const": "x" * 70000}}, "at most"),
        ({"regex": "a" * 5000}, "at most 4096"),
        ({"regex": ""}, "not empty"),
        ({"regex": "\ud800"}, "not valid text"),
        ({"choice": []}, "1 to 1000"),
        ({"choice": "yes"}, "list of strings"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"choice": [1]}, "strings"),
        ({"grammar": 3}, "must be a text"),
        ({"json_object": "yes"}, "allowed: true"),
    ],
)
def test_malformed_specifications(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputs(**options)


class Unread(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("looked at one by one")


@pytest.mark.parametrize("where", [["enum"], ["properties", "a", "anyOf"]])
def test_a_schema_of_very_many_values_is_refused_unread(where: list[str]) -> None:
    schema: Any = Unread([None] * 100_000)
    for key in reversed(where):
        schema = {key: schema}
    with pytest.raises(RequestError, match="at most 65536 bytes"):
        StructuredOutputs(json=schema)


def test_schemas_are_known_by_their_text() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    spec = StructuredOutputs(json=schema)
    assert spec == StructuredOutputs(json=dict(schema))
    assert hash(spec) == hash(StructuredOutputs(json=schema))
    assert json.loads(spec.source) == schema
    assert spec.key != StructuredOutputs(regex=spec.source[:50]).key
