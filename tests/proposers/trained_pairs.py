"""Tiny targets that have learnt a language, and heads that have learnt the target.

A token of a language follows from an earlier one, so that a draft needs the keys and values of the
right positions. In a language that *branches* a token has two followers, and which one comes is
drawn: what comes two places on depends on what was drafted, and a head that forgets that misses
it. Heads that read tokens beside the target's hidden states have an embedding in which four tokens
are one, so that they need these hidden states to know which.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file

from tests.proposers.dflash import PlainDFlash, dflash_config, dflash_tensors
from tests.proposers.heads import (
    HIDDEN,
    TAPS,
    PlainHead,
    Tensors,
    write_head,
)
from tests.proposers.mtp import PlainMtp, mtp_tensors, qwen
from tests.proposers.parallel_heads import (
    PlainDSpark,
    PlainPEagle,
    dspark_config,
    dspark_tensors,
    peagle_config,
    peagle_tensors,
)
from tests.proposers.trained_assistants import steps
from tests.toy import TOY, VOCAB, toy_folder

LENGTH, DEPTH, BLOCK, TEXTS = 36, 3, 5, 32
FIRST, LAST = 4, 44
ALIKE = 4
"""Tokens that are one in the embedding of a head that reads hidden states beside tokens."""


class Language(NamedTuple):
    """How a token follows from the one that stands ``lag`` places before it.

    Attributes:
        first: how often the first of two followers comes; at 1 there is one alone.
    """

    lag: int
    first: float


SURE, BRANCHING, NEXT = Language(2, 1.0), Language(2, 0.75), Language(1, 0.75)


def texts(language: Language, count: int, seed: int) -> torch.Tensor:
    """Tokens ``[count, LENGTH]``."""
    size, orders = LAST - FIRST, torch.Generator().manual_seed(1)
    followers = torch.stack([torch.randperm(size, generator=orders) for _ in range(2)])
    drawn = torch.Generator().manual_seed(seed)
    columns = [*torch.randint(0, size, (language.lag, count), generator=drawn)]
    while len(columns) < LENGTH:
        which = (torch.rand(count, generator=drawn) >= language.first).long()
        columns.append(followers[which, columns[-language.lag]])
    return torch.stack(columns, dim=1) + FIRST


def cross_entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of rows of logits with the distributions of others."""
    return -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


class Target(NamedTuple):
    """A trained target.

    Attributes:
        language: what it has learnt.
        model: as transformers has it.
        tensors: by the names of its checkpoint.
    """

    language: Language
    model: Any
    tensors: Tensors

    def read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of all taps ``[texts, length, num_layers + 2, width]``, and logits."""
        last = list[torch.Tensor]()
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
        with torch.no_grad():
            said = self.model(tokens, output_hidden_states=True)
        hook.remove()
        *streams, normed = said.hidden_states
        return torch.stack([*streams, last[0], normed], dim=2), said.logits

    def write(self, folder: Path, further: Tensors) -> Path:
        """Its folder, with further tensors."""
        folder.mkdir(parents=True)
        toy_folder(folder)
        save_file({**self.tensors, **further}, folder / "model.safetensors")
        return folder


@cache
def trained_target(language: Language, count: int = 400) -> Target:
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=TOY.intermediate_size,
        num_hidden_layers=TOY.num_layers,
        num_attention_heads=TOY.num_heads,
        num_key_value_heads=TOY.num_kv_heads,
        head_dim=TOY.head_dim,
        max_position_embeddings=TOY.max_position,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).train()
    step = steps(model, count, 1e-2)
    for seed in range(count):
        tokens = texts(language, TEXTS, seed)
        logits = model(tokens[:, :-1]).logits[:, language.lag - 1 :]
        wanted = tokens[:, language.lag :]
        step(torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()))
    weights = {n: t.detach().clone() for n, t in model.state_dict().items() if n[:7] != "lm_head"}
    return Target(language, model.eval(), weights)


Said = tuple[torch.Tensor, list[int]]
"""Logits of a head's rows, and the positions of the target's that they are to be like."""


def agreement(ours: torch.Tensor, theirs: torch.Tensor, temperature: float) -> torch.Tensor:
    """How often two distributions that are sampled with the same Gumbel noise give one token.

    The probability that token i is the largest in both is 1 / sum over j of
    max(p_j / p_i, q_j / q_i).

    Args:
        ours, theirs: logits ``[..., tokens]``.
    """
    p, q = ((x.double() / temperature).log_softmax(-1) for x in (ours, theirs))
    ratios = [x[..., None, :] - x[..., :, None] for x in (p, q)]  # [..., i, j]
    return (1 / torch.maximum(*ratios).exp().sum(-1)).sum(-1)


def chained(plain: PlainHead, tokens: torch.Tensor, features: torch.Tensor, end: int) -> Said:
    """Of a head that drafts below token ``end``, and of all rows before."""
    hidden = plain.fuse(features[:end])
    logits, outputs = plain.outputs(tokens[1 : end + 1], hidden)
    rows, places = [*logits], [*range(1, end + 1)]
    for depth in range(1, DEPTH):
        hidden = torch.cat([hidden, outputs[-1:]])
        logits, outputs = plain.outputs(tokens[1 : end + depth + 1], hidden)
        rows.append(logits[-1])
        places.append(end + depth)
    return torch.stack(rows), places


def masked(plain: PlainPEagle, tokens: torch.Tensor, features: torch.Tensor, end: int) -> Said:
    hidden, read = plain.with_masks(tokens[: end + 1], features[:end], DEPTH - 1)
    return plain.outputs(read, hidden)[0][end - 1 :], [*range(end, end + DEPTH)]


def in_block(plain: PlainDFlash, tokens: torch.Tensor, features: torch.Tensor, end: int) -> Said:
    logits = plain.logits(tokens[end], plain.fuse(features[:end]), BLOCK)[plain.first :]
    return logits, [*range(end, end + len(logits))]


def behind(plain: PlainDSpark, tokens: torch.Tensor, features: torch.Tensor, end: int) -> Said:
    """Each row of a block after the text's own tokens."""
    count = BLOCK - plain.first
    hidden, before = plain.read(tokens[end], features[:end], tokens[end + 1 : end + count])
    rows = range(len(before) - count, len(before))
    logits = [plain.after(hidden[: row + 1], before[: row + 1]) for row in rows]
    return torch.stack(logits), [*range(end, end + count)]


class Form(NamedTuple):
    """A kind of head.

    Attributes:
        method: the proposer's.
        language: what its target has learnt.
        config: the head's; None of a layer that lies with its target.
        tensors: before it is trained.
        said: what is trained.
        count: steps of its training.
    """

    method: str
    language: Language
    config: dict[str, Any] | None
    tensors: Tensors
    said: Callable[..., Said]
    count: int = 300

    def plain(self, target: Target, tensors: Tensors) -> Any:
        lent = target.tensors
        if self.config is None:
            return PlainMtp(tensors, lent)
        return PLAIN[self.method](
            tensors, {"sample_from_anchor": self.method == "dspark"} | self.config, lent
        )

    def rows(
        self, target: Target, tensors: Tensors, tokens: torch.Tensor, end: int
    ) -> tuple[torch.Tensor, list[int]]:
        """:data:`Said` of texts ``[texts, length]`` that are known up to token ``end``."""
        plain, places = self.plain(target, tensors), list[int]()
        taps = [TOY.num_layers + 1] if self.config is None else list(TAPS)

        def said(tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
            logits, places[:] = self.said(plain, tokens, features, end)
            return logits

        return torch.vmap(said)(tokens, target.read(tokens)[0][:, :, taps]), places


PLAIN = {"peagle": PlainPEagle, "dflash": PlainDFlash, "dspark": PlainDSpark}


def forms() -> dict[str, Form]:
    size = {"block_size": BLOCK}
    gated = {"markov_head_type": "gated", "sample_from_anchor": False}
    return {
        "mtp": Form("mtp", BRANCHING, None, mtp_tensors(3), chained, 400),
        "peagle": Form("peagle", SURE, peagle_config(False), peagle_tensors(4, False), masked),
        "dflash": Form(
            "dflash", SURE, dflash_config(False, **size), dflash_tensors(5, False), in_block
        ),
        "dspark gated": Form(
            "dspark",
            NEXT,
            dspark_config(False, **gated, **size),
            dspark_tensors(6, False, markov="gated"),
            behind,
        ),
    }


def trained(form: Form, target: Target, count: int) -> Tensors:
    """A form's tensors once they are trained."""
    tensors: Tensors = {
        name: torch.nn.Parameter(tensor.clone()) for name, tensor in form.tensors.items()
    }
    learnt = torch.nn.ParameterList(tensors.values())
    if form.said in (chained, masked):
        shared = target.tensors["model.embed_tokens.weight"]
        name = "embed_tokens.weight" if form.config else "model.embed_tokens.weight"
        tensors[name] = shared[torch.arange(VOCAB) // ALIKE * ALIKE].clone()
    step = steps(learnt, count, 1e-2)
    ends = torch.Generator().manual_seed(7)
    for seed in range(count):
        tokens = texts(form.language, TEXTS, 1000 + seed)
        end = int(torch.randint(4, LENGTH - BLOCK, (), generator=ends))
        wanted = target.read(tokens)[1]
        logits, places = form.rows(target, tensors, tokens, end)
        wanted = wanted[:, places]
        loss = cross_entropy(logits[:, -DEPTH:], wanted[:, -DEPTH:])
        if len(places) > DEPTH:
            loss = loss + cross_entropy(logits[:, :-DEPTH], wanted[:, :-DEPTH])
        step(loss)
    return {name: tensor.detach() for name, tensor in tensors.items()}


class Pair(NamedTuple):
    """A trained head and its target.

    Attributes:
        form: the head's.
        target: the target.
        tensors: the head's.
        folder: the target's.
        config: how it is drafted for.
    """

    form: Form
    target: Target
    tensors: Tensors
    folder: Path
    config: dict[str, Any]

    def expected(self, tokens: torch.Tensor, ends: range, temperature: float) -> list[float]:
        """By depth, how often plain torch would draft what the target says, given those before.

        Args:
            tokens: texts that the target has written from ``ends`` on, ``[texts, length]``.
        """
        shares = []
        for end in ends:
            with torch.no_grad():
                logits, places = self.form.rows(self.target, self.tensors, tokens, end)
            first = places.index(end)
            ours, theirs = logits[:, first : first + DEPTH], self.target.read(tokens)[1]
            theirs = theirs[:, end : end + DEPTH]
            if temperature:
                shares.append(agreement(ours, theirs, temperature).mean(0))
            else:
                shares.append((ours.argmax(-1) == theirs.argmax(-1)).double().mean(0))
        return torch.stack(shares).mean(0).tolist()


def write_pair(form: Form, folder: Path) -> Pair:
    """A pair, and its files."""
    target = trained_target(form.language)
    tensors = trained(form, target, form.count)
    if form.config is None:
        place = target.write(folder / "target", qwen(tensors))
        return Pair(form, target, tensors, place, {"method": form.method})
    head = write_head(folder / "head", form.config, tensors)
    place = target.write(folder / "target", {})
    return Pair(form, target, tensors, place, {"method": form.method, "model": str(head)})
