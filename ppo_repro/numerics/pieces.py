"""Tensors that the processes of a run divide: each holds one piece of every tensor, laid out flat.

Integers are added up at the process that owns them, and travel in the fewest bytes that hold them. Weights come back as
their own bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.numerics.arithmetic.divided import Holders
from ppo_repro.ranks import ALONE, Ranks
from ppo_repro.shares import pieces

AT_ONCE = 1 << 22  # numbers of one exchange, over all its pieces


@dataclass(frozen=True)
class _Segment:
    """A part of every rank's piece of one tensor."""

    tensor: int
    ranges: tuple[range, ...]  # by rank


def _exchanges(counts: Sequence[int], size: int) -> Iterator[list[_Segment]]:
    """All numbers of tensors of `counts` numbers, as segments of at most AT_ONCE numbers together."""
    bucket: list[_Segment] = []
    room = AT_ONCE
    step = max(1, AT_ONCE // size)
    for tensor, count in enumerate(counts):
        whole = pieces(count, size)
        for start in range(0, max(map(len, whole)), step):
            segment = _Segment(tensor, tuple(piece[start : start + step] for piece in whole))
            numbers = sum(map(len, segment.ranges))
            if bucket and numbers > room:
                yield bucket
                bucket, room = [], AT_ONCE
            bucket.append(segment)
            room -= numbers
    if bucket:
        yield bucket


def _part(flat: Tensor, numbers: range) -> Tensor:
    return flat[numbers.start : numbers.stop]


def width(integers: Tensor) -> int:
    """The fewest bytes that hold each of some integers in two's complement; 0 where all are 0."""
    if not integers.numel():
        return 0
    low, high = (int(bound) for bound in torch.aminmax(integers))
    bits = max(high.bit_length(), (~low).bit_length() if low < 0 else 0)
    return 0 if low == high == 0 else bits // 8 + 1


def packed(integers: Tensor, width: int) -> Tensor:
    """The lowest `width` bytes of integers, flat [n] -> uint8 [n width]; lossless where `width` holds them."""
    return integers.to(torch.int64).contiguous().view(torch.uint8).view(-1, 8)[:, :width].reshape(-1)


def unpacked(data: Tensor, width: int) -> Tensor:
    """The integers of `packed`: uint8 [n width] -> int64 [n]; `width` is at least 1."""
    wide = torch.zeros(len(data) // width, 8, dtype=torch.uint8)
    wide[:, :width] = data.view(-1, width)
    integers = wide.view(torch.int64).view(-1)
    unused = 64 - 8 * width
    return integers.bitwise_left_shift_(unused).bitwise_right_shift_(unused)  # with the sign


def add_up_pieces(tensors: list[Tensor], ranks: Ranks, apart: bool) -> None:
    """Replace each integer tensor of a list by this rank's piece, flat, of the sum over all ranks.

    Shapes and dtypes are the same on every rank. `apart`: the piece has memory of its own, so that the tensor is freed
    as soon as its last piece is sent, unless the caller holds it too.
    """
    rank, size = ranks.rank, ranks.size
    widths = ranks.gather([bytes(width(t) for t in tensors)])
    counts, complete = [t.numel() for t in tensors], 0
    for bucket in [*_exchanges(counts, size), []]:
        while complete < (bucket[0].tensor if bucket else len(tensors)):
            own = _part(tensors[complete].view(-1), pieces(counts[complete], size)[rank])
            tensors[complete] = own.clone() if apart else own
            complete += 1
        if bucket:
            _add_bucket(tensors, bucket, widths, ranks)


def _add_bucket(tensors: Sequence[Tensor], bucket: Sequence[_Segment], widths: Sequence[bytes], ranks: Ranks) -> None:
    """Send the other ranks their segments of a bucket, and add theirs to those of this rank."""
    rank, others = ranks.rank, [r for r in range(ranks.size) if r != ranks.rank]
    parts = [torch.empty(0, dtype=torch.uint8)] * ranks.size
    coming = [0] * ranks.size
    for other in others:
        mine = [(tensors[s.tensor].view(-1), s.ranges[other], widths[rank][s.tensor]) for s in bucket]
        parts[other] = torch.cat([packed(_part(flat, numbers), each) for flat, numbers, each in mine])
        coming[other] = sum(len(s.ranges[rank]) * widths[other][s.tensor] for s in bucket)
    received = ranks.deal(parts, coming)
    for other in others:
        data = received[other]
        for segment in bucket:
            own, each = _part(tensors[segment.tensor].view(-1), segment.ranges[rank]), widths[other][segment.tensor]
            if each:
                own += unpacked(data[: len(own) * each], each).to(own.dtype)
            data = data[len(own) * each :]


def spread_pieces(tensors: Sequence[Tensor], ranks: Ranks) -> None:
    """Replace all but this rank's piece of each tensor by the pieces of the ranks that own them, to the bit.

    Contiguous float32 tensors, of the same shapes on every rank.
    """
    flat = [t.detach().view(-1) for t in tensors]
    rank = ranks.rank
    for bucket in _exchanges([len(t) for t in flat], ranks.size):
        own = torch.cat([_part(flat[s.tensor], s.ranges[rank]) for s in bucket]).view(torch.uint8)
        nothing = own[:0]
        parts = [nothing if other == rank else own for other in range(ranks.size)]
        coming = [0 if other == rank else 4 * sum(len(s.ranges[other]) for s in bucket) for other in range(ranks.size)]
        for other, data in enumerate(ranks.deal(parts, coming)):
            for segment in bucket if other != rank else ():
                target = _part(flat[segment.tensor], segment.ranges[other])
                # a piece may begin anywhere in the message: its bytes are copied, not taken as float32 where they lie
                target.view(torch.uint8).copy_(data[: 4 * len(target)])
                data = data[4 * len(target) :]


@dataclass(frozen=True)
class Divided:
    """A tensor of which this process holds one piece."""

    piece: Tensor  # flat
    shape: torch.Size
    ranks: Holders

    def whole(self) -> Tensor:
        """The tensor, from the pieces of all ranks, which must call this too."""
        return torch.cat(self.ranks.gather([self.piece])).view(self.shape)


@dataclass(frozen=True)
class Division:
    """What the processes of a run divide of an optimizer's state, as `layout.mesh.zero` says.

    Rajbhandari et al., 2020, section 5: the moments of stage 1; in stage 2 the sums of gradients are freed as soon as
    their owners have them, which here is after the backward pass.
    """

    ranks: Ranks
    zero: int

    @property
    def divides(self) -> bool:
        """Whether there is anything to divide."""
        return self.zero > 0 and self.ranks.size > 1

    @property
    def owners(self) -> Ranks:
        """The processes that each hold their pieces of a tensor; this one alone if none divides."""
        return self.ranks if self.divides else ALONE

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's piece of a contiguous tensor, flat, in the memory of the tensor; all of it if none divides."""
        if not self.divides:
            return tensor
        return _part(tensor.view(-1), pieces(tensor.numel(), self.ranks.size)[self.ranks.rank])

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """`spread_pieces`, if anything is divided."""
        if self.divides:
            spread_pieces(tensors, self.ranks)

    def held(self, piece: Tensor, shape: torch.Size) -> Tensor | Divided:
        """What this process holds of a tensor: a piece, or all of it."""
        return Divided(piece, shape, self.ranks) if self.divides else piece


WHOLE = Division(ALONE, 0)
