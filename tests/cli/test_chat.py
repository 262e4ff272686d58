"""A conversation with the embedded model, by a scripted person and at a real terminal."""

from __future__ import annotations

import json
import readline
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.api.llm import LLM, embedded_model
from paceline.build.default_drafts import default_speculative_config
from paceline.cli.chat import PARAMETERS, PromptHistory, TerminalChat, talk
from paceline.cli.prompts import Encoder
from paceline.cli.terminal import Screen
from paceline.core.errors import ShapeError
from paceline.core.folders import state_folder
from paceline.request.sampling_params import SamplingParams
from tests.cli.pseudo_terminal import at_a_terminal

CONTEXT = 256
LONG = "so it goes on and on " * 10


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    drafts = default_speculative_config("other")
    with LLM("embedded", speculative_config=drafts, planner="fixed", max_model_len=CONTEXT) as made:
        yield made


@dataclass
class Said:
    """What a conversation showed, and what was encoded in it."""

    code: int
    out: str
    err: str
    asked: list[Any]
    remembered: list[str]
    conversation: TerminalChat


Chat = Callable[..., Said]


@pytest.fixture
def chat(llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """A conversation of these lines; exceptions among them are raised."""

    def held(*lines: object, max_tokens: int | None = 5, uses_chat: bool = True) -> Said:
        script = iter([*lines, EOFError()])
        asked: list[Any] = []

        def read(prompt: str) -> str:
            line = next(script)
            if isinstance(line, BaseException):
                raise line
            return str(line)

        class Listening(Encoder):
            def encode(self, content: Any) -> list[int]:
                asked.append(content)
                if isinstance(content, str):
                    return self.tokenizer.encode(content)
                system = [{"role": "system", "content": self.system}] if self.system else []
                said = [f"{each['role']}: {each['content']}\n" for each in [*system, *content]]
                return self.tokenizer.encode("".join([*said, "assistant:"]))

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0)
        encoder = Listening(llm.tokenizer, chat=uses_chat)
        conversation = TerminalChat(llm, encoder, params, Screen(llm.proposers))
        capsys.readouterr()
        remembered: list[str] = []
        code = talk(conversation, read, remembered.append)
        return Said(code, *capsys.readouterr(), asked, remembered, conversation)

    return held


def roles(messages: list[dict[str, str]]) -> list[str]:
    return [message["role"] for message in messages]


def test_a_chat_remembers(chat: Chat) -> None:
    said = chat("first", "", "second")
    assert said.code == 0
    assert roles(said.asked[1]) == ["user", "assistant", "user"]
    assert said.asked[1][1]["content"]
    assert said.asked[1][2]["content"] == "second"


def test_a_shape_that_cannot_be_used_ends_the_conversation(
    llm: LLM, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given on the command line, which the error names, and no message would mend it."""

    def refused(*arguments: object, **options: object) -> None:
        raise ShapeError("json", "cannot be used")

    monkeypatch.setattr(llm, "stream", refused)
    with pytest.raises(ShapeError):
        chat("first", "second")


def test_without_a_template_each_text_stands_alone(chat: Chat) -> None:
    said = chat("first", KeyboardInterrupt(), "second", uses_chat=False)
    assert said.asked == ["first", "second"]
    assert "Ctrl-D or /bye leaves\n" in said.err


def test_an_interrupt_ends_the_answer_alone(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Screen.write
    interrupts = iter([True])

    def interrupted(self: Screen, pieces: Any) -> None:
        write(self, pieces)
        if next(interrupts, False):
            raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "write", interrupted)
    said = chat("first", "second")
    assert said.code == 0
    assert len(said.asked) == 2


def test_an_error_does_not_end_it(chat: Chat) -> None:
    said = chat("too long " * 5000, "second")
    assert said.code == 0
    assert "error: the prompt has" in said.err
    assert len(said.asked) == 2


@pytest.mark.parametrize("word", ["/bye", "/exit", "exit", "quit", " /bye "])
def test_words_that_leave(chat: Chat, word: str) -> None:
    assert chat(word, "never asked").asked == []


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (['"""first', "second", 'third"""'], "first\nsecond\nthird"),
        (['"""', "first", "", '"""'], "\nfirst\n\n"),
        (['"""/bye"""'], "/bye"),
        (["/usr/bin, what is it?"], "/usr/bin, what is it?"),
        (["pasted\nin two lines"], "pasted\nin two lines"),
        (["/bye\nand more"], "/bye\nand more"),
        (['"""A docstring."""\npass'], '"""A docstring."""\npass'),
        (['"""both pasted\nand quoted"""'], "both pasted\nand quoted"),
        (['"""given up', KeyboardInterrupt(), "asked"], "asked"),
    ],
)
def test_what_is_a_message(chat: Chat, lines: list[object], text: str) -> None:
    said = chat(*lines)
    assert [messages[-1]["content"] for messages in said.asked] == [text]


def test_help_is_shown_and_never_asked(chat: Chat) -> None:
    said = chat(
        "/?", "/help", "/set", "/show", "/set parameter", "/set parameter top_k", "/nonsense"
    )
    assert said.asked == []
    for told in ("/clear", "/stats", "/set parameter NAME VALUE", "temperature", "/show template"):
        assert told in said.err
    assert "there is no command /nonsense; /? lists the commands" in said.err
    assert said.out == "\n"


def test_clear_forgets(chat: Chat) -> None:
    said = chat("first", "/clear", "second")
    assert roles(said.asked[1]) == ["user"]


@pytest.mark.parametrize(
    "lines",
    [['/set system "Be brief."'], ["/system Be brief."], ['/set system """Be', 'brief."""']],
)
def test_a_system_message(chat: Chat, lines: list[str]) -> None:
    said = chat(*lines, "/show system")
    assert said.conversation.encoder.system in ("Be brief.", "Be\nbrief.")
    assert str(said.conversation.encoder.system).splitlines()[-1] in said.err
    for line in ("/set system", "/set nosystem"):
        assert chat(*lines, line).conversation.encoder.system is None
    refused = chat(*lines, uses_chat=False)
    assert "the model has no chat template" in refused.err


def test_parameters_are_ollamas(chat: Chat) -> None:
    said = chat(
        "/set parameter temperature 0.5",
        "/set parameter num_predict 2",
        "/set parameter repeat_penalty 1.1",
        "/set parameter stop A B",
        "hello",
        "/show parameters",
        "/set parameter num_predict -1",
    )
    params = said.conversation.params
    assert (params.temperature, params.max_tokens, params.repetition_penalty) == (0.5, None, 1.1)
    assert tuple(params.stop) == ("A", "B")
    assert "cut at the limit of 2 tokens" in said.err
    assert "num_predict 2\nstop A B\n" in said.err


def test_every_parameter_has_a_usage_line(chat: Chat) -> None:
    usage = chat("/set parameter").err
    for name in PARAMETERS:
        assert f"/set parameter {name} VALUE" in usage


@pytest.mark.parametrize("parameter", ["num_predict -1", "num_predict -2"])
def test_no_limit(chat: Chat, parameter: str) -> None:
    assert chat(f"/set parameter {parameter}").conversation.params.max_tokens is None


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("/load smollm2", "leave with /bye, then paceline run MODEL"),
        ("/save mine", "chats are not saved"),
        ("/read notes.txt", "paceline run MODEL -p QUESTION < FILE"),
    ],
)
def test_commands_of_other_chats_are_answered_by_what_to_do(
    chat: Chat, line: str, advice: str
) -> None:
    said = chat(line)
    assert (said.code, said.asked) == (0, [])
    assert advice in said.err


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/set parameter temperature hot", "temperature is 'hot'; allowed: a number"),
        ("/set parameter temperature -1", "temperature is -1.0; allowed:"),
        (
            "/set parameter num_ctx 9",
            "num_ctx is fixed while a model is loaded: start again with --max",
        ),
        ("/set parameter mirostat 1", "there is no parameter 'mirostat'; allowed: temperature"),
        ("/set nothink", "the chat template does not know thinking"),
        ("/set format xml", "format is 'xml'; allowed: json"),
    ],
)
def test_what_cannot_be_set_is_an_error(chat: Chat, line: str, problem: str) -> None:
    said = chat(line)
    assert said.code == 0
    assert f"error: {problem}" in said.err


def test_a_format(chat: Chat) -> None:
    pytest.importorskip("llguidance")
    said = chat("/set format json", "hello", max_tokens=1)
    assert said.out.startswith("{")
    assert chat("/set format json", "/set noformat").conversation.params.structured_outputs is None


def test_figures_after_an_answer(chat: Chat) -> None:
    said = chat("one two one two one two one two", max_tokens=24)
    (line,) = [line for line in said.err.splitlines() if "tok/s" in line]
    assert line.startswith("24 tokens, ")
    assert "first token after " in line
    assert ", guessed " in line
    assert line.endswith(" of 24")
    assert "acceptance" not in said.err
    silent = chat("/set quiet", "hello")
    assert "tok/s" not in silent.err


def test_stats(chat: Chat) -> None:
    said = chat("one two one two one two", "three four", "/stats", max_tokens=12)
    *_, last, whole = said.err.splitlines()
    assert last.startswith("last answer: 12 tokens, ")
    assert whole.startswith("all answers: 24 tokens, ")
    assert "acceptance rate" in whole
    assert "mean acceptance length" in whole


def test_an_answer_goes_to_the_end_of_the_context(chat: Chat) -> None:
    said = chat("one two one two one two", max_tokens=None)
    assert f"cut at the end of the context of {CONTEXT} tokens: /clear starts a new" in said.err
    alone = chat("one two one two one two", max_tokens=None, uses_chat=False)
    assert f"cut at the end of the context of {CONTEXT} tokens\n" in alone.err


def test_a_full_context_is_said_and_old_turns_go_if_asked(chat: Chat) -> None:
    said = chat(LONG, LONG, LONG, LONG)
    assert (
        "tokens is full: /clear starts a new conversation, /drop drops the oldest turns" in said.err
    )
    turns = len(said.conversation.messages) // 2
    assert 0 < turns < 4
    dropped = chat(LONG, LONG, LONG, LONG, "/drop")
    assert dropped.conversation.unanswered is None
    assert dropped.conversation.messages[-2]["content"] == LONG
    assert "dropped the oldest" in dropped.err
    by_itself = chat("/set drop", LONG, LONG, LONG, LONG, LONG)
    assert "tokens is full" not in by_itself.err
    assert roles(by_itself.conversation.messages)[-2:] == ["user", "assistant"]
    assert "dropped the oldest 1 turn\n" in by_itself.err


def test_what_is_typed_is_remembered_unless_that_is_unwanted(chat: Chat) -> None:
    said = chat("first", "/stats", '"""second', 'third"""', "", "/set nohistory", "secret")
    assert said.remembered == ["first", "/stats", "second\nthird", "/set nohistory"]
    assert chat("/set nohistory", "a", "/set history", "b").remembered[1:] == ["b"]


READ = """
from paceline.cli.chat import typed
from paceline.cli.terminal import Terminal
terminal = Terminal(["earlier", "two\\nlines"])
while True:
    text = typed(terminal.read)
    terminal.remember(str(text))
    print(repr(text), flush=True)
"""
UP = "\x1b[A"


def paste(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="only GNU readline asks for it")
def test_a_paste_is_one_message() -> None:
    with at_a_terminal(["-c", READ], {}) as terminal:
        assert "\x1b[?2004h" in terminal.until("> ")  # it asks to be told of pastes
        terminal.type(paste("first\nsecond\n"))
        terminal.type("\n")
        terminal.until(repr("first\nsecond"))
        terminal.until("> ")
        terminal.type(paste("one\r") + " more\n")
        terminal.until(repr("one\n more"))


def test_arrows_bring_texts_back() -> None:
    with at_a_terminal(["-c", READ], {}) as terminal:
        terminal.until("> ")
        terminal.type(f"{UP}\n")
        terminal.until(repr("two\nlines"))
        terminal.until("> ")
        terminal.type('"""a\nb"""\n')
        terminal.until(repr("a\nb"))
        terminal.until("> ")
        terminal.type(f"{UP}{UP}{UP}{UP}\n")
        terminal.until(repr("earlier"))


def test_a_history_is_private_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "state" / "paceline" / "typed.jsonl"
    one, other = PromptHistory(path), PromptHistory(path)
    assert one.texts() == []
    one.add("first")
    other.add("zwei\nZeilen: ü")
    assert PromptHistory(path).texts() == ["first", "zwei\nZeilen: ü"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    one.add("third")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_history_does_not_grow_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cli.chat.MAX_ENTRIES", 3)
    path = tmp_path / "typed.jsonl"
    lines = [json.dumps(str(number)) for number in range(7)]
    path.write_text("\n".join([*lines, "damaged", "{}", ""]), encoding="utf-8")
    assert PromptHistory(path).texts() == ["6"]
    assert path.read_text(encoding="utf-8").splitlines() == ['"6"', "damaged", "{}"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_history_that_cannot_be_kept_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    history = PromptHistory(tmp_path / "file" / "typed.jsonl")
    assert history.texts() == []
    history.add("a")
    history.add("b")
    assert len(caplog.records) == 1
    assert "what is typed is not kept" in caplog.text


@pytest.mark.slow
def test_a_chat(tmp_path: Path) -> None:
    """The command itself, in two sessions."""
    environment = {"XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = ["-m", "paceline", "run", embedded_model("target"), "-n", "8"]
    with at_a_terminal(command, environment) as terminal:
        assert ", seed " in terminal.until("> ")
        terminal.type(paste("Once upon\na time"))
        terminal.type("\n")
        assert "cut at the limit of 8 tokens" in terminal.until(" tok/s")
        terminal.until("> ")
        terminal.type("/stats\n")
        terminal.until("all answers: 8 tokens")
        terminal.until("> ")
        terminal.type("/bye\n")
        terminal.to_the_end()
    (kept,) = tmp_path.glob("**/typed.jsonl")
    assert PromptHistory(kept).texts() == ["Once upon\na time", "/stats", "/bye"]
    with at_a_terminal(command, environment) as terminal:
        terminal.until("> ")
        terminal.type(UP * 3)
        terminal.until("a time")
        terminal.type("\n")
        terminal.until(" tok/s")
        terminal.until("> ")
        terminal.type("\x04")
        terminal.to_the_end()


def test_the_usual_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    PromptHistory().add("x")
    assert [path.name for path in state_folder().iterdir()] == ["typed.jsonl"]
