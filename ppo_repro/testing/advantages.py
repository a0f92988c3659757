"""Compare a user's advantage estimator with its definition; tokens that do not count must not change the advantages.

The definitions are loops over the tokens of one response that count, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.testing.layouts import LAYOUTS, WHOLE, DrawnResponses, Layout, lay_out, ordered

Kind = Literal["gae", "rewards_to_go", "group_mean", "group_normalised"]
Divisor = Literal["n", "n - 1"]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative to the largest advantage
# the layouts of one batch, in which groups are whole
ONE_BATCH = [
    layout for layout in LAYOUTS if layout.padding != "packed" and layout.micro_batch == 0 and layout.ranks == 1
]
CASES = [*((layout, torch.float64) for layout in (WHOLE, *ONE_BATCH)), (WHOLE, torch.float32)]
LENGTHS, GROUPS = (5, 1, 4, 6, 2, 3), (0, 0, 1, 1, 1, 2)


@dataclass(frozen=True)
class PaddedAdvantageBatch:
    """Batch that a user's estimator receives: R responses of L positions.

    `rewards`, `values` [R, L]: any number at padding and at tokens that do not count; `mask` [R, L] bool: False at
    these positions; `scores` [R]: the sum of a response's rewards; `groups` [R] int64: the number of each response's
    prompt.
    """

    rewards: Tensor
    values: Tensor
    mask: Tensor
    scores: Tensor
    groups: Tensor


Estimator = Callable[[PaddedAdvantageBatch], Tensor]  # [R, L]; advantages under the mask are ignored


def definition(
    kind: Kind,
    responses: Sequence[tuple[list[float], list[float]]],
    groups: Sequence[int],
    gamma: float,
    lam: float,
    divisor: Divisor = "n",
    epsilon: float = 1e-6,
) -> list[list[float]]:
    """Compute the advantages of the tokens that count, in float64, by the formula of an estimator.

    gae (Schulman et al., 2016): A_t = delta_t + gamma lam A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t and V = 0
    after the last token. rewards_to_go: sum over k >= t of gamma^(k - t) r_k. group_mean: score minus the mean score of
    the group. group_normalised (Shao et al., 2024): (score minus mean) / (std + epsilon), where std^2 is the sum of
    squared deviations over the divisor; 0 in a group of equal scores.

    Args:
        responses: rewards and values of the tokens of each response; all these tokens count.
        groups: number of the prompt of each response.
    """
    found = []
    scores = [math.fsum(rewards) for rewards, _ in responses]
    for (rewards, values), score, group in zip(responses, scores, groups, strict=True):
        advantages, after, value_after = [0.0] * len(rewards), 0.0, 0.0
        peers = [s for s, g in zip(scores, groups, strict=True) if g == group]
        mean = math.fsum(peers) / len(peers)
        count = len(peers) if divisor == "n" else max(len(peers) - 1, 1)
        spread = math.sqrt(math.fsum((s - mean) ** 2 for s in peers) / count)
        for t in reversed(range(len(rewards))):
            if kind == "gae":
                after = rewards[t] + gamma * value_after - values[t] + gamma * lam * after
                value_after = values[t]
            elif kind == "rewards_to_go":
                after = rewards[t] + gamma * after
            else:
                after = score - mean
                if kind == "group_normalised":
                    after = after / (spread + epsilon) if spread else 0.0
            advantages[t] = after
        found.append(advantages)
    return found


def _alone_in_verl(
    kind: Kind, rewards: Sequence[Sequence[float]], groups: Sequence[int], epsilon: float
) -> list[list[float]]:
    """Return the advantages that verl gives to the only response of a group, NaN to the tokens of other responses.

    They are score / (1 + epsilon), or the score in group_mean: `compute_grpo_outcome_advantage`.
    """
    divisor = {"group_mean": 1.0, "group_normalised": 1.0 + epsilon}.get(kind, math.nan)
    return [
        [math.fsum(row) / divisor if groups.count(group) == 1 else math.nan] * len(row)
        for row, group in zip(rewards, groups, strict=True)
    ]


def check_advantages(
    estimator: Estimator,
    kind: Kind,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    divisor: Divisor = "n",
    epsilon: float = 1e-6,
    seed: int = 0,
) -> dict[str, str]:
    """Compare an estimator with its definition on random responses, in several layouts.

    If a group has one response, its score minus the mean is 0. verl subtracts nothing from that score and divides it by
    1 + epsilon; this passes too.

    Args:
        estimator: a function from a PaddedAdvantageBatch to advantages [R, L].
        kind: name of the definition.
        gamma: discount.
        lam: lambda of GAE.
        divisor: divisor of the squared deviations, for group_normalised.
        epsilon: number added to the standard deviation, for group_normalised.
        seed: seed of the responses.

    Returns:
        A sentence by layout about the first token that differs; empty if the estimator conforms.

    Raises:
        UserError: there is no such kind or divisor.
        Exception: any exception of the estimator.

    >>> from ppo_repro.testing import check_advantages
    >>> def to_go(batch):
    ...     rewards = batch.rewards.masked_fill(~batch.mask, 0.0)
    ...     return rewards.flip(1).cumsum(1).flip(1)
    >>> check_advantages(to_go, "rewards_to_go")
    {}
    """
    for name, value, known in (("kind", kind, get_args(Kind)), ("divisor", divisor, get_args(Divisor))):
        if value not in known:
            raise UserError(f"check_advantages: {name} = {value!r}: must be one of {', '.join(map(repr, known))}")
    rollout, (rewards, values) = _drawn(seed)
    pairs = list(zip(rewards, values, strict=True))
    expected = _joined(definition(kind, pairs, GROUPS, gamma, lam, divisor, epsilon))
    in_verl = _joined(_alone_in_verl(kind, rewards, GROUPS, epsilon))
    size, changes = float(expected.abs().max()), {}
    for layout, dtype in CASES:
        found = _estimated(estimator, rollout, layout, dtype)
        # verl has 1 + epsilon in float32 whatever the scores are in
        is_right = (found - expected).abs() <= TOLERANCE[dtype] * size
        is_right |= (found - in_verl).abs() <= TOLERANCE[torch.float32] * size
        for i in (~is_right).nonzero()[:1, 0].tolist():
            both = f"{float(found[i]):.6g} instead of {float(expected[i]):.6g}"
            name = layout.describe()
            changes[name if dtype == torch.float64 else f"float32, {name}"] = f"{both} at {rollout.places[i]}"
    return changes


def _drawn(seed: int) -> tuple[DrawnResponses, list[list[list[float]]]]:
    """Return random responses, and their rewards and values as lists."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(2, sum(LENGTHS), generator=generator, dtype=torch.float64).float().double()
    columns = {"new_logprobs": torch.zeros(sum(LENGTHS)).double(), "rewards": numbers[0], "values": numbers[1]}
    places = [f"sequence {sequence}, position {k}" for sequence, length in enumerate(LENGTHS) for k in range(length)]
    rollout = DrawnResponses(LENGTHS, columns, torch.ones(sum(LENGTHS), dtype=torch.bool), places)
    return rollout, [[part.tolist() for part in row.split(LENGTHS)] for row in numbers]


def _joined(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def _estimated(estimator: Estimator, rollout: DrawnResponses, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return the advantages of a user's estimator in a layout, float64 [N] in the order of the rollout."""
    order = ordered(len(LENGTHS), layout)
    batch, indices = lay_out(rollout, order, layout, dtype)
    rewards = rollout.columns["rewards"].split(LENGTHS)
    scores = torch.tensor([math.fsum(rewards[i].tolist()) for i in order], dtype=dtype)
    groups = torch.tensor([GROUPS[i] for i in order])
    inputs = batch.columns["rewards"], batch.columns["values"], batch.mask
    found = torch.empty(len(rollout.mask), dtype=torch.float64)
    found[indices[batch.mask]] = estimator(PaddedAdvantageBatch(*inputs, scores, groups))[batch.mask].double()
    return found
