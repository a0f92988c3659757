"""Add the gradients of a deterministic model to `.grad`, also if other code wrote `.grad`.

A gradient is one chain of additions over all sequences since `zero_grad`. So a batch of eight sequences and eight
batches of one give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.numerics.gradient_sums import GradientSums, Group, Slots, SlotSums
from ppo_repro.numerics.interface import Struct

_ROWS = 1024  # of a gradient that are compared at once


class RunningSums(GradientSums):
    """Gradient sums that continue from `grad`, and write `grad` as stock torch does: in place, or anew after None.

    If a parameter has one use, a new `grad` shares the memory of the sum. If a parameter has two uses, `grad` is the
    sum of both uses' gradients. Each use continues its own sum as long as `grad` is still the sum of both.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(parameters, slots=1)
        self._uses_of: dict[int, list[_RunningUse]] = {id(p): [] for p in self.trained.values()}

    def make_sums(self, groups: Sequence[Group]) -> SlotSums:
        use = _RunningUse(groups, self)
        for p in use.parameters:
            self._uses_of[id(p)].append(use)
        return use

    def go_on(self, use: _RunningUse) -> None:
        """Let the sums of a use, and of its parameters' other uses, begin with `grad`, or with 0 if it is None."""
        self._check()
        used_once = [p for p in use.parameters if len(self._uses_of[id(p)]) == 1]
        if use.is_lent and not all(_is_same(p.grad, use.view(p)) for p in used_once):
            use.release()  # the caller may have kept the earlier gradients
        for p in use.parameters:
            grad, sums = p.grad, [each.view(p) for each in self._uses_of[id(p)]]
            if _is_same(grad, sums[0]) if len(sums) == 1 else _is_total(grad, sums):
                continue
            for each in sums:
                each.zero_()
            if grad is not None:
                use.view(p).copy_(grad)

    def _check(self) -> None:
        """Raise UserError for a `grad` to which nothing can be added."""
        for name, p in self.trained.items():
            if p.grad is not None and _kind(p.grad) != _kind(p):
                raise UserError(f"the gradient of {name} is {_kind(p.grad)}; must be {_kind(p)}")
        begins = [p.grad.data_ptr() for p in self.trained.values() if p.grad is not None and p.grad.numel()]
        if len(set(begins)) < len(begins):
            names = [n for n, p in self.trained.items() if p.grad is not None and begins.count(p.grad.data_ptr()) > 1]
            raise UserError(f"{names[0]} and {names[1]} have one gradient in common; give each a tensor of its own")

    def publish(self, use: _RunningUse) -> None:
        """Write the sums over all uses into `grad`."""
        for p in use.parameters:
            first, *others = (each.view(p) for each in self._uses_of[id(p)])
            if others:
                if p.grad is None or _is_same(p.grad, first):  # until now there was one use
                    p.grad = torch.empty_like(first)
                p.grad.copy_(first)
                for other in others:
                    p.grad.add_(other)
            elif p.grad is None:
                p.grad, use.is_lent = first, True
            elif not _is_same(p.grad, first):
                p.grad.copy_(first)


def _kind(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f"{tensor.layout} "
    return f"{layout}{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def _is_same(grad: Tensor | None, view: Tensor) -> bool:
    """Return whether two tensors are the same memory."""
    return grad is not None and grad.data_ptr() == view.data_ptr() and grad.stride() == view.stride()


def _is_total(grad: Tensor | None, sums: Sequence[Tensor]) -> bool:
    """Return whether `grad` is the sum of some tensors, added in order. A few rows at a time save memory."""
    if grad is None:
        return False
    parts = zip(grad.split(_ROWS), *(each.split(_ROWS) for each in sums), strict=True)
    return all(torch.equal(part, sum(others, first)) for part, first, *others in parts)


class _RunningUse(SlotSums):
    def __init__(self, groups: Sequence[Group], owner: RunningSums) -> None:
        self._owner, self.is_lent = owner, False  # lent: the caller may have parts of the memory as gradients
        super().__init__(groups, slots=1)

    def release(self) -> None:
        super().release()
        self.is_lent = False

    def begin(self) -> None:
        self._slot, self._is_open = 0, True

    @contextmanager
    def adding(self, slots: Slots) -> Iterator[Struct]:
        if any(slots):
            raise ValueError(f"slots {list(slots)}; running sums have one slot, which stays open")
        with torch.no_grad():
            self._owner.go_on(self)
            with super().adding(slots) as sums:
                yield sums
            self._owner.publish(self)
