"""Read one response for the page: its tokens, and its prompt as the model saw it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import duckdb
import pandas as pd

from ppo_repro.analysis.report.data.chosen_responses import ChosenResponse
from ppo_repro.analysis.report.data.token_view import TokenView, responses_by_token, token_view
from ppo_repro.analysis.view.database import Responses, escaped, parquet_sql
from ppo_repro.analysis.view.index import IndexedRun
from ppo_repro.base.errors import UserError
from ppo_repro.records import manifest


def open_response(responses: Responses, run: IndexedRun, row: Mapping[str, Any]) -> tuple[str | None, TokenView]:
    """Read the response of one row of the table from the files of its run, and return its prompt and its tokens.

    The prompt is decoded from its tokens, with special tokens; None if the run has no tokenizer yet. Raises UserError
    if the files cannot be read.
    """
    iteration, sequence = row["iteration"], row["sequence"]

    def recorded(table: str) -> pd.DataFrame:
        file = parquet_sql([escaped(manifest.table_path(run.folder, table, iteration))])
        try:
            return responses.frame(f"select * from {file} where sequence = ?", [sequence])
        except duckdb.Error as error:
            raise UserError(f"{run.name}: {str(error).splitlines()[0]}; the file was changed or damaged") from error

    sequences = recorded("sequences")
    chosen = ChosenResponse(iteration, sequence, row["mismatch"], row["clipped"], why=())
    place = f"{run.name}: iteration {iteration}"
    shown = responses_by_token(sequences, recorded("tokens"), recorded("updates"), [chosen], place)
    tokenizer = run.tokenizer()
    prompts = [tokenizer.decode_all(ids.tolist()) for ids in sequences["prompt_ids"]] if tokenizer else []
    return prompts[0] if prompts else None, token_view(shown)
