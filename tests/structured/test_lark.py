"""Structural tags: which texts they allow, and which of them are malformed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.core.errors import RequestError
from paceline.request.structured_outputs import MAX_DEPTH, StructuredOutputs
from paceline.structured.grammar import GrammarCompiler
from paceline.text.tokenizer import Tokenizer
from tests.server.chats import chat_tokenizer

pytest.importorskip("llguidance")

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}


def tag(begin: str, content: Any = INTEGER, end: Any = "</f>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def text(value: str) -> dict[str, str]:
    return {"type": "const_string", "value": value}


def triggered(*tags: Any, triggers: Any = ("<f",), **options: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": [*triggers], "tags": [*tags], **options}


def separated(*tags: Any, **options: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [*tags], "separator": ";", **options}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


A, B = tag("<f=a>"), tag("<f=b>", end=["</f>", "</b>"])
ONE, TWO = "<f=a>1</f>", "<f=b>2</b>"
# The texts that xgrammar 0.2.8 allows and forbids for the same tags.
CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "text": (text('a"\n\\d/'), ['a"\n\\d/'], ["", "a"]),
    "expression": ({"type": "regex", "pattern": "[ab]/+"}, ["a//", "b/"], ["a", "ab/"]),
    "gbnf": ({"type": "grammar", "grammar": 'root ::= "x" y\ny ::= [0-9]+'}, ["x12"], ["x"]),
    "lark": ({"type": "grammar", "grammar": 'start: "x"+'}, ["xx"], ["", "y"]),
    "tag": (A, [ONE], ["", "<f=a></f>", "<f=a>x</f>", ONE + " "]),
    "ends": (B, ["<f=b>2</f>", TWO], ["<f=b>2</c>"]),
    "no end": (tag("n: ", INTEGER, ""), ["n: 12"], ["n: x"]),
    "free in a tag": (tag("<a>", ANY, "</a>"), ["<a></a>", "<a>x\n<</a>"], ["<a>", "<a>x</a>y"]),
    "excluded": (
        tag("<a>", {**ANY, "excludes": ["b/", "(c"]}, "</a>"),
        ["<a>xb c</a>"],
        ["<a>xb/x</a>", "<a>(c</a>"],
    ),
    "free": (ANY, ["", "x\ny"], []),
    "either": (
        {"type": "or", "elements": [A, tag("<g>", ANY, "!"), text("no")]},
        [ONE, "<g>x!", "no"],
        ["", "<g>x"],
    ),
    "counted": (
        sequence(
            {"type": "optional", "content": text("a")},
            {"type": "plus", "content": text("b")},
            {"type": "star", "content": A},
        ),
        ["ab", "bb", f"b{ONE}{ONE}"],
        ["a", "aab"],
    ),
    "sequence": (sequence(tag("<t>", ANY, "</t>"), A), [f"<t>x</t>{ONE}"], ["<t>x</t>", ONE]),
    "free before a text": (
        sequence(ANY, text("."), text("x")), ["ab.x", ".x"], ["ab", "ab.", "a.b"]
    ),
    "thoughts and calls": (
        sequence(tag("<t>", ANY, "</t>"), triggered(A)),
        ["<t>x</t>", f"<t>x</t>so {ONE}"],
        ["<t>x", "<t>x</t><f=a>q</f>"],
    ),
    "triggered": (
        triggered(A, B),
        ["", "x", "a < b", ONE, f"x{ONE}y{TWO}z"],
        ["<f=c>1</f>", "x<f=a>x</f>", "<f"],
    ),
    "two triggers": (
        triggered(A, tag("<g>", text("y"), "</g>"), triggers=["<f", "<g"]),
        [f"x{ONE}<g>y</g>", "<g>y</g> z"],
        ["<g>1</g>", "<f=a>y</f>"],
    ),
    "at least one": (
        triggered(A, B, at_least_one=True),
        [ONE, f"{ONE}y", f"{ONE}y{TWO}"],
        ["", "x", f"x{ONE}"],
    ),
    "stop": (
        triggered(A, B, stop_after_first=True), ["", "x", ONE, f"x{TWO}"], [f"{ONE}y", ONE + TWO]
    ),
    "exactly one": (
        triggered(A, at_least_one=True, stop_after_first=True), [ONE], ["", f"x{ONE}", ONE + ONE]
    ),
    "triggered in a tag": (
        tag("<m>", triggered(A), "</m>"), ["<m></m>", f"<m>x{ONE}y</m>"], ["<m>", f"<m>{ONE}"]
    ),
    "separated": (separated(A, B), ["", ONE, f"{ONE};{TWO};{ONE}"], ["x", f"{ONE};", ONE + TWO]),
    "separated, at least one": (separated(A, at_least_one=True), [ONE, f"{ONE};{ONE}"], [""]),
    "separated, at most one": (separated(A, stop_after_first=True), ["", ONE], [f"{ONE};{ONE}"]),
    "tokens": (
        triggered(tag("<tool_call>\n", INTEGER, "\n</tool_call>"), triggers=["<tool_call>"]),
        ["", "x", "x<tool_call>\n1\n</tool_call>y"],
        ["<tool_call>1</tool_call>", "<tool_call>\n1"],
    ),
    "free up to a token": (
        tag("<tool_call>", ANY, "\n</tool_call>"),
        ["<tool_call>x\n</tool_call>", "<tool_call>\n\n</tool_call>"],
        ["<tool_call>x</tool_call>", "<tool_call>x\n"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    tokenizer = chat_tokenizer()
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    yield made
    made.close()


def allows(compiler: GrammarCompiler, spec: StructuredOutputs, answer: str) -> bool:
    tokenizer: Tokenizer = chat_tokenizer()
    (constraint,) = compiler.constraints(spec, 1)
    (end,) = tokenizer.eos_token_ids
    for token in [*tokenizer.encode(answer, add_special_tokens=False), end]:
        if not constraint.mask(())[token // 8] >> token % 8 & 1:
            return False
        if token != end:
            constraint.advance(token)
    return True


@pytest.mark.parametrize("name", CASES)
def test_texts(compiler: GrammarCompiler, name: str) -> None:
    form, good, bad = CASES[name]
    spec = StructuredOutputs(structural_tag={"type": "structural_tag", "format": form})
    assert [each for each in good if not allows(compiler, spec, each)] == []
    assert [each for each in bad if allows(compiler, spec, each)] == []


def test_the_older_form(compiler: GrammarCompiler) -> None:
    structures = [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}]
    spec = StructuredOutputs(structural_tag={"structures": structures, "triggers": ["<f"]})
    assert allows(compiler, spec, f"x{ONE}y")
    assert not allows(compiler, spec, "x<f=a>x</f>")


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "else"}, "format: Input tag 'else' found using 'type' does not match any of"),
        ({"type": "const_string"}, "format.const_string.value: Field required"),
        ({**text("a"), "excludes": []}, "excludes: Extra inputs are not permitted"),
        ({**INTEGER, "style": "qwen_xml"}, "style: Input should be 'json'"),
        ({"type": "json_schema", "json_schema": LOOP}, "leads back to itself"),
        (triggered(tag("<g>")), "begins with 0 of the triggers"),
        (triggered(A, triggers=["<", "<f"]), "begins with 2 of the triggers"),
        (sequence(ANY, A), "free text in a sequence that does not tell where it ends"),
        ({"type": "star", "content": ANY}, "free text in a star"),
    ],
)
def test_what_is_malformed(compiler: GrammarCompiler, form: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.constraints(StructuredOutputs(structural_tag={"format": form}), 1)
    assert str(caught.value).startswith("structured_outputs.structural_tag")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "tag", ["[]", "{", "{}", {"format": 1}, {"format": {}, "x": 1}, {"a": {1}}]
)
def test_what_is_no_tag(tag: Any) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.structural_tag"):
        StructuredOutputs(structural_tag=tag)


def test_deep_ones_are_refused() -> None:
    form: Any = text("a")
    for _ in range(MAX_DEPTH):
        form = {"type": "star", "content": form}
    with pytest.raises(RequestError, match="nests deeper"):
        StructuredOutputs(structural_tag={"format": form})
