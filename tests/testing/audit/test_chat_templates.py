"""Faults of chat templates, by a template like Qwen2.5's, which adds a system turn where there is none, are named."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from ppo_repro.tasks.tokenizer import train_bpe
from ppo_repro.testing.audit.audit import audit
from ppo_repro.testing.audit.causes.chat_templates import (
    BARE,
    CUED_TWICE,
    DEFAULT,
    NO_DEFAULT,
    NO_SYSTEM,
    TWICE,
    UNCUED,
)
from ppo_repro.testing.audit.stack import StackModel, StackSampling
from tests.support.models import qwen3_config, small_model
from tests.testing.audit.material import TEMPERATURE, Material, material

TEMPLATE = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role != 'system' or not loop.first %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
CUE, KIND = "<|im_start|>assistant\n", "<|im_start|>system\nBe kind.<|im_end|>\n"
BOS_ID = 1  # of the tokenizer the end token, as in Qwen's


def whole(question: str, system: str = KIND, cue: str = CUE) -> str:
    return f"{system}<|im_start|>user\n{question}<|im_end|>\n{cue}"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found = train_bpe([" What is nine and six? user assistant system Be kind. Say no. \n"] * 9, 75)
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    found.chat_template = TEMPLATE
    return found


QUESTIONS = " What is nine?", " is six and nine six?", " What and nine?"
OWN = "<|im_start|>system\nSay no.<|im_end|>\n"
# of a question: the prompt of the dump, and what the wrong side had instead
FAULTS = {
    NO_DEFAULT: (whole, lambda q: whole(q, "")),
    NO_SYSTEM: (lambda q: whole(q, OWN), lambda q: whole(q, "")),
    DEFAULT: (lambda q: whole(q, ""), whole),
    UNCUED: (whole, lambda q: whole(q, cue="")),
    CUED_TWICE: (whole, lambda q: whole(q) + CUE),
    TWICE: (whole, lambda q: whole(whole(q))),
    BARE: (whole, lambda q: q),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", FAULTS)
def test_a_fault_of_the_chat_template_is_named(tokenizer: PreTrainedTokenizerBase, words: str) -> None:
    model = small_model(qwen3_config(), 4)
    right, wrong = ([tokenizer(of(q)).input_ids for q in QUESTIONS] for of in FAULTS[words])
    drawn = material(model, [(5, 9)] * len(QUESTIONS))
    dump = Material(model, right, drawn.responses)
    bad = dump.logprobs(dump.logits(prompt=lambda i: wrong[i]))
    stack = StackModel(model, {}, BOS_ID, tokenizer=tokenizer)
    found = audit(stack, dump.dump(bad, dump.logprobs()), StackSampling(TEMPERATURE))
    assert found.sampler.cause == words
    assert found.trainer.is_right
