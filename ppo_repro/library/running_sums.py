"""Gradients in the `grad` of parameters, for a training loop that calls `backward` and an optimizer of torch itself.

One slot stays open, so a gradient is one chain over all sequences since `zero_grad`: a batch of eight sequences and
eight batches of one give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ppo_repro.numerics.gradient_sums import GradientSums, Slots, SlotSums, Sums


class RunningSums(GradientSums):
    """Sums that go on from the `grad` of each parameter, whoever set it, and are put there after each backward pass."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(parameters, slots=1)
        self._users: dict[int, list[SlotSums]] = {id(p): [] for p in self.trained.values()}
        self._published: dict[int, tuple[Tensor, int]] = {}  # what `grad` was set to, and its version

    def _made(self, parameters: Sequence[Tensor]) -> SlotSums:
        use = _RunningUse(parameters, self)
        for p in use.parameters:
            self._users[id(p)].append(use)
        return use

    def go_on(self, use: SlotSums) -> None:
        """Make the sums of all uses what `grad` says: nothing after `zero_grad`, or another tensor."""
        for p in use.parameters:
            if p.grad is None:
                self._published.pop(id(p), None)
        only_here = [p for p in use.parameters if len(self._users[id(p)]) == 1] or use.parameters
        if all(p.grad is None for p in only_here):
            use.release()  # the earlier gradients may still be in use elsewhere
        for p in use.parameters:
            grad, (published, version) = p.grad, self._published.get(id(p), (None, 0))
            if grad is None:
                for each in self._users[id(p)]:
                    each.view(p).zero_()
            elif grad is not published or grad._version != version:
                value = grad.clone()
                for each in self._users[id(p)]:
                    each.view(p).zero_()
                use.view(p).copy_(value)

    def publish(self, use: SlotSums) -> None:
        """Set `grad` to the sum over all uses: their memory itself if there is one use."""
        for p in use.parameters:
            first, *others = (each.view(p) for each in self._users[id(p)])
            published = self._published.get(id(p), (None, 0))[0]
            if others or published is None or published.data_ptr() != first.data_ptr():
                for other in others:
                    first = first + other
                published = first
            p.grad = published
            self._published[id(p)] = published, published._version


class _RunningUse(SlotSums):
    def __init__(self, parameters: Sequence[Tensor], owner: RunningSums) -> None:
        self._owner = owner
        super().__init__(parameters, slots=1)

    def begin(self) -> None:
        self._slot, self._is_open = 0, True

    @contextmanager
    def adding(self, slots: Slots) -> Iterator[Sums]:
        if any(slots):
            raise ValueError(f"slots {list(slots)}; running sums have one slot, which stays open")
        with torch.no_grad():
            self._owner.go_on(self)
            with super().adding(slots) as sums:
                yield sums
            self._owner.publish(self)
