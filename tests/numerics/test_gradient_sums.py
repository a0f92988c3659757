"""Gradients of a minibatch in slots: the definition's bits for every number of ranks.

`tests/promises/test_kernels.py` cuts the minibatch into micro-batches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ppo_repro.errors import PromiseBroken
from ppo_repro.numerics import library
from ppo_repro.numerics.gradient_sums import GradientSums, SlotSums
from ppo_repro.numerics.structs import struct
from tests.numerics import definition
from tests.numerics.definition_elementary import Array, F
from tests.support.thread_ranks import in_threads

SLOTS, N, K = 8, 5, 19


@dataclass(frozen=True)
class Sequences:
    """Rows of a linear layer: of each sequence dy [T, N] and x [T, K]."""

    dy: list[Array]
    x: list[Array]

    def __len__(self) -> int:
        return len(self.dy)


def drawn(lengths: Sequence[int], seed: int = 0) -> Sequences:
    rng = np.random.default_rng(seed)

    def rows(columns: int) -> list[Array]:
        scale = np.exp2(rng.integers(-6, 7, columns))
        return [(rng.standard_normal((t, columns)) * scale).astype(F) for t in lengths]

    return Sequences(rows(N), rows(K))


def slots_of(count: int, first: int, after: int) -> list[int]:
    """The slots of sequences [first, after) of `count`, and of the one that follows."""
    return [SLOTS if i == count else definition.slot_of(i, count, SLOTS) for i in range(first, after + 1)]


def add(use: SlotSums, weight: Tensor, of: Sequences, first: int, after: int, slots: Sequence[int]) -> None:
    """The backward pass of a micro-batch of the sequences [first, after)."""
    lengths = [len(x) for x in of.x[first:after]]
    dy, x = (np.concatenate([*rows[first:after], np.zeros((0, c), F)]) for rows, c in ((of.dy, N), (of.x, K)))
    index = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    position = np.concatenate([np.zeros(0), *(np.arange(t) for t in lengths)]).astype(np.int32)
    matrix = struct("Matrix")(w=weight.data_ptr(), n=N, k=K, grad=use.offset(weight), bias_grad=-1)
    of_sequences = np.array(slots, np.int32)
    with use.adding(slots) as sums:
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (dy, x, index, position, of_sequences)]
        library.load().linear_backward(
            ctypes.byref(matrix),
            *(pointers[0], pointers[1], len(x), *pointers[2:], ctypes.byref(sums), None),
        )


def defined(of: Sequences, slots: int = SLOTS) -> Array:
    addends = [definition.weight_addends(dy, x, np.arange(len(x))) for dy, x in zip(of.dy, of.x, strict=True)]
    return definition.join_slots(definition.slot_sums((N, K), addends, slots))


def bits(a: Array | Tensor) -> bytes:
    return np.ascontiguousarray(a).tobytes()


def over_ranks(of: Sequences, size: int) -> list[Tensor]:
    """The gradient that each of several ranks ends with."""
    slots, found = SLOTS // size, []
    for rank in range(size):
        weight = nn.Parameter(torch.zeros(N, K))
        sums = GradientSums([("w", weight)], slots)
        mine = [i for i in range(len(of)) if definition.slot_of(i, len(of), SLOTS) // slots == rank]
        if mine:  # a rank without sequences makes no backward pass
            own = [*(definition.slot_of(i, len(of), SLOTS) - rank * slots for i in mine), slots]
            add(sums.use("linear", weight), weight, of, mine[0], mine[-1] + 1, own)
        found.append(sums)
    return in_threads(size, lambda ranks: found[ranks.rank].finish(ranks)["w"])


@pytest.mark.parametrize("sequences", [1, 3, 8, 13])
def test_ranks_give_the_bits_of_one_process(sequences: int) -> None:
    of = drawn([3 + i % 4 for i in range(sequences)], sequences)
    for size in (1, 2, 4, 8):
        gradients = over_ranks(of, size)
        assert len(gradients) == size and {bits(g) for g in gradients} == {bits(defined(of))}, size
    if sequences > 1:
        assert bits(defined(of, 1)) != bits(defined(of)), "another order shows"


def test_sequences_out_of_order_are_refused() -> None:
    of, weight = drawn([2] * 8), nn.Parameter(torch.zeros(N, K))
    use = GradientSums([("w", weight)], SLOTS).use("linear", weight)
    add(use, weight, of, 4, 6, slots_of(8, 4, 6))
    with pytest.raises(PromiseBroken, match="a sequence of slot 3 comes after those of slot 6"):
        add(use, weight, of, 3, 4, slots_of(8, 3, 4))
