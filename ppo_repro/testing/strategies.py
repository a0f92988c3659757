"""Hypothesis strategies: rollouts for tests of losses, advantages and whatever reads tokens of ragged responses."""

# without postponed annotations: Hypothesis makes a function of its own, in whose module their names are not known
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from ppo_repro.testing.losses import LossRollout


@st.composite
def rollouts(
    draw: DrawFn,
    max_sequences: int = 6,
    max_tokens: int = 8,
    columns: Sequence[str] = ("old_logprobs", "advantages"),
) -> LossRollout:
    """Ragged responses: 1..max_sequences of 1..max_tokens tokens, some of which may not count; nats; columns as named.

    new_logprobs are in [-12, 0]; columns that end in `_logprobs` are within 1 of them and at most 0; `advantages` are
    in [-3, 3], `is_...` are 0 or 1, other columns are in [-10, 10]. All are float64 tensors [N]. Hypothesis raises its
    InvalidArgument where a count is below 1.

    >>> from hypothesis import given
    >>> from ppo_repro.testing.strategies import rollouts
    >>> @given(rollouts())
    ... def check(rollout):
    ...     assert sum(rollout.lengths) == len(rollout.new_logprobs)
    >>> check()
    """
    lengths = tuple(draw(st.lists(st.integers(1, max_tokens), min_size=1, max_size=max_sequences)))
    count = sum(lengths)

    def drawn(numbers: st.SearchStrategy[float]) -> torch.Tensor:
        return torch.tensor(draw(st.lists(numbers, min_size=count, max_size=count)), dtype=torch.float64)

    new, found = drawn(st.floats(-12.0, 0.0, width=32)), {}
    for name in columns:
        if name.endswith("_logprobs"):
            found[name] = (new + drawn(st.floats(-1.0, 1.0, width=32))).clamp(max=0.0)
        else:
            bound = 3.0 if name == "advantages" else 10.0
            found[name] = drawn(st.integers(0, 1) if name.startswith("is_") else st.floats(-bound, bound, width=32))
    mask = drawn(st.integers(0, 1)) > 0
    mask[torch.tensor((0, *lengths[:-1])).cumsum(0)] = True  # a token of each response counts
    return LossRollout(lengths, new, found, mask)
