"""Records what llama.cpp says of texts in GBNF grammars.

Run ``python -m tests.structured.record_gbnf FOLDER`` in an environment with ``xllamacpp`` (whose
library exports llama.cpp's functions) and ``tokenizers``; the folder is ``grammars`` of llama.cpp's
source. It is no test.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.structured.gbnf_parser import parsed
from paceline.text.token_pieces import TokenNames
from tests.structured.gbnf_cases import FILE, OWN, REFUSED, RESTATED, TAKEN, token_texts
from tests.structured.gbnf_drawing import GrammarDrawer, Writer, texts_near
from tests.structured.llama_grammars import Llama

NUM_TEXTS = 200
NUM_MASKED_TEXTS = 2
NUM_MASKS = 6
NUM_DRAWN = 80
NUM_TEXTS_OF_DRAWN = 18


def texts_of(source: str, chance: random.Random) -> list[str]:
    writer = Writer(parsed(source, TokenNames()), chance)
    good = sorted({writer.text() for _ in range(4 * NUM_TEXTS)})
    good = chance.sample(good, min(len(good), NUM_TEXTS // 2))
    others = "".join(good) + 'aZ0 \n\t"\\([{,:-é😀一'
    found = dict.fromkeys(good)
    while len(found) < NUM_TEXTS:
        found[writer.spoilt(chance.choice(good), others)] = None
    return list(found)


def masks_of(llama: Llama, source: str, texts: list[str]) -> list[tuple[str, str]]:
    """Beginnings of texts, and the tokens that may follow each: bits of a hexadecimal number."""
    found = {}
    for text in texts[:NUM_MASKED_TEXTS]:
        for place in range(0, len(text) + 1, len(text) // NUM_MASKS + 1):
            begun = text[:place]
            mask = sum(
                1 << token
                for token, piece in token_texts().items()
                if abs(llama.verdict(source, begun + piece)) >= len(begun + piece)
            )
            found[begun] = f"{mask:x}"
    return list(found.items())


def of_drawn(llama: Llama) -> list[tuple[str, list[tuple[str, int]] | None]]:
    """Grammars drawn at random, each with verdicts on texts, or None where it is refused."""
    found: list[tuple[str, list[tuple[str, int]] | None]] = []
    for seed in range(NUM_DRAWN):
        chance = random.Random(seed)
        source = GrammarDrawer(chance).grammar()
        texts = texts_near(source, chance, NUM_TEXTS_OF_DRAWN)
        verdicts = [(text, llama.verdict(source, text)) for text in texts]
        found.append((source, verdicts if llama.takes(source) else None))
    return found


def main(folder: Path) -> None:
    llama, chance = Llama(), random.Random(11549)
    grammars = {name: (folder / f"{name}.gbnf").read_text() for name in RESTATED} | OWN
    texts: dict[str, Any] = {}
    masks: dict[str, Any] = {}
    for name, source in grammars.items():
        drawn = texts_of(source, chance)
        texts[name] = [(text, llama.verdict(source, text)) for text in drawn]
        masks[name] = masks_of(llama, source, drawn)
        print(name, sum(v == len(t) for t, v in texts[name]), "of", len(drawn), "match")
    taken = {source: llama.takes(source) for source in (*REFUSED, *TAKEN)}
    record = {"version": version("xllamacpp"), "taken": taken, "texts": texts, "masks": masks}
    record["drawn"] = of_drawn(llama)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_bytes(lzma.compress(json.dumps(record, ensure_ascii=False).encode(), preset=9))
    print(FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
