"""Read dumps: responses with the log-probs of sampler and trainer, from files of any training stack.

A dump is JSON Lines, Parquet, a `.pt` file of tensors and lists (whose code is never run) or a data frame. A row is a
response or a token. A missing column is an error, and so are lists of different lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import shown
from ppo_repro.testing.dump_files import file_rows
from ppo_repro.testing.dump_formats import EXTRA, OF_RESPONSE, DumpRow, Names, names_of, no_column

if TYPE_CHECKING:
    import pandas as pd

ABOVE_0 = 1e-3  # nats; a log-prob may be so much above 0, by rounding
Array = npt.NDArray[Any]
Kind = Literal["log-probs in nats", "numbers", "token ids", "positions", "0 and 1"]
_DTYPES = {
    "log-probs in nats": "fiu",
    "numbers": "fiub",
    "token ids": "iu",
    "positions": "iu",
    "0 and 1": "fiub",
}  # kinds of NumPy


@dataclass(frozen=True)
class DumpedResponse:
    """One response up to its last token that counts, the n-th.

    `sampler`, `trainer`: float32 [n], nats; `counts`: bool [n].
    """

    row: int  # the number of the response in the file, from 1
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]  # () if the file has no tokens
    sampler: npt.NDArray[np.float32]
    trainer: npt.NDArray[np.float32]
    counts: npt.NDArray[np.bool_]
    padding: tuple[int, ...] = ()  # ids of the padding before the prompt
    iteration: int = 0
    masked: int = 0  # tokens of the response that do not count, also after the n, but not padding that the row marks
    extra: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)  # [n] each, of EXTRA

    @property
    def turns(self) -> npt.NDArray[np.int64]:
        """Return the turn of each token [n], from 1; a turn begins at a token that counts after one that does not."""
        return np.cumsum(np.diff(self.counts.astype(np.int64), prepend=0) == 1)


def read_dump(source: Path | str | pd.DataFrame, names: Names | str | None = None) -> Iterator[DumpedResponse]:
    """Yield in order the responses of a dump; a response without a token that counts has n = 0.

    `names` is a `Names`, a format of FORMATS, or None to recognise the format by the columns. Raises UserError, which
    names the row.
    """
    if isinstance(source, Path | str):
        with closing(file_rows(Path(source), names)) as rows:  # a wrong row closes the file at once
            yield from _responses(str(source), rows, names)
    else:
        yield from _responses("the frame", iter(source.to_dict("records")), names)


def _responses(where: str, rows: Iterator[Any], names: Names | str | None) -> Iterator[DumpedResponse]:
    """Yield the responses of rows; the columns of a frame need not be texts."""
    first = next(rows, None)
    if first is None:
        return
    if not isinstance(names, Names):
        names = names_of(where, first, names)
    every: Iterable[DumpRow] = chain([first], rows)
    sampled = first.get(names.sampler)
    is_list = isinstance(sampled, list | tuple | np.ndarray)
    is_by_token = not is_list and names.sampler in first and "sequence" in first
    if is_by_token:
        every = _responses_of_tokens(where, every, names)
    elif isinstance(sampled, int | float | np.number):
        raise UserError(f"{where}: has a row per token and no column sequence; add it: the number of the response")
    for number, row in enumerate(every, 1):
        place = f"sequence {row['sequence'][0]}" if is_by_token else f"row {number}"
        yield _response(f"{where}: {place}", number, row, names)


def impossible(values: npt.NDArray[np.float32]) -> str:
    """Return the reason why numbers cannot be log-probs, "" if they can be. NaN and infinities are ignored."""
    finite = values[np.isfinite(values)]
    above = finite[finite > ABOVE_0]
    if above.size:
        kind = "0 or above: losses or probabilities?" if (finite >= 0).all() else "some above 0"
        return f"{above.size} of {finite.size} numbers are above 0, as {above[0]:.4g} ({kind}); give log-probs in nats"
    if finite.size and not finite.any():
        return f"all {finite.size} numbers are exactly 0; nothing was recorded"
    return ""


def _responses_of_tokens(where: str, rows: Iterable[DumpRow], names: Names) -> Iterator[DumpRow]:
    """Join consecutive rows of tokens of the same iteration and sequence to one row of lists.

    The prompt and its mask are of the whole response, and in every row.
    Raises UserError for rows in another order, by `sequence` or, if the rows have it, by `position`.
    """
    seen = set[tuple[Any, Any]]()
    for (iteration, sequence), group in groupby(rows, lambda row: (row.get(names.iteration), row.get("sequence"))):
        if (iteration, sequence) in seen:
            raise UserError(f"{where}: the tokens of sequence {sequence} are not in consecutive rows; sort them")
        seen.add((iteration, sequence))
        tokens = list(group)
        columns = dict.fromkeys(name for row in tokens for name in row)
        joined: dict[str, Any] = {name: [row.get(name) for row in tokens] for name in columns}
        joined |= _of_whole_response(f"{where}: sequence {sequence}", tokens, names)
        if joined.get("position", [None])[0] is not None:
            positions = _array(f"{where}: sequence {sequence}", "position", joined["position"], "positions")
            if (backward := np.flatnonzero(np.diff(positions) <= 0)).size:
                before, after = positions[backward[0]], positions[backward[0] + 1]
                raise UserError(
                    f"{where}: in sequence {sequence} position {after} follows {before}; sort the rows by position"
                )
        if "token_id" in joined:  # the name in a run's own table
            joined["response_ids"] = joined["token_id"]
        yield joined | {names.iteration: iteration}


def _of_whole_response(where: str, tokens: Sequence[DumpRow], names: Names) -> DumpRow:
    """Return the prompt and its mask, which every token has. Raises UserError if two tokens have different ones."""
    found = {}
    for name in filter(None, (names.prompt, names.padding_mask)):
        value = tokens[0].get(name)
        if isinstance(value, list | tuple | np.ndarray):  # else there is none, or one for each token
            if any(not np.array_equal(value, row.get(name, ())) for row in tokens):
                raise UserError(f"{where}: its tokens have different {name}; give each the {name} of the response")
            found[name] = value
    return found


@dataclass(frozen=True)
class _Ids:
    """Token ids of a row. Before `_split_whole`, `tokens` of a whole sequence has the prompt too."""

    tokens: Array  # -1 if the file has no tokens
    is_real: npt.NDArray[np.bool_]  # of each token; False at padding that the row marks
    prompt: Array = field(default_factory=lambda: np.empty(0, np.int64))
    padding: Array = field(default_factory=lambda: np.empty(0, np.int64))  # before the prompt


def _response(where: str, number: int, row: DumpRow, names: Names) -> DumpedResponse:
    lists = _lists(where, row, names)
    ids = _ids(where, row, names, len(lists["sampler"]))
    for name, values in lists.items():
        if len(values) != len(ids.tokens):
            what = _column_names(names).get(name, name)
            raise UserError(f"{where}: {what} has {len(values)} entries for {len(ids.tokens)} response tokens")
    has_tokens = _has(row, names.tokens)
    if has_tokens and names.has_whole_sequences:
        ids, lists = _split_whole(ids, _about_own_tokens(row, names, lists))
    counts = lists["counts"].astype(bool)
    end = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0
    with np.errstate(over="ignore"):  # numbers beyond float32 become infinite
        arrays = {name: values[:end].astype(np.float32) for name, values in lists.items()}
    return DumpedResponse(
        row=number,
        prompt_ids=tuple(ids.prompt.tolist()),
        response_ids=tuple(ids.tokens[:end].tolist()) if has_tokens else (),
        sampler=arrays["sampler"],
        trainer=arrays["trainer"],
        counts=counts[:end],
        padding=tuple(ids.padding.tolist()),
        iteration=_iteration(where, names, row),
        masked=int((ids.is_real & ~counts).sum()),
        extra={name: arrays[name] for name in EXTRA if name in arrays},
    )


def _has(row: DumpRow, name: str | None) -> bool:
    return name is not None and row.get(name) is not None


def _column_names(names: Names) -> dict[str, str | None]:
    """Return the columns of the numbers that `_response` needs; other numbers have the names of EXTRA."""
    return {"sampler": names.sampler, "trainer": names.trainer, "counts": names.mask}


def _lists(where: str, row: DumpRow, names: Names) -> dict[str, Array]:
    """Return the numbers of each token: `sampler`, `trainer`, `counts`, and the numbers of EXTRA that the row has."""
    sampler, trainer = (
        _array(where, name, _column(where, row, name), "log-probs in nats") for name in (names.sampler, names.trainer)
    )
    counts = _optional(where, row, names.mask, "0 and 1")
    found = {"sampler": sampler, "trainer": trainer, "counts": np.ones(len(sampler)) if counts is None else counts}
    for name, spelled in EXTRA.items():
        values = next((row[n] for n in spelled if isinstance(row.get(n), list | tuple | np.ndarray)), ())
        if name in OF_RESPONSE and isinstance(row.get(name), int | float | np.number | np.bool_):
            values = [row[name]] * len(sampler)
        if len(values):
            found[name] = _array(where, name, values, "numbers")
    return found


def _ids(where: str, row: DumpRow, names: Names, count: int) -> _Ids:
    """Return the ids of a row with `count` log-probs of the sampler."""
    tokens, prompt = (_optional(where, row, name, "token ids") for name in (names.tokens, names.prompt))
    real = _optional(where, row, names.padding_mask, "0 and 1")
    found = np.full(count, -1) if tokens is None else tokens
    everywhere = np.ones(len(found), bool)
    if prompt is not None:
        return _Ids(found, everywhere, prompt) if real is None else _padded(where, names, prompt, found, real == 1)
    if tokens is not None and names.response_length is not None:
        start = len(tokens) - _response_length(where, row, names.response_length, len(tokens))
        return _Ids(tokens[start:], everywhere[start:], tokens[:start])
    if tokens is None or real is None or not names.has_whole_sequences:
        return _Ids(found, everywhere)
    if len(real) != len(tokens):
        raise UserError(f"{where}: {names.padding_mask} has {len(real)} entries for {len(tokens)} tokens")
    return _Ids(tokens, real == 1)


def _padded(where: str, names: Names, prompt: Array, tokens: Array, is_real: Array) -> _Ids:
    """Split a padded prompt into the padding before it and its tokens; the mask may also be of the response."""
    if len(is_real) < len(prompt):
        raise UserError(f"{where}: {names.padding_mask} is shorter than {names.prompt}")
    of_prompt, of_tokens = is_real[: len(prompt)], is_real[len(prompt) :]
    if len(of_tokens) != len(tokens):
        of_tokens = np.ones(len(tokens), bool)
    padding = prompt[: int(of_prompt.argmax()) if of_prompt.any() else len(prompt)]
    return _Ids(tokens, of_tokens, prompt[of_prompt], padding)


def _about_own_tokens(row: DumpRow, names: Names, lists: dict[str, Array]) -> dict[str, Array]:
    """Return the numbers of a whole sequence, each at its own token: some stacks write them one token ahead."""
    if _has(row, names.all_ahead_with):
        ahead = lists.keys() - {"token_id_b"}
    else:
        columns = _column_names(names)
        ahead = {name for name in lists if {columns.get(name, name), *EXTRA.get(name, ())} & {*names.ahead}}
    return {name: np.roll(values, 1) if name in ahead else values for name, values in lists.items()}


def _split_whole(ids: _Ids, lists: dict[str, Array]) -> tuple[_Ids, dict[str, Array]]:
    """Split a whole sequence at the first token that counts; return the ids, and the lists of the response."""
    tokens, lists = ids.tokens[ids.is_real], {name: values[ids.is_real] for name, values in lists.items()}
    counts = lists["counts"][1:]  # nothing predicts the very first token
    start = 1 + int(np.argmax(counts)) if counts.any() else len(tokens)
    response = {name: values[start:] for name, values in lists.items()}
    return _Ids(tokens[start:], np.ones(len(tokens) - start, bool), tokens[:start]), response


def _response_length(where: str, row: DumpRow, name: str, tokens: int) -> int:
    """Return how many of a row's tokens are the response; the prompt has at least one."""
    length = row.get(name)
    if not isinstance(length, int | np.integer) or isinstance(length, bool) or not 0 <= length < tokens:
        raise UserError(
            f"{where}: {name} = {shown(repr(length))}: must leave at least one of {tokens} tokens for the prompt"
        )
    return int(length)


def _optional(where: str, row: DumpRow, name: str | None, kind: Kind) -> Array | None:
    return _array(where, name, row[name], kind) if name is not None and _has(row, name) else None


def _array(where: str, name: str, values: Any, kind: Kind) -> Array:
    """Return a list of numbers as an array of float64 or int64; null becomes NaN in float64."""
    is_float = kind in ("log-probs in nats", "numbers")
    try:
        array = np.array([np.nan if v is None else v for v in values] if is_float else values)
        if array.ndim != 1 or (array.size and array.dtype.kind not in _DTYPES[kind]):
            raise ValueError(array.dtype)
        if kind == "0 and 1" and not np.isin(array, (0, 1)).all():  # a cast makes 0 of 0.7
            raise ValueError(kind)
        array = array.astype(np.float64 if is_float else np.int64)
        if kind in ("token ids", "positions") and (array < 0).any():
            raise ValueError(kind)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{where}: {name} = {shown(repr(values))}: must be a list of {kind}") from error
    return array


def _column(where: str, row: DumpRow, name: str) -> Any:
    if row.get(name) is None:
        raise no_column(where, name, row)
    return row[name]


def _iteration(where: str, names: Names, row: DumpRow) -> int:
    value = row.get(names.iteration)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 1 << 63:
        raise UserError(f"{where}: {names.iteration} = {shown(repr(value))}: must be a whole number from 0")
    return int(value)
