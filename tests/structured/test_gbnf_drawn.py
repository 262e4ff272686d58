"""Grammars in GBNF that are drawn at random mean what llama.cpp says that they mean.

The slow tests ask llama.cpp itself. They need an interpreter that has llama-cpp-python or
xllamacpp: the one that ``make peers`` installs, or that of ``PACELINE_LLAMA_PYTHON``. The others
hold what ``record_gbnf.py`` wrote down.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from paceline.api.llm import embedded_model
from paceline.core.errors import RequestError, UnservableRequestError
from paceline.request.request import Constraint
from paceline.request.structured_outputs import StructuredOutputs
from paceline.structured.gbnf import from_gbnf
from paceline.structured.grammar import GrammarCompiler
from paceline.text.token_pieces import TokenNames
from paceline.text.tokenizer import Tokenizer
from tests.conftest import REPOSITORY
from tests.structured.gbnf_cases import recorded, token_texts
from tests.structured.gbnf_drawing import GrammarDrawer, texts_near
from tests.structured.gbnf_walk import Walk
from tests.text.record_gguf_ids import write_vocabulary

pytest.importorskip("llguidance")
PYTHON = Path(os.environ.get("PACELINE_LLAMA_PYTHON", ".peers/llama/bin/python"))
needs_llama = pytest.mark.skipif(
    not PYTHON.is_file(), reason=f"there is no {PYTHON}: make peers, or PACELINE_LLAMA_PYTHON"
)
ENDS = (0, 2)
"""What llama.cpp takes as ends in the embedded model's vocabulary."""
LETTERS = {token: text for token, text in token_texts().items() if set(text) <= set("abc")}
"""Tokens of the texts in drawn grammars that name tokens."""
NUM_GRAMMARS = 100
NUM_TEXTS = 24
NUM_PATHS = 4
LONGEST_PATH = 8


class Peer:
    """llama.cpp in another process, and another one after each grammar on which it fails."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments

    @cached_property
    def _child(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [PYTHON.absolute(), "-m", "tests.structured.llama_grammars", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"},
        )

    def ask(self, **task: Any) -> dict[str, Any] | None:
        """None where llama.cpp finds no answer."""
        child = self._child
        assert child.stdin
        assert child.stdout
        child.stdin.write(json.dumps(task) + "\n")
        child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            self.close()
            return None
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        child = self._child
        child.kill()
        child.communicate()
        del self._child


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, ENDS)
    yield made
    made.close()


def is_taken(source: str, names: TokenNames) -> bool:
    try:
        from_gbnf(source, names)
    except RequestError:
        return False
    return True


def verdict_of(walk: Walk, text: str) -> int | None:
    """None where the grammar allows too much at once, and says so."""
    try:
        return walk.verdict(text)
    except (RequestError, UnservableRequestError) as error:
        if "Too many items" in str(error):
            return None
        raise


def test_what_was_drawn_and_recorded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for source, verdicts in recorded()["drawn"]:
        assert is_taken(source, TokenNames(size=10)) is (verdicts is not None), source
        walk = Walk(compiler, tokenizer, source)
        for text, verdict in verdicts or ():
            ours = verdict_of(walk, text)
            if ours is None:
                break
            assert ours == verdict, (source, text)


@needs_llama
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 10 * NUM_GRAMMARS, NUM_GRAMMARS))
def test_drawn_grammars(compiler: GrammarCompiler, tokenizer: Tokenizer, first: int) -> None:
    peer, num_compared = Peer(), 0
    for seed in range(first, first + NUM_GRAMMARS):
        chance = random.Random(seed)
        source = GrammarDrawer(chance).grammar()
        texts = texts_near(source, chance, NUM_TEXTS)
        said = peer.ask(grammar=source, texts=texts)
        if said is None:
            continue
        assert is_taken(source, TokenNames(size=10)) is said["taken"], (seed, source)
        if not said["taken"]:
            continue
        walk = Walk(compiler, tokenizer, source)
        for text, verdict in zip(texts, said["texts"], strict=True):
            ours = verdict_of(walk, text)
            if ours is None:
                break
            assert ours == verdict, (seed, source, text)
            num_compared += 1
    peer.close()
    assert num_compared > NUM_GRAMMARS * NUM_TEXTS / 4


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's, as llama.cpp reads it."""
    pytest.importorskip("gguf")
    described = json.loads((Path(embedded_model("target")) / "tokenizer.json").read_text())
    tokens = sorted(described["model"]["vocab"], key=described["model"]["vocab"].__getitem__)
    special = {each["content"] for each in described["added_tokens"]}
    path = tmp_path_factory.mktemp("vocabulary") / "vocabulary.gguf"
    write_vocabulary(
        path,
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [" ".join(each) for each in described["model"]["merges"]],
            "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 0,
        },
    )
    return path


class TokenWalk:
    """Paths of tokens through one grammar, drawn at random.

    Args:
        known: tokens of which paths consist, as bits of a number.
    """

    def __init__(
        self, compiler: GrammarCompiler, source: str, chance: random.Random, known: int
    ) -> None:
        self._compiler, self._chance, self._known = compiler, chance, known
        self._spec = StructuredOutputs(grammar=source)

    def path(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Its tokens; and before each, and behind the last, what may follow: as bits of a number.

        Those whose text may begin there, but not stand there as a whole, are in a number of their
        own: llama.cpp takes them where a reference is next, and fails then.
        """
        (constraint,) = self._compiler.constraints(self._spec, 1)
        path: list[int] = []
        masks = []
        while True:
            mask = int.from_bytes(constraint.mask(()), "little")
            masks.append((self._all_spellings(constraint, mask), self._begun(constraint)))
            mask &= self._known & ~_bits(ENDS)
            ids = [token for token in range(mask.bit_length()) if mask >> token & 1]
            if not ids or len(path) == LONGEST_PATH:
                return path, masks
            path.append(self._chance.choice(ids))
            constraint.advance(path[-1])

    @staticmethod
    def _all_spellings(constraint: Constraint, mask: int) -> int:
        if constraint.certain(()) is None:
            return mask
        return mask | _bits(token for token in LETTERS if constraint.takes((token,)))

    @staticmethod
    def _begun(constraint: Constraint) -> int:
        taken = {
            text: constraint.takes((token,)) for token, text in LETTERS.items() if len(text) == 1
        }
        return _bits(token for token, text in LETTERS.items() if taken[text[0]] and len(text) > 1)


def _bits(tokens: Iterable[int]) -> int:
    return sum(1 << token for token in tokens)


@needs_llama
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_drawn_references(
    compiler: GrammarCompiler, tokenizer: Tokenizer, vocabulary: Path
) -> None:
    """Masks are llama.cpp's, but for those tokens on which it fails itself."""
    names = TokenNames.of(tokenizer, tokenizer.vocab_size, ENDS)
    known = _bits({*token_texts(), *tokenizer.shown_added_tokens().values()})
    peer, num_compared = Peer(str(vocabulary)), 0
    for seed in range(3 * NUM_GRAMMARS):
        chance = random.Random(seed)
        source = GrammarDrawer(chance, with_tokens=True).grammar()
        taken = is_taken(source, names)
        walk = TokenWalk(compiler, source, chance, known)
        paths = [walk.path() for _ in range(NUM_PATHS)] if taken else []
        said = peer.ask(grammar=source, paths=[path for path, _ in paths])
        if said is None:
            continue
        assert said["taken"] is taken, (seed, source)
        for (path, masks), theirs in zip(paths, said.get("masks", ()), strict=True):
            assert len(theirs) == len(masks), (seed, source, path)
            for place, ((mask, begun), their) in enumerate(zip(masks, theirs, strict=True)):
                differing = (mask ^ int(their, 16)) & known
                assert differing & (mask | ~begun) == 0, (seed, source, path[:place])
                num_compared += 1
    peer.close()
    assert num_compared > NUM_GRAMMARS * NUM_PATHS
