"""Pieces of tensors that processes divide: integers add up to the sums of Python, weights keep every bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.numerics import pieces
from ppo_repro.numerics.pieces import Division, add_up_pieces, packed, spread_pieces, unpacked, width
from ppo_repro.ranks import ALONE, Ranks
from ppo_repro.shares import pieces as cut
from tests.support.in_order import sum_in_order
from tests.support.thread_ranks import ThreadRanks, in_threads

integers = st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300) | st.just(0)


def test_pieces_by_hand() -> None:
    assert cut(7, 3) == [range(0, 2), range(2, 4), range(4, 7)]
    assert cut(1, 3) == [range(0, 0), range(0, 0), range(0, 1)]
    assert cut(0, 2) == [range(0, 0)] * 2


@given(st.integers(0, 1000), st.integers(1, 9))
def test_pieces_are_everything_once_and_nearly_equal(count: int, size: int) -> None:
    found = cut(count, size)
    assert [i for piece in found for i in piece] == list(range(count))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(
    ("values", "bytes_each"),
    [
        ([], 0),
        ([0, 0], 0),
        ([127, -128], 1),
        ([128], 2),
        ([-129], 2),
        ([2**47 - 1], 6),
        ([-(2**47) - 1], 7),
        ([2**63 - 1, -(2**63)], 8),
    ],
)
def test_the_fewest_bytes_by_hand(values: list[int], bytes_each: int) -> None:
    assert width(torch.tensor(values, dtype=torch.int64)) == bytes_each


@given(st.lists(integers, min_size=1, max_size=20))
def test_integers_travel_without_loss_and_in_no_byte_fewer(values: list[int]) -> None:
    tensor = torch.tensor(values, dtype=torch.int64)
    needed = width(tensor)

    def fits(each: int) -> bool:
        return all(v == 0 if each == 0 else -(2 ** (8 * each - 1)) <= v < 2 ** (8 * each - 1) for v in values)

    assert needed == next(each for each in range(9) if fits(each))
    if needed:
        data = packed(tensor, needed)
        assert len(data) == needed * len(values) and unpacked(data, needed).tolist() == values
    if needed > 1:
        assert unpacked(packed(tensor, needed - 1), needed - 1).tolist() != values


def of_rank(shapes: list[tuple[int, ...]], rank: int, limit: int, dtype: torch.dtype = torch.int64) -> list[Tensor]:
    rng = np.random.default_rng(rank)
    return [torch.from_numpy(rng.integers(-limit, limit, shape)).to(dtype) for shape in shapes]


@settings(max_examples=30)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), min_size=1, max_size=5),
    st.sampled_from([1, 2**7, 2**30, 2**60]),
    st.sampled_from([3, 16, 1 << 22]),
    st.booleans(),
)
def test_sums_of_pieces_are_those_of_python_integers(
    size: int, shapes: list[tuple[int, ...]], limit: int, at_once: int, apart: bool
) -> None:
    dtype = torch.int32 if limit <= 2**29 else torch.int64

    def work(ranks: Ranks) -> list[Tensor]:
        tensors = of_rank(shapes, ranks.rank, limit, dtype)
        add_up_pieces(tensors, ranks, apart)
        return tensors

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "AT_ONCE", at_once)
        found = in_threads(size, work)
    everything = [of_rank(shapes, rank, limit) for rank in range(size)]
    for i in range(len(shapes)):
        expected = [sum(column) for column in zip(*(own[i].flatten().tolist() for own in everything), strict=True)]
        assert [v for pieces_of in found for v in pieces_of[i].tolist()] == expected
        assert {pieces_of[i].dtype for pieces_of in found} == {dtype}


def test_a_piece_apart_does_not_hold_the_whole_tensor() -> None:
    def work(apart: bool) -> list[int]:
        def of(ranks: Ranks) -> int:
            tensors = of_rank([(8, 4)], ranks.rank, 100)
            add_up_pieces(tensors, ranks, apart)
            return tensors[0].untyped_storage().nbytes()

        return in_threads(2, of)

    assert work(True) == [8 * 16] * 2
    assert work(False) == [8 * 32] * 2


def test_a_float_sum_depends_on_who_adds_what() -> None:
    """The control: the same division of float32 numbers, which are rounded at every addition."""
    x = torch.tensor([[2.0**24], [1.0], [1.0]])
    whole, divided = sum_in_order(x), sum_in_order(torch.stack([x[0], sum_in_order(x[1:])]))
    assert whole.tolist() == [2.0**24] and divided.tolist() == [2.0**24 + 2]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_spread_pieces_keep_every_bit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", 8)
    bits = torch.tensor([0x7F800001, -0x80000000, 1, 0x7FC12345, 0, -1, 5, 6, 7, 8, 9], dtype=torch.int32)
    expected = [bits.clone(), bits[:6].view(2, 3).clone(), bits[:1].clone(), bits[:0].clone()]

    def work(ranks: Ranks) -> list[list[int]]:
        tensors = [t.clone().view(torch.float32) for t in expected]
        for tensor in tensors:  # only its own piece is known to each rank
            own = Division(ranks, 1).own(tensor).clone()
            tensor.fill_(-7.0)
            Division(ranks, 1).own(tensor).copy_(own)
        Division(ranks, 1).spread(tensors)
        return [t.view(torch.int32).flatten().tolist() for t in tensors]

    assert in_threads(size, work) == [[t.flatten().tolist() for t in expected]] * size


def test_what_travels_is_what_was_promised() -> None:
    def work(ranks: ThreadRanks) -> tuple[int, int]:
        sums = [torch.full((10, 10), 2**40), torch.zeros(50, dtype=torch.int64)]
        add_up_pieces(sums, ranks, False)
        integers = sum(ranks.sent)
        spread_pieces([torch.zeros(100)], ranks)
        return integers, sum(ranks.sent) - integers

    # half of 100 integers of 42 bits with their sign, and none of the zeros; half of 100 float32
    assert in_threads(2, work) == [(50 * 6, 50 * 4)] * 2


def test_one_process_divides_nothing() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    for division in (Division(ALONE, 2), Division(Ranks(0, 2), 0)):
        assert not division.divides and division.own(tensor) is tensor and division.owners is ALONE
        division.spread([tensor])
        assert division.held(tensor, tensor.shape) is tensor
