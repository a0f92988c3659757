"""What each input of a cause feeds a model: by hand, and a chat template put on, taken off, doubled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from ppo_repro.tasks.tokenizer import train_bpe
from ppo_repro.testing.audit.causes.chat_templates import (
    BARE,
    CUED,
    CUED_TWICE,
    DEFAULT,
    NO_DEFAULT,
    NO_SYSTEM,
    TEMPLATED,
    TWICE,
    UNCUED,
    Template,
    parsed,
)
from ppo_repro.testing.audit.causes.inputs import of_inputs
from ppo_repro.testing.audit.forward import Pass
from ppo_repro.testing.audit.stack import StackModel
from ppo_repro.testing.dumps import DumpedResponse
from tests.support.models import qwen3_config, small_model

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}|{{ m['content'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<a|{% endif %}"
)


def response(prompt: tuple[int, ...], ids: tuple[int, ...], padding: tuple[int, ...] = ()) -> DumpedResponse:
    values, counts = np.zeros(len(ids), np.float32), np.ones(len(ids), bool)
    return DumpedResponse(1, prompt, ids, values, values, counts, padding)


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerBase:
    found = train_bpe(["ab<>|/;usaSBcdn"], 40)
    found.chat_template = template
    return found


def inputs(responses: Sequence[DumpedResponse], stack: StackModel) -> dict[str, Sequence[Sequence[Pass]]]:
    """The passes of each response, by the words of an input."""
    return {cause.words: cause.passes for cause in of_inputs(responses, stack)}


def prompts(of: PreTrainedTokenizerBase, text: str) -> dict[str, str]:
    """By the words of an input, the text that it makes of a prompt."""
    one = response(tuple(of(text).input_ids), (3,))
    found = inputs([one], StackModel(small_model(qwen3_config(), 4), {}, tokenizer=of))
    return {words: of.decode(list(fed[0][0].ids)) for words, fed in found.items() if fed[0][0].positions is None}


def test_a_chat_template_is_put_on_taken_off_and_doubled() -> None:
    of = tokenizer()
    bare, whole = prompts(of, "ab"), prompts(of, "<u|ab><a|")
    assert (bare[TEMPLATED], bare[CUED]) == ("<u|ab><a|", "ab<a|")
    assert not {BARE, UNCUED, TWICE} & bare.keys()
    assert (whole[BARE], whole[UNCUED]) == ("ab", "<u|ab>")
    assert whole[TWICE] == "<u|<u|ab><a|><a|"
    assert whole[CUED_TWICE] == "<u|ab><a|<a|"
    assert not {TEMPLATED, CUED, NO_SYSTEM, DEFAULT} & whole.keys()


def test_a_default_system_turn_is_left_out_and_put_in() -> None:
    of = tokenizer("{% if messages[0]['role'] != 'system' %}<s|bab>{% endif %}" + TEMPLATE)
    given, own, none = prompts(of, "<s|bab><u|ab><a|"), prompts(of, "<s|aa><u|ab><a|"), prompts(of, "<u|ab><a|")
    assert given[NO_DEFAULT] == own[NO_SYSTEM] == "<u|ab><a|"
    assert own[DEFAULT] == none[DEFAULT] == "<s|bab><u|ab><a|"
    assert given[TWICE] == "<s|bab><u|<s|bab><u|ab><a|><a|"
    assert not {NO_DEFAULT, NO_SYSTEM} & none.keys()


def test_a_template_is_parsed_into_the_texts_around_those_of_a_prompt() -> None:
    of = tokenizer("{% if messages[0]['role'] != 'system' %}<s|Be kind.>{% endif %}" + TEMPLATE)
    expected = Template("<s|Be kind.><u|", "><a|", "<a|", "", "<u|", "<s|Be kind.>", "<s|", "><u|")
    assert parsed(of) == expected
    assert parsed(tokenizer("{{ messages | length }}")) is None


def test_a_second_bos_token_has_its_own_words() -> None:
    model = small_model(qwen3_config(), 4)
    found = [inputs([response(ids, (3,))], StackModel(model, {}, 7)) for ids in ((4, 5), (7, 4, 5))]
    assert found[0]["prompt with a BOS token before it"][0][0].ids == (7, 4, 5)
    assert found[1]["prompt with a second BOS token before it"][0][0].ids == (7, 7, 4, 5)
    assert found[1]["prompt without its BOS token"][0][0].ids == (4, 5)


def test_a_token_that_the_model_does_not_have_is_in_no_input() -> None:
    model = small_model(qwen3_config(), 4)
    size = model.config.vocab_size
    one, two = response((4, 5), (3,)), response((4, 5, 6), (3,))
    words = ["prompt with a BOS token before it", "prompt with an EOS token after it"]
    words.append("attention to the padding before the prompt")
    for missing, outside in enumerate(words):
        special = [size if k == missing else size - 1 for k in range(3)]
        found = inputs([one, two], StackModel(model, {}, *special))
        assert set(words) - found.keys() == {outside}


def test_of_many_lengths_those_that_stacks_cut_at_are_tried() -> None:
    one, model = response(tuple(k % 80 for k in range(600)), (3,)), qwen3_config(max_position_embeddings=1024)
    found = inputs([one], StackModel(small_model(model, 4), {}))
    tried = {words for words in found if words.startswith("prompt cut to its last ")}
    assert {f"prompt cut to its last {n} tokens" for n in (1, 128, 256, 512)} <= tried
    assert len(tried) == 12
