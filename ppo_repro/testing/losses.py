"""A loss of one's own under every layout of a batch: what it is shown, and what a step of it computes.

A loss sees what a trainer shows it: one micro-batch, padded or packed, on one rank. What a step computes should follow
from its sequences alone. Everything is float64, so that rounding stays far below what is looked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ppo_repro.errors import UserError
from ppo_repro.seeding import permutation

if TYPE_CHECKING:
    import pandas as pd

Combine = Literal["mean", "sum"]
TOLERANCE = 1e-9  # relative; float64 sums of a million terms stay below 1e-10, changes of meaning are far above


@dataclass(frozen=True)
class LossRollout:
    """B responses with N tokens together, in order of sequences and positions.

    `lengths` [B] are tokens of a response, `new_logprobs` [N] float64 in nats, `columns` [N] float64 each. UserError
    for a response without a token, and for another shape or dtype.
    """

    lengths: tuple[int, ...]  # [B]
    new_logprobs: Tensor  # [N] float64, nats; the gradient is taken with respect to them
    columns: Mapping[str, Tensor]  # [N] float64 each: old_logprobs, advantages, whatever the loss reads

    def __post_init__(self) -> None:
        count = sum(self.lengths)
        if not self.lengths or min(self.lengths) < 1:
            raise UserError("loss rollout: needs at least one response, and a token in each")
        for name, column in {"new_logprobs": self.new_logprobs, **self.columns}.items():
            if column.shape != (count,) or column.dtype != torch.float64:
                raise UserError(
                    f"loss rollout: {name} is {column.dtype} {list(column.shape)}; must be torch.float64 [{count}]"
                )


@dataclass(frozen=True)
class LossBatch:
    """What a loss is called with: R rows of L positions of one micro-batch.

    `new_logprobs` [R, L] float64, nats, with a gradient; `columns` [R, L] float64 each; `mask` [R, L] bool, False at
    padding; `sequences` [R, L] int64, the response of a token, -1 at padding. `step_tokens` and `step_sequences` count
    the whole optimizer step, all micro-batches and ranks.
    """

    new_logprobs: Tensor  # [R, L] float64, requires grad
    columns: Mapping[str, Tensor]  # [R, L] float64 each
    mask: Tensor  # [R, L] bool, False at padding
    sequences: Tensor  # [R, L] int64, the response of a token; -1 at padding. A packed row holds several
    step_tokens: int  # of the whole optimizer step: all micro-batches, all ranks
    step_sequences: int


Loss = Callable[[LossBatch], Tensor]


@dataclass(frozen=True)
class LossLayout:
    """How the sequences of one optimizer step are shown to the loss.

    `micro_batch` sequences in a pass (0: all), in the given `order`, over `ranks` processes; `padding` on the right or
    left, or rows packed without any, `extra` more columns of it than are needed, which hold `fill`.
    """

    micro_batch: int = 0  # sequences in a pass; 0: all
    padding: Literal["right", "left", "packed"] = "right"
    extra: int = 0  # columns of padding more than are needed
    fill: float = 0.0  # what padding holds
    order: Literal["given", "reversed", "shuffled"] = "given"
    ranks: int = 1  # processes that share the sequences

    def describe(self) -> str:
        """The fields that are not the default."""
        plain = LossLayout()
        fields = {name: value for name, value in vars(self).items() if value != getattr(plain, name)}
        return ", ".join(f"{name} {value}" for name, value in fields.items()) or "all at once, padded right"


LAYOUTS = (
    LossLayout(micro_batch=1),
    LossLayout(micro_batch=2),
    LossLayout(micro_batch=3),
    LossLayout(padding="left"),
    LossLayout(extra=3),
    LossLayout(extra=1, fill=1.0),
    LossLayout(padding="packed"),
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
    positions of padding that got one other than 0.
    """

    value: float
    gradients: tuple[float, ...]  # [N] d value / d new_logprobs
    padding_gradients: int = 0  # positions of padding that got a gradient other than 0

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

    Rows of a sequence are in the order of `position` where there is such a column. UserError names a column that is
    missing or holds no finite numbers.
    """
    for name in ("sequence", "new_logprobs"):
        if name not in frame.columns:
            raise UserError(f"loss rollout: the frame has no column '{name}'; there are {', '.join(map(str, frame))}")
    by = ["sequence", *(["position"] if "position" in frame.columns else [])]
    ordered = frame.sort_values(by, kind="stable")
    lengths = tuple(int(n) for n in ordered.groupby("sequence", sort=True).size())
    columns = {str(n): _numbers(str(n), ordered[n]) for n in ordered.columns if n not in ("sequence", "position")}
    return LossRollout(lengths, columns.pop("new_logprobs"), columns)


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
    shares = _shares(rollout, layout)
    value, padding, gradients = 0.0, 0, torch.zeros(sum(rollout.lengths), dtype=torch.float64)
    for share in shares:
        size = layout.micro_batch or len(share)
        passes = [share[i : i + size] for i in range(0, len(share), size)]
        weight = 1.0 if combine == "sum" else 1.0 / (len(passes) * len(shares))
        for sequences in passes:
            batch, places = _lay_out(rollout, sequences, layout)
            result = loss(batch)
            if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
                raise UserError("loss: must return a tensor with one number that depends on new_logprobs")
            (grad,) = torch.autograd.grad(result.reshape(()), batch.new_logprobs)
            value += weight * float(result.detach())
            gradients[places[batch.mask]] += weight * grad[batch.mask]
            padding += int((grad[~batch.mask] != 0).sum())
    return LossResult(value, tuple(gradients.tolist()), padding)


def _shares(rollout: LossRollout, layout: LossLayout) -> list[list[int]]:
    """The sequences of each rank that has any."""
    order = list(range(len(rollout.lengths)))
    if layout.order == "reversed":
        order.reverse()
    elif layout.order == "shuffled":
        order = [order[i] for i in permutation(len(order), "loss layout")]
    return [share for rank in range(layout.ranks) if (share := order[rank :: layout.ranks])]


def _lay_out(rollout: LossRollout, sequences: Sequence[int], layout: LossLayout) -> tuple[LossBatch, Tensor]:
    """A batch, and the index in the rollout of each of its positions [R, L], -1 at padding."""
    starts = [sum(rollout.lengths[:s]) for s in sequences]
    indices = [list(range(start, start + rollout.lengths[s])) for start, s in zip(starts, sequences, strict=True)]
    owners = [[s] * rollout.lengths[s] for s in sequences]
    if layout.padding == "packed":
        indices, owners = [[i for row in indices for i in row]], [[s for row in owners for s in row]]
    width = max(map(len, indices)) + layout.extra
    places = torch.tensor([_padded(row, width, layout) for row in indices])
    mask = places >= 0

    def column(values: Tensor) -> Tensor:
        return torch.where(mask, values[places.clamp(min=0)], layout.fill)

    batch = LossBatch(
        new_logprobs=column(rollout.new_logprobs).requires_grad_(),
        columns={name: column(values) for name, values in rollout.columns.items()},
        mask=mask,
        sequences=torch.tensor([_padded(row, width, layout) for row in owners]),
        step_tokens=sum(rollout.lengths),
        step_sequences=len(rollout.lengths),
    )
    return batch, places


def _padded(row: list[int], width: int, layout: LossLayout) -> list[int]:
    rest = [-1] * (width - len(row))
    return [*rest, *row] if layout.padding == "left" else [*row, *rest]
