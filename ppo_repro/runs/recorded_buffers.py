"""Make the buffers of an iteration from its records, as they were when the iteration was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ppo_repro import buffers
from ppo_repro.base.errors import UserError
from ppo_repro.records import manifest, reader, schema
from ppo_repro.records.manifest import Manifest


@dataclass(frozen=True)
class Records:
    """Recorded tables of one iteration, by name."""

    iteration: int
    tables: Mapping[str, pa.Table]

    def has(self, table: str, column: str) -> bool:
        """Return whether a column was recorded; otherwise it is null in every row."""
        values = self.tables[table].column(column)
        return bool(values.null_count < len(values))

    def tensor(self, table: str, column: str, rows: slice = slice(None)) -> Tensor:
        """Return some rows of a column as a tensor. The column has no nulls."""
        return torch.from_numpy(np.array(self.tables[table].column(column).to_numpy()[rows]))

    def tensor_or_none(self, table: str, column: str, rows: slice = slice(None)) -> Tensor | None:
        """Return some rows of a column as a tensor; None if one of these rows is null."""
        is_there = self.tables[table].column(column).is_valid().to_numpy()[rows].all()
        return self.tensor(table, column, rows) if is_there else None

    def values(self, table: str, column: str) -> tuple[Any, ...]:
        """Return a column as Python values. Lists become tuples."""
        values = self.tables[table].column(column).to_pylist()
        return tuple(tuple(value) if isinstance(value, list) else value for value in values)

    def values_or_none(self, table: str, column: str) -> tuple[Any, ...] | None:
        return self.values(table, column) if self.has(table, column) else None


def read_iteration(run_dir: Path, recorded: Manifest, iteration: int) -> Records:
    """Read the tables of an iteration, side tables included, without comparing digests.

    Raises UserError if they cannot be read or do not fit together.
    """
    tables = reader.read_moment(run_dir, recorded, iteration, verify=False)
    records = Records(iteration, tables)
    lengths = records.tensor("sequences", "response_length")
    tokens = tables["tokens"].num_rows
    if len(lengths) == 0 or lengths.min() < 1 or int(lengths.sum()) != tokens:
        path = manifest.table_path(run_dir, "tokens", iteration)
        raise UserError(f"{path}: has {tokens} rows; the responses have {int(lengths.sum())} tokens; restore the file")
    return records


def rollout_of(records: Records, temperature: float) -> buffers.Rollout:
    """Return the sampled responses. The sets of kept tokens are absent, because no later stage reads them.

    `temperature`: at which they were sampled, which the configuration says.
    """
    count = records.tables["tokens"].num_rows
    lengths = records.tensor("sequences", "response_length").to(torch.int64)
    spans = {name: of.split(lengths.tolist()) for name, of in _token_fields(records, "spans").items()}
    as_sampled = records.values_or_none("sequences", "is_as_sampled")
    return buffers.Rollout(
        prompts=buffers.Prompts(**_fields(records, schema.SEQUENCES, "prompts")),
        response_ids=records.tensor("tokens", "token_id").to(torch.int64),
        lengths=lengths,
        temperature=temperature,
        **_token_fields(records, "rollout"),
        kept_tokens=torch.empty(count, 0, dtype=torch.uint8),
        finish_reason=records.values("sequences", "finish_reason"),
        response=records.values("sequences", "response"),
        server=(None,) * len(lengths),
        latency=(None,) * len(lengths),
        spans=tuple(buffers.Spans(**{n: of[i].tolist() for n, of in spans.items()}) for i in range(len(lengths))),
        episodes=_episodes(records, "sequences"),
        rollout_policy_versions=records.values_or_none("sequences", "rollout_policy_versions"),
        sampled_ids=records.values_or_none("sequences", "sampled_ids"),
        is_as_sampled=None if as_sampled is None else tuple(tuple(map(bool, row)) for row in as_sampled),
    )


def _episodes(records: Records, table: str) -> tuple[buffers.Episode, ...] | None:
    """Return the episodes, without the unrecorded texts of turns; None if the run has no environment."""
    if not records.has(table, "episode_ids"):
        return None
    rows = zip(records.values(table, "episode_ids"), records.values(table, "is_forced"), strict=True)
    return tuple(buffers.Episode(ids, tuple(map(bool, forced)), ()) for ids, forced in rows)


def forward_of(records: Records) -> buffers.ForwardPass:
    """Return the outputs of the networks before the update."""
    routes = torch.empty(records.tables["tokens"].num_rows, 0, dtype=torch.int32)
    return buffers.ForwardPass(**_token_fields(records, "forward"), routes=routes)


def rewards_of(records: Records) -> buffers.Rewards:
    """Return scores and rewards. A column without records is 0, and is not compared."""
    zeros, recorded = torch.zeros(records.tables["tokens"].num_rows), _token_fields(records, "rewards")
    unrecorded = {"placed_scores": zeros.to(torch.float64), "raw_rewards": zeros}
    return buffers.Rewards(
        scores=records.tensor("sequences", "scores"),
        score_parts=records.values("sequences", "score_parts"),
        is_correct=torch.tensor(records.values("sequences", "is_correct")),
        **unrecorded | {name: column for name, column in recorded.items() if column is not None},
    )


def advantages_of(records: Records) -> buffers.Advantages:
    """Return advantages and value targets."""
    return buffers.Advantages(**_token_fields(records, "advantages"))


def _token_fields(records: Records, source: schema.Source) -> dict[str, Any]:
    """Return the fields of a stage of which each is a column of the table `tokens`; None for one without records."""
    columns = [column for column in schema.TOKENS.columns if column.source == source]
    return {c.field or c.name: records.tensor_or_none("tokens", c.name) for c in columns}


def _fields(records: Records, table: schema.Table, source: schema.Source) -> dict[str, Any]:
    """Return the fields of a stage of which each is a column of a table, as Python values."""
    return {c.field or c.name: records.values(table.name, c.name) for c in table.columns if c.source == source}


def evaluation_of(records: Records) -> buffers.Evaluation | None:
    """Return the held-out responses; None if the run has no evaluation, or did not record its responses."""
    if "evaluations" not in records.tables:
        return None
    fields = _fields(records, schema.EVALUATIONS, "evaluation")
    return buffers.Evaluation(**fields, episodes=_episodes(records, "evaluations"))
