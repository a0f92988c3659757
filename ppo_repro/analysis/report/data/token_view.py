"""Collect what token_view.js shows: columns with their scales, and responses token by token."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.clip_flags import flag_legend
from ppo_repro.analysis.report.data.chosen_responses import REASONS, ChosenResponse
from ppo_repro.analysis.run_tables import RunTables
from ppo_repro.base.errors import UserError
from ppo_repro.records.logprob_pairs import deltas

DIGITS = 6
NULLABLE = ("values", "returns", "ratio_")  # the beginnings of columns whose NaN is null
Scale = Literal["diverging", "sequential", "negative", "ratio", "category"]
Cell = float | str | None  # JSON has no NaN or infinity: they are words, or None where NaN is null


class ShownResponse(TypedDict):
    """A response of the token view; each list has an item per token, in order of position."""

    iteration: int
    sequence: int
    why: Sequence[str]  # keys of REASONS
    prompt: str
    response: str
    answer: str
    score: Cell
    finish: str
    mismatch: Cell  # nats
    clipped: int  # token updates
    ids: list[int]
    texts: list[str]
    special: list[int]  # 1 for `are_special`
    columns: dict[str, list[Cell]]  # by key; ratio_e and flag_e are None if epoch e did not use the token


class ShownColumn(TypedDict):
    """A TokenColumn of the token view, with the value that gets the full colour."""

    key: str
    label: str
    unit: str
    scale: Scale
    limit: float


class TokenView(TypedDict):
    """The JSON that token_view.js reads."""

    columns: list[ShownColumn]
    reasons: Mapping[str, str]
    flags: list[dict[str, str]]
    responses: list[ShownResponse]


@dataclass(frozen=True)
class TokenColumn:
    """Column of the token view; `scale` says how its values are coloured.

    Colours diverge about 0, go from 0 up (sequential) or from 0 down (negative), diverge about 1 (ratio), or are those
    of categories.
    """

    key: str
    label: str
    unit: str
    scale: Scale


VIEW_COLUMNS = (  # `token_view` adds a ratio and a flag for each epoch
    TokenColumn("delta", "mismatch, old - rollout log-prob", "nats", "diverging"),
    TokenColumn("rollout_logprobs", "rollout log-prob", "nats", "negative"),
    TokenColumn("old_logprobs", "old log-prob", "nats", "negative"),
    TokenColumn("ref_logprobs", "reference log-prob", "nats", "negative"),
    TokenColumn("ref_kl", "KL(policy || reference), exact", "nats", "sequential"),
    TokenColumn("entropies", "entropy", "nats", "sequential"),
    TokenColumn("kl_penalties", "KL penalty", "reward", "diverging"),
    TokenColumn("rewards", "reward", "reward", "diverging"),
    TokenColumn("advantages", "advantage", "", "diverging"),
    TokenColumn("values", "value", "reward", "diverging"),
    TokenColumn("returns", "return", "reward", "diverging"),
)
# the columns that are read from each table
_SEQUENCE_COLUMNS = ["iteration", "sequence", "prompt", "response", "answer", "scores", "finish_reason"]
_TOKEN_COLUMNS = [
    "iteration", "sequence", "position", "token_id", "char_start", "char_end", "word_id",
    *(column.key for column in VIEW_COLUMNS if column.key != "delta"),
]  # fmt: skip
_UPDATE_COLUMNS = ["iteration", "epoch", "sequence", "position", "ratios", "clip_flag"]


def read_token_view(tables: RunTables, chosen: Sequence[ChosenResponse]) -> TokenView:
    """Read the chosen responses of a run, which are in order of iteration, and return them token by token."""
    responses: list[ShownResponse] = []
    for iteration, group in groupby(chosen, key=lambda response: response.iteration):
        sequences = tables.read("sequences", _SEQUENCE_COLUMNS, iteration)
        tokens = tables.read("tokens", _TOKEN_COLUMNS, iteration)
        updates = tables.read("updates", _UPDATE_COLUMNS, iteration)
        place = f"{tables.run_dir}: iteration {iteration}"
        responses += responses_by_token(sequences, tokens, updates, [*group], place)
    return token_view(responses)


def token_view(responses: list[ShownResponse]) -> TokenView:
    """Return the responses with the columns that have a value in any of them; a ratio and a flag for each epoch."""
    columns = [*VIEW_COLUMNS]
    keys = {key for response in responses for key in response["columns"] if key.startswith("ratio_")}
    for epoch in sorted(int(key.removeprefix("ratio_")) for key in keys):
        columns.append(TokenColumn(f"ratio_{epoch}", f"ratio, epoch {epoch}", "", "ratio"))
        columns.append(TokenColumn(f"flag_{epoch}", f"clip flag, epoch {epoch}", "", "category"))
    shown: list[ShownColumn] = []
    for column in columns:
        values = [value for response in responses for value in response["columns"].get(column.key, [])]
        if any(value is not None for value in values):
            limit = _limit(column.scale, values)
            shown.append(
                {"key": column.key, "label": column.label, "unit": column.unit, "scale": column.scale, "limit": limit}
            )
    return {"columns": shown, "reasons": REASONS, "flags": flag_legend(), "responses": responses}


def responses_by_token(
    sequences: pd.DataFrame, tokens: pd.DataFrame, updates: pd.DataFrame, chosen: Sequence[ChosenResponse], place: str
) -> list[ShownResponse]:
    """Return the chosen responses of one iteration, token by token.

    Args:
        sequences, tokens, updates: rows of the recorded tables; whole responses.
        place: the name of the run and iteration, for messages.

    Raises:
        UserError: the updates have tokens that `tokens` does not have.
    """
    tokens = tokens.join(_epoch_columns(tokens, updates, place))
    tokens = tokens.assign(delta=deltas(tokens), special=are_special(tokens))
    chosen_by_sequence: dict[Hashable, ChosenResponse] = {response.sequence: response for response in chosen}
    chosen_sequences, chosen_tokens = (
        rows[rows["sequence"].isin(list(chosen_by_sequence))] for rows in (sequences, tokens)
    )
    sequence_rows = {row["sequence"]: row for row in chosen_sequences.to_dict("records")}
    return [
        _shown(chosen_by_sequence[sequence], sequence_rows[sequence], rows.sort_values("position"))
        for sequence, rows in chosen_tokens.groupby("sequence", sort=True)
    ]


def are_special(tokens: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Return the tokens without text that are alone in their word: end tokens, but not bytes of a character."""
    empty = (tokens["char_start"] == tokens["char_end"]).to_numpy()
    words = tokens.groupby(["iteration", "sequence", "word_id"])["position"].transform("size").to_numpy()
    return np.asarray(empty & (words == 1), dtype=np.bool_)


def _epoch_columns(tokens: pd.DataFrame, updates: pd.DataFrame, place: str) -> pd.DataFrame:
    """Return the columns ratio_e and flag_e of each token for each epoch e; empty if epoch e did not use the token."""
    keys = ["sequence", "position"]
    rows = pd.MultiIndex.from_frame(tokens[keys]).get_indexer(pd.MultiIndex.from_frame(updates[keys]))
    if (rows < 0).any():
        raise UserError(f"{place}: the updates name tokens that are not in the tokens table; the records are damaged")
    columns: dict[str, Any] = {}
    for epoch in np.unique(updates["epoch"].to_numpy()).tolist():
        in_epoch = (updates["epoch"] == epoch).to_numpy()
        ratios = np.full(len(tokens), np.nan)
        ratios[rows[in_epoch]] = updates["ratios"].to_numpy(np.float64)[in_epoch]
        flags = np.full(len(tokens), None, dtype=object)
        flags[rows[in_epoch]] = updates["clip_flag"].to_numpy(object)[in_epoch]
        columns |= {f"ratio_{epoch}": ratios, f"flag_{epoch}": flags}
    return pd.DataFrame(columns, index=tokens.index)


def _shown(chosen: ChosenResponse, row: Mapping[Hashable, Any], tokens: pd.DataFrame) -> ShownResponse:
    """Return a response from its row of `sequences` and its rows of `tokens`."""
    text = str(row["response"])
    spans = zip(tokens["char_start"], tokens["char_end"], strict=True)
    keys = [name for name in tokens.columns if name.startswith(("ratio_", "flag_"))]
    columns = {key: _cells(tokens[key]) for key in [*(column.key for column in VIEW_COLUMNS), *keys]}
    return ShownResponse(
        iteration=chosen.iteration,
        sequence=chosen.sequence,
        why=chosen.why,
        prompt=str(row["prompt"]),
        response=text,
        answer=str(row["answer"]),
        score=_number(float(row["scores"])),
        finish=str(row["finish_reason"]),
        mismatch=_number(chosen.mismatch),
        clipped=chosen.clipped,
        ids=tokens["token_id"].tolist(),
        texts=[text[start:end] for start, end in spans],
        special=tokens["special"].astype(int).tolist(),
        columns=columns,
    )


def _cells(values: pd.Series) -> list[Cell]:
    if values.dtype.kind == "f":
        # in a column without nulls, NaN is a recorded NaN
        absent = None if str(values.name).startswith(NULLABLE) else "nan"
        return [absent if value != value else _number(value) for value in values.to_numpy(np.float64).tolist()]
    return [None if value is None or value != value else str(value) for value in values.tolist()]


def _number(value: float) -> Cell:
    """Return the number rounded to DIGITS; for JSON, NaN becomes None and an infinity becomes a word."""
    if math.isnan(value):
        return None
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)


def _limit(scale: Scale, values: Sequence[Cell]) -> float:
    """Return the size that gets the full colour: the 98th percentile of |value|, or the largest if that is 0.

    The size of a ratio is |log ratio|; a category has none, which is 0.
    """
    if scale == "category":
        return 0.0
    numbers = np.array([value for value in values if isinstance(value, float | int)], dtype=np.float64)
    if scale == "ratio":
        numbers = np.log(numbers[numbers > 0])
    if not len(numbers):
        return 0.0
    sizes = np.abs(numbers)
    full = float(np.quantile(sizes, 0.98)) or float(sizes.max())
    return float(f"{full:.3g}")
