"""Where the answer begins in a chat's prompt, and what the next turn of a hybrid model computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.api.llm import LLM
from paceline.request.sampling_params import SamplingParams
from paceline.text.tokenizer import LONGEST, Tokenizer, answer_opening, resume_point
from tests.models.reference import save_model
from tests.text.vocabularies import byte_level, byte_level_json, save_tokenizer

# Thoughts are opened in the prompt, and left out of earlier answers, as Qwen's template has it.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}x{% else %}y{% endif %}{% endif %}"
)


def opening_of(template: str) -> str:
    tokenizer = byte_level()
    tokenizer.set_chat_template(template)
    return tokenizer.decode(answer_opening(tokenizer), skip_special_tokens=False)


def test_an_opening_is_what_all_answers_have() -> None:
    assert opening_of(TEMPLATE) == "<|im_start|>assistant\n"
    assert opening_of("{{ messages[0].content }}") == ""
    assert opening_of("{% if add_generation_prompt %}a{% else %}b{% endif %}") == ""
    assert opening_of("{{ raise_exception('no') }}") == ""
    assert answer_opening(byte_level()) == answer_opening(None) == []


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([5, 1, 2, 9, 1, 2, 3], 4),
        ([5, 1, 2], 1),
        ([1, 2, 3], 0),
        ([5, 1, 3], 0),
        ([5, 1, 2, *range(3, LONGEST + 1)], 1),
        ([5, 1, 2, *range(3, LONGEST + 2)], 0),
        ([2], 0),
    ],
)
def test_it_is_looked_for_at_the_end(prompt: list[int], found: int) -> None:
    assert resume_point(prompt, [1, 2]) == found
    assert resume_point(prompt, []) == 0


def hybrid_folder(folder: Path) -> str:
    save_model("qwen3-5", folder, vocab_size=400)
    tokenizer = json.loads(byte_level_json())
    added = tokenizer["added_tokens"][0]
    number = max(tokenizer["model"]["vocab"].values()) + 1
    number = max(number, *(token["id"] + 1 for token in tokenizer["added_tokens"]))
    for shift, content in enumerate(("<|im_start|>", "assistant\n")):
        tokenizer["added_tokens"].append({**added, "id": number + shift, "content": content})
    options = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    save_tokenizer(folder, json.dumps(tokenizer), **options)
    return str(folder)


def test_the_next_turn_computes_only_what_is_new(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(hybrid_folder(tmp_path), dtype="float32", speculative_config=[]) as llm:
        assert isinstance(llm.tokenizer, Tokenizer)
        chat = [{"role": "user", "content": "one two three"}]
        llm.generate(chat, params)
        before = len(llm.encode(chat, add_generation_prompt=False))
        chat += [{"role": "assistant", "content": "four"}, {"role": "user", "content": "five"}]
        llm.generate(chat, params)
        assert llm.stats().num_cached_tokens == before
        (output,) = llm.generate([chat], params)  # the same again
        assert llm.stats().num_cached_tokens - before == len(llm.encode(chat)) - 3
    with LLM(str(tmp_path), dtype="float32", speculative_config=[]) as llm:
        (alone,) = llm.generate([chat], params)
    assert alone.token_ids == output.token_ids
