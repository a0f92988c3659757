"""What a user's class returns: plain data in any container, or one line about what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.sampling.responses import UncutSampling, checked_responses
from ppo_repro.user.file import RefusedError

SAMPLING = UncutSampling(temperature=1.0, max_response_tokens=3, end_ids=(1, 2), vocab_size=10)
GOOD = ([5, 1], [-0.5, -1.25], "stop")
CUT = ([5, 6, 7], [-0.5, -0.25, 0.0], "length")

NAN, INF = float("nan"), float("inf")
REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (None, "returned None; must be a list"),
    "a text": ("stop", "returned 'stop'; must be a list"),
    "one too few": ([GOOD], "returned 1 responses to 2 prompts"),
    "one too many": ([GOOD] * 3, "returned 3 responses to 2 prompts"),
    "a pair": ([GOOD, GOOD[:2]], "as response 1 2 entries; must be (ids, logprobs, finish_reason)"),
    "ids that are a number": ([GOOD, (5, [-1.0], "stop")], "as response 1 5 as ids; must be a list of numbers"),
    "no ids": ([GOOD, ([], [], "stop")], "as response 1 0 ids; must be 1 to rollout.max_response_tokens = 3"),
    "too many ids": ([GOOD, ([5] * 4, [-1.0] * 4, "length")], "as response 1 4 ids; must be 1 to"),
    "an id outside": ([GOOD, ([10, 1], [-1.0] * 2, "stop")], "the id 10 at place 0; must be a whole number in 0..9"),
    "a negative id": ([GOOD, ([-1, 1], [-1.0] * 2, "stop")], "the id -1 at place 0"),
    "an id that is a float": ([GOOD, ([5.0, 1], [-1.0] * 2, "stop")], "the id 5.0 at place 0"),
    "an id that is a bool": ([GOOD, ([True, 1], [-1.0] * 2, "stop")], "the id True at place 0"),
    "tokens after the end": ([GOOD, ([5, 2, 6], [-1.0] * 3, "length")], "tokens after the end token 2 at place 1"),
    "a log-prob missing": ([GOOD, ([5, 1], [-1.0], "stop")], "1 log-probs for 2 ids; must be one for each id"),
    "a log-prob above 0": ([GOOD, ([5, 1], [-1.0, 1e-6], "stop")], "the log-prob 1e-06 at place 1; must be a finite"),
    "NaN": ([GOOD, ([5, 1], [NAN, -1.0], "stop")], "the log-prob nan at place 0"),
    "minus infinity": ([GOOD, ([5, 1], [-INF, -1.0], "stop")], "the log-prob -inf at place 0"),
    "beyond float32": ([GOOD, ([5, 1], [-1e39, -1.0], "stop")], "the log-prob -1e+39 at place 0"),
    "beyond float64": ([GOOD, ([5, 1], [-(10**400), -1.0], "stop")], "at place 0; must be a finite number of nats"),
    "no log-prob": ([GOOD, ([5, 1], [None, -1.0], "stop")], "the log-prob None at place 0"),
    "another reason": ([GOOD, ([5, 1], [-1.0] * 2, "eos")], "the finish reason 'eos'; must be 'stop' or 'length'"),
    "no reason": ([GOOD, ([5, 1], [-1.0] * 2, None)], "the finish reason None; must be"),
    "stop without an end": ([GOOD, ([5, 6], [-1.0] * 2, "stop")], "'stop' after token 6, none of the end tokens [1"),
    "length after an end": ([GOOD, ([5, 1], [-1.0] * 2, "length")], "'length' after the end token 1; must be 'stop'"),
    "length too early": ([GOOD, ([5, 6], [-1.0] * 2, "length")], "'length' after 2 ids; must be rollout.max"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_wrong_response_is_refused_in_one_line(name: str) -> None:
    value, said = REFUSED[name]
    with pytest.raises(RefusedError) as caught:
        checked_responses(value, 2, SAMPLING)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("container", [list, tuple, np.array, torch.tensor])
def test_arrays_tensors_and_tuples_are_lists(container: Any) -> None:
    given_ = [(container(ids), container(logprobs), reason) for ids, logprobs, reason in (GOOD, CUT)]
    assert checked_responses(given_, 2, SAMPLING) == [GOOD, CUT]


def test_an_end_token_at_the_limit_is_a_stop_whatever_the_program_says() -> None:
    for said in ("stop", "length"):
        assert checked_responses([([5, 6, 1], [-1.0] * 3, said)], 1, SAMPLING)[0][2] == "stop"


@given(st.recursive(st.none() | st.integers() | st.floats() | st.text(max_size=5), st.lists, max_leaves=30))
def test_whatever_is_returned_is_checked_or_refused(value: Any) -> None:
    try:
        for ids, logprobs, reason in checked_responses(value, 1, SAMPLING):
            assert len(ids) == len(logprobs)
            assert all(0 <= i < 10 for i in ids)
            assert reason in ("stop", "length")
    except RefusedError as error:
        assert "\n" not in str(error)
