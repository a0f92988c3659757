"""Pairs from the dumps of other stacks: the frame of a run's pairs, by the reader of the audit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ppo_repro.analysis.mismatch import mismatch_by_iteration, mismatch_summary, mismatch_table
from ppo_repro.analysis.remedies import remedy_table
from ppo_repro.base.errors import UserError
from ppo_repro.records.logprob_pairs import PAIR, iteration_of, masked_tokens
from ppo_repro.testing import Names
from ppo_repro.testing.diagnosis import diagnose_chunks
from ppo_repro.testing.pairs import imported_pairs
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
        assert masked_tokens(chunk) == 4
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


def test_every_token_that_a_mask_removes_is_counted_and_marked_padding_is_not(tmp_path: Path) -> None:
    row = ROWS["verl"] | {"attention_mask": [0, 1, 1, 1, 1, 0]}  # the last token is padding
    rows = [
        row | {"response_mask": [1, 0, 0]},
        row | {"response_mask": [0, 0, 0]},
        row | {"response_mask": [0, 0, 0], "iteration": 1},
    ]
    chunks = list(imported_pairs(write_lines(tmp_path / "a.jsonl", rows)))
    assert [(iteration_of(chunk), len(chunk), masked_tokens(chunk)) for chunk in chunks] == [(0, 1, 3), (1, 0, 2)]
    summary = mismatch_summary(iter(chunks)).set_index("metric")["value"]
    assert summary[["n_tokens", "n_masked"]].tolist() == [1.0, 5.0]
    by_iteration = mismatch_table(mismatch_by_iteration(chunks)).set_index(["iteration", "metric"])["value"]
    assert [by_iteration[i, "n_masked"] for i in (0, 1)] == [3.0, 2.0]
    assert remedy_table(chunks).equals(remedy_table(chunks[:1]))
    assert diagnose_chunks(chunks).verdict == "none"
    for table in (mismatch_summary, remedy_table, lambda pairs: mismatch_table(mismatch_by_iteration(pairs))):
        with pytest.raises(UserError, match="there is no token to compare"):
            table(chunks[1:])


def test_ids_stand_at_their_own_tokens_where_all_numbers_are_ahead(tmp_path: Path) -> None:
    row = {name: np.roll(values, -1).tolist() for name, values in ROWS["areal"].items()}
    row |= {name: ROWS["areal"][name] for name in ("input_ids", "attention_mask", "prox_logp")}
    row |= {"advantages": [0.0] * 6, "token_id_b": row["input_ids"]}
    (chunk,) = imported_pairs(write_lines(tmp_path / "a.jsonl", [row]))
    assert chunk["token_id"].tolist() == chunk["token_id_b"].tolist() == [7, 9]
    assert chunk["logprobs_a"].tolist() == chunk["logprobs_b"].tolist() == [-0.5, -2.0]


def test_an_unknown_stack_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [ROWS["verl"]])
    with pytest.raises(UserError, match="names = 'mine': must be one of ppo_repro, verl"):
        list(imported_pairs(path, "mine"))
