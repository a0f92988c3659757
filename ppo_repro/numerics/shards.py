"""Divide trained tensors among the ranks of a run: each rank adds up, keeps moments of, and steps on its own shards.

A shard is a range of elements. It begins where a stretch of rule 3 begins, so one rank sums the squares of a stretch.
The shards of a tensor lie in the order of the ranks' *positions*. A position is the rank with its bits reversed: with 4
ranks the order of the shards is 0, 2, 1, 3. Rule 2 joins ranks 0 and 1 first. Then each of the two ranks keeps one half
of the tensor, and sends the other half as one range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.base.ranks import Ranks
from ppo_repro.numerics.interface import constants

STRETCH = constants.STRETCH
MESSAGE = 1 << 24  # elements of the tensors whose parts are sent together


def position_of(rank: int, size: int) -> int:
    """Return the position of one of `size` ranks, a power of two: the bits of the rank in reverse."""
    bits = size.bit_length() - 1
    return sum(((rank >> i) & 1) << (bits - 1 - i) for i in range(bits))


@dataclass(frozen=True)
class Shards:
    """The elements of each tensor that each position owns: position k owns `cuts[name][k]` to `cuts[name][k + 1]`."""

    ranks: Ranks
    cuts: Mapping[str, Sequence[int]]

    @property
    def position(self) -> int:
        """Return the position of this rank."""
        return position_of(self.ranks.rank, self.ranks.size)

    def in_order(self) -> list[int]:
        """Return the ranks in the order of their positions."""
        return [position_of(position, self.ranks.size) for position in range(self.ranks.size)]

    def own(self, name: str) -> slice:
        """Return the elements of a flat tensor that this rank owns."""
        return self._elements(name, range(self.position, self.position + 1))

    def own_shard(self, name: str, tensor: Tensor) -> Tensor:
        """Return the elements that this rank owns as a view: flat, or in the tensor's shape if these are all."""
        flat, own = tensor.detach().view(-1), self.own(name)
        return tensor.detach() if own == slice(0, len(flat)) else flat[own]

    def add_up(self, flat: Mapping[str, Tensor]) -> None:
        """Replace the owned elements of flat tensors by their sums over all ranks. The other elements become useless.

        Rule 2: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). In round b a rank and rank XOR 2^b each hold sums of one
        range, send each other the half that the other keeps, and add. So a rank sends (size - 1) / size of the
        elements. Raises RankLost if a rank is gone.
        """
        for other, kept, given in self._rounds():
            for names in _messages(flat):
                keep = [flat[name][self._elements(name, kept)] for name in names]
                for mine, theirs in zip(keep, self._swapped(flat, names, given, keep, other), strict=True):
                    mine += theirs

    def spread(self, flat: Mapping[str, Tensor]) -> None:
        """Copy the owned elements of flat tensors to all ranks. Raises RankLost if a rank is gone."""
        for other, owned, wanted in reversed(list(self._rounds())):
            for names in _messages(flat):
                want = [flat[name][self._elements(name, wanted)] for name in names]
                for mine, theirs in zip(want, self._swapped(flat, names, owned, want, other), strict=True):
                    mine.copy_(theirs)

    def joined(self, name: str, own: Tensor) -> Tensor | None:
        """Return the whole flat tensor on the CPU, from every rank's own part; None on all ranks but the first."""
        parts = self.ranks.to_first(own.cpu().view(-1))
        if not self.ranks.is_first:
            return None
        return torch.cat([parts[rank] for rank in self.in_order()])

    def _elements(self, name: str, positions: range) -> slice:
        return slice(self.cuts[name][positions.start], self.cuts[name][positions.stop])

    def _rounds(self) -> Iterator[tuple[int, range, range]]:
        """Yield for each round the other rank, and the positions that this rank and the other rank keep."""
        bit, half = 1, self.ranks.size // 2
        while half:
            kept, given = (position // half * half for position in (self.position, self.position ^ half))
            yield self.ranks.rank ^ bit, range(kept, kept + half), range(given, given + half)
            bit, half = bit * 2, half // 2

    def _swapped(
        self, flat: Mapping[str, Tensor], names: Sequence[str], sent: range, like: Sequence[Tensor], other: int
    ) -> Sequence[Tensor]:
        """Send the elements of some positions, and return what the other rank sends, in the sizes of `like`."""
        ours = torch.cat([flat[name][self._elements(name, sent)] for name in names])
        theirs = ours.new_empty(sum(map(len, like)))
        self.ranks.swap(ours, theirs, other)
        return theirs.split([len(part) for part in like])


def _messages(flat: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names in groups of at most MESSAGE elements, or of one tensor."""
    names: list[str] = []
    elements = 0
    for name, tensor in flat.items():
        if names and elements + len(tensor) > MESSAGE:
            yield names
            names, elements = [], 0
        names.append(name)
        elements += len(tensor)
    if names:
        yield names


def divided(tensors: Mapping[str, Tensor], ranks: Ranks) -> Shards:
    """Divide the stretches of each tensor evenly. From tensor to tensor, other ranks get one stretch more."""
    cuts = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        n, stretches, odd = tensor.numel(), -(-tensor.numel() // STRETCH), number % ranks.size
        ends = [(stretches * position + odd) // ranks.size for position in range(ranks.size + 1)]
        cuts[name] = [min(n, end * STRETCH) for end in ends]
    return Shards(ranks, cuts)


def owned_whole(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, int]:
    """Choose the position that owns each whole tensor, so that all positions own about equally many elements."""
    held = [0] * ranks.size
    positions = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].numel(), name)):
        positions[name] = held.index(min(held))
        held[positions[name]] += tensors[name].numel()
    return positions


def whole_cuts(tensor: Tensor, position: int, ranks: Ranks) -> list[int]:
    """Return the cuts of a tensor of which one position owns all elements."""
    return [0] * (position + 1) + [tensor.numel()] * (ranks.size - position)
