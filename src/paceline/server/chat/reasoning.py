"""The ways in which models mark their thoughts, and how to tell from a chat template which is used.

Owns the table of formats; supporting another pair of marks is another entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Thoughts stand between an opening and a closing mark, and the answer follows.

    The answer may have marks around it as well, which are no part of it.

    Attributes:
        opening: strings that open thoughts.
        closing: strings that close them; whichever comes first counts.
        shown_by: words of a chat template that show that the model was taught this format.
        answer: the marks that may stand before and behind the answer; empty if there are none.
        tail: a mark behind all of it, calls included; "" if there is none.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    shown_by: tuple[str, ...]
    answer: tuple[str, ...] = ()
    tail: str = ""


THINK = ReasoningFormat(("<think>",), ("</think>",), ("think>",))
MISTRAL = ReasoningFormat(("[THINK]",), ("[/THINK]",), ("[THINK]",))
GRANITE = ReasoningFormat(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    ("Here is my thought process:", "Here's my thought process:"),
)
SEED_OSS = ReasoningFormat(("<seed:think>",), ("</seed:think>",), ("seed:think>",))
MINIMAX_M3 = ReasoningFormat(("<mm:think>",), ("</mm:think>",), ("mm:think>",))
COHERE = ReasoningFormat(
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    ("<|START_THINKING|>",),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
GEMMA4 = ReasoningFormat(("<|channel>thought",), ("<channel|>",), ("<|channel>",))
APERTUS = ReasoningFormat(("<|inner_prefix|>",), ("<|inner_suffix|>",), ("<|inner_prefix|>",))
EXAONE = ReasoningFormat(("<thought>", "<think>"), ("</thought>", "</think>"), ("<thought>",))
HUNYUAN = ReasoningFormat(("<think>",), ("</think>",), ("<answer>",), ("<answer>", "</answer>"))
ERNIE = ReasoningFormat(("<think>",), ("</think>",), ("<response>",), ("<response>", "</response>"))
HY_V3 = ReasoningFormat(
    ("<think:opensource>", "<think>"),
    ("</think:opensource>", "</think>"),
    ("<think:opensource>", "'<think{}>'.format("),
)
KIMI_K3 = ReasoningFormat(
    ("<|open|>think<|sep|>",),
    ("<|close|>think<|sep|>",),
    ("<|open|>think<|sep|>", "open_tag('think')"),
    ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    tail="<|close|>message<|sep|>",
)
GIGACHAT3 = ReasoningFormat((), (), ("<|message_sep|>",), ("<|role_sep|>", "<|message_sep|>"))
"""Without thoughts: only the mark behind the answer is taken off."""
_LIKE_THINK = (
    *("deepseek_r1", "deepseek_v3", "glm45", "glm47", "holo2", "kimi_k2", "mimo", "minimax_m2"),
    *("nemotron_v3", "olmo3", "qwen3", "smollm3", "step3", "step3p5"),
)
THOUGHT_FORMATS = {
    "granite": GRANITE,
    "mistral": MISTRAL,
    "seed_oss": SEED_OSS,
    "minimax_m3": MINIMAX_M3,
    **dict.fromkeys(("cohere_command3", "cohere_command4"), COHERE),
    "gemma4": GEMMA4,
    "apertus": APERTUS,
    "exaone": EXAONE,
    "hunyuan_a13b": HUNYUAN,
    "ernie45": ERNIE,
    "hy_v3": HY_V3,
    "kimi_k3": KIMI_K3,
    **dict.fromkeys(_LIKE_THINK, THINK),
}
"""By vLLM's names, and ours. Where a template shows several of them, the first one counts."""


def reasoning_format(name: str, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """The format by its name; ``auto`` asks the chat template, and gets None if it knows none.

    Names are :data:`paceline.server.http.config.REASONING_PARSERS`.
    """
    if name == "none":
        return None
    if name in THOUGHT_FORMATS:
        return THOUGHT_FORMATS[name]
    for form in (*THOUGHT_FORMATS.values(), GIGACHAT3):
        if any(tokenizer.template_mentions(word) for word in form.shown_by):
            return form
    return None
