"""The table of an evaluation: every held-out response."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ppo_repro.buffers import Evaluation
from ppo_repro.records import side_schema
from ppo_repro.records.arrow import to_arrow


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
    }
    return {side_schema.EVALUATIONS.name: to_arrow(side_schema.EVALUATIONS, columns)}
