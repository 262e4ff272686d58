"""What the training of an n-gram model can be told, checked on construction. Knows no data."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.proposers.ngram_model import (
    MAX_CONTINUATIONS,
    MAX_ORDER,
    MIN_ORDER,
)
from paceline_lab.train.configs import check_range, check_unused


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramTrainingConfig:
    """Options of an n-gram model's training.

    Attributes:
        output: the file.
        traces: folders that ``paceline trace`` wrote; their answers are learnt, not their prompts.
        text: files and folders of text to learn.
        exclude: glob patterns of files to leave out, relative to their folder.
        stdlib: also learn Python's own standard library, as found on this machine.
        target: folder of the model that is to be drafted for, whose tokenizer reads the texts; None
            takes the vocabulary from the traces.
        order: longest n-grams, in tokens.
        soft_labels: learn the traced probabilities of the likeliest tokens, not the tokens alone.
        top_k: most continuations that are kept of one context.
        max_bytes: of the file.
        import_uzu: ``model.bin`` of uzu or lalamo to take over instead of learning.
        import_llama: lookup cache of llama.cpp whose counts are taken instead of learnt ones.
        export_llama: lookup cache of llama.cpp to write the counts to, as well.
        held_out_tokens: tokens of whole texts that are never learnt, no more than a fifth of all.
        seed: of the held-out split.
    """

    output: str
    traces: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    stdlib: bool = False
    target: str | None = None
    order: int = 4
    soft_labels: bool = False
    top_k: int = 8
    max_bytes: int = 64 << 20
    import_uzu: str | None = None
    import_llama: str | None = None
    export_llama: str | None = None
    held_out_tokens: int = 16_384
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.output:
            raise ConfigError("output is empty; name the file of the trained model")
        check_range("order", self.order, MIN_ORDER, MAX_ORDER)
        check_range("top_k", self.top_k, 1, MAX_CONTINUATIONS)
        check_range("max_bytes", self.max_bytes, 1, 1 << 40)
        check_range("held_out_tokens", self.held_out_tokens, 0, 1 << 32)
        check_range("seed", self.seed, 0, (1 << 63) - 1)
        learns = bool(self.traces or self.text or self.stdlib)
        sources = [learns, self.import_uzu is not None, self.import_llama is not None]
        if sum(sources) != 1:
            raise ConfigError(
                "what is learnt comes from traces and texts, or from import_uzu, or from "
                f"import_llama; {sum(sources)} of them are given, one is needed"
            )
        if not learns and self.target is None:
            raise ConfigError("an imported file does not name its vocabulary; name the target")
        if self.soft_labels and not self.traces:
            raise ConfigError("soft_labels are the probabilities in traces; name some")
        if self.import_uzu is not None:
            names = ("order", "top_k", "max_bytes", "held_out_tokens")
            check_unused(self, names, "import_uzu takes over a whole model")
        if self.export_llama is not None and self.import_uzu is not None:
            raise ConfigError("a model.bin has no counts that export_llama could write")
