"""Chat templates: what real ones use works, what hostile ones do ends soon and harmlessly.

And the built-in ones, and the choice of one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from paceline.core.errors import BusyError, ConfigError, TemplateError
from paceline.text import chat_templates
from paceline.text.chat_templates import BUILT_IN, chosen_template, render_chat_template
from paceline.text.tokenizer import Tokenizer
from tests.children import HAS_PROC, kill, running
from tests.text.vocabularies import begin_texts, byte_level_json

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And now?"},
]
WRITTEN = {
    "plain": "<s>System: Be brief.\n\nUser: Hello.\n\nAssistant: Hi.\n\n"
    "User: And now?\n\nAssistant:",
    "alpaca": "<s>Be brief.\n\n### Instruction:\nHello.\n\n### Response:\nHi.\n\n"
    "### Instruction:\nAnd now?\n\n### Response:\n",
    "chatml": "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n"
    "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "gemma": "<s><start_of_turn>user\nBe brief.<end_of_turn>\n<start_of_turn>user\nHello."
    "<end_of_turn>\n<start_of_turn>model\nHi.<end_of_turn>\n<start_of_turn>user\nAnd now?"
    "<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello. [/INST] Hi. </s>"
    "<s>[INST] And now? [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHello.<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHi.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "zephyr": "<s><|system|>\nBe brief.</s>\n<|user|>\nHello.</s>\n<|assistant|>\nHi.</s>\n"
    "<|user|>\nAnd now?</s>\n<|assistant|>\n",
}


def tokenizer(*, adds_bos: bool = True) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.add_special_tokens(["<s>"])
    if adds_bos:
        begin_texts(backend, "<s>")
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_writes_a_chat(name: str) -> None:
    chats = tokenizer()
    chats.set_chat_template(chosen_template(name))
    assert chats.apply_chat_template(CHAT) == WRITTEN[name]


def test_a_text_begins_as_the_model_wants_it() -> None:
    chats = tokenizer(adds_bos=False)
    chats.set_chat_template(BUILT_IN["plain"])
    assert chats.apply_chat_template(CHAT[1:2]) == "User: Hello.\n\nAssistant:"
    closed = chats.apply_chat_template(CHAT[1:2], add_generation_prompt=False)
    assert closed == "User: Hello.\n\n"


def test_a_file_is_a_template_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}!")
    chats = tokenizer()
    chats.set_chat_template(chosen_template(str(path)))
    assert chats.apply_chat_template(CHAT) == "Be brief.!"


def test_a_template_that_refuses_a_short_chat_is_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ raise_exception('no system message') }}")
    assert chosen_template(str(path)) == path.read_text()


def test_what_is_no_template_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'chatlm', which is not a file; built in: plain, alp"):
        chosen_template("chatlm")
    path = tmp_path / "broken.jinja"
    path.write_text("{% for %}")
    with pytest.raises(ConfigError, match="is not a valid template: "):
        chosen_template(str(path))
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        chosen_template(str(path))


SCRIPT = "template_worker.py"
finds_processes = pytest.mark.skipif(not HAS_PROC, reason="processes are found in /proc")


def render(template: str, **variables: Any) -> str:
    """Without a limit of time that a busy machine could reach."""
    return render_chat_template(template, variables, max_seconds=60)


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{{ x }}", "<é> & 'q'"),
        ("{{ x|tojson }}", "\"<é> & 'q'\""),
        ("{{ {'a': [1, none]}|tojson(indent=1) }}", '{\n "a": [\n  1,\n  null\n ]\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{{ x[0] }}{% endgeneration %}b", "a<b"),
        ("{% generation %}{% set y = 1 %}{% endgeneration %}{{ y is defined }}", "False"),
        ("  {% if true %}\nline\n  {% endif %}\nend", "line\nend"),
        ("{% set a = namespace(n=0) %}{% if 1 %}{% set a.n = 2 %}{% endif %}{{ a.n }}", "2"),
        ("{{ missing }}|{{ missing is defined }}", "|False"),
        ("{% macro f(a) %}[{{ a }}]{% endmacro %}{{ f(1) ~ f(2) }}", "[1][2]"),
        ("{{ x.split(' ')[0]|trim }}", "<é>"),
    ],
)  # fmt: skip
def test_what_templates_use(template: str, want: str) -> None:
    assert render(template, x="<é> & 'q'") == want


def test_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_a_template_may_refuse() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 10 ** (10 ** 10) }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99999) %}"
    "{% set ns.s = (ns.s * 2)[:100000] %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_endless_templates_are_ended(template: str) -> None:
    with pytest.raises(TemplateError, match="too much processor time"):
        render_chat_template(template, {}, max_seconds=0.3)
    assert render("{{ 1 }}") == "1"


@finds_processes
def test_a_machine_that_is_busy_says_nothing_about_a_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert render("a") == "a"
    (process,) = running(SCRIPT)
    os.kill(process, signal.SIGSTOP)  # as if others had all processors
    goes_on = threading.Timer(1.0, os.kill, (process, signal.SIGCONT))
    goes_on.start()
    assert render_chat_template("b", {}, max_seconds=0.3) == "b"
    goes_on.join()
    monkeypatch.setattr(chat_templates, "DEADLINE_SECONDS", 0.1)
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(BusyError, match=r"longer than 0\.4 s; try again"):
        render_chat_template("c", {}, max_seconds=0.3)
    assert render("d") == "d"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'x' * 10**9 }}", "memory"),
        ("{{ 'x'|center(10**10) }}", "memory"),
        ("{{ '%2000000000d' % 1 }}", "memory"),
        ("{{ [0] * 10**9 }}", "memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
        ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "without end"),
        ("{% for i in range(10**6) %}{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}some more text{% endfor %}", "longer than 1048576 char"),
        ("{{ 'x' * (2 * 10**6) }}", "longer than 1048576 char"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "failed"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ none.x.y }}", "UndefinedError"),
    ],
)
def test_hostile_templates(template: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        render(template, messages=[])
    assert render("{{ 1 }}") == "1"


def test_long_template_and_odd_values() -> None:
    with pytest.raises(TemplateError, match="longer than"):
        render("x" * (1 << 21))
    with pytest.raises(TemplateError, match="must be JSON"):
        render("{{ x }}", x=object())
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TemplateError, match="must be JSON"):
        render("{{ x }}", x=endless)


def test_long_messages_and_threads() -> None:
    """More than a pipe holds, from several threads at once."""
    results: dict[int, str] = {}

    def work(index: int) -> None:
        results[index] = render("{{ x }}", x=str(index) * 300_000)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: str(i) * 300_000 for i in range(4)}


@finds_processes
def test_a_lost_process_is_replaced() -> None:
    assert render("a") == "a"
    (lost,) = running(SCRIPT)
    kill(lost)
    assert render("b") == "b"
    assert running(SCRIPT) not in ([], [lost])


@finds_processes
def test_a_forked_process_has_its_own() -> None:
    assert render("a") == "a"
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        good = False
        try:  # whatever happens, the child must not go on with the tests
            before, said, own = running(SCRIPT), render("c"), running(SCRIPT)
            good = before == [] and said == "c" and len(own) == 1
            kill(*own)
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert render("d") == "d"
