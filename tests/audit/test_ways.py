"""What each way feeds a model: by hand, and a chat template put on, taken off, doubled."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from ppo_repro.audit import ways
from ppo_repro.audit.ways import Fed, Special
from ppo_repro.tasks.tokenizer import train_bpe
from ppo_repro.testing.dumps import Response

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}|{{ m['content'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<a|{% endif %}"
)


def response(prompt: tuple[int, ...], ids: tuple[int, ...], padding: tuple[int, ...] = ()) -> Response:
    values, counts = np.zeros(len(ids), np.float32), np.ones(len(ids), bool)
    return Response(1, prompt, ids, values, values, counts, counts.astype(np.int64), padding)


SOME = [response((5, 6), (7, 8, 9)), response((5, 6, 7), (8,))]


def one(before: tuple[int, ...], ids: tuple[int, ...], positions: tuple[int, ...] | None = None) -> list[Fed]:
    """A response in one pass."""
    tokens = tuple(range(len(ids)))
    return [Fed((*before, *ids[:-1]), tokens, tuple(len(before) - 1 + t for t in tokens), ids, positions)]


def test_ways_by_hand() -> None:
    found = ways.ways(SOME, Special(1, 2, 0, None, 20))
    a, b = SOME[0].response_ids, SOME[1].response_ids
    expected = {
        ways.WITHOUT_FIRST: [one((6,), a), one((6, 7), b)],
        ways.WITHOUT_LAST: [one((5,), a), one((5, 6), b)],
        ways.WITH_BOS: [one((1, 5, 6), a), one((1, 5, 6, 7), b)],
        ways.WITH_EOS: [one((5, 6, 2), a), one((5, 6, 7, 2), b)],
        ways.PADDED: [one((0, 5, 6), a), one((5, 6, 7), b)],
        ways.PACKED: [one((5, 6), a), one((5, 6, 7, 8, 9, 5, 6, 7), b)],
        ways.AGAIN: [one((5, 6), a, (0, 1, 0, 1)), one((5, 6, 7), b)],
        ways.TOO_HIGH: [one((5, 6), a, (0, 1, 3, 4)), one((5, 6, 7), b)],
        ways.TOO_LOW: [one((5, 6), a, (0, 1, 1, 2)), one((5, 6, 7), b)],
        ways.COUNTED: [one((5, 6), a, (1, 2, 3, 4)), one((5, 6, 7), b)],
    }
    assert {words: found[words] for words in expected} == expected
    assert found[ways.NO_CACHE][0][1] == Fed((7,), (1,), (0,), (8,), (2,))


def test_padding_of_the_file_comes_before_a_guess() -> None:
    found = ways.ways([response((5, 6), (7,), (3, 3)), SOME[1]], Special(None, None, 0, None, None))
    assert found[ways.PADDED] == [one((3, 3, 5, 6), (7,)), one((5, 6, 7), (8,))] and ways.WITH_BOS not in found


def test_what_the_model_has_no_positions_for_or_changes_nothing_is_no_way() -> None:
    found = ways.ways(SOME, Special(1, 2, 0, None, 4))
    assert ways.WITH_BOS not in found and ways.PACKED not in found and ways.WITHOUT_FIRST in found
    assert ways.AGAIN not in ways.ways(SOME, Special(1, 2, 0, None, None), has_positions=False)


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerBase:
    found = train_bpe(["ab<>|/;usaSB"], 30)
    found.chat_template = template
    return found


def prompts(of: PreTrainedTokenizerBase, text: str) -> dict[str, str]:
    """By the words of a way, the text that it makes of a prompt."""
    one = response(tuple(of(text).input_ids), (3,))
    found = ways.ways([one], Special(None, None, None, of, None))
    return {words: of.decode(list(fed[0][0].ids)) for words, fed in found.items() if fed[0][0].positions is None}


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
