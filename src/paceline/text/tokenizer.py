"""Text to token ids and back, and chats to text. Knows no model and no request.

Owns what encoders of the ``tokenizers`` library leave open: bytes that are no UTF-8, texts in which
special tokens that are written out are mere text, and with which tokens a chat template opens an
answer. The files of a tokenizer are read in :mod:`paceline.text.tokenizer_files`, those inside a
GGUF in :mod:`paceline.text.gguf_tokenizer`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from paceline.core.errors import NoFimTokensError, RequestError, TemplateError
from paceline.text.chat_templates import (
    MARK_FAMILIES,
    SHOWN_MARKS,
    read_by_templates,
    render_chat_template,
    stops_of,
    with_opening,
)
from paceline.text.fim import FimTokens, Gap, find_fim_tokens
from paceline.text.piece_scores import with_scored_pieces
from paceline.text.tokenizer_files import (
    TokenizerParts,
    read_tokenizer_folder,
    write_tokenizer_folder,
)

LONG_TEXT = 256
"""Characters from which on encoding a text is worth letting other threads of Python run."""
_KIND = re.compile(r'"type":\s*"(\w+)"')
_MARK = re.compile(r"<.*>", re.DOTALL)


class Tokenizer:
    """A vocabulary with its rules, special tokens and chat templates.

    Args:
        backend: the encoder; truncation and padding in it are switched off.
        special_tokens: role -> token (``bos_token``, ``eos_token``, ...), as templates name them.
        eos_token_ids: ids that end a text; default: that of the ``eos_token``.
        chat_templates: name -> Jinja source; ``default`` is used unless tools are given and there
            is a ``tool_use``.
        piece_scores: piece -> score, where these cut texts into pieces, not the backend's merges.

    Attributes:
        has_fallback_template: the template is one that nobody chose for this model.
        chat_opening: messages that its owner put before each chat. A chat with a system message of
            its own goes without theirs.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        piece_scores: Mapping[str, float] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._file_backend = backend
        self._splits_special_tokens = bool(backend.encode_special_tokens)
        self._piece_scores = piece_scores
        self._backend = self._joining(backend)
        self._special_tokens = dict(special_tokens or {})
        self._set_templates(dict(chat_templates or {}))
        self.has_fallback_template = False
        self.chat_opening: tuple[Mapping[str, Any], ...] = ()
        added = backend.get_added_tokens_decoder()
        texts = {each.content for each in added.values()}
        shown = SHOWN_MARKS.union(*(marks for marks in MARK_FAMILIES if texts >= marks))
        self._special_ids = frozenset(
            i for i, token in added.items() if token.special and token.content not in shown
        )
        self.bos_token_id = self._id_of_role("bos_token")
        self.unk_token_id = self._id_of_role("unk_token")
        eos = self._id_of_role("eos_token")
        default = () if eos is None else (eos,)
        self.eos_token_ids = default if eos_token_ids is None else tuple(eos_token_ids)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and what lies beside it; ``ModelLoadError`` where it cannot."""
        parts = read_tokenizer_folder(Path(path))
        return cls(
            parts.backend,
            special_tokens=parts.special_tokens,
            chat_templates=parts.chat_templates,
            piece_scores=parts.piece_scores,
        )

    def _joining(self, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """The backend as it joins pieces; where they have scores, no file could hold that."""
        scores = self._piece_scores
        return backend if scores is None else with_scored_pieces(backend, scores)

    def __getstate__(self) -> dict[str, Any]:
        """Without encoders that are made of the rest: those that join by scores cannot travel."""
        made = ("_backend", "_literal_backend")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._file_backend.encode_special_tokens = self._splits_special_tokens
        self._backend = self._joining(self._file_backend)

    def save(self, folder: Path) -> None:
        """Write the files that :meth:`from_folder` reads."""
        parts = TokenizerParts(
            self._file_backend,
            self._special_tokens,
            self._templates,
            self._piece_scores,
        )
        write_tokenizer_folder(folder, parts)

    def to_json(self) -> str:
        """The encoder as the text of a ``tokenizer.json``; scores of pieces are no part of it."""
        text: str = self._file_backend.to_str()
        return text

    def _id_of_role(self, role: str) -> int | None:
        token = self._special_tokens.get(role)
        token_id = None if token is None else self._backend.token_to_id(token)
        return None if token_id is None else int(token_id)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return self._extent[0]

    @property
    def longest_token(self) -> int:
        """Characters of the longest of the vocabulary's own spellings."""
        return self._extent[1]

    @functools.cached_property
    def _extent(self) -> tuple[int, int]:
        vocabulary = self._vocabulary()  # which takes its time, so both are told by one
        return max(vocabulary.values(), default=-1) + 1, max(map(len, vocabulary), default=0)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex hash of which string has which id; equal exactly for equal vocabularies."""
        digest = hashlib.blake2b(digest_size=16)
        for token, index in sorted(self._vocabulary().items(), key=lambda item: item[1]):
            data = token.encode("utf-8", "surrogatepass")
            digest.update(b"%d %d " % (index, len(data)) + data)
        return digest.hexdigest()

    def _vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, between the BOS and EOS tokens that the vocabulary puts there.

        Special tokens written out in the text become those tokens. A rendered chat template brings
        its own BOS: encode it with ``add_special_tokens=False``.

        Raises:
            RequestError: the text holds a lone surrogate, which no encoding has.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of several texts, each as :meth:`encode` has them."""
        try:
            return self._backend_ids(texts, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise not_encodable(texts, error) from error

    def _backend_ids(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        options = {"add_special_tokens": add_special_tokens}
        if len(texts) == 1 and len(texts[0]) < LONG_TEXT:
            return [self._backend.encode(texts[0], **options).ids]
        # The backend lets other threads of Python run during batches only.
        return [each.ids for each in self._backend.encode_batch(list(texts), **options)]

    def encode_literal(
        self, text: str, *, begins: bool = True, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a text in which special tokens that are written out are mere text.

        Args:
            begins: as at a text's beginning; otherwise as behind other tokens, without the space
                that some vocabularies put first.
            add_special_tokens: as in :meth:`encode`; only for what begins a text.

        Raises:
            RequestError: as :meth:`encode`.
        """
        return self._ids_by(self._literal_backend, text, begins, add_special_tokens)

    def encoder_within(self, marks: Collection[int]) -> Callable[[str], list[int]]:
        """What encodes texts behind other tokens, in which special tokens, and those of these ids,
        are mere text.
        """
        backend = literal_backend(self._backend, marks)
        return lambda text: self._ids_by(backend, text, begins=False)

    def _ids_by(
        self, backend: tokenizers.Tokenizer, text: str, begins: bool, adds: bool = False
    ) -> list[int]:
        before = "" if begins or not self._puts_space_first else "\0"
        try:
            ids: list[int] = backend.encode(before + text, add_special_tokens=adds).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise not_encodable([text], error) from error
        if before:
            return ids[len(backend.encode(before, add_special_tokens=False).ids) :]
        return ids

    def spellings(self, text: str) -> list[list[int]]:
        """Token ids of a text at the beginning and, where they differ, behind other tokens; no
        others are around them. Raises as :meth:`encode`.
        """
        begun = self.encode(text, add_special_tokens=False)
        within = self.encode_literal(text, begins=False)
        return [begun] if within == begun else [begun, within]

    @functools.cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        marks = () if self.fim is None else self.fim.all
        return literal_backend(self._backend, marks)

    @functools.cached_property
    def _puts_space_first(self) -> bool:
        return self._backend.encode("a", add_special_tokens=False).tokens[:1] in (["▁a"], ["▁"])

    @functools.cached_property
    def fim(self) -> FimTokens | None:
        """The marks by which the model fills gaps, where its vocabulary has them."""
        return find_fim_tokens(self._special_tokens, self._backend.token_to_id)

    def needed_fim(self) -> FimTokens:
        """``NoFimTokensError`` where the vocabulary has no marks."""
        if self.fim is None:
            raise NoFimTokensError(
                "the model cannot fill a gap before a suffix: its vocabulary has no "
                "fill-in-the-middle tokens; serve one that has, as many code models do, or send "
                "the text before the gap alone to /v1/completions, which continues it"
            )
        return self.fim

    def fim_prompt(self, gap: Gap) -> list[int]:
        """The token ids that ask to fill a gap, no text of which becomes a mark."""

        def encode(text: str, begins: bool) -> list[int]:
            return self.encode_literal(text, begins=begins)

        return self.needed_fim().prompt(gap, self.begin_ids, encode)

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """The tokens that encoding puts before a text."""
        return self._frame[0]

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that encoding puts behind a text."""
        return self._frame[1]

    @functools.cached_property
    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # Not of an empty text: the token behind a text may be the one that would begin it.
        plain = self._backend.encode("a", add_special_tokens=False).ids
        framed = self._backend.encode("a", add_special_tokens=True).ids
        starts = range(len(framed) - len(plain) + 1)
        count = next((i for i in starts if framed[i : i + len(plain)] == plain), 0)
        return tuple(framed[:count]), tuple(framed[count + len(plain) :])

    @property
    def begins_with_bos(self) -> bool:
        """Whether encoding a text begins with its BOS token."""
        return self.begin_ids[:1] == (self.bos_token_id,)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids without any added around them, and the characters that each stands for."""
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise not_encodable([text], error) from error
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD, unknown ids nothing.

        Text never takes back what an earlier part of it said, except a U+FFFD at that part's end.
        """
        # The backend would skip by spelling, and miss tokens that its normaliser spells otherwise.
        kept = [i for i in ids if not (skip_special_tokens and i in self._special_ids)]
        if self._bytes and any(self._bytes.get(i, 0) >= 0x80 for i in kept):
            return str(self._backend.decoder.decode(self._mended(kept)))
        if len(kept) < LONG_TEXT:
            text: str = self._backend.decode(kept, skip_special_tokens=False)
        else:  # as in encoding
            text = self._backend.decode_batch([kept], skip_special_tokens=False)[0]
        return text

    def _mended(self, ids: Sequence[int]) -> list[str]:
        """The spellings of known tokens, in which bytes that are no character become U+FFFD.

        tokenizers 0.23 has a run of byte tokens read as U+FFFD alone, one for each byte, where any
        of it is no UTF-8. Here its complete characters are kept, and what is between them becomes
        one U+FFFD for each beginning of a character or stray byte, as in llama.cpp b11549.
        """
        known = (i for i in ids if i in self._bytes or self.id_to_token(i) is not None)
        spellings = list[str]()
        for is_byte, run in itertools.groupby(known, self._bytes.__contains__):
            if is_byte:
                text = bytes(self._bytes[token_id] for token_id in run).decode(errors="replace")
                spellings += [token for character in text for token in _spelled(character)]
            else:
                spellings += [self.id_to_token(token_id) or "" for token_id in run]
        return spellings

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, or None outside of it."""
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        return token

    def is_special(self, token_id: int) -> bool:
        """Whether decoding leaves the token out."""
        return token_id in self._special_ids

    def special_tokens_in(self, text: str) -> dict[int, str]:
        """The tokens that decoding leaves out and that a text spells out, with their spellings."""
        spelled_out = dict[int, str]()
        ids, lengths = self._special_spellings
        for start, character in enumerate(text):
            for length in lengths.get(character, ()):
                spelling = text[start : start + length]
                if spelling in ids:
                    spelled_out[ids[spelling]] = spelling
        return spelled_out

    @functools.cached_property
    def _special_spellings(self) -> tuple[dict[str, int], dict[str, set[int]]]:
        """Ids of special tokens by their spellings, whose lengths are by their first character."""
        added = self._backend.get_added_tokens_decoder()
        ids = {each.content: i for i, each in added.items() if i in self._special_ids}
        lengths = dict[str, set[int]]()
        for spelling in ids:
            lengths.setdefault(spelling[:1], set()).add(len(spelling))
        return ids, lengths

    def shown_added_tokens(self) -> dict[str, int]:
        """Texts that are one token each, added to the vocabulary, and that decoding shows."""
        added = self._backend.get_added_tokens_decoder()
        return {each.content: i for i, each in added.items() if i not in self._special_ids}

    def mark_ids(self) -> set[int]:
        """Ids of added tokens that are marks, not words: special or in angle brackets."""
        added = self._backend.get_added_tokens_decoder()
        return {i for i, each in added.items() if each.special or _MARK.fullmatch(each.content)}

    def byte_of(self, token_id: int) -> int | None:
        """The byte that the token stands for, in vocabularies that fall back to bytes."""
        return self._bytes.get(token_id)

    @functools.cached_property
    def _bytes(self) -> dict[int, int]:
        byte_of = dict[int, int]()
        for byte in range(256) if "ByteFallback" in self.decoder_kinds else ():
            for spelling in (f"<0x{byte:02X}>", f"<0x{byte:02x}>"):
                token_id = self._backend.token_to_id(spelling)
                if token_id is not None:
                    byte_of[token_id] = byte
        return byte_of

    @property
    def decoder_kinds(self) -> set[str]:
        """Names of the steps by which tokens become text, as ``tokenizer.json`` has them."""
        decoder = self._backend.decoder
        return set() if decoder is None else set(_KIND.findall(decoder.__getstate__().decode()))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source by which chats are written, as long as they offer no tools."""
        return self._templates.get("default")

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """Strings that end an answer in a chat, for models that would write the next turn too."""
        return stops_of(self._templates.get("default", ""))

    def set_chat_template(self, source: str, *, is_fallback: bool = False) -> None:
        """Write chats by this Jinja template. A fallback is one that nobody chose for this model,
        which may know no chats at all.
        """
        self._set_templates({"default": source})
        self.has_fallback_template = is_fallback

    def _set_templates(self, templates: dict[str, str]) -> None:
        self._templates = templates
        self._template_text = "\0".join(templates.values())

    def set_tool_template(self, source: str) -> None:
        """Write chats that offer tools by this Jinja template, and all others as before."""
        if self._templates:
            self._set_templates({**self._templates, "tool_use": source})

    def template_mentions(self, word: str) -> bool:
        """Whether any chat template has this text, as a part of a name too."""
        return word in self._template_text

    def template_knows(self, variable: str) -> bool:
        """Whether any chat template has this variable's whole name."""
        name = re.compile(rf"(?<!\w){re.escape(variable)}(?!\w)")
        return name.search(self._template_text) is not None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The conversation as one prompt text, by the model's own template.

        Args:
            messages: each with a ``role`` and a ``content``, as JSON values; what single
                messages leave out is filled in by :mod:`paceline.text.chat_templates`.
            add_generation_prompt: end where the assistant's next words begin.
            tools: JSON schemas of functions, for templates that know tools.
            template_kwargs: further variables, for example ``enable_thinking=False``.

        Raises:
            TemplateError: there is no template, it refuses the messages, or passes its limits.
        """
        if not self._templates:
            raise TemplateError("the model has no chat template; send a plain prompt instead")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            known = ", ".join(sorted(self._templates))
            raise TemplateError(f"the model has no default chat template; it has {known}")
        variables = {
            "documents": None,
            **self._special_tokens,
            **template_kwargs,
            "text_begin": self._special_tokens["bos_token"] if self.begins_with_bos else "",
            "messages": read_by_templates(
                with_opening(self.chat_opening, messages), self.template_mentions
            ),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        return render_chat_template(template, variables)


REPLACEMENT = "\ufffd"


def _spelled(character: str) -> list[str]:
    if character == REPLACEMENT:
        return [character]
    return [f"<0x{byte:02X}>" for byte in character.encode()]


_CONTROL = re.compile(r"<[|｜].+[|｜]>")  # noqa: RUF001


def literal_backend(
    backend: tokenizers.Tokenizer, marks: Collection[int] = ()
) -> tokenizers.Tokenizer:
    """An encoder that takes no special token out of a text, nor those of ``marks``. It can only
    encode.

    Added tokens that are words of texts, such as runs of spaces, stay. Some vocabularies call marks
    ordinary words; what is spelled ``<|...|>`` is taken for one. The vocabulary itself is shared
    with the given encoder: to read a copy of 262,144 tokens takes seconds, during which no other
    thread of Python runs (tokenizers 0.23.3).
    """
    literal = tokenizers.Tokenizer(backend.model)
    literal.normalizer, literal.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    literal.post_processor = backend.post_processor
    added = sorted(backend.get_added_tokens_decoder().items())
    for token_id, token in added:
        token.special |= token_id in marks or bool(_CONTROL.fullmatch(token.content))
    literal.add_tokens([token for _, token in added])
    literal.encode_special_tokens = True
    return literal


_HALF = re.compile("[\ud800-\udfff]")


def not_encodable(texts: Sequence[str], error: Exception) -> RequestError:
    """The error of texts that an encoder did not take; it names the half of a surrogate pair."""
    halves = (match for text in texts if isinstance(text, str) for match in _HALF.finditer(text))
    half = next(halves, None)
    if half is None:
        return RequestError(f"the text cannot be encoded: {error}")
    return RequestError(
        f"the text cannot be encoded: its character {half.start()} is U+{ord(half[0]):04X}, half "
        "of a surrogate pair; leave it out"
    )


LONGEST = 16
"""Tokens that may stand between the earlier text and the answer."""
_CHAT = [{"role": "user", "content": "Hello."}]
_SWITCHES: Sequence[dict[str, Any]] = ({}, {"enable_thinking": True}, {"enable_thinking": False})


def answer_opening(tokenizer: Tokenizer | None) -> list[int]:
    """What all answers begin with, however thinking is switched; empty where nothing is known."""
    if tokenizer is None or not tokenizer.has_chat_template:
        return []
    try:
        openings = [_opening(tokenizer, options) for options in _SWITCHES]
    except RequestError:
        return []
    same = (len(set(each)) == 1 for each in zip(*openings, strict=False))
    count = next((i for i, is_same in enumerate(same) if not is_same), min(map(len, openings)))
    return openings[0][:count]


def _opening(tokenizer: Tokenizer, options: dict[str, Any]) -> list[int]:
    before, whole = (
        tokenizer.apply_chat_template(_CHAT, add_generation_prompt=opens, **options)
        for opens in (False, True)
    )
    added = whole.removeprefix(before) if whole.startswith(before) else ""
    return tokenizer.encode(added, add_special_tokens=False)


def resume_point(token_ids: Sequence[int], opening: Sequence[int]) -> int:
    """Where the opening of the answer begins at the end of a prompt; 0 where there is none."""
    for start in range(len(token_ids) - len(opening), len(token_ids) - LONGEST - 1, -1):
        if start <= 0 or not opening:
            break
        if list(token_ids[start : start + len(opening)]) == list(opening):
            return start
    return 0
