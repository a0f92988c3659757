"""What each way feeds a model: by hand, and a chat template put on, taken off, doubled."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from ppo_repro.tasks.tokenizer import train_bpe
from ppo_repro.testing.audit import ways
from ppo_repro.testing.audit.ways import Subject
from ppo_repro.testing.dumps import Response
from tests.support.models import qwen3_config, small_model

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}|{{ m['content'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<a|{% endif %}"
)


def response(prompt: tuple[int, ...], ids: tuple[int, ...], padding: tuple[int, ...] = ()) -> Response:
    values, counts = np.zeros(len(ids), np.float32), np.ones(len(ids), bool)
    return Response(1, prompt, ids, values, values, counts, padding)


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerBase:
    found = train_bpe(["ab<>|/;usaSB"], 30)
    found.chat_template = template
    return found


def prompts(of: PreTrainedTokenizerBase, text: str) -> dict[str, str]:
    """By the words of a way, the text that it makes of a prompt."""
    one = response(tuple(of(text).input_ids), (3,))
    found = ways.ways([one], Subject(small_model(qwen3_config(), 4), {}, tokenizer=of))
    return {words: of.decode(list(fed[0][0].ids)) for words, fed in found.items() if fed[0][0].positions is None}


def test_a_chat_template_is_put_on_taken_off_and_doubled() -> None:
    of = tokenizer()
    bare, whole = prompts(of, "ab"), prompts(of, "<u|ab><a|")
    assert (bare[ways.TEMPLATED], bare[ways.CUED]) == ("<u|ab><a|", "ab<a|")
    assert not {ways.BARE, ways.UNCUED} & bare.keys()
    assert (whole[ways.BARE], whole[ways.UNCUED]) == ("ab", "<u|ab>")
    assert whole[ways.TEMPLATED] == "<u|<u|ab><a|><a|"
