"""A loss of one's own as trainers show it a batch: micro-batches, padding, junk under the mask, turns, ranks, dtypes.

A loss sees one micro-batch, padded or packed, on one rank. What an optimizer step computes should follow from the
tokens that count alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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

    def place(self, index: int) -> tuple[int, int]:
        """Sequence and position of a token."""
        ends = np.cumsum(self.lengths)
        sequence = int(np.searchsorted(ends, index, side="right"))
        return sequence, index - int(ends[sequence] - self.lengths[sequence])


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


@dataclass(frozen=True)
class Finding:
    """What a layout, a dtype or an extreme token changes, and the sequence and position of the first token changed."""

    layout: str
    change: str
    first: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.layout}: {self.change}"


@dataclass(frozen=True)
class LossResult:
    """The loss of one optimizer step and its gradient.

    `gradients` [N] are d `value` / d new_logprobs, in the order of the rollout; `padding_gradients` counts the
    positions under the mask that got one other than 0.
    """

    value: float
    gradients: tuple[float, ...]
    padding_gradients: int = 0

    def save(self, path: Path | str) -> None:
        """Write it as JSON that reads back to the same bits."""
        Path(path).write_text(json.dumps(vars(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> LossResult:
        """A result that `save` wrote; UserError where the file is none."""
        try:
            tree = json.loads(Path(path).read_text(encoding="utf-8"))
            gradients = tuple(float(g) for g in tree["gradients"])
            return cls(float(tree["value"]), gradients, int(tree["padding_gradients"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: is no saved result of a loss ({type(error).__name__}); save it again") from error


def rollout_of(frame: pd.DataFrame) -> LossRollout:
    """A rollout from a data frame with one row per token: `sequence`, `new_logprobs`, and what else the loss reads.

    Rows of a sequence are in the order of `position` where there is such a column; `mask` is 0 at tokens that do not
    count. UserError names a column that is missing or holds no finite numbers.
    """
    for name in ("sequence", "new_logprobs"):
        if name not in frame.columns:
            raise UserError(f"loss rollout: the frame has no column '{name}'; there are {', '.join(map(str, frame))}")
    ordered = frame.sort_values([n for n in ("sequence", "position") if n in frame.columns], kind="stable")
    lengths = tuple(int(n) for n in ordered.groupby("sequence", sort=True).size())
    columns = {str(n): _numbers(str(n), ordered[n]) for n in ordered.columns if n not in ("sequence", "position")}
    mask = columns.pop("mask") != 0 if "mask" in columns else None
    return LossRollout(lengths, columns.pop("new_logprobs"), columns, mask)


def _numbers(name: str, column: pd.Series[Any]) -> Tensor:
    try:
        values = torch.tensor(column.to_numpy(dtype="float64"))
    except (TypeError, ValueError) as error:
        raise UserError(f"loss rollout: column '{name}' holds no numbers; leave it out of the frame") from error
    if not bool(torch.isfinite(values).all()):
        raise UserError(f"loss rollout: column '{name}' holds numbers that are not finite; leave them out")
    return values


def evaluate_loss(
    loss: Loss, rollout: LossRollout, layout: LossLayout = WHOLE, *, combine: Combine = "sum"
) -> LossResult:
    """Value and gradient of one optimizer step under a layout.

    combine: what the trainer does with the losses of micro-batches, and with those of ranks: their `mean`, as gradient
    accumulation in transformers and DDP have it, or their `sum`. UserError where the loss returns no scalar.
    """
    order = ordered(len(rollout.lengths), layout)
    ranks = [sequences for rank in range(layout.ranks) if (sequences := order[rank :: layout.ranks])]
    value, padding, gradients = 0.0, 0, torch.zeros(sum(rollout.lengths), dtype=torch.float64)
    for sequences in ranks:
        size = layout.micro_batch or len(sequences)
        passes = [sequences[i : i + size] for i in range(0, len(sequences), size)]
        weight = 1.0 if combine == "sum" else 1.0 / (len(passes) * len(ranks))
        for some in passes:
            batch, places = lay_out(rollout, some, layout)
            result = loss(batch)
            if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
                raise UserError("loss: must return a tensor with one number that depends on new_logprobs")
            (grad,) = torch.autograd.grad(result.reshape(()), batch.new_logprobs)
            value += weight * float(result.detach())
            gradients[places[batch.mask]] += weight * grad[batch.mask].double()
            padding += int((grad[~batch.mask] != 0).sum())  # NaN is not 0
    return LossResult(value, tuple(gradients.tolist()), padding)


def ordered(count: int, layout: LossLayout) -> list[int]:
    """The sequences in the order of a layout."""
    if layout.order == "shuffled":
        return permutation(count, "loss layout").tolist()
    return list(range(count))[:: -1 if layout.order == "reversed" else 1]


def lay_out(rollout: LossRollout, sequences: Sequence[int], layout: LossLayout) -> tuple[LossBatch, Tensor]:
    """A batch, and the index in the rollout of each of its positions [R, L], below 0 where there is none."""
    indices, owners = [], []
    for s in sequences:
        start, row = sum(rollout.lengths[:s]), list[int]()
        for k in range(rollout.lengths[s]):
            row += [start + k, *([-2] * layout.inserted if k % 2 else [])]
        indices.append(row)
        owners.append([s] * len(row))
    if layout.padding == "packed":
        indices, owners = [list(chain(*indices))], [list(chain(*owners))]
    width = max(map(len, indices)) + layout.extra

    def padded(row: list[int]) -> list[int]:
        padding = [-1] * (width - len(row))
        return [*padding, *row] if layout.padding == "left" else [*row, *padding]

    places = torch.tensor([padded(row) for row in indices])
    there = places >= 0
    mask = there & rollout.counts[places.clamp(min=0)]

    def column(values: Tensor, number: int) -> Tensor:
        filled = torch.where(there, values[places.clamp(min=0)], 0.0)
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
    return batch, places


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


def _compared(
    layout: str, found: LossResult, expected: LossResult, rollout: LossRollout, tolerance: float
) -> list[Finding]:
    """What differs by more than the tolerance, relative to the value or the largest gradient, if anything does."""
    a, b = np.array(found.gradients), np.array(expected.gradients)
    if a.shape != b.shape:
        raise UserError(f"{layout}: the baseline has {b.size} tokens, the rollout {a.size}; compare the same rollout")
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b) / (np.abs(b).max(initial=0.0) or 1.0)
    wrong, lost = np.flatnonzero(~(apart <= tolerance)), np.flatnonzero(~np.isfinite(a))
    # a value near 0 is a sum that cancels: the gradients say how large its terms are
    distance = abs(found.value - expected.value) / (max(abs(expected.value), float(np.abs(b).sum())) or 1.0)
    first = rollout.place(int((lost if lost.size else wrong)[0])) if wrong.size or lost.size else None
    where = f"sequence {first[0]}, position {first[1]}" if first else ""
    changes = []
    if lost.size:
        changes.append(f"not finite at {where}" + f" and {lost.size - 1} more" * (lost.size > 1))
    else:
        if not distance <= tolerance:
            changes.append(f"value {found.value:.9g} instead of {expected.value:.9g}")
        if wrong.size:
            changes.append(f"gradient differs at {wrong.size} tokens, by {apart.max():.2g}, first at {where}")
    if found.padding_gradients:
        changes.append(f"{found.padding_gradients} positions under the mask have a gradient")
    return [Finding(layout, "; ".join(changes), first)] if changes else []


def check_loss(
    loss: Loss,
    rollout: LossRollout | pd.DataFrame,
    *,
    combine: Combine,
    layouts: Sequence[LossLayout] = LAYOUTS,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    log_ratios: Sequence[float] = LOG_RATIOS,
    tolerance: float = TOLERANCE,
) -> list[Finding]:
    """What changes value or gradient of `loss`: layouts, dtypes, extreme tokens. An empty list: the loss conforms.

    Args:
        loss: a function of `LossBatch` that returns a scalar; nats and units are its own.
        rollout: a `LossRollout`, or a data frame with one row per token, see `rollout_of`.
        combine: `mean` or `sum` of the losses of micro-batches and ranks, as the trainer does it.
        dtypes: beside float64; each is compared with float64 of the same numbers.
        log_ratios: of one token that is made extreme, also with an advantage of 0 and of the other sign.
        tolerance: relative, of the value and of the largest gradient, in float64.

    A loss that is not finite on the rollout itself has that one finding, and no layout is blamed. Raises UserError for
    a rollout or a loss that cannot be used.

    >>> import torch
    >>> from ppo_repro.testing import LossRollout, check_loss
    >>> rollout = LossRollout((2, 1), torch.tensor([-1.0, -2.0, -0.5]).double(), {})
    >>> check_loss(lambda b: b.new_logprobs.masked_fill(~b.mask, 0).sum() / b.step_tokens, rollout, combine="sum")
    []
    >>> print(check_loss(lambda b: b.new_logprobs[b.mask].mean(), rollout, combine="mean")[0])
    micro batch 1: value -1 instead of -1.16666667; gradient differs at 3 tokens, by 0.5, first at sequence 0, \
position 0
    """
    checked = rollout if isinstance(rollout, LossRollout) else rollout_of(rollout)
    whole = evaluate_loss(loss, checked, combine=combine)
    plain = _compared(WHOLE.describe(), whole, whole, checked, tolerance)
    if not math.isfinite(whole.value) or not np.isfinite(whole.gradients).all():
        return plain or [Finding(WHOLE.describe(), f"the value is {whole.value:g}")]
    found = []
    for layout in layouts:
        result = evaluate_loss(loss, checked, layout, combine=combine)
        found += _compared(layout.describe(), result, whole, checked, tolerance)
    failed: set[str] = set()  # in float64: not said again of narrower numbers
    for dtype in (torch.float64, *dtypes):
        name = str(dtype).removeprefix("torch.")
        for what, case in [("", checked), *_extremes(checked, log_ratios)]:
            rounded = _rounded(case, dtype)  # so that only what the loss computes is compared
            wide = evaluate_loss(loss, rounded, combine=combine)
            result = evaluate_loss(loss, rounded, replace(WHOLE, dtype=dtype), combine=combine)
            words = ", ".join(filter(None, [name, what]))
            more = [] if what in failed else _compared(words, result, wide, rounded, TOLERANCES.get(dtype, 0.1))
            failed |= {what} if more else set()
            found += more
    return found + plain


def _rounded(rollout: LossRollout, dtype: torch.dtype) -> LossRollout:
    columns = {name: x.to(dtype).double() for name, x in rollout.columns.items()}
    return replace(rollout, new_logprobs=rollout.new_logprobs.to(dtype).double(), columns=columns)


def assert_loss_conforms(
    loss: Loss,
    rollout: LossRollout | pd.DataFrame,
    *,
    combine: Combine,
    layouts: Sequence[LossLayout] = LAYOUTS,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    log_ratios: Sequence[float] = LOG_RATIOS,
    tolerance: float = TOLERANCE,
) -> None:
    """Assert that no layout or dtype changes a loss, and that it is finite; arguments as of `check_loss`.

    AssertionError has one line for each that does, with the first token; UserError as `check_loss`.
    """
    __tracebackhide__ = True
    options = {"layouts": layouts, "dtypes": dtypes, "log_ratios": log_ratios}
    found = check_loss(loss, rollout, combine=combine, tolerance=tolerance, **options)  # type: ignore[arg-type]
    if found:
        raise AssertionError("\n".join(["the loss does not follow from the tokens that count:", *map(str, found)]))


def assert_loss_drift_below(
    loss: Loss,
    baseline: Loss | LossResult | Path | str,
    rollout: LossRollout | pd.DataFrame,
    *,
    limit: float,
    combine: Combine = "sum",
) -> None:
    """Assert that value and gradient are within `limit` of another loss, or of a result that was saved before.

    The limit is of |a - b| / max(|b|, sum of |gradients|) of the value and |a - b| / max |b| of the gradients [N].
    AssertionError says how far they are and names the first token; UserError where the baseline is of other tokens, or
    a file is no saved result.
    """
    __tracebackhide__ = True
    checked = rollout if isinstance(rollout, LossRollout) else rollout_of(rollout)
    if callable(baseline):
        baseline = evaluate_loss(baseline, checked, combine=combine)
    elif not isinstance(baseline, LossResult):
        baseline = LossResult.load(baseline)
    for finding in _compared("drift", evaluate_loss(loss, checked, combine=combine), baseline, checked, limit):
        raise AssertionError(str(finding))
