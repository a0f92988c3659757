"""The built-in sampler: seats that are used again, ends of responses, requests that are refused, prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.sampler import Request, Sampling
from ppo_repro.sampling.built_in import BuiltInSampler
from ppo_repro.sampling.seats import PrefixIndex, Seated, Seats
from tests.support.models import CONTEXT, VOCAB, policy
from tests.support.sampler import STOPS, requests_of

PLAIN = Sampling(1.0, 0, 1.0, 12)


def sampler(seats: int = 16) -> BuiltInSampler:
    return BuiltInSampler(policy("qwen3", "deterministic"), STOPS, "deterministic", CONTEXT, seats, 0)


def test_a_finished_sequence_gives_its_seat_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    started, passes = 0, []  # prompts taken in so far; rows of every decoding pass, and the prompts before it
    compute = Seats.logits_after

    def counting(seats: Seats, batch: list[Seated]) -> Tensor:
        nonlocal started
        if batch[0].is_new:
            started += len(batch)
        else:
            assert len({item.seat for item in batch}) == len(batch)
            passes.append((len(batch), started))
        return compute(seats, batch)

    monkeypatch.setattr(Seats, "logits_after", counting)
    completions = sampler(3).generate(requests_of(25, 4), PLAIN)
    lengths = [len(c.response_ids) for c in completions]
    assert len(completions) == started == 25
    assert len(set(lengths)) > 4
    # the first token of a response comes with its prompt, every other is one row of a decoding pass
    assert sum(rows for rows, _ in passes) == sum(lengths) - 25
    # while prompts wait, no seat is idle
    assert {rows for rows, before in passes if before < 25} == {3}
    assert sum(before < 25 for _, before in passes) > 20


def test_the_index_of_prefixes_has_the_keys_of_what_is_in_the_seats_alone() -> None:
    prefixes = PrefixIndex()
    for first in range(50):
        prefixes.note(first % 2, (first, 1, 2, 3))
    assert len(prefixes._seats) == 2 * 4
    assert [prefixes.longest((first, 1, 9)) for first in (47, 48, 49)] == [(0, 0), (0, 2), (1, 2)]
    prefixes.note(0, (49, 1, 2, 3))
    prefixes.note(1, ())
    assert len(prefixes._seats) == 4
    assert prefixes.longest((49, 1, 9)) == (0, 2), "the keys belong to the seat that was noted last"


def test_a_response_ends_at_its_first_stop_token_or_at_the_limit() -> None:
    completions = sampler(4).generate(requests_of(60, 6), PLAIN)
    reasons = {"stop": 0, "length": 0}
    for c in completions:
        reasons[c.finish_reason] += 1
        assert not STOPS.intersection(c.response_ids[:-1])
        assert (c.response_ids[-1] in STOPS) == (c.finish_reason == "stop")
        assert c.finish_reason == "stop" or len(c.response_ids) == PLAIN.max_response_tokens
        assert len(c.logprobs) == len(c.log_kept_mass) == len(c.kept_tokens) == len(c.response_ids)
    assert min(reasons.values()) > 5


class SpeaksOnce:
    """An environment that says `tokens` after the model's first token, and nothing after the next one."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def ends(self, turn: Sequence[int]) -> bool:
        return True

    def reply(self, turns: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        return (1,) * self.tokens if len(turns) == 1 else None


def test_a_reply_is_put_in_if_it_leaves_room_for_another_token() -> None:
    """Within 12 tokens."""
    for tokens, reason, forced in ((10, "stop", [False, *[True] * 10, False]), (11, "length", [False])):
        (request,) = requests_of(1, 4)
        (completion,) = sampler().generate([replace(request, dialogue=SpeaksOnce(tokens))], PLAIN)
        assert (completion.finish_reason, list(completion.is_forced)) == (reason, forced)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "empty prompt"),
        ((0, VOCAB), rf"prompt token id {VOCAB}: must be in 0\.\.{VOCAB - 1}"),
        ((0, -1), r"prompt token id -1"),
        ((0,) * (CONTEXT - 11), r"prompt of 53 tokens: .*max_response_tokens = 12 .*numerics\.max_context = 64"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(prompt: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sampler().generate([Request((1, 2), 0), Request(prompt, 0)], PLAIN)
