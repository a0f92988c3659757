"""Hypothesis strategies: rollouts for tests of losses, advantages and whatever reads tokens of ragged responses."""

# without postponed annotations: Hypothesis makes a function of its own, in whose module their names are not known
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from ppo_repro.testing.losses import LossRollout


def _numbers(low: float, high: float, count: int) -> SearchStrategy[list[float]]:
    return st.lists(st.floats(low, high, width=32), min_size=count, max_size=count)


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
    new = torch.tensor(draw(_numbers(-12.0, 0.0, count)), dtype=torch.float64)
    found = {}
    for name in columns:
        if name.endswith("_logprobs"):
            found[name] = (new + torch.tensor(draw(_numbers(-1.0, 1.0, count)), dtype=torch.float64)).clamp(max=0.0)
        elif name.startswith("is_"):
            bits = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
            found[name] = torch.tensor(bits, dtype=torch.float64)
        else:
            bound = 3.0 if name == "advantages" else 10.0
            found[name] = torch.tensor(draw(_numbers(-bound, bound, count)), dtype=torch.float64)
    bits = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    mask, starts = torch.tensor(bits), torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    mask[starts] = True  # a token of each response counts
    return LossRollout(lengths, new, found, mask)
