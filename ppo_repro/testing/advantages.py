"""An advantage estimator of one's own against its definition: tokens that do not count must not change what the others
get.

The definitions are loops over the tokens of one response that count, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ppo_repro.seeding import permutation
from ppo_repro.testing.losses import Junk

Kind = Literal["gae", "rewards_to_go", "group_mean", "group_normalised"]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative to the largest advantage


@dataclass(frozen=True)
class AdvantageBatch:
    """What an estimator is called with: R responses of L positions.

    `rewards`, `values` [R, L]; `mask` [R, L] bool, False at padding and at tokens that do not count, where they may
    hold anything; `scores` [R], the sum of a response's rewards; `groups` [R] int64, the prompt of each response.
    """

    rewards: Tensor
    values: Tensor
    mask: Tensor
    scores: Tensor
    groups: Tensor


Estimator = Callable[[AdvantageBatch], Tensor]  # [R, L]; what it gives under the mask is ignored


@dataclass(frozen=True)
class AdvantageDrift:
    """How far an estimator is from the definition in one layout, relative to the largest advantage."""

    what: str
    drift: float
    first: tuple[int, int] | None  # response and position, among those that count, of the first that differs
    found: float
    expected: float

    def describe(self) -> str:
        """One line."""
        if self.first is None:
            return f"{self.what}: the same"
        where = f"response {self.first[0]}, token {self.first[1]}"
        if not math.isfinite(self.found):
            return f"{self.what}: not finite at {where}"
        return f"{self.what}: {self.found:.6g} instead of {self.expected:.6g} at {where}"


def definition(
    kind: Kind, responses: Sequence[tuple[list[float], list[float]]], groups: Sequence[int], gamma: float, lam: float
) -> list[list[float]]:
    """Advantages of the tokens that count, of (rewards, values) of each response.

    gae: A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, V after the last token 0 (Schulman et
    al., 2016). rewards_to_go: sum over k >= t of gamma^(k - t) r_k. group_mean: score minus the mean score of the
    group; group_normalised: that divided by the standard deviation with n - 1, 0 where it is 0 (Shao et al., 2024).
    """
    found = []
    scores = [math.fsum(rewards) for rewards, _ in responses]
    for (rewards, values), score, group in zip(responses, scores, groups, strict=True):
        advantages, after, value_after = [0.0] * len(rewards), 0.0, 0.0
        peers = [s for s, g in zip(scores, groups, strict=True) if g == group]
        mean = math.fsum(peers) / len(peers)
        spread = math.sqrt(math.fsum((s - mean) ** 2 for s in peers) / max(len(peers) - 1, 1))
        for t in reversed(range(len(rewards))):
            if kind == "gae":
                after = rewards[t] + gamma * value_after - values[t] + gamma * lam * after
                value_after = values[t]
            elif kind == "rewards_to_go":
                after = rewards[t] + gamma * after
            else:
                after = score - mean
                if kind == "group_normalised":
                    after = after / spread if spread else 0.0
            advantages[t] = after
        found.append(advantages)
    return found


@dataclass(frozen=True)
class _Layout:
    what: str
    inserted: int = 0  # tokens that do not count after each second token
    extra: int = 0  # columns of padding more than are needed
    is_left: bool = False
    junk: Junk = ""
    is_shuffled: bool = False
    dtype: torch.dtype = torch.float64


_LAYOUTS = (
    _Layout("padded right"),
    _Layout("padded left", is_left=True),
    _Layout("more padding", extra=3),
    _Layout("tokens that do not count between turns", inserted=2),
    _Layout("finite junk under the mask", inserted=1, extra=1, junk="finite"),
    _Layout("NaN and infinities under the mask", inserted=1, extra=1, junk="not finite"),
    _Layout("responses in another order", is_shuffled=True),
    _Layout("float32", inserted=1, dtype=torch.float32),
)


def check_advantages(
    estimator: Estimator, kind: Kind, *, gamma: float = 1.0, lam: float = 0.95, seed: int = 0, tolerance: float = 0.0
) -> list[AdvantageDrift]:
    """An estimator beside its definition on drawn responses, in every layout; one entry for each layout.

    tolerance: relative to the largest advantage, if the estimator adds a small number to a denominator. Raises what the
    estimator raises, and ValueError for a result with another number of rows.
    """
    generator = torch.Generator().manual_seed(seed)

    def numbers(count: int) -> list[float]:
        return torch.randn(count, generator=generator, dtype=torch.float64).float().tolist()

    lengths, groups = (5, 1, 4, 6, 2, 3), (0, 0, 1, 1, 1, 2)
    responses = [(numbers(n), numbers(n)) for n in lengths]
    expected = definition(kind, responses, groups, gamma, lam)
    largest = max(abs(a) for row in expected for a in row) or 1.0
    found = []
    for layout in _LAYOUTS:
        order = permutation(len(lengths), "advantage layout") if layout.is_shuffled else list(range(len(lengths)))
        batch = _lay_out([responses[i] for i in order], [groups[i] for i in order], layout)
        rows = estimator(batch)
        limit = max(TOLERANCE[layout.dtype], tolerance)
        drift = AdvantageDrift(layout.what, 0.0, None, 0.0, 0.0)
        for i, row, mask in zip(order, rows, batch.mask, strict=True):
            for t, (a, b) in enumerate(zip(row[mask].tolist(), expected[i], strict=True)):
                apart = abs(a - b) / largest if math.isfinite(a) else math.inf
                first = (i, t) if drift.first is None and not apart <= limit else drift.first
                is_first = first != drift.first
                drift = replace(
                    drift,
                    drift=max(drift.drift, apart),
                    first=first,
                    found=a if is_first else drift.found,
                    expected=b if is_first else drift.expected,
                )
        found.append(drift)
    return found


def assert_advantages_conform(
    estimator: Estimator, kind: Kind, *, gamma: float = 1.0, lam: float = 0.95, seed: int = 0, tolerance: float = 0.0
) -> None:
    """Assert that an estimator follows its definition in every layout; AssertionError has a line for each failure.

    >>> from ppo_repro.testing.advantages import assert_advantages_conform
    >>> def to_go(batch):
    ...     rewards = batch.rewards.masked_fill(~batch.mask, 0.0)
    ...     return rewards.flip(1).cumsum(1).flip(1)
    >>> assert_advantages_conform(to_go, "rewards_to_go")
    """
    __tracebackhide__ = True
    found = check_advantages(estimator, kind, gamma=gamma, lam=lam, seed=seed, tolerance=tolerance)
    lines = [drift.describe() for drift in found if drift.first is not None]
    if lines:
        raise AssertionError(f"the estimator is not {kind} of the tokens that count:\n" + "\n".join(lines))


def _lay_out(
    responses: Sequence[tuple[list[float], list[float]]], groups: Sequence[int], layout: _Layout
) -> AdvantageBatch:
    rows: list[list[int]] = []  # indices of tokens, -1 at tokens that do not count
    for rewards, _ in responses:
        row: list[int] = []
        for t in range(len(rewards)):
            row += [t, *([-1] * layout.inserted if t % 2 and t + 1 < len(rewards) else [])]
        rows.append(row)
    width = max(map(len, rows)) + layout.extra
    columns: list[list[list[float]]] = [[], []]
    mask = []
    junk = {"": [0.0], "finite": [77.0, -1e4, 3e3], "not finite": [math.nan, math.inf, -math.inf]}[layout.junk]
    for number, (row, pair) in enumerate(zip(rows, responses, strict=True)):
        padding = [-1] * (width - len(row))
        whole = [*padding, *row] if layout.is_left else [*row, *padding]
        mask.append([t >= 0 for t in whole])
        for k, (column, values) in enumerate(zip(columns, pair, strict=True)):
            filled = [values[t] if t >= 0 else junk[(i + k + number) % len(junk)] for i, t in enumerate(whole)]
            column.append(filled)
    reward_rows, value_rows = (torch.tensor(column, dtype=layout.dtype) for column in columns)
    scores = torch.tensor([math.fsum(r) for r, _ in responses], dtype=layout.dtype)
    return AdvantageBatch(reward_rows, value_rows, torch.tensor(mask), scores, torch.tensor(groups))
