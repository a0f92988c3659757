"""A loss of one's own as trainers show it a batch: micro-batches, padding, junk under the mask, turns, ranks, dtypes.

A loss sees one micro-batch, padded or packed, on one rank. What an optimizer step computes should follow from the
tokens that count alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ppo_repro.errors import UserError
from ppo_repro.seeding import permutation

if TYPE_CHECKING:
    import pandas as pd

Combine = Literal["mean", "sum"]
Junk = Literal["", "finite", "not finite"]
NOT_FINITE = (math.nan, math.inf, -math.inf)


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
        for name, column in {"new_logprobs": self.new_logprobs, **self.columns}.items():
            if column.shape != (count,) or column.dtype != torch.float64:
                raise UserError(
                    f"loss rollout: {name} is {column.dtype} {list(column.shape)}; must be torch.float64 [{count}]"
                )
        if self.mask is not None and (self.mask.shape != (count,) or self.mask.dtype != torch.bool):
            raise UserError(f"loss rollout: mask is {self.mask.dtype} {list(self.mask.shape)}; must be bool [{count}]")
        if not all(bool(part.any()) for part in self.counts.split(self.lengths)):
            raise UserError("loss rollout: a response has no token that counts; leave it out")

    @property
    def counts(self) -> Tensor:
        """Which tokens count, bool [N]."""
        return torch.ones(sum(self.lengths), dtype=torch.bool) if self.mask is None else self.mask

    def place(self, index: int) -> tuple[int, int]:
        """Sequence and position of a token."""
        sequence = 0
        while index >= self.lengths[sequence]:
            index -= self.lengths[sequence]
            sequence += 1
        return sequence, index


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
        plain = LossLayout()
        fields = {name: value for name, value in vars(self).items() if value != getattr(plain, name)}
        words = (f"{name.replace('_', ' ')} {str(value).removeprefix('torch.')}" for name, value in fields.items())
        return ", ".join(words) or "all at once, padded right"


LAYOUTS = (
    LossLayout(micro_batch=1),
    LossLayout(micro_batch=2),
    LossLayout(micro_batch=3),
    LossLayout(padding="left"),
    LossLayout(extra=3),
    LossLayout(extra=1, junk="finite"),
    LossLayout(extra=1, junk="not finite"),
    LossLayout(padding="packed"),
    LossLayout(inserted=2),
    LossLayout(inserted=1, junk="not finite"),
    LossLayout(order="reversed"),
    LossLayout(order="shuffled"),
    LossLayout(ranks=2),
    LossLayout(ranks=3),
    LossLayout(micro_batch=1, padding="packed", order="shuffled", ranks=2),
)


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
    by = ["sequence", *(["position"] if "position" in frame.columns else [])]
    ordered = frame.sort_values(by, kind="stable")
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


def evaluate_loss(loss: Loss, rollout: LossRollout, layout: LossLayout, combine: Combine) -> LossResult:
    """Value and gradient of one optimizer step under a layout.

    combine: what the trainer does with the losses of micro-batches, and with those of ranks: their `mean`, as gradient
    accumulation in transformers and DDP have it, or their `sum`. UserError where the loss returns no scalar.
    """
    ranks = _by_rank(rollout, layout)
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


def _by_rank(rollout: LossRollout, layout: LossLayout) -> list[list[int]]:
    """The sequences of each rank that has any."""
    order = list(range(len(rollout.lengths)))
    if layout.order == "reversed":
        order.reverse()
    elif layout.order == "shuffled":
        order = [order[i] for i in permutation(len(order), "loss layout")]
    return [sequences for rank in range(layout.ranks) if (sequences := order[rank :: layout.ranks])]


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
        indices, owners = [[i for row in indices for i in row]], [[s for row in owners for s in row]]
    width = max(map(len, indices)) + layout.extra
    places = torch.tensor([_padded(row, width, layout) for row in indices])
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
        sequences=torch.tensor([_padded(row, width, layout) for row in owners]).clamp_min(-1),
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


def _padded(row: list[int], width: int, layout: LossLayout) -> list[int]:
    padding = [-1] * (width - len(row))
    return [*padding, *row] if layout.padding == "left" else [*row, *padding]


LOG_RATIOS = (1e-8, -1e-8, 20.0, -20.0, 100.0, -100.0, 800.0, -800.0)


def extremes(rollout: LossRollout, log_ratios: Sequence[float] = LOG_RATIOS) -> list[tuple[str, int, LossRollout]]:
    """What it is, the token, and the rollout with one extreme token: large and tiny log-ratios, advantages of 0.

    Columns that end in `_logprobs` are new - log-ratio there; where the advantage is 0, columns `is_...` are 0 as well.
    """
    token = int(rollout.counts.nonzero()[:, 0][int(rollout.counts.sum()) // 2])
    found = []
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
            found.append((f"log-ratio {x:g}{words}", token, replace(rollout, new_logprobs=new, columns=columns)))
    return found
