"""Responses with the log-probs of sampler and trainer, from files that training stacks dumped.

JSON Lines, Parquet, or a `.pt` file of tensors and lists, which is read without running code from it. One row is one
response. Nothing is guessed: a column that is missing is an error, and so are lists of different lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ppo_repro.disk.json_lines import read_lines
from ppo_repro.errors import UserError, is_out_of_memory
from ppo_repro.output import shown


@dataclass(frozen=True)
class Names:
    """The columns of a format; None: there is no such column."""

    tokens: str  # of the response; of the whole sequence where there is no `prompt`
    sampler: str
    trainer: str
    mask: str | None  # 1: the token counts; 0: it is context only. A file without the column has all count
    prompt: str | None
    prompt_mask: str | None = None  # 0 for padding, at least as long as the prompt; may be missing
    response_length: str | None = None  # how many tokens at the end of `tokens` are the response


FORMATS = {
    "ppo_repro": Names("response_ids", "rollout_logprobs", "old_logprobs", "mask", "prompt_ids"),
    "verl": Names(
        "responses", "rollout_log_probs", "old_log_probs", "response_mask", "prompts", prompt_mask="attention_mask"
    ),
    "trl": Names(
        "completion_ids",
        "sampling_per_token_logps",
        "old_per_token_logps",
        "completion_mask",
        "prompt_ids",
        prompt_mask="prompt_mask",
    ),
    "slime": Names("tokens", "rollout_log_probs", "log_probs", "loss_mask", None, response_length="response_length"),
    "prime-rl": Names("token_ids", "inference_logprobs", "trainer_logprobs", "loss_mask", None),
}
SUFFIXES = (".jsonl", ".parquet", ".pt")


@dataclass(frozen=True)
class Response:
    """One response. `sampler`, `trainer`: float32 [n], nats; `counts`: bool [n]."""

    row: int  # in the file, from 1
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler: npt.NDArray[np.float32]
    trainer: npt.NDArray[np.float32]
    counts: npt.NDArray[np.bool_]


def read_dump(path: Path, form: str, responses: int) -> list[Response]:
    """The first `responses` responses of a file that have a token that counts; UserError names file and row."""
    names = FORMATS[form]
    found = (_response(f"{path}: row {row}", row, fields, names) for row, fields in enumerate(_rows(path), 1))
    kept = list(islice((r for r in found if r.counts.any()), responses))
    if not kept:
        raise UserError(f"{path}: has no response with a token that counts; there is nothing to audit")
    return kept


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: must be a {', a '.join(SUFFIXES)} file")
    if path.suffix == ".jsonl":
        return (line.fields for line in read_lines("the dump", path, constants=True))
    return _parquet_rows(path) if path.suffix == ".parquet" else _tensor_rows(path)


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read ({reason}); give a whole Parquet file") from error


def _tensor_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a file that torch.save wrote") from error
    except Exception as error:  # damaged files fail in many ways
        if is_out_of_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        advice = "save a dict of tensors and lists, or a list of such dicts, with torch.save"
        raise UserError(f"{path}: cannot be read without running code from it ({shown(reason)}); {advice}") from error
    if isinstance(loaded, dict):
        columns = {str(name): values for name, values in loaded.items() if hasattr(values, "__len__")}
        if len(lengths := {len(values) for values in columns.values()}) != 1:
            raise UserError(f"{path}: its columns have {sorted(lengths)} rows; all must have as many")
        loaded = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if not isinstance(loaded, list) or not all(isinstance(row, dict) for row in loaded):
        raise UserError(f"{path}: holds {type(loaded).__name__}; must be a dict of columns or a list of rows")
    for row in loaded:
        yield {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()}


def _response(where: str, row: int, fields: Mapping[str, Any], names: Names) -> Response:
    def column(name: str) -> Any:
        if fields.get(name) is None:
            raise UserError(f"{where}: no column {name!r}; there are {', '.join(map(str, fields))}; choose --format")
        return fields[name]

    tokens = _ids(where, names.tokens, column(names.tokens))
    sampler, trainer = (_logprobs(where, name, column(name)) for name in (names.sampler, names.trainer))
    if names.prompt is not None:
        prompt = _ids(where, names.prompt, column(names.prompt))
        if names.prompt_mask is not None and fields.get(names.prompt_mask) is not None:
            real = _flags(where, names.prompt_mask, fields[names.prompt_mask])
            if len(real) < len(prompt):
                raise UserError(f"{where}: {names.prompt_mask} is shorter than {names.prompt}")
            prompt = [token for token, is_real in zip(prompt, real, strict=False) if is_real]
    elif names.response_length is not None:
        length = column(names.response_length)
        if not isinstance(length, int) or not 0 < length < len(tokens):
            raise UserError(
                f"{where}: {names.response_length} = {shown(repr(length))}: must leave at least one of "
                f"{len(tokens)} tokens for the prompt"
            )
        prompt, tokens = tokens[:-length], tokens[-length:]
    else:  # log-probs of the whole sequence: nothing predicts its first token
        prompt, tokens, sampler, trainer = tokens[:1], tokens[1:], sampler[1:], trainer[1:]
    mask = None if names.mask is None else fields.get(names.mask)
    counts = np.ones(len(tokens), bool) if mask is None else np.array(_flags(where, str(names.mask), mask), bool)
    if names.prompt is None and names.response_length is None:
        counts = counts[1:]
    if not prompt:
        raise UserError(f"{where}: has no prompt token, so nothing predicts its first token")
    for name, values in ((names.sampler, sampler), (names.trainer, trainer), (str(names.mask), counts)):
        if len(values) != len(tokens):
            raise UserError(f"{where}: {name} has {len(values)} entries for {len(tokens)} response tokens")
    return Response(row, tuple(prompt), tuple(tokens), sampler, trainer, counts)


def _ids(where: str, name: str, values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise UserError(f"{where}: {name} = {shown(repr(values))}: must be a list of token ids")
    return values


def _flags(where: str, name: str, values: Any) -> list[bool]:
    if not isinstance(values, list) or not all(v in (0, 1) for v in values):
        raise UserError(f"{where}: {name} = {shown(repr(values))}: must be a list of 0 and 1")
    return [bool(v) for v in values]


def _logprobs(where: str, name: str, values: Any) -> npt.NDArray[np.float32]:
    good = isinstance(values, list) and all(
        v is None or (isinstance(v, int | float) and type(v) is not bool) for v in values
    )
    if not good:
        raise UserError(f"{where}: {name} = {shown(repr(values))}: must be a list of log-probs in nats")
    return np.array([np.nan if v is None else v for v in values], np.float64).astype(np.float32)
