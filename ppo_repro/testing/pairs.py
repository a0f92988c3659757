"""Read pairs of log-probs from a recorded run or from dumps, for the guard and the diagnosis.

A source is an iterator of chunks (`records.logprob_pairs`), one per iteration. Chunks of a dump also have the other
columns of `testing.dump_formats.EXTRA` that the dump has, in float32; token_id is -1 without tokens.
Only a `.pt` dump loads torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeGuard

import numpy as np
import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.logprob_pairs import run_evidence
from ppo_repro.testing.dump_formats import Names
from ppo_repro.testing.dumps import DumpedResponse, read_dump

Source = Path | str | pd.DataFrame  # a run folder, or a dump


def imported_pairs(sources: Source | Sequence[Source], names: Names | str | None = None) -> Iterator[pd.DataFrame]:
    """Yield the pairs of dumps, one chunk for consecutive rows of the same iteration.

    `names` is a `Names`, one of FORMATS, or None to recognise the stack by its columns. The column sequence numbers the
    responses of all dumps from 0; position is the index in the response, which counts masked tokens. Log-probs are in
    nats; null becomes NaN. Masked tokens are dropped and counted in `chunk.attrs["masked"]`, also padding after a
    response, unless a padding mask of the dump is of the response too. Raises UserError, which names dump and row.
    """
    dumps = [sources] if isinstance(sources, str | Path | pd.DataFrame) else sources
    responses = enumerate(response for dump in dumps for response in read_dump(dump, names))
    for iteration, group in groupby(responses, lambda item: item[1].iteration):
        members = list(group)
        frame = pd.concat([_pairs_of_response(r, sequence) for sequence, r in members], ignore_index=True)
        frame.attrs.update(masked=sum(r.masked for _, r in members), iteration=iteration)
        yield frame


def _pairs_of_response(response: DumpedResponse, sequence: int) -> pd.DataFrame:
    """Return the pairs of the tokens that count, with EXTRA of `dump_formats`; token_id is -1 without tokens."""
    positions = np.flatnonzero(response.counts)
    ids = np.array(response.response_ids) if response.response_ids else np.full(len(response.counts), -1)
    lists = {"token_id": ids, "logprobs_a": response.sampler, "logprobs_b": response.trainer, **response.extra}
    columns = {name: values[positions] for name, values in lists.items()}
    return pd.DataFrame({"iteration": response.iteration, "sequence": sequence, "position": positions, **columns})


def is_run(source: Source, names: Names | str | None) -> TypeGuard[Path | str]:
    """Return whether `source` is a run folder, not a dump. Raises UserError for names of a run's columns."""
    found = not isinstance(source, pd.DataFrame) and Path(source).is_dir()
    if found and names is not None:
        raise UserError(f"{source}: is a run folder, whose names are fixed; leave names out")
    return found


def evidence_of(source: Source, names: Names | str | None = None) -> Iterator[pd.DataFrame]:
    """Yield the pairs of a run folder or a dump, with the columns of `diagnose_chunks` that it has."""
    if is_run(source, names):
        return run_evidence(source, reader.open_manifest(source))
    return imported_pairs(source, names)
