"""What each way feeds a model: by hand, and a chat template put on, taken off, doubled."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from ppo_repro.audit import ways
from ppo_repro.audit.dump import Response
from ppo_repro.audit.ways import Fed, Special
from ppo_repro.tasks.tokenizer import train_bpe

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}|{{ m['content'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<a|{% endif %}"
)


def response(prompt: tuple[int, ...], ids: tuple[int, ...], padding: tuple[int, ...] = ()) -> Response:
    values, counts = np.zeros(len(ids), np.float32), np.ones(len(ids), bool)
    return Response(1, prompt, ids, values, values, counts, counts.astype(np.int64), padding)


SOME = [response((5, 6), (7, 8, 9)), response((5, 6, 7), (8,))]


def test_every_way_by_hand() -> None:
    found = ways.ways(SOME, Special(1, 0, None, 20, True))
    assert found == {
        ways.AS_DUMPED: [Fed((5, 6)), Fed((5, 6, 7))],
        ways.WITHOUT_FIRST: [Fed((6,)), Fed((6, 7))],
        ways.WITH_BOS: [Fed((1, 5, 6)), Fed((1, 5, 6, 7))],
        ways.PADDED: [Fed((0, 5, 6)), Fed((5, 6, 7))],
        ways.PACKED: [Fed((5, 6)), Fed((5, 6, 7, 8, 9, 5, 6, 7))],
        ways.AGAIN: [Fed((5, 6), (0, 1, 0, 1)), Fed((5, 6, 7))],
        ways.TOO_HIGH: [Fed((5, 6), (0, 1, 3, 4)), Fed((5, 6, 7))],
        ways.TOO_LOW: [Fed((5, 6), (0, 1, 1, 2)), Fed((5, 6, 7))],
        ways.COUNTED: [Fed((5, 6), (1, 2, 3, 4)), Fed((5, 6, 7))],
    }


def test_padding_of_the_file_comes_before_a_guess() -> None:
    found = ways.ways([response((5, 6), (7,), (3, 3)), SOME[1]], Special(None, 0, None, None, False))
    assert found[ways.PADDED] == [Fed((3, 3, 5, 6)), Fed((5, 6, 7))]
    assert ways.WITH_BOS not in found and ways.COUNTED not in found


def test_what_the_model_has_no_positions_for_or_changes_nothing_is_no_way() -> None:
    found = ways.ways(SOME, Special(1, 0, None, 4, False))
    assert ways.WITH_BOS not in found and ways.PACKED not in found and ways.WITHOUT_FIRST in found
    alone = ways.ways([response((5,), (7,))], Special(None, 0, None, None, True))
    assert list(alone) == [ways.AS_DUMPED]


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerBase:
    found = train_bpe(["ab<>|/;usaSB"], 30)
    found.chat_template = template
    return found


def prompts(of: PreTrainedTokenizerBase, text: str) -> dict[str, str]:
    """By the words of a way, the text that it makes of a prompt."""
    one = response(tuple(of(text).input_ids), (3,))
    found = ways.ways([one], Special(None, None, of, None, False))
    return {words: of.decode(list(fed[0].before)) for words, fed in found.items() if fed[0].positions is None}


def test_a_chat_template_is_put_on_taken_off_and_doubled() -> None:
    of = tokenizer()
    bare, whole = prompts(of, "ab"), prompts(of, "<u|ab><a|")
    assert bare[ways.TEMPLATED] == "<u|ab><a|" and bare[ways.CUED] == "ab<a|"
    assert not {ways.BARE, ways.UNCUED} & bare.keys()
    assert whole[ways.BARE] == "ab" and whole[ways.UNCUED] == "<u|ab>"
    assert whole[ways.TEMPLATED] == "<u|<u|ab><a|><a|"


def test_a_template_that_refuses_or_drops_what_it_is_given_is_no_way() -> None:
    for template in ("{{ raise_exception('no') }}", "nothing of it"):
        assert not {ways.TEMPLATED, ways.BARE, ways.CUED, ways.UNCUED} & prompts(tokenizer(template), "ab").keys()
