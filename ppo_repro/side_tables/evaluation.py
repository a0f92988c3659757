"""The table of an evaluation: every held-out response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ppo_repro.buffers import Episode, Evaluation
from ppo_repro.records import side_schema
from ppo_repro.records.arrow import to_arrow
from ppo_repro.records.schema import as_built


def evaluation_table(evaluation: Evaluation, iteration: int) -> dict[str, pa.Table]:
    """The table `evaluations` of one evaluation, by name; `iteration` is the one it came before."""
    count = len(evaluation.keys)
    columns: dict[str, Any] = {
        "iteration": np.full(count, iteration, np.int32),
        "sequence": np.arange(count, dtype=np.int32),
        "prompt_key": evaluation.keys,
        "prompt": evaluation.texts,
        "response": evaluation.responses,
        "answer": evaluation.answers,
        "prompt_ids": evaluation.prompt_ids,
        "response_ids": evaluation.response_ids,
        "response_length": [len(ids) for ids in evaluation.response_ids],
        "finish_reason": evaluation.finish_reasons,
        "scores": evaluation.scores,
        "score_parts": evaluation.score_parts,
        "is_correct": evaluation.is_correct,
        **episode_columns(evaluation.episodes),
    }
    table = as_built(side_schema.EVALUATIONS, columns)
    return {table.name: to_arrow(table, columns)}


def episode_columns(episodes: Sequence[Episode] | None) -> dict[str, Any]:
    """The columns that only episodes of several turns have; none where there are no such episodes."""
    if episodes is None:
        return {}
    ids, forced = [e.ids for e in episodes], [[int(put_in) for put_in in e.is_forced] for e in episodes]
    return {"episode_ids": ids, "is_forced": forced}
