"""Read log-prob pairs from dumps of other training stacks; audit and pytest guard use the same reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.testing.dumps import FORMATS, Names, read_dump
from ppo_repro.testing.pairs import tokens_of


def imported_pairs(
    paths: Path | str | Sequence[Path | str], names: Names | str | None = None
) -> Iterator[pd.DataFrame]:
    """Yield one chunk (`run_pairs`) for consecutive rows of the same iteration.

    `names` is a `Names`, one of FORMATS, or None to recognise the stack by its columns. The column sequence numbers the
    responses of all files; position is the index in the response, which counts masked tokens. Log-probs are in nats;
    null becomes NaN. Masked tokens are dropped and counted in `chunk.attrs["masked"]`. Raises UserError, which names
    file and row.
    """
    if isinstance(names, str) and names not in FORMATS:
        raise UserError(f"columns = {names!r}: must be one of {', '.join(FORMATS)}, or Names(...)")
    files = [paths] if isinstance(paths, str | Path) else paths
    responses = enumerate(r for path in files for r in read_dump(Path(path), names))
    for iteration, group in groupby(responses, lambda item: item[1].iteration):
        some = list(group)
        frame = pd.concat([tokens_of(r, sequence) for sequence, r in some], ignore_index=True)
        frame.attrs.update(masked=sum(r.masked for _, r in some), iteration=iteration)
        yield frame


def masked_tokens(chunk: pd.DataFrame) -> int:
    """Return the number of tokens that a mask removed from a chunk."""
    return int(chunk.attrs.get("masked", 0))


def iteration_of(chunk: pd.DataFrame) -> int:
    """Return the iteration of a chunk, even if a mask removed every row."""
    return int(chunk["iteration"].iloc[0] if len(chunk) else chunk.attrs["iteration"])
