"""From the padded or packed tensors that a transformers model takes to sequences without padding."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from ppo_repro.config.section import LARGEST
from ppo_repro.errors import UserError
from ppo_repro.numerics.rows import Ragged, ragged
from ppo_repro.numerics.structs import ints


@dataclass(frozen=True)
class Layout:
    """R rows of L positions; padding is token 0 at position 0."""

    input_ids: Tensor  # [R, L] int64
    position_ids: Tensor  # [R, L] int64, from 0 in each sequence
    real: Tensor  # [R, L] bool, False for padding

    def sequences(self) -> Ragged:
        """The sequences, row after row; their gradients are one chain, which the next batch goes on with."""
        starts = np.flatnonzero(self.position_ids[self.real].numpy() == 0)
        tokens = [part.tolist() for part in np.split(self.input_ids[self.real].numpy(), starts[1:])]
        return ragged(tokens, slots=ints(np.zeros(len(tokens) + 1)))

    def follows(self) -> Tensor:
        """bool [R, L]: whether the next position of the row goes on with the same sequence."""
        next_goes_on = self.real[:, 1:] & self.real[:, :-1] & (self.position_ids[:, 1:] > 0)
        return torch.cat([next_goes_on, torch.zeros_like(self.real[:, :1])], 1)


def is_whole(value: object) -> bool:
    """Whether it is a whole number, Python's or NumPy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_number(name: str, value: object, least: float, most: float = LARGEST, whole: bool = False) -> None:
    """UserError unless `value` is a number in least..most, and a whole one if `whole`."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real) or not least <= value <= most:  # type: ignore[operator]
        shown = " ".join(f"{value!r:.60}".split())
        raise UserError(f"{name} = {shown}: must be a {'whole ' if whole else ''}number in {least:g}..{most:g}")


def _described(x: object) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"


def _same_shape(name: str, x: Tensor, ids: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.shape != ids.shape or x.is_floating_point():
        raise UserError(f"{name}: is {_described(x)}; must be whole numbers {list(ids.shape)}, as input_ids")
    return x


def make_layout(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, vocab_size: int, context: int
) -> Layout:
    """The layout of padded or packed rows; UserError names what is wrong.

    attention_mask [R, L] is 1 for tokens and 0 for padding, which lies before or after the tokens of a row; none: no
    padding. position_ids [R, L] count from 0 in every sequence, where a row may hold several; none: one in each row.
    """
    whole = isinstance(input_ids, Tensor) and input_ids.dtype in (torch.int64, torch.int32)
    if not whole or input_ids.dim() != 2 or not input_ids.numel():
        raise UserError(
            f"input_ids: is {_described(input_ids)}; must be an int64 tensor [rows, length], neither of them 0"
        )
    ids = input_ids.to(torch.int64)
    mask = torch.ones_like(ids) if attention_mask is None else _same_shape("attention_mask", attention_mask, ids)
    real = mask != 0
    if bool((real & (mask != 1)).any()):
        raise UserError("attention_mask: must hold 0 and 1 only")
    counts = real.to(torch.int64).cumsum(1)
    columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    positions = (counts - 1).masked_fill(~real, 0)
    first = (columns - positions).masked_fill(~real, 0)
    if bool((first != first.amax(1, keepdim=True)).logical_and(real).any()):
        raise UserError("attention_mask: a row has padding between its tokens; it may lie before or after them only")
    if position_ids is not None:
        if isinstance(position_ids, Tensor) and position_ids.shape in (ids.shape[1:], (1, ids.shape[1])):
            position_ids = position_ids.expand_as(ids)
        positions = _positions(_same_shape("position_ids", position_ids, ids), real)
    outside = real & ((ids < 0) | (ids >= vocab_size))
    if bool(outside.any()):
        row, column = torch.nonzero(outside)[0].tolist()
        raise UserError(
            f"input_ids[{row}, {column}] = {int(ids[row, column])}: must be in 0..{vocab_size - 1}; "
            "check that tokenizer and model belong together, and that attention_mask is 0 at padding"
        )
    longest = int(positions.max()) + 1
    if longest > context:
        raise UserError(
            f"input_ids: a sequence has {longest} tokens; deterministic(model, max_context={context}) takes no more"
        )
    return Layout(ids.masked_fill(~real, 0), positions, real)


def _positions(given: Tensor, real: Tensor) -> Tensor:
    """Positions that count from 0 in every sequence; UserError for others. Those of padding do not matter."""
    positions = given.to(torch.int64).masked_fill(~real, 0)
    before = torch.cat([torch.full_like(positions[:, :1], -1), positions[:, :-1]], 1)
    goes_on = torch.cat([torch.zeros_like(real[:, :1]), real[:, :-1]], 1) & (positions == before + 1)
    wrong = real & (positions != 0) & ~goes_on
    if bool(wrong.any()):
        row, column = torch.nonzero(wrong)[0].tolist()
        raise UserError(
            f"position_ids[{row}, {column}] = {int(positions[row, column])}: must be one more than the one before it, "
            "or 0 where a sequence begins; leave them out for one sequence in each row"
        )
    return positions
