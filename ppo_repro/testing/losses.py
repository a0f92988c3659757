"""Check a user's loss in the ways that trainers call it: micro-batches, padding, tool tokens, ranks, narrow dtypes.

The optimizer step must depend only on the tokens that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.ppo.log_ratios import LOG_RATIOS, extreme_logprobs
from ppo_repro.testing.layouts import LAYOUTS, WHOLE, DrawnResponses, Layout, LossBatch, lay_out, ordered

if TYPE_CHECKING:
    import pandas as pd

# relative; float64 sums of a million terms stay below 1e-9, and float32 keeps 1e-4 of a log-ratio of 800
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
Loss = Callable[[LossBatch], Tensor]
Combine = Literal["mean", "sum"]  # of the losses of micro-batches and ranks


class _Step(NamedTuple):
    """Loss of one optimizer step, and its gradient with respect to `new_logprobs`, in the order of the rollout."""

    value: float
    gradients: Tensor  # [N] float64
    under_mask: int  # positions that do not count, with a gradient other than 0


def _rollout_of(frame: pd.DataFrame) -> DrawnResponses:
    for name in ("sequence", "new_logprobs"):
        if name not in frame.columns:
            raise UserError(f"check_loss: the frame has no column '{name}'; there are {', '.join(map(str, frame))}")
    if frame["sequence"].isna().any():
        raise UserError("check_loss: column 'sequence' has rows without a value; give each token its response")
    frame = frame.sort_values([n for n in ("sequence", "position") if n in frame.columns], kind="stable")
    lengths = [int(n) for n in frame.groupby("sequence", sort=True).size()]
    columns: dict[str, Tensor] = {}
    for name in frame.columns.drop(["sequence", "position"], errors="ignore"):
        try:
            columns[str(name)] = torch.tensor(frame[name].to_numpy(dtype="float64"))
        except (TypeError, ValueError) as error:
            raise UserError(f"check_loss: column '{name}' holds no numbers; leave it out of the frame") from error
        if not bool(columns[str(name)].isfinite().all()):
            raise UserError(f"check_loss: column '{name}' holds numbers that are not finite; leave them out")
    mask = columns.pop("mask", torch.ones(len(frame))) != 0
    if not lengths or not all(bool(part.any()) for part in mask.split(lengths)):
        raise UserError("check_loss: needs at least one response, and in each a token that counts")
    positions = frame["position"] if "position" in frame.columns else frame.groupby("sequence").cumcount()
    places = [f"sequence {s}, position {p}" for s, p in zip(frame["sequence"], positions, strict=True)]
    return DrawnResponses(lengths, columns, mask, places)


def _step(
    loss: Loss, rollout: DrawnResponses, layout: Layout, combine: Combine, dtype: torch.dtype = torch.float64
) -> _Step:
    """Take one optimizer step in a layout; `combine` is `mean` or `sum`, over micro-batches and ranks.

    Raises UserError if the loss returns no scalar that depends on new_logprobs.
    """
    order = ordered(len(rollout.lengths), layout)
    ranks = [order[rank :: layout.ranks] for rank in range(min(layout.ranks, len(order)))]
    value, under_mask, gradients = 0.0, 0, torch.zeros(len(rollout.mask), dtype=torch.float64)
    for sequences in ranks:
        size = layout.micro_batch or len(sequences)
        passes = [sequences[i : i + size] for i in range(0, len(sequences), size)]
        weight = 1.0 if combine == "sum" else 1.0 / (len(passes) * len(ranks))
        for some in passes:
            batch, indices = lay_out(rollout, some, layout, dtype)
            result = loss(batch)
            if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
                raise UserError(
                    "check_loss: the loss must return a tensor with one number that depends on new_logprobs"
                )
            (grad,) = torch.autograd.grad(result.reshape(()), batch.new_logprobs)
            value += weight * float(result.detach())
            gradients[indices[batch.mask]] += weight * grad[batch.mask].double()
            under_mask += int((grad[~batch.mask] != 0).sum())  # NaN is not 0
    return _Step(value, gradients, under_mask)


def _extremes(rollout: DrawnResponses) -> Iterator[tuple[str, DrawnResponses]]:
    """Yield the rollout with one extreme token, and its description: a large or tiny log-ratio, an advantage of 0.

    At this token, columns that end in `_logprobs` are new_logprobs - log-ratio. If the advantage is 0, columns `is_...`
    are 0 too.
    """
    token = int(rollout.mask.nonzero()[:, 0][int(rollout.mask.sum()) // 2])
    for x in LOG_RATIOS:
        new, old = extreme_logprobs(x)
        for sign, words in ((1.0, ""), (-1.0, ", advantage of the other sign"), (0.0, ", advantage 0")):
            columns = {name: values.clone() for name, values in rollout.columns.items()}
            for name, values in columns.items():
                if name == "new_logprobs":
                    values[token] = new
                elif name.endswith("_logprobs"):
                    values[token] = old
                elif name == "advantages":
                    values[token] *= sign
                elif name.startswith("is_") and sign == 0.0:
                    values[token] = 0.0
            yield f"log-ratio {x:g}{words}", replace(rollout, columns=columns)


def _difference(found: _Step, expected: _Step, rollout: DrawnResponses, dtype: torch.dtype = torch.float64) -> str:
    """Describe the differences beyond the tolerance of a dtype, relative to the value or largest gradient; "" if none.

    The trial before a run (`user/trial.py`) compares by a rule of its own: every bit counts there.
    """
    a, b, tolerance = found.gradients, expected.gradients, TOLERANCES.get(dtype, 0.1)
    apart = (a - b).abs() / (float(b.abs().max()) or 1.0)
    wrong, lost = (~(apart <= tolerance)).nonzero()[:, 0].tolist(), (~a.isfinite()).nonzero()[:, 0].tolist()
    # a value near 0 is a sum that cancels: the gradients say how large its terms are
    distance = abs(found.value - expected.value) / (max(abs(expected.value), float(b.abs().sum())) or 1.0)
    changes = []
    if lost:
        changes.append(f"not finite at {rollout.places[lost[0]]}" + f" and {len(lost) - 1} more" * (len(lost) > 1))
    else:
        if not distance <= tolerance:
            changes.append(f"value {found.value:.9g} instead of {expected.value:.9g}")
        if wrong:
            where = rollout.places[wrong[0]]
            changes.append(f"gradient differs at {len(wrong)} tokens, by {float(apart.max()):.2g}, first at {where}")
    if found.under_mask:
        changes.append(f"{found.under_mask} positions under the mask have a gradient")
    return "; ".join(changes)


def check_loss(
    loss: Loss,
    frame: pd.DataFrame,
    *,
    combine: Combine,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
) -> dict[str, str]:
    """Call a loss in many layouts, and return each change of its value or gradient.

    Args:
        loss: a function of `LossBatch` that returns a scalar, in any unit.
        frame: a row for each token, with `sequence`, `new_logprobs` (nats), and the other columns that the loss reads;
            `position` orders the rows; `mask` is 0 at tokens that do not count, such as tokens of a tool.
        combine: whether the trainer takes the `mean` of the losses of micro-batches and ranks (gradient accumulation of
            transformers, DDP), or their `sum`.
        dtypes: dtypes beside float64; each is compared with float64 of the same numbers.

    Returns:
        A sentence by layout, dtype or extreme token; empty if the loss conforms. A loss that is not finite on the frame
        itself has one entry, and no layout is tried.

    Raises:
        UserError: the frame or the loss cannot be used.

    >>> import pandas as pd
    >>> from ppo_repro.testing import check_loss
    >>> frame = pd.DataFrame({"sequence": [0, 0, 1], "new_logprobs": [-1.0, -2.0, -0.5]})
    >>> check_loss(lambda b: b.new_logprobs.masked_fill(~b.mask, 0).sum() / b.step_tokens, frame, combine="sum")
    {}
    >>> found = check_loss(lambda b: b.new_logprobs[b.mask].mean(), frame, combine="mean")
    >>> print(found["micro batch 1"])
    value -1 instead of -1.16666667; gradient differs at 3 tokens, by 0.5, first at sequence 0, position 0
    """
    if combine not in ("mean", "sum"):
        raise UserError(f"check_loss: combine = {combine!r}: must be 'mean' or 'sum'")
    rollout = _rollout_of(frame)
    whole = _step(loss, rollout, WHOLE, combine)
    found = {WHOLE.describe(): _difference(whole, whole, rollout)}
    if math.isfinite(whole.value) and bool(whole.gradients.isfinite().all()):
        for layout in LAYOUTS:
            found[layout.describe()] = _difference(_step(loss, rollout, layout, combine), whole, rollout)
        found |= _changes_of_dtype(loss, rollout, combine, (torch.float64, *dtypes))
    return {what: change for what, change in found.items() if change}


def _changes_of_dtype(
    loss: Loss, rollout: DrawnResponses, combine: Combine, dtypes: Sequence[torch.dtype]
) -> dict[str, str]:
    """Return each change of the loss in a dtype, on the rollout and with an extreme token."""
    found: dict[str, str] = {}
    failed: set[str] = set()  # cases that fail in float64 are not reported again for narrower dtypes
    for dtype in dtypes:
        for what, case in [("", rollout), *_extremes(rollout)]:
            if what in failed:
                continue
            # the inputs are rounded first: only the computation of the loss is compared
            rounded = replace(case, columns={name: x.to(dtype).double() for name, x in case.columns.items()})
            wide, narrow = (_step(loss, rounded, WHOLE, combine, of) for of in (torch.float64, dtype))
            if change := _difference(narrow, wide, rollout, dtype):
                failed.add(what)
                found[", ".join(filter(None, [str(dtype).removeprefix("torch."), what]))] = change
    return found
