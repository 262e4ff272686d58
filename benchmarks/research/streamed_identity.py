"""Whether a model whose weights come from disk says what it says in memory, over many tokens.

Of a mixture these are experts, of another model layers.

The model in memory decodes plainly, one request at a time; the other has as little memory for its
weights as it can have, and drafts, in batches. Requests are those of ``paceline verify
--num-tokens``: all ways of sampling, about half of them with log-probabilities, whose bits are
compared too. The model is random: ``tests/models/reference.py`` makes it.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import arguments, note
from report import Report, Target, markdown

from paceline import LLM
from paceline.backends.native.packing import Packer
from paceline.cli.check.verify import Arms
from paceline.config import SpeculativeConfig
from paceline.disk.packed_folder import write_packed
from paceline.disk.streaming import placement_of
from paceline.loading.checkpoint import load_checkpoint
from paceline.workbench.mixture import drafting_variants, mixed_requests

SHAPE = {"max_position_embeddings": 512}
LAYERS = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512}
EXPERTS = {
    "num_hidden_layers": 4,
    "num_experts": 32,
    "moe_intermediate_size": 128,
    "hidden_size": 128,
}
BATCH = 8


def made(family: str, folder: Path) -> Path:
    """A small random model, packed."""
    from tests.models.reference import save_model

    is_mixture = "moe" in family
    save_model(family, folder / "plain", **SHAPE, **(EXPERTS if is_mixture else LAYERS))
    write_packed(load_checkpoint(folder / "plain"), folder / "packed", Packer("int8"))
    return folder / "packed"


def least_memory(model: Path, share: float) -> int:
    """Bytes for all but the experts, or else the layers, and for a share of these."""
    checkpoint = load_checkpoint(model, with_tokenizer=False)
    tensors: Any = checkpoint.tensors
    of_layers = [name for name in tensors if name.startswith("model.layers.")]
    read = [name for name in of_layers if ".experts." in name] or of_layers
    limit = tensors.num_bytes() - int((1.0 - share) * sum(tensors[name].nbytes for name in read))
    placed = placement_of(tensors, checkpoint.config.num_layers, limit)
    note(placed.told(checkpoint.config.num_layers))
    return limit


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--family", default="qwen3-moe")
    parser.add_argument("--share", type=float, default=0.3, help="of that in memory")
    parser.sized("--num-tokens", 100_000, 500, "that are compared")
    options = parser.parse_args(argv)
    keys = ("quick", "family", "share", "num_tokens")
    name = "streamed_identity"
    if options.family != parser.get_default("family"):
        name += f"-{options.family}"
    report = Report(name, {key: getattr(options, key) for key in keys})
    draw, drafts = random.Random(0), (SpeculativeConfig("suffix"), SpeculativeConfig())
    limits: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory": 64 << 20}
    with tempfile.TemporaryDirectory() as folder:
        model = made(options.family, Path(folder))
        memory = least_memory(model, options.share)
        with (
            LLM(str(model), speculative_config=[], max_num_seqs=1, **limits) as resident,
            LLM(
                str(model),
                speculative_config=list(drafts),
                weight_memory=memory,
                max_num_seqs=BATCH,
                **limits,
            ) as streamed,
        ):
            arms, vocab = Arms(resident, streamed), resident.checkpoint.config.vocab_size
            prompts = [[draw.randrange(3, vocab) for _ in range(48)] for _ in range(32)]
            requests = mixed_requests(
                prompts,
                seed=0,
                max_tokens=96,
                context=256,
                vocab_size=vocab,
                methods=["prompt_lookup", "suffix"],
            )
            variants = drafting_variants(drafts)
            for number, variant in enumerate(variants, start=1):
                streamed.set_speculation(variant)
                while arms.tally.num_tokens < options.num_tokens * number / len(variants):
                    arms.run([next(requests) for _ in range(4 * BATCH)])
                    note(f"{arms.tally.num_tokens} tokens, {arms.tally.num_differences} differ")
            read = streamed.stats()
            figures = arms.tally.figures()
    figures["experts_read"], figures["experts_fetched"] = (
        read.num_experts_read,
        read.num_experts_fetched,
    )
    figures["bytes_read"] = read.num_weight_bytes_read
    figures["draft_tokens"] = arms.speculative_figures.num_draft_tokens
    report.results.append({"family": options.family, **figures})
    report.samples.append({"error": None, **figures})
    report.targets = [
        Target("tokens that differ", figures["num_differences"], 0),
        Target("log-probabilities that differ", figures["num_logprob_differences"], 0),
        Target("bytes from disk", figures["bytes_read"], 1, "at least"),
    ]
    shown = ("num_tokens", "num_logprob_tokens", "draft_tokens", "bytes_read")
    return report.finish(options, [markdown(shown, [[figures[name] for name in shown]])])


if __name__ == "__main__":
    sys.exit(main())
