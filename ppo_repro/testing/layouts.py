"""Lay out the responses of an optimizer step as trainers do: micro-batches, padding, packing, tool tokens, ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ppo_repro.base.seeding import permutation

NOT_FINITE = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64)


@dataclass(frozen=True)
class LossBatch:
    """Micro-batch that a user's loss receives: R rows of L positions.

    `new_logprobs` [R, L] in nats, with a gradient; `columns` have [R, L] each, in the same dtype; `mask` [R, L] bool,
    False at padding and at tokens that do not count, where columns have arbitrary numbers; `sequences` [R, L] int64,
    the index of a token's response, -1 at padding (a packed row has several responses). `step_tokens` is the number of
    tokens that count, and `step_sequences` the number of responses, in all micro-batches and ranks of the optimizer
    step.
    """

    new_logprobs: Tensor
    columns: Mapping[str, Tensor]
    mask: Tensor
    sequences: Tensor
    step_tokens: int
    step_sequences: int


class Layout(NamedTuple):
    """Layout of a step's responses; `micro_batch` 0: all responses of a rank are one micro-batch."""

    micro_batch: int = 0
    padding: Literal["right", "left", "packed"] = "right"
    extra: int = 0  # columns of padding that are not needed
    inserted: int = 0  # tokens that do not count, after every second token
    junk: Literal["", "finite", "not finite"] = ""  # in every column under the mask
    order: Literal["given", "reversed", "shuffled"] = "given"
    ranks: int = 1

    def describe(self) -> str:
        """Return what differs from WHOLE as text."""
        fields = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in fields.items()) or WHOLE_IN_WORDS


WHOLE_IN_WORDS = "all at once, padded right"
WHOLE = Layout()
LAYOUTS = (
    *(Layout(micro_batch=n) for n in (1, 2, 3)),
    Layout(padding="left"),
    Layout(extra=3),
    Layout(extra=1, junk="finite"),
    Layout(extra=1, junk="not finite"),
    Layout(inserted=2),
    Layout(inserted=1, junk="not finite"),
    Layout(order="shuffled"),
    Layout(padding="packed"),
    Layout(order="reversed"),
    Layout(ranks=2),
    Layout(ranks=3),
    Layout(micro_batch=1, padding="packed", order="shuffled", ranks=2),
)


@dataclass(frozen=True)
class DrawnResponses:
    """Responses with N tokens in total: their `lengths`, columns [N] float64, and the tokens that count, [N] bool.

    `places` [N] says which token each is, in messages.
    """

    lengths: Sequence[int]
    columns: dict[str, Tensor]
    mask: Tensor
    places: Sequence[str]


def ordered(count: int, layout: Layout) -> list[int]:
    """Return the responses 0 to count - 1 in the order of a layout."""
    order = permutation(count, "loss layout").tolist() if layout.order == "shuffled" else list(range(count))
    return order[:: -1 if layout.order == "reversed" else 1]


def lay_out(
    rollout: DrawnResponses, sequences: Sequence[int], layout: Layout, dtype: torch.dtype
) -> tuple[LossBatch, Tensor]:
    """Return the responses `sequences`, in this order, as a batch in one layout.

    The second result is the index in the rollout of each position [R, L], below 0 for padding and inserted tokens.
    """
    rows, owners = [], []
    for s in sequences:
        start, row = sum(rollout.lengths[:s]), list[int]()
        for k in range(rollout.lengths[s]):
            row += [start + k, *([-2] * layout.inserted if k % 2 else [])]
        rows.append(row)
        owners.append([s] * len(row))
    if layout.padding == "packed":
        rows, owners = [list(chain(*rows))], [list(chain(*owners))]
    width = max(map(len, rows)) + layout.extra

    def padded(row: list[int]) -> list[int]:
        padding = [-1] * (width - len(row))
        return [*padding, *row] if layout.padding == "left" else [*row, *padding]

    indices = torch.tensor([padded(row) for row in rows])
    there = indices >= 0
    mask = there & rollout.mask[indices.clamp(min=0)]
    number = torch.arange(indices.numel(), dtype=torch.float64).reshape(indices.shape)

    def column(name: str, k: int) -> Tensor:
        """Return column k with random junk at masked tokens; new log-probs (k = 0) stay finite, like a model's."""
        filled = torch.where(there, rollout.columns[name][indices.clamp(min=0)], 0.0)
        if layout.junk == "not finite" and k:
            filled = torch.where(mask, filled, NOT_FINITE[(number.long() + k) % 3])
        elif layout.junk:
            filled = torch.where(mask, filled, (-1.0) ** k * (7.0 + 60.0 * k + number) * (10.0 if k else -1.0))
        return filled.to(dtype)

    others = [name for name in rollout.columns if name != "new_logprobs"]
    batch = LossBatch(
        new_logprobs=column("new_logprobs", 0).requires_grad_(),
        columns={name: column(name, k) for k, name in enumerate(others, 1)},
        mask=mask,
        sequences=torch.tensor([padded(row) for row in owners]),
        step_tokens=int(rollout.mask.sum()),
        step_sequences=len(rollout.lengths),
    )
    return batch, indices
