"""Read one response for the page: its tokens, and its prompt as the model saw it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import duckdb
import pandas as pd

from ppo_repro.analysis.report.data.chosen_responses import ChosenResponse
from ppo_repro.analysis.report.data.token_view import TokenView, responses_by_token, token_view
from ppo_repro.analysis.tokenization.recorded_tokenizer import PATHS, RecordedTokenizer, load_tokenizer
from ppo_repro.analysis.view.database import Responses, pattern, source
from ppo_repro.analysis.view.index import IndexedRun
from ppo_repro.base.errors import UserError
from ppo_repro.records import manifest


def tokens_of_response(responses: Responses, run: IndexedRun, row: Mapping[str, Any]) -> TokenView:
    """Return the token view of one row of the table.

    Raises UserError if the run's files cannot be read.
    """
    shown = ChosenResponse(row["iteration"], row["sequence"], row["mismatch"], row["clipped"], why=())

    def rows_of(name: str) -> pd.DataFrame:
        file = source([pattern(manifest.table_path(run.folder, name, row["iteration"]))])
        try:
            return responses.frame(f"select * from {file} where sequence = ?", [row["sequence"]])
        except duckdb.Error as error:
            raise UserError(f"{run.name}: {str(error).splitlines()[0]}; the file was changed or damaged") from error

    tables = rows_of("sequences"), rows_of("tokens"), rows_of("updates")
    where = f"{run.name}: iteration {row['iteration']}"
    return token_view(responses_by_token(*tables, [shown], where))


def decoded_prompt(responses: Responses, run: IndexedRun, iteration: int, sequence: int) -> str | None:
    """Return the prompt decoded from its tokens, with special tokens; None if the run has no tokenizer yet."""
    file = source([pattern(manifest.table_path(run.folder, "sequences", iteration))])
    rows = responses.rows(f"select prompt_ids from {file} where sequence = ?", [sequence])
    tokenizer = _tokenizer(run)
    return tokenizer.decode_all(rows[0]["prompt_ids"]) if tokenizer and rows else None


def _tokenizer(run: IndexedRun) -> RecordedTokenizer | None:
    """Return the tokenizer of a run, loaded once until its file changes; None if the run has no tokenizer yet."""
    path = next((run.folder / name for name in PATHS if (run.folder / name).is_file()), None)
    if path is None:
        return None
    loaded, changed = run.tokenizer, path.stat().st_mtime_ns
    if loaded is None or loaded[0] != changed:  # another run may have the folder now
        loaded = run.tokenizer = changed, load_tokenizer(path)
    return loaded[1]
