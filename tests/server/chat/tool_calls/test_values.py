"""Literals in calls mean what they mean to Python, or to Gemma 4's template."""

from __future__ import annotations

import ast
import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.server.chat.tool_calls.values import MalformedError, json_of_literal
from tests.server.chat.tool_calls.test_tool_formats import parsed, read

LITERALS = [
    "'''a'''", '"""a "b" c"""', "'''it's'''", "''", '""', '""""""',
    r'"\033[31m"', r'"\U0001F600"', r'"\N{BULLET}"', r'"\x41\u00e9\0\7"', r"'\'\"\\\a\v'",
    '"a\\\nb"', r'r"a\n"', r"R'\d'", "u'a'", '"a" \'b\'', "('a'\n\"b\")", "'a''b'",
    ".5", "5.", "+3", "-3", "1_000", "0x10", "0o17", "0b101", "1e5", "1_0.5e-3", "-.5", "+0X_ff",
    "(1)", "((1,), ())", "[1, 2,]", "{'a': {1: [None, True, False]},}", "('a')",
]  # fmt: skip


@pytest.mark.parametrize("source", LITERALS)
def test_pythons_literals_mean_what_python_says(source: str) -> None:
    expected = json.loads(json.dumps(ast.literal_eval(source)))
    assert json.loads(json_of_literal(source)) == expected
    text = f"[f(s={source}, t=[{source}])]"
    assert parsed(read("pythonic", [text], {"f": {}})[1]) == [
        ("f", {"s": expected, "t": [expected]})
    ]


@pytest.mark.parametrize("source", LITERALS)
def test_literals_do_not_depend_on_how_the_text_is_cut(source: str) -> None:
    text = f"[f(s={source})]"
    found = read("pythonic", [text], {"f": {}})
    assert found == read("pythonic", text, {"f": {}})
    for at in range(1, len(text)):
        assert found == read("pythonic", [text[:at], text[at:]], {"f": {}})


PIECES = [
    "\\",
    "n",
    "x4",
    "1",
    "u00e9",
    "U0001F600",
    "N{BULLET}",
    "0",
    "'",
    '"',
    "a",
    " ",
    "{",
    "r",
]


@settings(max_examples=80, deadline=None)
@given(
    prefix=st.sampled_from(["", "r", "u"]),
    quote=st.sampled_from(["'", '"', "'''", '"""']),
    pieces=st.lists(st.sampled_from(PIECES), max_size=6),
)
def test_strings_of_any_escapes_mean_what_python_says(
    prefix: str, quote: str, pieces: list[str]
) -> None:
    source = f"{prefix}{quote}{''.join(pieces)}{quote}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = ast.literal_eval(source)
    except SyntaxError:
        return
    assert json.loads(json_of_literal(source)) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("true", "true"),
        ("null", "null"),
        ('"a\nb"', '"a\\nb"'),  # models write line feeds as they are
        (r'"\ud83d\ude00"', '"\U0001f600"'),  # as JSON has it
        (r'"\d\/"', r'"\\d\\/"'),  # no escapes in Python
        (r'"\N{NO SUCH CHARACTER}\x4"', r'"\\N{NO SUCH CHARACTER}\\x4"'),
        ("1e999", "1e999"),
        ("-1_0e999", "-1.0E+1000"),  # beyond a double, which JSON can say and infinity cannot
        (".5e999", "5E+998"),
        ("9" * 5000, "9" * 5000),  # more digits than Python converts
        ("-0.0", "-0.0"),
    ],
)
def test_what_else_is_read(source: str, expected: str) -> None:
    assert json_of_literal(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "f'a'",
        "b'a'",
        "a",
        "1 2",
        "0777",
        "1__0",
        "1_0e99999999999999999999",
        "1j",
        "1-2",
        "'a",
        "[" * 5000,
    ],
)
def test_what_is_no_value(source: str) -> None:
    with pytest.raises(MalformedError):
        json_of_literal(source)


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        (
            "from='a', class=1",
            {"from": "a", "class": 1},
        ),  # key words, which models write all the same
        ("first name='a', user[id]=1", {"first name": "a", "user[id]": 1}),  # as LFM2's template
        ("**{'first name': 'a'}, b=1", {"first name": "a", "b": 1}),
    ],
)
def test_names_of_pythons_arguments(source: str, arguments: object) -> None:
    tools = {"f": {"properties": {key: {} for key in ("first name", "user[id]")}}}
    for pieces in ([f"[f({source})]"], f"[f({source})]"):
        assert parsed(read("pythonic", pieces, tools)[1]) == [("f", arguments)]


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        # bare keys end at the colon, as in llama.cpp b11549 and vLLM
        ('nodes:{Basic Node:{t:<|"|>x<|"|>}}', {"nodes": {"Basic Node": {"t": "x"}}}),
        ("the user's name:1, it's:<|\"|>a<|\"|>", {"the user's name": 1, "it's": "a"}),
        ("first name:1,user[id]:2", {"first name": 1, "user[id]": 2}),
        # strings in other quotation marks, and in none
        ("a:'x', b:[\"y\", 'z']", {"a": "x", "b": ["y", "z"]}),
        ("a:'it\\'s {',b:''", {"a": "it's {", "b": ""}),
        ("unit:celsius,at:http://a/b,n:None", {"unit": "celsius", "at": "http://a/b", "n": None}),
        ("note:don't,b:1", {"note": "don't", "b": 1}),
    ],
)
def test_gemmas_arguments(source: str, arguments: object) -> None:
    tools = {"f": {"properties": {key: {} for key in ("first name", "user[id]")}}}
    text = f"<|tool_call>call:f{{{source}}}<tool_call|>"
    for at in range(len(text)):
        words, calls = read("gemma4", [text[:at], text[at:]], tools)
        assert (words, parsed(calls)) == ("", [("f", arguments)])
