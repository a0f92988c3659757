"""Faults of chat templates, by a template like Qwen2.5's, which adds a system turn where there is none, are named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerBase

from ppo_repro.tasks.tokenizer import train_bpe
from ppo_repro.testing.advice import ADVICE
from ppo_repro.testing.audit.audit import audit
from ppo_repro.testing.audit.causes.chat_templates import CHANGES
from ppo_repro.testing.audit.causes.inputs import of_inputs
from ppo_repro.testing.audit.stack import StackModel, StackSampling
from tests.support.models import qwen3_config, small_model
from tests.testing.audit.material import TEMPERATURE, Material, cause_of, material, response

TURNS = (
    "{%- for m in messages %}{%- if m.role != 'system' or not loop.first %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SYSTEM = "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
DEFAULT = "{%- else %}{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}"
WITHOUT_DEFAULT, TEMPLATE = f"{SYSTEM}{{%- endif %}}{TURNS}", f"{SYSTEM}{DEFAULT}{{%- endif %}}{TURNS}"
CUE, KIND = "<|im_start|>assistant\n", "<|im_start|>system\nBe kind.<|im_end|>\n"
BOS_ID = 1  # of the tokenizer the end token, as in Qwen's


def whole(question: str, system: str = KIND, cue: str = CUE) -> str:
    return f"{system}<|im_start|>user\n{question}<|im_end|>\n{cue}"


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerBase:
    found = train_bpe([" What is nine and six? user assistant system Be kind. Say no. \n"] * 9, 75)
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    found.chat_template = template
    return found


QUESTIONS = " What is nine?", " is six and nine six?", " What and nine?"
OWN = "<|im_start|>system\nSay no.<|im_end|>\n"
# of a question: the prompt of the dump, and what the wrong side had instead
FAULTS: dict[str, tuple[Callable[[str], str], Callable[[str], str]]] = {
    "prompt in the chat template": (lambda q: q, whole),
    "prompt in the chat template twice": (whole, lambda q: whole(whole(q))),
    "prompt without the chat template": (whole, lambda q: q),
    "prompt with the generation prompt after it": (lambda q: whole(q, cue=""), whole),
    "prompt with a second generation prompt after it": (whole, lambda q: whole(q) + CUE),
    "prompt without the generation prompt": (whole, lambda q: whole(q, cue="")),
    "prompt without the template's default system turn": (whole, lambda q: whole(q, "")),
    "prompt without its system turn": (lambda q: whole(q, OWN), lambda q: whole(q, "")),
    "prompt with the template's default system turn": (lambda q: whole(q, ""), whole),
}


def fed(of: PreTrainedTokenizerBase, text: str) -> dict[str, str]:
    """By the words of each fault of a chat template, the text that it makes of a prompt."""
    stack = StackModel(small_model(qwen3_config(max_position_embeddings=512), 4), {}, tokenizer=of)
    causes = of_inputs([response(tuple(of(text).input_ids), (3,))], stack)
    return {c.words: of.decode(list(c.passes[0][0].ids)) for c in causes if c.words in FAULTS}


def test_every_change_has_a_planted_fault() -> None:
    assert [row.words for row in CHANGES] == list(FAULTS)


@pytest.mark.parametrize("words", FAULTS)
def test_a_change_of_the_template_is_fed_to_the_model(words: str) -> None:
    right, wrong = FAULTS[words]
    assert fed(tokenizer(), right(" is nine"))[words] == wrong(" is nine")


def test_a_change_that_a_prompt_or_a_template_does_not_have_is_not_fed() -> None:
    def words(text: str, template: str = TEMPLATE) -> set[str]:
        return {said.removeprefix("prompt ") for said in fed(tokenizer(template), text)}

    taken_off = {"in the chat template twice", "without the chat template", "without the generation prompt"}
    taken_off |= {"with a second generation prompt after it"}
    assert words(" is nine") == {"in the chat template", "with the generation prompt after it"}
    assert words(whole(" is nine", ""), WITHOUT_DEFAULT) == taken_off
    assert words(whole(" is nine")) == taken_off | {"without the template's default system turn"}
    assert words(" is nine", "{{ messages | length }}") == set()  # it leaves out the user's text


@pytest.mark.slow
@pytest.mark.parametrize("words", FAULTS)
def test_a_fault_of_the_chat_template_is_named(words: str) -> None:
    model, of = small_model(qwen3_config(), 4), tokenizer()
    right, wrong = ([of(text(q)).input_ids for q in QUESTIONS] for text in FAULTS[words])
    drawn = material(model, [(5, 9)] * len(QUESTIONS))
    dump = Material(model, right, drawn.responses)
    bad = dump.logprobs(dump.logits(prompt=lambda i: wrong[i]))
    found = audit(
        StackModel(model, {}, BOS_ID, tokenizer=of), dump.dump(bad, dump.logprobs()), StackSampling(TEMPERATURE)
    )
    assert cause_of(found.sampler) == words
    assert found.trainer.is_right


@pytest.mark.slow
def test_a_prompt_that_was_encoded_again_is_named() -> None:
    """The dump has one id for each letter, the wrong side the ids that the tokenizer gives the same text."""
    model, of = small_model(qwen3_config(), 4), tokenizer()
    letters = [[i for letter in q for i in of(letter).input_ids] for q in QUESTIONS]
    responses = [of(" nine six nine What").input_ids for _ in QUESTIONS]
    dump = Material(model, letters, responses)
    bad = dump.logprobs(dump.logits(prompt=lambda i: of(QUESTIONS[i]).input_ids))
    stack = StackModel(model, {}, BOS_ID, tokenizer=of)
    found = audit(stack, dump.dump(bad, dump.logprobs()), StackSampling(TEMPERATURE))
    assert cause_of(found.sampler) == "ids that were decoded and encoded again"
    assert found.sampler.state == "explained"
    assert found.sampler.advice == ADVICE["retokenization"].mend
