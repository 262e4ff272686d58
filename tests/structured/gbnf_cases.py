"""Grammars in GBNF, and what llama.cpp said of texts in them (``record_gbnf.py`` wrote it down).

``RESTATED`` says in other words what the files of llama.cpp's folder ``grammars`` say; the recorded
answers are those to the files themselves.
"""

from __future__ import annotations

import json
import lzma
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from paceline.api.llm import embedded_model
from paceline.text.token_pieces import token_pieces
from paceline.text.tokenizer import Tokenizer

FILE = Path(__file__).with_name("recorded") / "gbnf.json.xz"

_JSON = r"""
value ::= map | list | text | amount | word gap
word ::= "true" | "false" | "null"
map ::= "{" gap (entry ("," gap entry)*)? "}" gap
entry ::= text ":" gap value
list ::= "[" gap (value ("," gap value)*)? "]" gap
text ::= "\"" (plain | escape)* "\"" gap
plain ::= [^\x00-\x1f"\x7f\\]
escape ::= "\\" ("u" hex hex hex hex | ["\\bfnrt])
hex ::= [A-Fa-f] | [0-9]
gap ::= "" | "\n" [\t ]{0,20} | " "
amount ::= whole fraction? power? gap
whole ::= "-"? [1-9] [0-9]{0,15} | "-"? "0"
fraction ::= "." [0-9] [0-9]*
"""

RESTATED = {
    "arithmetic": r"""
root ::= line line*
line ::= sum "=" gap operand "\n"
sum ::= operand | operand ("+" | "-" | "*" | "/") sum
operand ::= name | number | "(" gap sum ")" gap
name ::= [a-z] rest gap
rest ::= ([a-z] | [0-9] | "_")*
number ::= [0-9] [0-9]* gap
gap ::= | (" " | "\t" | "\n") gap
""",
    "c": r"""
root ::= | function root
function ::= kind name "(" (kind name)? ")" block
block ::= "{" step* "}"
kind ::= ("int" | "float" | "char") gap
name ::= [A-Z_a-z] [0-9A-Z_a-z]*
step ::= kind set ";" | set ";" | name gap "(" list? ")" ";" | "return" gap sum ";" | loop |
  branch | remark
loop ::= "while" "(" test ")" block | "for" "(" kind? set ";" gap test ";" gap set ")" block
branch ::= "if" "(" test ")" block ("else" block)?
set ::= name gap "=" gap sum
test ::= sum ("=" "=" | "!=" | "<" "="? | ">" "="?) sum
sum ::= product ([-+] product)*
product ::= factor ([*/] factor)*
factor ::= "-"* (name | [0-9]+ | name "(" list? ")" | "(" gap sum gap ")")
list ::= sum ("," gap sum)*
remark ::= "//" [^\n]* "\n" | "/*" ([^*] | "*" [^/])* "*/"
gap ::= [\n\t ]+
""",
    "chess": r"""
root ::= "1" pair (number pair)+
pair ::= ". " move " " move "\n"
number ::= [1-9] [0-9] | [1-9]
move ::= (figure | farmer | "O-O-O" | "O-O") ("+" | "#" |)
figure ::= ("N" | "B" | "K" | "Q" | "R") file? rank? "x"? file rank
farmer ::= (file "x" |) file rank ("=" [BKNQR])?
file ::= [a-h]
rank ::= [1-8]
""",
    "english": r"""
root ::= word ([\n\t ] word)*
word ::= sign sign*
sign ::= [\x21-\x7e]
""",
    "japanese": r"""
root ::= word | word [\n\t ] root
word ::= sign+
sign ::= [\u3041-\u309f] | [\u30a1-\u30ff] | [\u3001-\u303e] | [\u4e00-\u9fff]
""",
    "json": "root ::= map\n" + _JSON + 'power ::= [eE] ("-" | "+")? [0-9] [1-9]{0,15}\n',
    "json_arr": 'root ::= "[\\n" gap (value (",\\n" gap value)*)? "]"\n'
    + _JSON
    + 'power ::= [eE] ("-" | "+")? [1-9] [0-9]{0,15}\n',
    "list": r"""
root ::= line | line root
line ::= "- " [^\x0a-\x0d\x85\u2028-\u2029] more
more ::= "\n" | [^\x0a-\x0d\x85\u2028\u2029] more
""",
}
"""Grammars of the same languages as llama.cpp's files of these names."""

OWN = {
    "greed": 'root ::= word "b"\nword ::= [a-z]+',
    "overlap": 'root ::= ("ab" | [a-c] "c" | [^b] . | "abc")+ "!"',
    "names": 'root ::= start Start s-tart\nstart ::= "a"+\nStart ::= "b" | start\ns-tart ::= "c"?',
    "any": 'root ::= "<" .* ">" .?',
    "faces": 'root ::= [\\U0001F600-\\U0001F64F😎]+ | [^\\u0000-\\U0000ffff]{2} "é"',
    "counts": 'root ::= "a"{2} "b"{0,2} ("c" | "dd"){1,} "e"{0} [f-g]{2,3}{2} ("h" | [hi]+)?',
    "escapes": r'root ::= "\t\r\n\\\"\[\]\-" [\]\-\\\[^] "\x41\u00e9" [-a] [a-] [^-]',
    "empty": 'root ::= "x" nothing ("y" | ) ""\nnothing ::= | "z"',
    "blanks": 'root::=(\n"a"  # one\n | # two\n "b"\n)+ |\n\t"c" tail #3\r\n\r\n#\ntail ::=\n "d"',
    "twice": 'root ::= x\nx ::= "a"\nx ::= "b" | "c"',
    "deep": 'root ::= "(" root? ")" | "[" root* "]" | [a-z()]',
    "loops": 'root ::= (("a"?)* "b"{0,3}){2,5} "a"',
    "stars": 'root ::= (("a"* x)*)* "c"\nx ::= ("b"+)*',
}
"""Grammars of what is special about GBNF."""

REFUSED = [
    "",
    "# nothing",
    "root ::= x",
    'x ::= "a"',
    'root ::= root "a" | "a"',
    'root ::= a\na ::= b "x"\nb ::= c? a',
    'root ::= ("a" | )*',
    'root ::= "a"?*',
    'root ::= ("")*',
    'root ::= ("a" | "")*',
    'root ::= x*\nx ::= "a" |',
    'root ::= "a" x{0}\ny ::= "b"',
    'root ::= "a" (x){0}',
    'root ::= "a" | *',
    'root ::= "" +',
    "root ::= []+",
    'root ::= "a" {2',
    'root ::= "a"{,2}',
    'root ::= "a"{x}',
    'root ::= "a"{2001}',
    'root ::= "a"{50}{50}',
    'root ::= ("a" ("b" "c"?)){700}',
    'root ::= "a"{99999999999999999999999}',
    'root ::= ("a"',
    'root ::= "a")',
    'root ::= "a',
    "root ::= [a",
    "root ::= [a-",
    'root ::= "\\q"',
    'root ::= "\\x4"',
    'root ::= "\\u00"',
    'root ::= "\\U0001F60"',
    'root : "a"\nroot ::= "b"',
    'root ::= größe\ngröße ::= "a"',
    'root ::= "a"\n"b"',
    "root ::= <[x]>",
    "root ::= <[2>",
    "root ::= <[4294967296]>",
    'root ::= ! "a"',
]
"""What llama.cpp does not take."""

TAKEN = [
    'root ::= "a"{0,3000}',
    'root ::= ("a"?)*',
    'root ::= (("a"*)*)+',
    'root ::= "a" x{0}\nx ::= "b"',
    'root ::= "a" root',
    'root ::= "a"{2000}',
    'root ::= ("a" "b"){1000}',
    'root ::= [] [^] "a"',
    "root ::= <[5]> !<[7]>* <[9]>{2}",
    'root ::= "a"{2,}{3}',
    "root ::=",
    'root ::= "a"\r\rb ::= "c"',
]
"""What it takes, though one might not think so."""


@cache
def recorded() -> dict[str, Any]:
    """What llama.cpp said.

    ``version``; ``taken``, for each of ``REFUSED`` and ``TAKEN``; ``texts``, of each grammar, with
    how many characters of each it took, negative where the text is whole but not complete;
    ``masks``, of each grammar, beginnings of texts with the tokens of the embedded model's
    vocabulary that may follow, as bits of a hexadecimal number; ``drawn``, grammars of
    :mod:`tests.structured.gbnf_drawing`, with texts and verdicts, None where they are refused.
    """
    found: dict[str, Any] = json.loads(lzma.decompress(FILE.read_bytes()))
    return found


@cache
def token_texts() -> dict[int, str]:
    """Texts of the embedded model's tokens, as far as they are whole characters.

    Without NUL, where a token ends for llama.cpp.
    """
    tokenizer = Tokenizer.from_folder(embedded_model("target"))
    found = {}
    for token, piece in enumerate(token_pieces(tokenizer, tokenizer.vocab_size)):
        with suppress(UnicodeDecodeError):
            if piece and piece != b"\0" and not tokenizer.is_special(token):
                found[token] = piece.decode()
    return found
