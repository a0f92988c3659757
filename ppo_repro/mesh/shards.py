"""Weights that the processes of a run hold in pieces, and that each has whole for as long as one product takes.

Processes compute different sequences, in different numbers of passes, so none of them knows what the others need next.
In each exchange every process says which weight it wants, and all send it their pieces of that one. A process that has
done its share, and waits for the others, gives them its pieces meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ppo_repro.errors import Failure
from ppo_repro.ranks import Ranks
from ppo_repro.shares import pieces

WANTED = "the weight that is wanted"
NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class ShardRanks(Ranks):
    """All processes of a run, each with its piece of every weight that was given to `keep` (ZeRO 3).

    All of them keep the same weights in the same order. Rajbhandari et al., 2020, section 5.3.
    """

    kept: list[tuple[Tensor, int]] = field(default_factory=list, repr=False, compare=False)  # piece, numbers of all

    @property
    def divides_weights(self) -> bool:
        return True

    def keep(self, piece: Tensor, count: int) -> int:
        """The number under which a weight of `count` float32 numbers is asked for; `piece` is this process's, flat."""
        self.kept.append((piece, count))
        return len(self.kept) - 1

    def whole(self, number: int) -> Tensor:
        """All numbers of a weight, flat float32, in memory of its own."""
        found = self._give(number)
        assert found is not None, "it was wanted"
        return found

    def _exchange(self, what: str, value: Any, failure: Failure | None = None) -> list[Any]:
        while self._give(None) is not None:  # until all others are at an exchange that is not about weights
            pass
        return super()._exchange(what, value, failure)

    def _give(self, wanted: int | None) -> Tensor | None:
        """Give the others what they want of this process; the weight `wanted`, or nothing in particular for None.

        None where nobody wants anything any more.
        """
        wishes: list[int | None] = super()._exchange(WANTED, wanted)
        if all(wish is None for wish in wishes):
            return None
        parts = [
            NOTHING if wish is None or rank == self.rank else self.kept[wish][0].detach().view(torch.uint8)
            for rank, wish in enumerate(wishes)
        ]
        count = 0 if wanted is None else self.kept[wanted][1]
        ranges = pieces(count, self.size)
        received = self.deal(parts, [0 if r == self.rank else 4 * len(each) for r, each in enumerate(ranges)])
        whole = torch.empty(count)
        for rank, each in enumerate(ranges):
            target = whole[each.start : each.stop]
            if rank != self.rank:
                target.view(torch.uint8).copy_(received[rank])
            elif wanted is not None:
                target.copy_(self.kept[wanted][0].detach())
        return whole
