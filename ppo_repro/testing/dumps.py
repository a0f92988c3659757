"""Responses with the log-probs of sampler and trainer, from the files of any training stack: one reader for all.

JSON Lines, Parquet, a `.pt` file of tensors and lists (of which no code is run) or a data frame. A row is a response,
or a token. A missing column is an error, and so are lists of different lengths. Never imports torch unless a file
needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ppo_repro.errors import UserError, is_out_of_memory
from ppo_repro.json_lines import read_lines
from ppo_repro.output import shown

if TYPE_CHECKING:
    import pandas as pd

ROUNDING = 1e-3  # nats; a log-prob may be above 0 by less
SUFFIXES = (".jsonl", ".parquet", ".pt")
INSIDE = ("samples", "rollout_data")  # where slime puts the rows, or the columns
# other numbers of each token, and their names in dumps
EXTRA = {
    "entropies": ("entropies", "entropy"),
    "log_kept_mass": ("log_kept_mass",),
    "advantages": ("advantages",),
}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Names:
    """The columns of a dump; None: no such column. A file may lack any but the log-probs, which are in nats."""

    sampler: str
    trainer: str
    mask: str | None = None  # 1: the token counts; 0: it is context only. Without it all tokens count
    tokens: str | None = None  # of the response; of the whole sequence if there is no prompt
    prompt: str | None = None
    padding_mask: str | None = None  # 0 for padding, of the prompt or the whole sequence
    response_length: str | None = None  # how many entries at the end of `tokens` are the response
    turns: str | None = "turns"  # the turn of each token; without it a run of tokens that count is a turn
    iteration: str | None = "iteration"
    sequence: str = "sequence"  # where a row is a token: the response of it
    ahead: tuple[str, ...] = ()  # columns whose entry i is about token i + 1
    all_ahead_with: str | None = None  # in a file with this column the mask and both log-probs are ahead


FORMATS = {
    "ppo_repro": Names("rollout_logprobs", "old_logprobs", "mask", "response_ids", "prompt_ids"),
    "verl": Names("rollout_log_probs", "old_log_probs", "response_mask", "responses", "prompts", "attention_mask"),
    "trl": Names(
        *("sampling_per_token_logps", "old_per_token_logps", "completion_mask", "completion_ids", "prompt_ids"),
        padding_mask="prompt_mask",
    ),
    "slime": Names("rollout_log_probs", "log_probs", "loss_masks", "tokens", response_length="response_lengths"),
    "prime-rl": Names("inference_logprobs", "trainer_logprobs", "loss_mask", "token_ids", iteration="step"),
    "areal": Names(
        *("logprobs", "prox_logp", "loss_mask", "input_ids"),
        padding_mask="attention_mask",
        ahead=("prox_logp",),
        all_ahead_with="advantages",
    ),
}


@dataclass(frozen=True)
class Response:
    """One response of n tokens. `sampler`, `trainer`: float32 [n], nats; `counts`: bool [n]; `turns`: int64 [n]."""

    row: int  # in the file, from 1
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]  # () if the file has no tokens
    sampler: npt.NDArray[np.float32]
    trainer: npt.NDArray[np.float32]
    counts: npt.NDArray[np.bool_]
    turns: npt.NDArray[np.int64]
    padding: tuple[int, ...] = ()  # before the prompt in the file
    iteration: int = 0
    masked: int = 0  # tokens of the row that do not count, those after the n too
    extra: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)  # [n] each, of EXTRA


def names_of(where: str, columns: Iterable[str], form: str | None = None) -> Names:
    """The names of a format, or of the one format whose log-probs a dump has; UserError for none or several."""
    there = set(columns)
    if form is not None:
        if form not in FORMATS:
            raise UserError(f"--format {form}: must be one of {', '.join(FORMATS)}")
        return FORMATS[form]
    fits = [names for names in FORMATS.values() if {names.sampler, names.trainer} <= there]
    if len(fits) != 1:
        known = "; ".join(f"{n.sampler} and {n.trainer} ({stack})" for stack, n in FORMATS.items())
        raise UserError(
            f"{where}: must have the two log-probs of one stack, {known}; there are "
            f"{shown(', '.join(map(str, there)))}; say which with --format, or names=ppo_repro.testing.Names(...)"
        )
    return fits[0]


def read_dump(source: Path | str | pd.DataFrame, names: Names | str | None = None) -> Iterator[Response]:
    """The responses of a dump in which a token counts, in order.

    `names`: a `Names`, a format of FORMATS, or None to tell it from the columns. UserError names the row.
    """
    where = str(source) if isinstance(source, Path | str) else "the frame"
    rows: Iterator[Any]  # of a frame the columns need not be texts
    rows = _file_rows(Path(source), names) if isinstance(source, Path | str) else iter(source.to_dict("records"))
    first = next(rows, None)
    if first is None:
        return
    if not isinstance(names, Names):
        names = names_of(where, first, names)
    every: Iterable[Row] = chain([first], rows)
    if not _is_list(_column(f"{where}: row 1", first, names.sampler)):
        every = _responses_of_tokens(every, names)
    for row, fields_ in enumerate(every, 1):
        response = _response(f"{where}: row {row}", row, fields_, names)
        if response is not None:
            yield response


def turns_of(counts: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The turn of each token, from 1: how many runs of tokens that count have begun. bool [n] -> int64 [n]."""
    return np.cumsum(np.diff(counts.astype(np.int64), prepend=0) == 1)


def impossible(values: npt.NDArray[np.float32]) -> str:
    """Why these cannot be log-probs of sampled tokens, in words; "" if they can. NaN and infinities are ignored."""
    finite = values[np.isfinite(values)]
    above = finite[finite > ROUNDING]
    if above.size:
        kind = "0 or above: losses or probabilities?" if (finite >= 0).all() else "some above 0"
        return f"{above.size} of {finite.size} numbers are above 0, as {above[0]:.4g} ({kind}); give log-probs in nats"
    if finite.size and not finite.any():
        return f"all {finite.size} numbers are exactly 0; nothing was recorded"
    return ""


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def _responses_of_tokens(rows: Iterable[Row], names: Names) -> Iterator[Row]:
    """Rows that are tokens, joined to one row of lists for each run of the same iteration and sequence."""

    def key(row: Row) -> tuple[Any, Any]:
        return row.get(names.iteration or ""), row.get(names.sequence)

    own = {"response_ids", "token_id"}  # the second is the name in a run's own table
    for (iteration, sequence), group in groupby(rows, key):
        tokens = list(group)
        joined: dict[str, Any] = {name: [row.get(name) for row in tokens] for name in tokens[0]}
        joined |= {"iteration": iteration, "sequence": sequence}
        if names.tokens in own and "token_id" in joined:
            joined["response_ids"] = joined["token_id"]
        if names.iteration:
            joined[names.iteration] = iteration
        yield joined


def _response(where: str, row: int, fields_: Row, names: Names) -> Response | None:
    lists: dict[str, list[Any]] = {
        names.sampler: _numbers(where, names.sampler, _column(where, fields_, names.sampler)),
        names.trainer: _numbers(where, names.trainer, _column(where, fields_, names.trainer)),
    }
    count = len(lists[names.sampler])
    has_tokens = names.tokens is not None and fields_.get(names.tokens) is not None
    tokens = _whole_numbers(where, names.tokens, fields_) if has_tokens else [-1] * count
    prompt: list[int] = []
    padding: tuple[int, ...] = ()
    counts, turns = "mask", "turn of each token"
    if names.prompt is not None and fields_.get(names.prompt) is not None:
        prompt, padding = _prompt(where, fields_, names)
    elif names.response_length is not None and has_tokens:
        prompt, tokens = _split(where, names.response_length, fields_.get(names.response_length), tokens)
    mask = None if names.mask is None else fields_.get(names.mask)
    lists[counts] = [True] * len(tokens) if mask is None else _flags(where, str(names.mask), mask)
    has_turns = names.turns is not None and fields_.get(names.turns) is not None
    lists[turns] = _whole_numbers(where, names.turns, fields_) if has_turns else [0] * len(tokens)
    for name, spelled in EXTRA.items():
        values = next((fields_[n] for n in spelled if _is_list(fields_.get(n))), None)
        if values is not None and len(values) == len(tokens):
            lists[name] = _numbers(where, name, values)
    for name, values in lists.items():
        if len(values) != len(tokens):
            shown_name = names.mask if name == counts else name
            raise UserError(f"{where}: {shown_name} has {len(values)} entries for {len(tokens)} response tokens")
    if names.prompt is None and names.response_length is None and has_tokens:
        prompt, tokens, lists = _whole(where, fields_, names, tokens, lists, counts)
    end = max((i for i, counts_ in enumerate(lists[counts], 1) if counts_), default=0)
    if not end:
        return None
    flags = np.array(lists[counts][:end], bool)
    with np.errstate(over="ignore"):  # numbers beyond float32 become infinite
        arrays = {n: np.array(v[:end], np.float64).astype(np.float32) for n, v in lists.items() if n != counts}
    return Response(
        row=row,
        prompt_ids=tuple(prompt),
        response_ids=tuple(tokens[:end]) if has_tokens else (),
        sampler=arrays[names.sampler],
        trainer=arrays[names.trainer],
        counts=flags,
        turns=arrays[turns].astype(np.int64) if has_turns else turns_of(flags),
        padding=padding,
        iteration=_iteration(where, names, fields_),
        masked=len(lists[counts]) - int(flags.sum()),
        extra={name: arrays[name] for name in EXTRA if name in arrays},
    )


def _column(where: str, fields_: Row, name: str) -> Any:
    if fields_.get(name) is None:
        raise _no_column(where, name, fields_)
    return fields_[name]


def _no_column(where: object, name: str, fields_: Row) -> UserError:
    there = shown(", ".join(map(str, fields_)))
    return UserError(f"{where}: no column {name!r}; there are {there}; choose --format or names=Names(...)")


def _iteration(where: str, names: Names, fields_: Row) -> int:
    value = fields_.get(names.iteration or "")
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 1 << 63:
        raise UserError(f"{where}: {names.iteration} = {shown(repr(value))}: must be a whole number from 0")
    return int(value)


def _prompt(where: str, fields_: Row, names: Names) -> tuple[list[int], tuple[int, ...]]:
    """The tokens of a prompt, and the padding before it."""
    prompt = _whole_numbers(where, names.prompt, fields_)
    mask = names.padding_mask
    if mask is None or fields_.get(mask) is None:
        return prompt, ()
    real = _flags(where, mask, fields_[mask])
    if len(real) < len(prompt):
        raise UserError(f"{where}: {mask} is shorter than {names.prompt}")
    first = real.index(True) if True in real else len(prompt)
    return _only(prompt, real[: len(prompt)]), tuple(prompt[:first])


def _split(where: str, name: str, length: Any, tokens: list[int]) -> tuple[list[int], list[int]]:
    if not isinstance(length, int | np.integer) or isinstance(length, bool) or not 0 <= length < len(tokens):
        raise UserError(
            f"{where}: {name} = {shown(repr(length))}: must leave at least one of {len(tokens)} tokens for the prompt"
        )
    at = len(tokens) - int(length)
    return tokens[:at], tokens[at:]


def _whole(
    where: str, fields_: Row, names: Names, tokens: list[int], lists: dict[str, list[Any]], counts: str
) -> tuple[list[int], list[int], dict[str, list[Any]]]:
    """Prompt and response of lists about a whole sequence: the response begins with the first token that counts."""
    all_ahead = names.all_ahead_with is not None and names.all_ahead_with in fields_
    ahead = lists.keys() if all_ahead else set(names.ahead)
    lists = {name: values[-1:] + values[:-1] if name in ahead else values for name, values in lists.items()}
    if names.padding_mask is not None and fields_.get(names.padding_mask) is not None:
        real = _flags(where, names.padding_mask, fields_[names.padding_mask])
        if len(real) != len(tokens):
            raise UserError(f"{where}: {names.padding_mask} has {len(real)} entries for {len(tokens)} tokens")
        tokens, lists = _only(tokens, real), {name: _only(values, real) for name, values in lists.items()}
    # nothing predicts the first token
    start = next((i for i, counts_ in enumerate(lists[counts]) if counts_ and i), len(tokens))
    return tokens[:start], tokens[start:], {name: values[start:] for name, values in lists.items()}


def _only(values: Sequence[Any], real: Sequence[bool]) -> list[Any]:
    return [value for value, is_real in zip(values, real, strict=True) if is_real]


def _whole_numbers(where: str, name: str | None, fields_: Row) -> list[int]:
    values = _column(where, fields_, str(name))
    good = _is_list(values) and all(isinstance(v, int | np.integer) and type(v) is not bool and v >= 0 for v in values)
    if not good:
        what = "turns, whole numbers" if name == "turns" else "token ids"
        raise UserError(f"{where}: {name} = {shown(repr(values))}: must be a list of {what}")
    return [int(v) for v in values]


def _flags(where: str, name: str, values: Any) -> list[bool]:
    if not _is_list(values) or not all(v in (0, 1) for v in values):
        raise UserError(f"{where}: {name} = {shown(repr(values))}: must be a list of 0 and 1")
    return [bool(v) for v in values]


def _numbers(where: str, name: str, values: Any) -> list[float]:
    good = _is_list(values) and all(
        v is None or (isinstance(v, int | float | np.number) and type(v) is not bool) for v in values
    )
    if not good:
        raise UserError(f"{where}: {name} = {shown(repr(values))}: must be a list of log-probs in nats")
    return [float("nan") if v is None else _float(v) for v in values]


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return float("inf") if value > 0 else float("-inf")


def _file_rows(path: Path, names: Names | str | None) -> Iterator[Row]:
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: must be a {', a '.join(SUFFIXES)} file")
    if path.suffix == ".jsonl":
        return (line.fields for line in read_lines("the dump", path, constants=True))
    return _parquet_rows(path) if path.suffix == ".parquet" else _tensor_rows(path, names)


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read ({reason}); give a whole Parquet file") from error


def _tensor_rows(path: Path, names: Names | str | None) -> Iterator[Row]:
    import torch

    loaded = _loaded(path)
    if isinstance(loaded, dict):
        loaded = next((loaded[name] for name in INSIDE if isinstance(loaded.get(name), dict | list)), loaded)
    parts = loaded if isinstance(loaded, list) else [loaded]
    if not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{path}: holds {type(loaded).__name__}; must be a dict of columns or a list of rows")
    for part in parts:
        if isinstance(loaded, dict) or any(isinstance(v, torch.Tensor) and v.dim() > 1 for v in part.values()):
            used = names if isinstance(names, Names) else names_of(str(path), map(str, part), names)
            yield from _rows_of_columns(path, part, used)
        else:
            yield {str(name): _plain(value) for name, value in part.items()}


def _loaded(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a file that torch.save wrote") from error
    except Exception as error:  # damaged files fail in many ways
        if is_out_of_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        advice = "save a dict of tensors and lists, or a list of such dicts, with torch.save"
        raise UserError(f"{path}: cannot be read without running code from it ({shown(reason)}); {advice}") from error


def _rows_of_columns(path: Path, part: Mapping[Any, Any], names: Names) -> Iterator[Row]:
    whole = {str(name): values for name, values in part.items() if hasattr(values, "__len__")}
    if names.sampler not in whole:
        raise _no_column(path, names.sampler, part)
    count = len(whole[names.sampler])
    for name in {str(getattr(names, f.name)) for f in fields(Names)} & whole.keys():
        if len(whole[name]) != count:
            raise UserError(
                f"{path}: {name} has {len(whole[name])} rows, {names.sampler} has {count}; all must have as many"
            )
    alike = {name: values for name, values in whole.items() if len(values) == count}
    for row in zip(*alike.values(), strict=True):
        yield {name: _plain(value) for name, value in zip(alike, row, strict=True)}


def _plain(value: Any) -> Any:
    import torch

    return value.tolist() if isinstance(value, torch.Tensor) else value
