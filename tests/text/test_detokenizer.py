"""Streams of text: nothing lost, nothing halved, nothing early; stop strings wherever they fall."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.text.detokenizer import TextStream
from paceline.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_fallback, byte_level

MAKERS = {"byte-level": byte_level(), "byte-fallback": byte_fallback()}
KINDS = st.sampled_from(sorted(MAKERS))
IDS = st.lists(st.integers(0, 450), max_size=40)
WORDS = st.lists(
    st.sampled_from(["the ", "é", "€", "😀", "日本", "\n", " ", "an", "<", "\ufffd", "x" * 9]),
    max_size=12,
).map("".join)


def stream(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], every: int = 1, **options
) -> tuple[list[str], str | None]:
    """Text taken after each token or few and at the end, and the stop string that was met."""
    checker = TextStream(tokenizer, prompt, **options)
    pieces, met = [], None
    for count, token_id in enumerate(output, start=1):
        met = checker.push(token_id)
        if count % every == 0:
            pieces.append(checker.take_text(final=False))
        if met is not None:
            break
    pieces.append(checker.take_text(final=True))
    assert checker.text == "".join(pieces)
    assert checker.take_text(final=True) == ""
    return pieces, met


def addition(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> str:
    """What the output adds to the prompt's text."""
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode([*prompt, *output])
    assert whole.startswith(before)
    return whole[len(before) :]


@given(kind=KINDS, prompt=WORDS, text=WORDS, ids=IDS, every=st.integers(1, 9))
@example("byte-fallback", "", " the", [3 + 0x20, 3 + 0xE2, 3 + 0x82, 290], 1)
@example(
    "byte-fallback", "the", "", [3 + 0x0A, 3 + 0xFF, 3 + 0x0A, 290, 3 + 0xC3, 3 + 0xA9, 1, 290], 1
)
@example("byte-level", "the", "", [3 + 0x99] * 40, 1)
def test_stream_is_the_full_decoding(
    kind: str, prompt: str, text: str, ids: list[int], every: int
) -> None:
    tokenizer = MAKERS[kind]
    before = tokenizer.encode(prompt)
    output = tokenizer.encode(text, add_special_tokens=False) + ids
    pieces, _ = stream(tokenizer, before, output, every)
    assert "".join(pieces) == addition(tokenizer, before, output)


@given(kind=KINDS, prompt=IDS, output=IDS, every=st.integers(1, 9))
@example("byte-fallback", [3 + 0x20], [3], 1)  # decoding strips a space at the beginning
def test_any_prompt(kind: str, prompt: list[int], output: list[int], every: int) -> None:
    """A prompt may end inside a character; then the whole character is the output's."""
    tokenizer = MAKERS[kind]
    pieces, _ = stream(tokenizer, prompt, output, every)
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *output])
    if whole.startswith(before):
        assert "".join(pieces) == whole[len(before) :]
    else:  # the prompt's end was an unfinished character
        assert before.endswith("\ufffd")
        assert before[:-1] + "".join(pieces) == whole


@given(kind=KINDS, text=WORDS.filter(lambda text: "\ufffd" not in text))
def test_never_half_a_character(kind: str, text: str) -> None:
    tokenizer = MAKERS[kind]
    pieces, _ = stream(tokenizer, [], tokenizer.encode(text, add_special_tokens=False))
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_prompt_cut_inside_a_character_is_completed() -> None:
    for tokenizer in MAKERS.values():
        ids = tokenizer.encode("the 🎈")
        pieces, _ = stream(tokenizer, ids[:-2], ids[-2:])
        assert "".join(pieces) == "🎈"


# What llama.cpp b11549's server makes of byte tokens of Gemma 3's (/detokenize, and answers that
# n_predict ends). tokenizers 0.23.3 makes one U+FFFD of each byte of a run that is not all UTF-8.
CUT_RUNS = [
    (b"\xe2\x82\xac\xe2\x82\xac\xe2\x82", "€€\ufffd"),
    (b"\xf0\x92\x81\xb8\xf0\x92\x81\xbf\xf0", "\U00012078\U0001207f\ufffd"),
    (b"\xf0\x92\x81\xb8\xf0\x92\x81\xbf\xf0\x92\x82", "\U00012078\U0001207f\ufffd"),
    (b"\xf0\x9f\x98", "\ufffd"),
    (b"a\xe2\x82a", "a\ufffda"),
    (b"\xe2\x82\xac\x80", "€\ufffd"),
    (b"\xe2\x82\xac\x80\x80", "€\ufffd\ufffd"),
    (b"\xff\xfe", "\ufffd\ufffd"),
    (b"\xe2\x82\xe2\x82\xac", "\ufffd€"),
]


def bytewise(data: bytes) -> list[int]:
    """Tokens of the vocabulary that falls back to bytes, one for each."""
    return [3 + byte for byte in data]


@pytest.mark.parametrize(("data", "text"), CUT_RUNS)
def test_complete_characters_of_a_run_of_bytes_are_kept(data: bytes, text: str) -> None:
    tokenizer, the = MAKERS["byte-fallback"], MAKERS["byte-fallback"].encode("the")
    assert tokenizer.decode(bytewise(data)) == text
    for every in range(1, len(data) + 1):
        assert "".join(stream(tokenizer, the, bytewise(data), every)[0]) == text


@given(data=st.binary(max_size=40), prompt=st.sampled_from(["", "the", "the €"]))
@example(b"\x80\x80", "the €")
def test_any_bytes_read_as_pythons_own_decoder_reads_them(data: bytes, prompt: str) -> None:
    """One U+FFFD for each beginning of a character and each stray byte, as the format has it."""
    tokenizer = MAKERS["byte-fallback"]
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    whole = tokenizer.decode([*ids, *bytewise(data)])
    expected = data.decode(errors="replace")
    assert whole == prompt + (expected if ids else expected.removeprefix(" "))
    assert "".join(stream(tokenizer, ids, bytewise(data))[0]) == whole[len(prompt) :]


def test_a_complete_character_is_told_with_its_last_byte() -> None:
    """A run of byte tokens need not end first."""
    pieces, _ = stream(MAKERS["byte-fallback"], [], bytewise("€😀".encode()))
    assert pieces == ["", "", "€", "", "", "", "😀", ""]


def test_spaces_between_words_are_kept() -> None:
    """Decoding one token alone would lose its leading space."""
    tokenizer = MAKERS["byte-fallback"]
    the, and_ = tokenizer.encode("the", False), tokenizer.encode("and", False)
    assert tokenizer.decode(and_) == "and"
    assert "".join(stream(tokenizer, the, and_)[0]) == " and"
    assert "".join(stream(tokenizer, [1], and_)[0]) == "and"
    assert "".join(stream(tokenizer, [*the, 1], and_)[0]) == " and"


def test_text_is_released_at_once_when_nothing_holds_it() -> None:
    tokenizer = MAKERS["byte-level"]
    output = tokenizer.encode("the quick brown fox")
    pieces, _ = stream(tokenizer, [], output)
    assert all(pieces[:-1])
    assert pieces[-1] == ""


@given(
    kind=KINDS,
    text=WORDS,
    stop=st.lists(st.text("the é€\n😀x", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_stop_strings(kind: str, text: str, stop: list[str], include: bool) -> None:
    """As if characters had arrived one by one, whatever the tokens; nothing after it is shown."""
    tokenizer = MAKERS[kind]
    output = tokenizer.encode("." + text, add_special_tokens=False)
    full = addition(tokenizer, [], output)
    pieces, met = stream(tokenizer, [], output, stop=stop, include_stop=include)
    ends = [(full.find(s) + len(s), full.find(s), s) for s in stop if s in full]
    if not ends:
        assert met is None
        assert "".join(pieces) == full
    else:
        end, start, _ = min(ends)
        assert met == full[start:end]
        assert "".join(pieces) == full[: end if include else start]


def test_a_stop_string_ends_the_text_at_its_last_token() -> None:
    """Also when that is a byte token, whose run might go on."""
    tokenizer = MAKERS["byte-fallback"]
    newline = 3 + 0x0A
    checker = TextStream(tokenizer, tokenizer.encode("the"), stop=["\n"])
    assert checker.push(tokenizer.encode("and", False)[0]) is None
    assert checker.push(newline) == "\n"
    assert checker.push(newline) is None
    assert checker.take_text(final=True) == checker.text == " a"


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    tokenizer = MAKERS["byte-level"]
    checker = TextStream(tokenizer, [], stop=["xyz"])
    taken = []
    for character in "axyaxyxyb":
        for token_id in tokenizer.encode(character):
            checker.push(token_id)
        taken.append(checker.take_text(final=False))
    assert taken == ["a", "", "", "xya", "", "", "xy", "", "xyb"]


END, START = 0, 1
"""Special tokens of the byte-level vocabulary: <|end|> and <|im_start|>."""


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("output", "stop", "text"),
    [
        (["the", START, " fox"], "<|im_start|>", "the"),
        (["the", START, " fox", END], "<|end|>", "the fox"),
        (["the", START, " fox", START, START], "<|im_start|><|im_start|>", "the fox"),
        (["the", END, " x", END], "x<|end|>", "the "),
        (["the", START, "user"], "<|im_start|>us", "the"),
        (["the", START, "us", START, "user"], "<|im_start|>user", "theus"),
        (["the x<|en", END], "x<|en<|end|>", "the "),
    ],
)
def test_a_stop_string_that_spells_a_special_token_stands_for_it(
    output: list[str | int], stop: str, text: str, include: bool
) -> None:
    tokenizer = MAKERS["byte-level"]
    ids = [
        token
        for each in output
        for token in ([each] if isinstance(each, int) else tokenizer.encode_literal(each))
    ]
    pieces, met = stream(tokenizer, [], ids, stop=[stop, "never"], include_stop=include)
    assert met == stop
    assert "".join(pieces) == (text + stop if include else text)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("output", "stops", "met", "text"),
    [
        # A plain one, whose text goes on behind special tokens that the others spell out.
        (["qu", START, "ick fox"], ["<|im_start|>user", "uic"], "uic", "q"),
        (
            ["q", END, "u", START, "i", END, "ck"],
            ["<|im_start|>user", "<|end|>x", "uic"],
            "uic",
            "q",
        ),
        (["the", START, "us", " fox"], ["<|im_start|>user", "s f"], "s f", "theu"),
        # One that spells a token, whose text goes on behind another one's.
        (["x", START, END, "y"], ["x<|end|>", "<|im_start|>user"], "x<|end|>", ""),
        (["x", START, "y", END], ["xy<|end|>", "<|im_start|><|im_start|>"], "xy<|end|>", ""),
        # Whichever is complete first; the longest of several that end at one place.
        (["the", START, " fox"], ["<|im_start|>", "fox"], "<|im_start|>", "the"),
        (["the", " fox", START], ["<|im_start|>", "fox"], "fox", "the "),
        (["a", START], ["<|im_start|>", "a<|im_start|>", "b"], "a<|im_start|>", ""),
        (["u", START, "s"], ["s", "<|im_start|>us", "<|im_start|>s"], "<|im_start|>s", "u"),
    ],
)
def test_stop_strings_with_and_without_special_tokens(
    output: list[str | int], stops: list[str], met: str, text: str, include: bool
) -> None:
    """Whichever characters are one token, and in whatever order they are asked for."""
    tokenizer = MAKERS["byte-level"]
    whole, single = list[int](), list[int]()
    for each in output:
        whole += [each] if isinstance(each, int) else tokenizer.encode_literal(each)
        characters = [each] if isinstance(each, int) else each
        for one in characters:
            single += [one] if isinstance(one, int) else tokenizer.encode_literal(one)
    for ids in (whole, single):
        for asked in (stops, stops[::-1]):
            for every in range(1, len(ids) + 1):
                pieces, found = stream(tokenizer, [], ids, every, stop=asked, include_stop=include)
                assert found == met
                assert "".join(pieces) == (text + met if include else text)


def test_special_tokens_that_no_stop_string_ends_at_stay_hidden() -> None:
    tokenizer = MAKERS["byte-level"]
    ids = [*tokenizer.encode("the"), START, *tokenizer.encode("us"), END, START]
    pieces, met = stream(tokenizer, [], ids, stop=["<|im_start|>user", "<|end|><|end|>"])
    assert met is None
    assert "".join(pieces) == "theus"
    checker = TextStream(tokenizer, [], ["<|end|>"])
    assert checker.push(END, may_stop=False) is None, "as far as min_tokens"
    assert checker.push(END) == "<|end|>"
    assert checker.take_text(final=True) == ""


def test_special_tokens_and_unknown_ids_say_nothing() -> None:
    tokenizer = MAKERS["byte-level"]
    the = tokenizer.encode("the")
    assert "".join(stream(tokenizer, [], [0, *the, 0, 10**6, *the])[0]) == "thethe"


@pytest.mark.parametrize("token_id", [3 + 0x80, 3 + 0x41, 290])
@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_the_work_per_token_does_not_grow(kind: str, token_id: int) -> None:
    """Endless rubbish included; quadratic work would not end within the time-out."""
    checker = TextStream(MAKERS[kind], [], stop=["never", "ever" * 20])
    for _ in range(20_000):
        checker.push(token_id)
    checker.take_text(final=True)
    assert len(checker.text) >= 10_000


def test_long_output_of_a_trained_tokenizer(shared_data) -> None:
    tokenizer = Tokenizer.from_folder(shared_data / "models" / "starter-target")
    text = (shared_data / "corpora" / "aider-chat-edits.txt").read_text()[:20_000]
    pieces, _ = stream(tokenizer, [], tokenizer.encode(text))
    assert "".join(pieces) == text
