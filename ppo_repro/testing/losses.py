"""A loss of one's own as trainers show it a batch: micro-batches, padding, junk under the mask, turns, ranks, dtypes.

A loss sees one micro-batch, padded or packed, on one rank. What an optimizer step computes should follow from the
tokens that count alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ppo_repro.errors import UserError
from ppo_repro.seeding import permutation

if TYPE_CHECKING:
    import pandas as pd

Combine = Literal["mean", "sum"]
Junk = Literal["", "finite", "not finite"]
NOT_FINITE = (math.nan, math.inf, -math.inf)
# relative; float64 sums of a million terms stay below 1e-10, changes of meaning are far above
TOLERANCE = 1e-9
# of a log-ratio of 800 float32 keeps 1e-4; a right loss in float32 stays below
TOLERANCES = {torch.float64: TOLERANCE, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
LOG_RATIOS = (1e-8, -1e-8, 20.0, -20.0, 100.0, -100.0, 800.0, -800.0)


@dataclass(frozen=True)
class LossRollout:
    """B responses with N tokens together, in order of sequences and positions.

    `lengths` [B] are tokens of a response, `new_logprobs` [N] float64 in nats, `columns` [N] float64 each, `mask` [N]
    bool (None: all True), False at tokens that do not count, as those of a tool. UserError for a response without a
    token that counts, and for another shape or dtype.
    """

    lengths: tuple[int, ...]
    new_logprobs: Tensor  # the gradient is taken with respect to them
    columns: Mapping[str, Tensor]  # old_logprobs, advantages, whatever the loss reads
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        count = sum(self.lengths)
        if not self.lengths or min(self.lengths) < 1:
            raise UserError("loss rollout: needs at least one response, and a token in each")
        for name, column in {"new_logprobs": self.new_logprobs, **self.columns, "mask": self.counts}.items():
            dtype = torch.bool if name == "mask" else torch.float64
            if column.shape != (count,) or column.dtype != dtype:
                found = f"{column.dtype} {list(column.shape)}"
                raise UserError(f"loss rollout: {name} is {found}; must be {dtype} [{count}]")
        if not all(bool(part.any()) for part in self.counts.split(self.lengths)):
            raise UserError("loss rollout: a response has no token that counts; leave it out")

    @property
    def counts(self) -> Tensor:
        """Which tokens count, bool [N]."""
        return torch.ones(sum(self.lengths), dtype=torch.bool) if self.mask is None else self.mask

    def describe(self, index: int) -> str:
        """Sequence and position of a token, in words."""
        ends = np.cumsum(self.lengths)
        sequence = int(np.searchsorted(ends, index, side="right"))
        return f"sequence {sequence}, position {index - int(ends[sequence] - self.lengths[sequence])}"


@dataclass(frozen=True)
class LossBatch:
    """What a loss is called with: R rows of L positions of one micro-batch.

    `new_logprobs` [R, L] in nats, with a gradient; `columns` [R, L] each, of the same dtype; `mask` [R, L] bool, False
    at padding and at tokens that do not count, where the columns may hold anything; `sequences` [R, L] int64, the
    response of a token, -1 at padding (a packed row has several). `step_tokens` counts the tokens that count and
    `step_sequences` the responses of the whole optimizer step, all micro-batches and ranks.
    """

    new_logprobs: Tensor
    columns: Mapping[str, Tensor]
    mask: Tensor
    sequences: Tensor
    step_tokens: int
    step_sequences: int


Loss = Callable[[LossBatch], Tensor]


@dataclass(frozen=True)
class LossLayout:
    """How the sequences of one optimizer step are shown to the loss.

    `micro_batch` sequences in a pass (0: all), in the given `order`, over `ranks` processes; `padding` on the right or
    left, or rows packed without any, `extra` more columns of it than are needed; `inserted` tokens that do not count
    after each second token. `junk` fills every column under the mask with numbers of its own. `dtype` is that of all
    numbers.
    """

    micro_batch: int = 0
    padding: Literal["right", "left", "packed"] = "right"
    extra: int = 0
    inserted: int = 0
    junk: Junk = ""
    order: Literal["given", "reversed", "shuffled"] = "given"
    ranks: int = 1
    dtype: torch.dtype = torch.float64

    def describe(self) -> str:
        """The fields that are not the default."""
        fields = {name: value for name, value in vars(self).items() if value != getattr(WHOLE, name)}
        words = (f"{name.replace('_', ' ')} {str(value).removeprefix('torch.')}" for name, value in fields.items())
        return ", ".join(words) or "all at once, padded right"


WHOLE = LossLayout()
ROWS = (  # of one batch
    LossLayout(padding="left"),
    LossLayout(extra=3),
    LossLayout(extra=1, junk="finite"),
    LossLayout(extra=1, junk="not finite"),
    LossLayout(inserted=2),
    LossLayout(inserted=1, junk="not finite"),
    LossLayout(order="shuffled"),
)
LAYOUTS = (
    *(LossLayout(micro_batch=n) for n in (1, 2, 3)),
    *ROWS,
    LossLayout(padding="packed"),
    LossLayout(order="reversed"),
    LossLayout(ranks=2),
    LossLayout(ranks=3),
    LossLayout(micro_batch=1, padding="packed", order="shuffled", ranks=2),
)


class Step(NamedTuple):
    """The loss of one optimizer step and its gradient with respect to `new_logprobs`, in the order of the rollout."""

    value: float
    gradients: Tensor  # [N] float64
    under_mask: int  # positions that do not count, with a gradient other than 0


def rollout_of(frame: pd.DataFrame) -> LossRollout:
    """A rollout from a data frame with one row per token: `sequence`, `new_logprobs`, and what else the loss reads.

    Rows of a sequence are in the order of `position` if there is such a column; `mask` is 0 at tokens that do not
    count. UserError names a column that is missing or holds no finite numbers.
    """
    for name in ("sequence", "new_logprobs"):
        if name not in frame.columns:
            raise UserError(f"loss rollout: the frame has no column '{name}'; there are {', '.join(map(str, frame))}")
    frame = frame.sort_values([n for n in ("sequence", "position") if n in frame.columns], kind="stable")
    lengths = tuple(int(n) for n in frame.groupby("sequence", sort=True).size())
    columns: dict[str, Tensor] = {}
    for name in frame.columns.drop(["sequence", "position"], errors="ignore"):
        try:
            columns[str(name)] = torch.tensor(frame[name].to_numpy(dtype="float64"))
        except (TypeError, ValueError) as error:
            raise UserError(f"loss rollout: column '{name}' holds no numbers; leave it out of the frame") from error
        if not bool(torch.isfinite(columns[str(name)]).all()):
            raise UserError(f"loss rollout: column '{name}' holds numbers that are not finite; leave them out")
    mask = columns.pop("mask") != 0 if "mask" in columns else None
    return LossRollout(lengths, columns.pop("new_logprobs"), columns, mask)


def step(loss: Loss, rollout: LossRollout, layout: LossLayout, combine: Combine) -> Step:
    """One optimizer step under a layout. UserError if the loss returns no scalar."""
    order = ordered(len(rollout.lengths), layout)
    ranks = [sequences for rank in range(layout.ranks) if (sequences := order[rank :: layout.ranks])]
    value, under_mask, gradients = 0.0, 0, torch.zeros(sum(rollout.lengths), dtype=torch.float64)
    for sequences in ranks:
        size = layout.micro_batch or len(sequences)
        passes = [sequences[i : i + size] for i in range(0, len(sequences), size)]
        weight = 1.0 if combine == "sum" else 1.0 / (len(passes) * len(ranks))
        for some in passes:
            batch, indices = lay_out(rollout, some, layout)
            result = loss(batch)
            if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
                raise UserError("loss: must return a tensor with one number that depends on new_logprobs")
            (grad,) = torch.autograd.grad(result.reshape(()), batch.new_logprobs)
            value += weight * float(result.detach())
            gradients[indices[batch.mask]] += weight * grad[batch.mask].double()
            under_mask += int((grad[~batch.mask] != 0).sum())  # NaN is not 0
    return Step(value, gradients, under_mask)


def ordered(count: int, layout: LossLayout) -> list[int]:
    """The sequences in the order of a layout."""
    if layout.order == "shuffled":
        return permutation(count, "loss layout").tolist()
    return list(range(count))[:: -1 if layout.order == "reversed" else 1]


def lay_out(rollout: LossRollout, sequences: Sequence[int], layout: LossLayout) -> tuple[LossBatch, Tensor]:
    """A batch, and the index in the rollout of each of its positions [R, L], below 0 where there is none."""
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
    mask = there & rollout.counts[indices.clamp(min=0)]

    def column(values: Tensor, number: int) -> Tensor:
        filled = torch.where(there, values[indices.clamp(min=0)], 0.0)
        return torch.where(mask, filled, _junk(layout.junk, number, filled)).to(layout.dtype)

    new = column(rollout.new_logprobs, 0)
    batch = LossBatch(
        new_logprobs=new.requires_grad_(),
        columns={name: column(values, i) for i, (name, values) in enumerate(rollout.columns.items(), 1)},
        mask=mask,
        sequences=torch.tensor([padded(row) for row in owners]),
        step_tokens=int(rollout.counts.sum()),
        step_sequences=len(rollout.lengths),
    )
    return batch, indices


def _junk(kind: Junk, number: int, otherwise: Tensor) -> Tensor:
    """What stands under the mask, [R, L]: in each column, and at each position, another number.

    The model computes the new log-probs (column 0) at padding too: they are finite.
    """
    if not kind:
        return otherwise
    index = torch.arange(otherwise.numel(), dtype=torch.float64).reshape(otherwise.shape)
    if kind == "finite" or number == 0:
        return (-1.0) ** number * (7.0 + 60.0 * number + index) * (10.0 if number else -1.0)
    return torch.tensor(NOT_FINITE, dtype=torch.float64)[(index.long() + number) % 3]


def _extremes(rollout: LossRollout, log_ratios: Sequence[float]) -> Iterator[tuple[str, LossRollout]]:
    """The rollout with one extreme token, and what it is: large and tiny log-ratios, advantages of 0.

    Columns that end in `_logprobs` are new - log-ratio there; where the advantage is 0, columns `is_...` are 0 as well.
    """
    token = int(rollout.counts.nonzero()[:, 0][int(rollout.counts.sum()) // 2])
    for x in log_ratios:
        for sign, words in ((1.0, ""), (-1.0, ", advantage of the other sign"), (0.0, ", advantage 0")):
            new, columns = rollout.new_logprobs.clone(), {n: v.clone() for n, v in rollout.columns.items()}
            new[token] = -0.5 + min(x, 0.0)
            for name, values in columns.items():
                if name.endswith("_logprobs"):
                    values[token] = -0.5 - max(x, 0.0)
                elif name == "advantages":
                    values[token] *= sign
                elif name.startswith("is_") and sign == 0.0:
                    values[token] = 0.0
            yield f"log-ratio {x:g}{words}", replace(rollout, new_logprobs=new, columns=columns)


def _difference(found: Step, expected: Step, rollout: LossRollout, tolerance: float) -> str:
    """What differs by more than the tolerance, relative to the value or the largest gradient; "" if nothing does."""
    a, b = found.gradients, expected.gradients
    apart = (a - b).abs() / (float(b.abs().max()) or 1.0)
    wrong, lost = (~(apart <= tolerance)).nonzero()[:, 0].tolist(), (~a.isfinite()).nonzero()[:, 0].tolist()
    # a value near 0 is a sum that cancels: the gradients say how large its terms are
    distance = abs(found.value - expected.value) / (max(abs(expected.value), float(b.abs().sum())) or 1.0)
    changes = []
    if lost:
        changes.append(f"not finite at {rollout.describe(lost[0])}" + f" and {len(lost) - 1} more" * (len(lost) > 1))
    else:
        if not distance <= tolerance:
            changes.append(f"value {found.value:.9g} instead of {expected.value:.9g}")
        if wrong:
            where = rollout.describe(wrong[0])
            changes.append(f"gradient differs at {len(wrong)} tokens, by {float(apart.max()):.2g}, first at {where}")
    if found.under_mask:
        changes.append(f"{found.under_mask} positions under the mask have a gradient")
    return "; ".join(changes)


def check_loss(
    loss: Loss,
    rollout: LossRollout | pd.DataFrame,
    *,
    combine: Combine,
    layouts: Sequence[LossLayout] = LAYOUTS,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    log_ratios: Sequence[float] = LOG_RATIOS,
    tolerance: float = TOLERANCE,
) -> dict[str, str]:
    """What changes value or gradient of `loss`, by layout, dtype or extreme token. An empty dict: the loss conforms.

    Args:
        loss: a function of `LossBatch` that returns a scalar; nats and units are its own.
        rollout: a `LossRollout`, or a data frame with one row per token, see `rollout_of`.
        combine: what the trainer does with the losses of micro-batches, and with those of ranks: their `mean`
            (gradient accumulation of transformers, DDP), or their `sum`.
        dtypes: beside float64; each is compared with float64 of the same numbers.
        log_ratios: of one token that is made extreme, also with an advantage of 0 and of the other sign.
        tolerance: relative, of the value and of the largest gradient, in float64.

    A loss that is not finite on the rollout itself has that one entry, and no layout is blamed. Raises UserError for a
    rollout or a loss that cannot be used.

    >>> import torch
    >>> from ppo_repro.testing import LossRollout, check_loss
    >>> rollout = LossRollout((2, 1), torch.tensor([-1.0, -2.0, -0.5]).double(), {})
    >>> check_loss(lambda b: b.new_logprobs.masked_fill(~b.mask, 0).sum() / b.step_tokens, rollout, combine="sum")
    {}
    >>> found = check_loss(lambda b: b.new_logprobs[b.mask].mean(), rollout, combine="mean")
    >>> print(found["micro batch 1"])
    value -1 instead of -1.16666667; gradient differs at 3 tokens, by 0.5, first at sequence 0, position 0
    """
    checked = rollout if isinstance(rollout, LossRollout) else rollout_of(rollout)
    whole = step(loss, checked, WHOLE, combine)
    plain = {WHOLE.describe(): _difference(whole, whole, checked, tolerance)}
    if not math.isfinite(whole.value) or not bool(whole.gradients.isfinite().all()):
        return plain
    found = {x.describe(): _difference(step(loss, checked, x, combine), whole, checked, tolerance) for x in layouts}
    failed: set[str] = set()  # in float64: not said again of narrower numbers
    for dtype in (torch.float64, *dtypes):
        name = str(dtype).removeprefix("torch.")
        for what, case in [("", checked), *_extremes(checked, log_ratios)]:
            if what in failed:
                continue
            columns = {name: x.to(dtype).double() for name, x in case.columns.items()}
            # rounded first, so that only what the loss computes is compared
            rounded = replace(case, new_logprobs=case.new_logprobs.to(dtype).double(), columns=columns)
            wide, narrow = (step(loss, rounded, replace(WHOLE, dtype=d), combine) for d in (torch.float64, dtype))
            change = _difference(narrow, wide, rounded, TOLERANCES.get(dtype, 0.1))
            if change:
                failed.add(what)
                found[", ".join(filter(None, [name, what]))] = change
    return {layout: change for layout, change in (found | plain).items() if change}
