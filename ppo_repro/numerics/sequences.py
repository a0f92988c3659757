"""Lay out sequences of tokens one after the other, without padding, and say each row's sequence and position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ppo_repro.base.ranks import Ranks
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.interface import CPU, Ints, constants, ints


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Sequence and position of each row of a tensor, in order.

    Gradients of weights are sums over rows. Rule 2 takes their order from sequence, position and slot.
    """

    sequence: Ints  # [n], rising
    position: Ints  # [n], rising within a sequence
    slots: Ints  # [S + 1], the slot of each sequence and of the sequence after them; number of slots if none follows
    sums: GradientSums | None = None  # receive the gradients of weights; None for a pass without such gradients
    edge: Tensor | None = None  # see `edge_of`; None: any trained parameter

    def select(self, rows: Ints) -> Rows:
        """Return some of the rows, in rising order."""
        return replace(self, sequence=ints(self.sequence[rows]), position=ints(self.position[rows]))

    def chunks(self, at_once: int) -> list[slice]:
        """Cut the rows into chunks of about `at_once` rows, never inside a block of 128 positions of a sequence."""
        n = len(self.position)
        if n <= at_once:
            return [slice(0, n)]
        blocks = self.sequence.astype(np.int64) * (1 << 32) + self.position // constants.BLOCK
        ends = [*(np.flatnonzero(np.diff(blocks)) + 1).tolist(), n]
        cuts = [0]
        for end, after in zip(ends, [*ends[1:], n + at_once + 1], strict=True):
            if after - cuts[-1] > at_once:
                cuts.append(end)
        return [slice(a, b) for a, b in pairwise(cuts)]

    def chunk(self, rows: slice) -> Rows:
        """Return the rows of a chunk. Its last slot is the slot of the sequence with which the next chunk begins."""
        sequence = self.sequence[rows]
        first, last = int(sequence[0]), int(sequence[-1])
        after = self.slots[self.sequence[rows.stop]] if rows.stop < len(self.sequence) else self.slots[-1]
        slots = ints([*self.slots[first : last + 1], after])
        return replace(self, sequence=ints(sequence - first), position=ints(self.position[rows]), slots=slots)


@dataclass(frozen=True)
class Ragged:
    """Tokens of S sequences, one sequence after the other."""

    ids: Ints  # [n]
    start: Ints  # [S + 1], the first row of each sequence, and n
    rows: Rows
    routes: Ints | None = None  # [n, M k] experts of each of M mixtures, rising; None: their routers choose
    padding: str = "right"  # of rows in native numerics: `right`, `left`, or `none` for one row of all sequences

    @property
    def lengths(self) -> Ints:
        return np.diff(self.start)

    def with_sums(self, sums: GradientSums | None, edge: Tensor | None = None) -> Ragged:
        """Return the same sequences. A backward pass adds the gradients of weights to `sums`, then reaches `edge`."""
        return replace(self, rows=replace(self.rows, sums=sums, edge=edge))


def sums_of(rows: Rows | None, what: str) -> GradientSums:
    """Return the sums that receive the gradients of a pass over rows.

    Raises ValueError, naming what is trained, if there are none.
    """
    if rows is None or rows.sums is None:
        raise ValueError(
            f"nothing receives the gradients of {what}; lay out the batch with `.with_sums(optimizer.sink)`"
        )
    return rows.sums


def edge_of(rows: Rows | None, trained: Sequence[Tensor]) -> Tensor | None:
    """Return the input with which autograd calls the backward of a pass: `rows.edge`, or the first trained weight.

    The kernels add the gradients of weights to `rows.sums`, so weights are no inputs of a pass's Function. But autograd
    calls no backward of a Function without an input that requires a gradient. This input gets none.
    """
    if rows is not None and rows.edge is not None:
        return rows.edge
    return trained[0] if trained else None


def _slot(sequence: int, minibatch: int, slots: int) -> int:
    """Return the slot of sequence i of n, ((i + 1) slots - 1) // n: slot s begins with sequence floor(s n / slots)."""
    return ((sequence + 1) * slots - 1) // minibatch


def slots_of(sequences: Sequence[int] | range, minibatch: int, slots: int) -> Ints:
    """Return the slots [S + 1] of some of the `minibatch` sequences of a step, and of the sequence after their last."""
    after = sequences[-1] + 1 if len(sequences) else 0
    own = [_slot(i, minibatch, slots) for i in sequences]
    return ints([*own, _slot(after, minibatch, slots) if after < minibatch else slots])


def slots_of_rank(minibatch: int, slots: int, ranks: Ranks) -> Ints:
    """Return the slots [S + 1] of this rank's sequences of a minibatch, from 0; slots / ranks consecutive ones."""
    each = slots // ranks.size
    return ints([*(_slot(i, minibatch, slots) - ranks.rank * each for i in ranks.mine(minibatch)), each])


def ragged(
    sequences: Sequence[Sequence[int]],
    past: Sequence[int] | None = None,
    slots: Ints | None = None,
    routes: Tensor | None = None,
    padding: str = "right",
) -> Ragged:
    """Lay sequences of tokens one after the other.

    Args:
        sequences: S sequences with N tokens in total.
        past: [S], the position of each sequence's first token; None: 0.
        slots: [S + 1], the slot of each sequence and of the next one; None if no gradient is wanted.
        routes: [N, M k] int32, experts to replay; None: the routers choose.
        padding: right, left or none; for native numerics.
    """
    lengths = np.array([len(s) for s in sequences])
    first = np.zeros(len(lengths), np.int64) if past is None else np.asarray(past)
    start = np.concatenate([[0], np.cumsum(lengths)])
    position = np.arange(start[-1]) + np.repeat(first - start[:-1], lengths)
    return Ragged(
        ids=ints(np.concatenate([np.asarray(s, np.int64) for s in sequences])),
        start=ints(start),
        rows=Rows(
            sequence=ints(np.repeat(np.arange(len(lengths)), lengths)),
            position=ints(position),
            slots=ints(np.zeros(len(lengths) + 1)) if slots is None else slots,
        ),
        routes=None if routes is None else ints(routes.reshape(int(start[-1]), -1)),
        padding=padding,
    )


def single_row_sequences(rows: int, slots: Ints, sums: GradientSums | None) -> Rows:
    """Return rows of which each is a sequence, for example the rows of a control network."""
    return Rows(sequence=ints(np.arange(rows)), position=ints(np.zeros(rows)), slots=slots, sums=sums)


def index(rows: Ints, device: torch.device = CPU) -> Tensor:
    """Return rows as an index of torch."""
    return torch.from_numpy(np.asarray(rows, np.int64)).to(device)
