"""Compute rule 2, the gradient of a weight: add blocks of 128 positions to slots, and join the slots as a tree.

A sequence contributes a list of addends for each parameter. `slot_sums` adds the addends of all sequences one by one,
in the order of the sequences. The code knows no micro-batches, threads or processes, so these cannot change a bit. A
kernel that stops between two sequences must save the open slot's sum and the sums of finished subtrees.

To sum a minibatch of S sequences: `slot_of` -> `weight_addends`, `column_addends` or `row_addends` -> `slot_sums` ->
`join_slots`. `network.gradients` does it for every parameter of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ppo_repro.numerics.definition.elementary import Array, D, F
from ppo_repro.numerics.definition.product import BLOCK, Precision, block_sum

EVERYWHERE = ...

# What a sequence adds to one gradient: (where, addend) in order, for total[where] = total[where] + addend
Addends = list[tuple[Any, Array]]

Contributions = dict[str, Addends]  # by the parameter's path, as in `model.parameters`


def slot_of(sequence: int, sequences: int, slots: int) -> int:
    """Return the slot of sequence i of S: slot s has the sequences floor(s S / slots) .. floor((s + 1) S / slots) - 1.

    A minibatch of fewer sequences than slots has empty slots. The package computes slots in `sequences.slots_of`.
    """
    return ((sequence + 1) * slots - 1) // sequences


def blocks_of(position: Array) -> list[Array]:
    """Return the rows of each block of 128 positions, in order. `position` [rows] rises. Kernel: `make_blocks`.

    A block is a range of positions, not of rows, so missing rows do not move its bounds.
    """
    block = position // BLOCK
    return [np.flatnonzero(block == b) for b in np.unique(block)]


def weight_addends(dy: Array, x: Array, position: Array, precision: Precision = "highest") -> Addends:
    """Compute rule 2 for a matrix: dW[n, k] = sum_t dy[t, n] x[t, k], one sum by rising position for each block.

    dy [rows, N], x [rows, K]; each addend [N, K]. An expert's rows are the tokens that chose it. A sequence without
    tokens of the expert adds nothing. Kernel: `weight_gradient`.
    """
    return [(EVERYWHERE, block_sum(dy[rows].T, x[rows].T, precision, "none")) for rows in blocks_of(position)]


def column_addends(dy: Array, x: Array | None, position: Array) -> Addends:
    """Compute rule 2 for biases and norms: db[c] = sum_t dy[t, c], or dw[c] = sum_t dy[t, c] x[t, c].

    Each block is summed in float64, term by term, and rounded once: the terms of a norm's weight may be far larger than
    their sum. dy and x are [rows, C], or [rows, heads, C]: then the heads of a row follow one another. Each addend is
    [C]. Kernel: `column_sums`.
    """
    addends: Addends = []
    for rows in blocks_of(position):
        acc = np.zeros(dy.shape[-1:], D)
        for row in rows:
            for index in np.ndindex(dy.shape[1:-1]):
                acc += dy[row][index].astype(D) * (1.0 if x is None else x[row][index].astype(D))
        addends.append((EVERYWHERE, acc.astype(F)))
    return addends


def row_addends(dx: Array, ids: Array) -> Addends:
    """Compute rule 2 for a table: d table[id] = sum of dx[t] over the rows t with this id, row by row, without blocks.

    dx [rows, H], ids [rows]; each addend [H] goes to one row of the table. Kernel: `table_gradient`.
    """
    return list(zip((int(i) for i in ids), dx, strict=True))


def slot_sums(shape: tuple[int, ...], sequences: Sequence[Addends], slots: int) -> list[Array]:
    """Return `slots` sums of this shape: add each sequence's addends to the sum of its slot, one by one from +0."""
    sums = [np.zeros(shape, F) for _ in range(slots)]
    for index, addends in enumerate(sequences):
        total = sums[slot_of(index, len(sequences), slots)]
        for where, addend in addends:
            total[where] = total[where] + addend
    return sums


def join_slots(sums: Sequence[Array]) -> Array:
    """Join the slots as ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). Kernels: `close_slots`, `join_sums`.

    Each of P processes has slots / P consecutive slots, and joins them; then the processes are joined in the same way.
    """
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]
