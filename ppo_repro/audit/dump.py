"""Responses with the log-probs of sampler and trainer, from files that training stacks dumped.

One row is one response. Nothing is guessed: a missing column is an error, and so are lists of different lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ppo_repro.audit.files import no_column, rows
from ppo_repro.errors import UserError
from ppo_repro.output import shown

ROUNDING = 1e-3  # nats; a log-prob may be above 0 by less
Value = TypeVar("Value")


@dataclass(frozen=True)
class Names:
    """The columns of a format; None: there is no such column."""

    tokens: str  # of the response; of the whole sequence where there is no `prompt`
    sampler: str
    trainer: str
    mask: str  # 1: the token counts; 0: it is context only. A file without the column has all count
    prompt: str | None = None
    padding_mask: str | None = None  # 0 for padding, of the prompt or the whole sequence; may be missing
    response_length: str | None = None  # how many tokens at the end of `tokens` are the response
    turns: str | None = None  # the turn of each token; without it a run of tokens that count is a turn
    ahead: tuple[str, ...] = ()  # columns whose entry i is about token i + 1
    all_ahead_with: str | None = None  # in a file with this column the mask and both log-probs are

    def columns(self) -> frozenset[str]:
        """All of them."""
        found = (self.tokens, self.sampler, self.trainer, self.mask, self.prompt, self.padding_mask)
        return frozenset(name for name in (*found, self.response_length, self.turns) if name)


FORMATS = {
    "ppo_repro": Names("response_ids", "rollout_logprobs", "old_logprobs", "mask", "prompt_ids", turns="turns"),
    "verl": Names(
        "responses", "rollout_log_probs", "old_log_probs", "response_mask", "prompts", padding_mask="attention_mask"
    ),
    "trl": Names(
        "completion_ids",
        "sampling_per_token_logps",
        "old_per_token_logps",
        "completion_mask",
        "prompt_ids",
        padding_mask="prompt_mask",
    ),
    "slime": Names("tokens", "rollout_log_probs", "log_probs", "loss_masks", response_length="response_lengths"),
    "prime-rl": Names("token_ids", "inference_logprobs", "trainer_logprobs", "loss_mask"),
    "areal": Names(
        "input_ids",
        "logprobs",
        "prox_logp",
        "loss_mask",
        padding_mask="attention_mask",
        ahead=("prox_logp",),
        all_ahead_with="advantages",
    ),
}


@dataclass(frozen=True)
class Response:
    """One response. `sampler`, `trainer`: float32 [n], nats; `counts`: bool [n]; `turns`: int [n]."""

    row: int  # in the file, from 1
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler: npt.NDArray[np.float32]
    trainer: npt.NDArray[np.float32]
    counts: npt.NDArray[np.bool_]
    turns: npt.NDArray[np.int64]
    padding: tuple[int, ...] = ()  # what stood before the prompt in the file


@dataclass(frozen=True)
class Dump:
    """The responses of a file that have a token that counts, and how many before the last of them have none."""

    responses: list[Response]
    skipped: int


def read_dump(path: Path, form: str, responses: int) -> Dump:
    """The first `responses` responses of a file that have a token that counts; UserError names file and row."""
    names = FORMATS[form]
    whole = rows(path, names.tokens, names.columns())
    found = (_response(f"{path}: row {row}", row, fields, names) for row, fields in enumerate(whole, 1))
    kept = list(islice(filter(None, found), responses))
    if not kept:
        raise UserError(f"{path}: has no response with a token that counts; there is nothing to audit")
    return Dump(kept, kept[-1].row - len(kept))


def turns_of(counts: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The turn of each token, from 1: how many runs of tokens that count have begun. bool [n] -> int64 [n]."""
    return np.cumsum(np.diff(counts.astype(np.int64), prepend=0) == 1)


def _response(where: str, row: int, fields: Mapping[str, Any], names: Names) -> Response | None:
    tokens = _ids(where, names.tokens, _column(where, fields, names.tokens))
    prompt: list[int] = []
    padding: tuple[int, ...] = ()
    if names.prompt is not None:
        prompt, padding = _prompt(where, fields, names.prompt, names.padding_mask)
    elif names.response_length is not None:
        prompt, tokens = _split(where, names.response_length, _column(where, fields, names.response_length), tokens)
    mask, turns = fields.get(names.mask), None if names.turns is None else fields.get(names.turns)
    lists: dict[str, list[Any]] = {
        names.sampler: _logprobs(where, names.sampler, _column(where, fields, names.sampler)),
        names.trainer: _logprobs(where, names.trainer, _column(where, fields, names.trainer)),
        names.mask: [True] * len(tokens) if mask is None else _flags(where, names.mask, mask),
        "turns": [0] * len(tokens) if turns is None else _ids(where, str(names.turns), turns),
    }
    for name, values in lists.items():
        if len(values) != len(tokens):
            raise UserError(f"{where}: {name} has {len(values)} entries for {len(tokens)} response tokens")
    if names.prompt is None and names.response_length is None:
        prompt, tokens, lists = _whole(where, fields, names, tokens, lists)
    end = max((i for i, counts in enumerate(lists[names.mask], 1) if counts), default=0)
    if not end:
        return None
    if not prompt:
        raise UserError(f"{where}: has no prompt token, so nothing predicts its first token")
    with np.errstate(over="ignore"):  # what is no float32 becomes infinite
        sampler, trainer = (np.array(lists[n][:end]).astype(np.float32) for n in (names.sampler, names.trainer))
    counts = np.array(lists[names.mask][:end], bool)
    for name, logp in ((names.sampler, sampler), (names.trainer, trainer)):
        if (above := logp[counts & np.isfinite(logp) & (logp > ROUNDING)]).size:
            raise UserError(f"{where}: {name} has {above[0]:.4g}; a log-prob is at most 0, give nats and not losses")
    given = turns_of(counts) if turns is None else np.array(lists["turns"][:end], np.int64)
    return Response(row, tuple(prompt), tuple(tokens[:end]), sampler, trainer, counts, given, padding)


def _column(where: str, fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise no_column(where, name, fields)
    return fields[name]


def _prompt(where: str, fields: Mapping[str, Any], name: str, mask: str | None) -> tuple[list[int], tuple[int, ...]]:
    """The tokens of a prompt, and the padding before it."""
    prompt = _ids(where, name, _column(where, fields, name))
    if mask is None or fields.get(mask) is None:
        return prompt, ()
    real = _flags(where, mask, fields[mask])
    if len(real) < len(prompt):
        raise UserError(f"{where}: {mask} is shorter than {name}")
    first = real.index(True) if True in real else len(prompt)
    return _kept(prompt, real[: len(prompt)]), tuple(prompt[:first])


def _split(where: str, name: str, length: Any, tokens: list[int]) -> tuple[list[int], list[int]]:
    if type(length) is not int or not 0 <= length < len(tokens):
        raise UserError(
            f"{where}: {name} = {shown(repr(length))}: must leave at least one of {len(tokens)} tokens for the prompt"
        )
    at = len(tokens) - length
    return tokens[:at], tokens[at:]


def _whole(
    where: str, fields: Mapping[str, Any], names: Names, tokens: list[int], lists: dict[str, list[Any]]
) -> tuple[list[int], list[int], dict[str, list[Any]]]:
    """Prompt and response of lists about a whole sequence: the response begins with the first token that counts."""
    all_ahead = names.all_ahead_with is not None and names.all_ahead_with in fields
    ahead = lists.keys() if all_ahead else set(names.ahead)
    lists = {name: values[-1:] + values[:-1] if name in ahead else values for name, values in lists.items()}
    if names.padding_mask is not None and fields.get(names.padding_mask) is not None:
        real = _flags(where, names.padding_mask, fields[names.padding_mask])
        if len(real) != len(tokens):
            raise UserError(f"{where}: {names.padding_mask} has {len(real)} entries for {len(tokens)} tokens")
        tokens, lists = _kept(tokens, real), {name: _kept(values, real) for name, values in lists.items()}
    # nothing predicts the first token
    start = next((i for i, counts in enumerate(lists[names.mask]) if counts and i), len(tokens))
    return tokens[:start], tokens[start:], {name: values[start:] for name, values in lists.items()}


def _kept(values: Sequence[Value], real: Sequence[bool]) -> list[Value]:
    return [value for value, is_real in zip(values, real, strict=True) if is_real]


def _ids(where: str, name: str, values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        what = "turns, whole numbers" if name == "turns" else "token ids"
        raise UserError(f"{where}: {name} = {shown(repr(values))}: must be a list of {what}")
    return values


def _flags(where: str, name: str, values: Any) -> list[bool]:
    if not isinstance(values, list) or not all(v in (0, 1) for v in values):
        raise UserError(f"{where}: {name} = {shown(repr(values))}: must be a list of 0 and 1")
    return [bool(v) for v in values]


def _logprobs(where: str, name: str, values: Any) -> list[float]:
    good = isinstance(values, list) and all(
        v is None or (isinstance(v, int | float) and type(v) is not bool) for v in values
    )
    if not good:
        raise UserError(f"{where}: {name} = {shown(repr(values))}: must be a list of log-probs in nats")
    return [float("nan") if v is None else _finite_or_infinite(v) for v in values]


def _finite_or_infinite(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return float("inf") if value > 0 else float("-inf")
