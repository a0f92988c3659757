"""From the recorded tables of one iteration back to the frozen types of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        """Whether a column was recorded; one that a level leaves out reads as null in every row."""
        values = self.tables[table].column(column)
        return bool(values.null_count < len(values))

    def array(self, table: str, column: str) -> npt.NDArray[Any]:
        """A column of fixed width without nulls."""
        return np.array(self.tables[table].column(column).to_numpy())

    def tensor(self, table: str, column: str) -> Tensor:
        """The same as a tensor, whose memory is its own."""
        return torch.from_numpy(self.array(table, column))

    def tensor_or_none(self, table: str, column: str) -> Tensor | None:
        """The same, None where the column is null in every row."""
        return self.tensor(table, column) if self.has(table, column) else None

    def present(self, table: str, column: str) -> npt.NDArray[np.bool_]:
        """In which rows a column is not null."""
        return np.asarray(self.tables[table].column(column).is_valid().to_numpy(), dtype=bool)

    def values(self, table: str, column: str) -> list[Any]:
        """A column as a list of Python values."""
        return list(self.tables[table].column(column).to_pylist())


def read(run_dir: Path, recorded: Manifest, iteration: int) -> Records:
    """The tables of an iteration, not compared with their digests; UserError where they cannot be read or fit together.

    Side tables are among them where they were recorded.
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
    """The sampled responses. Eligible tokens and largest logits stay empty: no later stage reads them."""
    count = records.tables["tokens"].num_rows
    of_sequences = {name: tuple(records.values("sequences", name)) for name in _SEQUENCE_COLUMNS}
    lengths = records.tensor("sequences", "response_length").to(torch.int64)
    as_sampled = _lists(records, "is_as_sampled")
    return Rollout(
        prompts=Prompts(
            keys=of_sequences["prompt_key"],
            sample_indices=of_sequences["sample_index"],
            seeds=of_sequences["seed"],
            texts=of_sequences["prompt"],
            answers=of_sequences["answer"],
            prompt_ids=tuple(tuple(ids) for ids in of_sequences["prompt_ids"]),
        ),
        response_ids=records.tensor("tokens", "token_id").to(torch.int64),
        lengths=lengths,
        rollout_logprobs=records.tensor("tokens", "rollout_logprobs"),
        log_kept_mass=records.tensor("tokens", "log_kept_mass"),
        kept_tokens=torch.empty(count, 0, dtype=torch.uint8),
        top_ids=torch.empty(count, 0, dtype=torch.int32),
        top_logits=torch.empty(count, 0),
        finish_reasons=of_sequences["finish_reason"],
        servers=(None,) * len(lengths),
        latencies=(None,) * len(lengths),
        responses=of_sequences["response"],
        spans=_spans(records, lengths.tolist()),
        episodes=_episodes(records, "sequences"),
        policy_versions=_lists(records, "rollout_policy_versions"),
        sampled_ids=_lists(records, "sampled_ids"),
        is_as_sampled=None if as_sampled is None else tuple(tuple(map(bool, row)) for row in as_sampled),
    )


def _lists(records: Records, column: str) -> tuple[tuple[int, ...], ...] | None:
    """A column of lists of `sequences`; None where it was not recorded."""
    if not records.has("sequences", column):
        return None
    return tuple(map(tuple, records.values("sequences", column)))


def _episodes(records: Records, table: str) -> tuple[Episode, ...] | None:
    """What the environment put in; None where it never speaks. The texts of turns are in no record."""
    if not records.has(table, "episode_ids"):
        return None
    rows = zip(records.values(table, "episode_ids"), records.values(table, "is_forced"), strict=True)
    return tuple(Episode(tuple(ids), tuple(map(bool, forced)), ()) for ids, forced in rows)


_SEQUENCE_COLUMNS = (
    *("prompt_key", "sample_index", "seed", "prompt", "answer", "prompt_ids"),
    *("finish_reason", "response"),
)


def _spans(records: Records, lengths: Sequence[int]) -> tuple[Spans, ...]:
    columns = {name: records.values("tokens", name) for name in _SPANS}
    ends = np.cumsum(lengths).tolist()
    pieces = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return tuple(Spans(*(columns[name][piece] for name in _SPANS)) for piece in pieces)


def forward_of(records: Records) -> ForwardPass:
    """What the networks said before the update."""
    count = records.tables["tokens"].num_rows
    ids, logits = torch.empty(count, 0, dtype=torch.int32), torch.empty(count, 0)
    final_values = records.tensor_or_none("sequences", "final_values")
    return ForwardPass(
        old_logprobs=records.tensor("tokens", "old_logprobs"),
        ref_logprobs=records.tensor("tokens", "ref_logprobs"),
        ref_kl=records.tensor("tokens", "ref_kl"),
        reverse_ref_kl=records.tensor_or_none("tokens", "reverse_ref_kl"),
        entropies=records.tensor("tokens", "entropies"),
        prob_sq_sums=records.tensor("tokens", "prob_sq_sums"),
        top_ids=ids,
        top_logits=logits,
        ref_top_ids=ids,
        ref_top_logits=logits,
        routes=ids,
        values=records.tensor_or_none("tokens", "values"),
        final_values=torch.zeros(records.tables["sequences"].num_rows) if final_values is None else final_values,
    )


def rewards_of(records: Records) -> Rewards:
    """Scores and rewards as recorded."""
    return Rewards(
        scores=records.tensor("sequences", "scores"),
        score_parts=tuple(tuple(parts) for parts in records.values("sequences", "score_parts")),
        is_correct=torch.tensor(records.values("sequences", "is_correct")),
        kl_penalties=records.tensor("tokens", "kl_penalties"),
        placed_scores=_or_zeros(records, "placed_scores", torch.float64),
        potentials=records.tensor_or_none("tokens", "potentials"),
        shaping_rewards=records.tensor_or_none("tokens", "shaping_rewards"),
        raw_rewards=_or_zeros(records, "raw_rewards", torch.float32),
        rewards=records.tensor("tokens", "rewards"),
    )


def _or_zeros(records: Records, column: str, dtype: torch.dtype) -> Tensor:
    """A column of the tokens; zeros where it was not recorded, and then it is not compared either."""
    values = records.tensor_or_none("tokens", column)
    return torch.zeros(records.tables["tokens"].num_rows, dtype=dtype) if values is None else values


def advantages_of(records: Records) -> Advantages:
    """Advantages and returns as recorded."""
    return Advantages(
        raw_advantages=records.tensor("tokens", "raw_advantages"),
        advantages=records.tensor("tokens", "advantages"),
        returns=records.tensor_or_none("tokens", "returns"),
    )


def evaluation_of(records: Records) -> Evaluation | None:
    """The held-out responses; None where there was no evaluation, or its responses are not recorded."""
    if "evaluations" not in records.tables:
        return None

    def column(name: str) -> tuple[Any, ...]:
        return tuple(records.values("evaluations", name))

    return Evaluation(
        keys=column("prompt_key"),
        texts=column("prompt"),
        answers=column("answer"),
        prompt_ids=tuple(tuple(ids) for ids in column("prompt_ids")),
        response_ids=tuple(tuple(ids) for ids in column("response_ids")),
        responses=column("response"),
        finish_reasons=column("finish_reason"),
        scores=column("scores"),
        score_parts=tuple(tuple(parts) for parts in column("score_parts")),
        is_correct=column("is_correct"),
        episodes=_episodes(records, "evaluations"),
    )
