"""What each input of a cause feeds a model, by hand; `test_chat_templates` has the chat templates."""

from __future__ import annotations

from collections.abc import Sequence

from ppo_repro.testing.audit.causes.inputs import of_inputs
from ppo_repro.testing.audit.forward import Pass
from ppo_repro.testing.audit.stack import StackModel
from ppo_repro.testing.dumps import DumpedResponse
from tests.support.models import qwen3_config, small_model
from tests.testing.audit.material import response


def inputs(responses: Sequence[DumpedResponse], stack: StackModel) -> dict[str, Sequence[Sequence[Pass]]]:
    """The passes of each response, by the words of an input."""
    return {cause.words: cause.passes for cause in of_inputs(responses, stack)}


def test_a_cause_that_the_diagnosis_has_too_has_its_name() -> None:
    model = small_model(qwen3_config(), 4)
    named = {cause.words: cause.name for cause in of_inputs([response((4, 5), (3, 6), (0,))], StackModel(model, {}))}
    assert {words for words, name in named.items() if name == "padding_leak"} == {
        "attention to the padding before the prompt",
        "positions that count the padding before the prompt",
    }


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
