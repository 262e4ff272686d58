"""The options of ``paceline train``: those of the training configurations, under the same names.

What both trainings share is read off :class:`~paceline.training.options.TrainingConfig`, help
texts included. What each has of its own is listed here, because the modules that define it import
torch. Knows no model.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from paceline.commands.options import option
from paceline.training.options import TrainingConfig


class Own(NamedTuple):
    """A field that one training's configuration adds."""

    name: str
    type: Any
    default: Any
    help: str


def _shape(*sizes: int) -> tuple[Own, ...]:
    layers, width, heads, kv_heads, head_dim, intermediate = sizes
    return (
        Own("num_layers", int, layers, "decoder layers of a model from scratch."),
        Own("hidden_size", int, width, "its width."),
        Own("num_heads", int, heads, "its query heads."),
        Own("num_kv_heads", int, kv_heads, "its key and value heads."),
        Own("head_dim", int, head_dim, "the width of each head."),
        Own("intermediate_size", int, intermediate, "the width of its feed-forward layers."),
        Own("max_position", int, 2048, "its context limit in tokens."),
        Own("rope_theta", float, 10000.0, "the base of its rotary embedding."),
        Own("tie_embeddings", bool, True, "use one matrix for tokens in and out."),
    )


LM_SHAPE = _shape(8, 320, 5, 1, 64, 864)
DRAFT_SHAPE = _shape(2, 128, 2, 1, 64, 352)
SHAPE_NAMES = tuple(own.name for own in LM_SHAPE)
LM = (
    Own("init", str | None, None, "folder of a model to continue, whose shape is kept."),
    Own("tokenizer", str | None, None, "folder of a tokenizer; default: one trained on the text."),
    Own("vocab_size", int, 4096, "entries of a tokenizer that is trained."),
    Own("chat_tokens", bool, True, "give that tokenizer the tokens of a chat."),
    *LM_SHAPE,
)
DRAFT = (
    Own("target", str, MISSING, "folder of the model that the draft will draft for."),
    Own("init", str | None, None, "folder of a model to begin from; default: random weights."),
    Own("drop_layers", int, 0, "layers to cut out of it first."),
    Own("mlp_width", int, 0, "feed-forward width to cut it to first; 0 leaves it."),
    Own("drop_heads", int, 0, "query heads of each layer to cut out of it first."),
    Own("hidden_width", int, 0, "width of its layers to cut it to first; 0 leaves it."),
    Own("draft_vocab_size", int, 0, "tokens of its head, the most frequent; 0 means all."),
    Own("loss", str, "kl", "kl, tv or ce: what to bring closer to the target."),
    Own("parallel", bool, False, "train it to draft all tokens in one forward, by mask tokens."),
    Own("num_speculative_tokens", int, 8, "how many such a draft drafts."),
    Own("mask_token_id", int | None, None, "its mask token; default: one that no text contains."),
    Own("text_tokens", int, 0, "train on at most this many tokens of the texts; 0 means all."),
    Own("traces", tuple[str, ...], (), "folders that paceline trace wrote with this target."),
    Own("generate_tokens", int, 0, "tokens that the target writes to train on."),
    Own("generate_prompt_tokens", int, 64, "length of the text that it continues."),
    Own("generate_new_tokens", int, 192, "length of each continuation."),
    Own("generate_temperatures", tuple[float, ...], (0.0, 0.8, 1.0), "these take turns."),
    Own("generate_batch", int, 64, "continuations that are written at once."),
    Own("eval_prompts", int, 64, "held-out texts on which acceptance is measured."),
    Own("eval_prompt_tokens", int, 32, "length of their beginnings that the target continues."),
    Own("eval_new_tokens", int, 96, "length of each continuation."),
    *DRAFT_SHAPE,
)
# The command line knows these better than its user.
_NOT_OPTIONS = ("command",)
_SHORT = {"output": ("-o",)}


def _options(name: str, own: tuple[Own, ...]) -> type[Any]:
    """The dataclass of the shared training options and of a training's own."""
    hints = get_type_hints(TrainingConfig)
    helps = _attribute_texts(TrainingConfig.__doc__ or "")
    shared = [
        Own(each.name, hints[each.name], each.default, helps[each.name])
        for each in fields(TrainingConfig)
        if each.name not in _NOT_OPTIONS
    ]
    # Required options first: the target of a draft, and where the result goes.
    wanted = sorted([*own, *shared], key=lambda each: each.default is not MISSING)
    columns = [(each.name, _annotation(each), field(default=each.default)) for each in wanted]
    return make_dataclass(name, columns, frozen=True, kw_only=True, eq=False, repr=False)


def _annotation(own: Own) -> Any:
    is_list = get_origin(own.type) is tuple
    kind = list[get_args(own.type)[0]] if is_list else own.type  # type: ignore[misc]
    flag = "--" + own.name.replace("_", "-")
    name = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    help_text = own.help[0].upper() + own.help[1:]
    more: dict[str, Any] = {}
    if is_list:
        help_text += " May be given several times."
        more["metavar"] = f"<{get_args(own.type)[0].__name__}>"
    flags = (*_SHORT.get(own.name, ()), name)
    return Annotated[kind, option(*flags, help=help_text, **more)]


def _attribute_texts(docstring: str) -> dict[str, str]:
    """What a docstring's ``Attributes`` section says of each name."""
    section = docstring.partition("Attributes:")[2]
    found = {}
    for entry in re.split(r"\n {8}(?=\w)", section):
        names, _, text = entry.strip().partition(": ")
        plain = " ".join(text.replace("``", "").split())
        found.update(dict.fromkeys(names.split(", "), plain))
    return found


LMOptions = _options("LMOptions", LM)
DraftOptions = _options("DraftOptions", DRAFT)
