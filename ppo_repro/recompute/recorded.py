"""From the recorded tables of one iteration back to the frozen types of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from ppo_repro.buffers import Advantages, Episode, Evaluation, ForwardPass, Prompts, Rewards, Rollout, Spans
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader
from ppo_repro.records.manifest import Manifest

_SPANS = ("char_start", "char_end", "byte_start", "byte_end", "word_id", "sub_idx")


@dataclass(frozen=True)
class Records:
    """The tables of one iteration by name, as they are in the files."""

    iteration: int
    tables: Mapping[str, pa.Table]

    def has(self, table: str, column: str) -> bool:
        """Tell whether a column was recorded; one that a level leaves out reads as null in every row."""
        values = self.tables[table].column(column)
        return bool(values.null_count < len(values))

    def array(self, table: str, column: str) -> npt.NDArray[Any]:
        """Read a column of fixed width without nulls."""
        return np.array(self.tables[table].column(column).to_numpy())

    def tensor(self, table: str, column: str) -> Tensor:
        return torch.from_numpy(self.array(table, column))

    def tensor_or_none(self, table: str, column: str) -> Tensor | None:
        """Read a column as a tensor; None if it is null in every row."""
        return self.tensor(table, column) if self.has(table, column) else None

    def present(self, table: str, column: str) -> npt.NDArray[np.bool_]:
        """Tell in which rows a column is not null."""
        return np.asarray(self.tables[table].column(column).is_valid().to_numpy(), dtype=bool)

    def values(self, table: str, column: str) -> tuple[Any, ...]:
        """Read a column as Python values; lists become tuples."""
        values = self.tables[table].column(column).to_pylist()
        return tuple(tuple(value) if isinstance(value, list) else value for value in values)

    def values_or_none(self, table: str, column: str) -> tuple[Any, ...] | None:
        return self.values(table, column) if self.has(table, column) else None


def read(run_dir: Path, recorded: Manifest, iteration: int) -> Records:
    """Read the tables of an iteration, side tables included, without comparing digests.

    UserError if they cannot be read or do not fit together.
    """
    tables = reader.read_moment(run_dir, recorded, iteration, verify=False)
    records = Records(iteration, tables)
    lengths = records.array("sequences", "response_length")
    tokens = tables["tokens"].num_rows
    if lengths.size == 0 or lengths.min() < 1 or int(lengths.sum()) != tokens:
        path = manifest.table_path(run_dir, "tokens", iteration)
        raise UserError(f"{path}: has {tokens} rows; the responses have {int(lengths.sum())} tokens; restore the file")
    return records


def rollout_of(records: Records) -> Rollout:
    """Return the sampled responses. Eligible tokens stay empty: no later stage reads them."""
    count = records.tables["tokens"].num_rows

    def of(column: str) -> tuple[Any, ...]:
        return records.values("sequences", column)

    lengths = records.tensor("sequences", "response_length").to(torch.int64)
    columns = [np.split(records.array("tokens", name), lengths.cumsum(0)[:-1].tolist()) for name in _SPANS]
    as_sampled = records.values_or_none("sequences", "is_as_sampled")
    return Rollout(
        prompts=Prompts(of("prompt_key"), of("sample_index"), of("seed"), of("prompt"), of("answer"), of("prompt_ids")),
        response_ids=records.tensor("tokens", "token_id").to(torch.int64),
        lengths=lengths,
        temperature=1.0,
        rollout_logprobs=records.tensor("tokens", "rollout_logprobs"),
        log_kept_mass=records.tensor("tokens", "log_kept_mass"),
        kept_tokens=torch.empty(count, 0, dtype=torch.uint8),
        finish_reasons=of("finish_reason"),
        servers=(None,) * len(lengths),
        latencies=(None,) * len(lengths),
        responses=of("response"),
        spans=tuple(Spans(*(part.tolist() for part in parts)) for parts in zip(*columns, strict=True)),
        episodes=_episodes(records, "sequences"),
        policy_versions=records.values_or_none("sequences", "rollout_policy_versions"),
        sampled_ids=records.values_or_none("sequences", "sampled_ids"),
        is_as_sampled=None if as_sampled is None else tuple(tuple(map(bool, row)) for row in as_sampled),
    )


def _episodes(records: Records, table: str) -> tuple[Episode, ...] | None:
    """Return what the environment put in; None if it never speaks. The texts of turns are in no record."""
    if not records.has(table, "episode_ids"):
        return None
    rows = zip(records.values(table, "episode_ids"), records.values(table, "is_forced"), strict=True)
    return tuple(Episode(ids, tuple(map(bool, forced)), ()) for ids, forced in rows)


def forward_of(records: Records) -> ForwardPass:
    """Return what the networks gave before the update."""
    names = ("old_logprobs", "ref_logprobs", "ref_kl", "entropies", "prob_sq_sums")
    return ForwardPass(
        **{name: records.tensor("tokens", name) for name in names},
        reverse_ref_kl=records.tensor_or_none("tokens", "reverse_ref_kl"),
        routes=torch.empty(records.tables["tokens"].num_rows, 0, dtype=torch.int32),
        values=records.tensor_or_none("tokens", "values"),
    )


def rewards_of(records: Records) -> Rewards:
    """Return scores and rewards; what a level leaves out is 0, and then it is not compared either."""
    zeros = torch.zeros(records.tables["tokens"].num_rows)
    placed, raw = (records.tensor_or_none("tokens", name) for name in ("placed_scores", "raw_rewards"))
    return Rewards(
        scores=records.tensor("sequences", "scores"),
        score_parts=records.values("sequences", "score_parts"),
        is_correct=torch.tensor(records.values("sequences", "is_correct")),
        kl_penalties=records.tensor("tokens", "kl_penalties"),
        placed_scores=zeros.to(torch.float64) if placed is None else placed,
        raw_rewards=zeros if raw is None else raw,
        rewards=records.tensor("tokens", "rewards"),
    )


def advantages_of(records: Records) -> Advantages:
    """Return advantages and returns."""
    return Advantages(
        raw_advantages=records.tensor("tokens", "raw_advantages"),
        advantages=records.tensor("tokens", "advantages"),
        returns=records.tensor_or_none("tokens", "returns"),
    )


def evaluation_of(records: Records) -> Evaluation | None:
    """Return the held-out responses; None if there was no evaluation, or its responses are not recorded."""
    if "evaluations" not in records.tables:
        return None
    names = ("prompt_key", "prompt", "answer", "prompt_ids", "response_ids", "response", "finish_reason", "scores")
    columns = [records.values("evaluations", name) for name in (*names, "score_parts", "is_correct")]
    return Evaluation(*columns, episodes=_episodes(records, "evaluations"))  # type: ignore[misc]
