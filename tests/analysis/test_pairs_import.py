"""Pairs from the dumps of other stacks: the frame of a run's pairs, by the reader of the audit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ppo_repro.analysis.pairs import imported_pairs, iteration_of, masked_tokens
from ppo_repro.base.errors import UserError
from ppo_repro.testing import Names
from ppo_repro.testing.pairs import PAIR
from tests.support.json_lines import write_lines
from tests.testing.audit.rows import ROWS


@pytest.mark.parametrize("form", ROWS)
def test_every_format_of_the_audit_gives_the_frame_of_a_run(form: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [ROWS[form]] * 2)
    for names in (form, None):
        (chunk,) = imported_pairs([path, path], names)
        assert list(chunk.columns[: len(PAIR)]) == PAIR
        assert chunk["sequence"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert chunk["position"].tolist() == [0, 2] * 4
        assert chunk["token_id"].tolist() == [7, 9] * 4
        assert chunk["logprobs_a"].dtype == np.float32
        assert masked_tokens(chunk) >= 4
        assert iteration_of(chunk) == 0


def test_iterations_are_chunks_and_other_columns_come_along(tmp_path: Path) -> None:
    row = {"a": [-1.0, None], "b": [-1.0, -2.0], "entropy": [0.5, 0.25]}
    rows = [row | {"iteration": i} for i in (0, 0, 3)]
    first, second = imported_pairs(write_lines(tmp_path / "a.jsonl", rows), Names("a", "b"))
    assert len(first) == 4
    assert iteration_of(second) == 3
    assert second["entropies"].tolist() == [0.5, 0.25]
    assert np.isnan(first["logprobs_a"].iloc[1])
    assert (first["token_id"] == -1).all()


def test_an_unknown_stack_is_refused() -> None:
    with pytest.raises(UserError, match="columns = 'mine': must be one of ppo_repro, verl"):
        list(imported_pairs("a.jsonl", "mine"))
