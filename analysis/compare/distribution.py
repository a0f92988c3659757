"""Do two runs answer alike? Responses, scores and lengths as samples of two distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.compare.rows import Row
from analysis.stats.significance import Permutation
from analysis.stats.two_sample import energy_distance, mmd_hamming, padded
from ppo_repro.records import reader

_COLUMNS = ["iteration", "sequence", "prompt_key", "prompt", "response_ids", "scores", "response_length"]


def responses_of(run_dir: Path | str, iterations: Sequence[int] | None) -> pd.DataFrame:
    """The responses of a run, without its tokens' numbers; raises UserError on damaged records."""
    return reader.read_sequences(run_dir, iterations=iterations, columns=_COLUMNS)


def distribution_rows(a: pd.DataFrame, b: pd.DataFrame, rng: np.random.Generator, draws: int) -> list[Row]:
    """MMD^2 of the responses within prompts and energy distances of scores and lengths; see `two_sample`.

    Two responses to one prompt at the same place of the same iteration are a pair, and only the two of a pair are
    swapped. H0: both runs answer alike in every iteration, however the policies move and whatever noise they share.
    Where the runs have no such pairs (other prompts or batches), labels are shuffled within the prompt, over all
    iterations.

    The p-value is NaN where there is nothing to test: no prompt has two responses in both runs, or scores are not
    finite. Raises UserError on more than 4,096 responses to one prompt.
    """
    keys = ["iteration", "sequence", "prompt_key", "prompt"]
    requests = [pd.MultiIndex.from_frame(frame[keys]) for frame in (a, b)]
    paired = bool(len(requests[0].intersection(requests[1])))
    if paired:
        a, b = a[requests[0].isin(requests[1])], b[requests[1].isin(requests[0])]
        a, b = (frame.sort_values(keys[:2], ignore_index=True) for frame in (a, b))
    prompts = [pd.MultiIndex.from_frame(frame[keys[2:]]) for frame in (a, b)]
    codes, _ = pd.factorize(prompts[0].append(prompts[1]))
    strata = codes[: len(a)].astype(np.int64), codes[len(a) :].astype(np.int64)
    width = int(max(a["response_length"].max(), b["response_length"].max()))
    ids = [padded([np.asarray(x, np.int32) for x in frame["response_ids"]], width) for frame in (a, b)]
    test = mmd_hamming(ids[0], ids[1], strata[0], strata[1], rng, paired=paired, draws=draws)
    rows = [_row("responses", "MMD^2 above its null mean, Hamming kernel, by prompt", test, paired)]
    for name, column in (("scores", "scores"), ("response_length", "response_length")):
        values = [frame[column].to_numpy(np.float64) for frame in (a, b)]
        odd = sum(int((~np.isfinite(v)).sum()) for v in values)
        if odd:
            # without them the test would compare other responses than were sampled
            what = f"{odd} values are not finite: no energy distance"
            rows.append(Row("distribution", name, math.nan, len(a) + len(b), what, "difference"))
            continue
        test = energy_distance(values[0], values[1], rng, paired=paired, draws=draws)
        rows.append(_row(name, "energy distance above its null mean", test, paired))
    return rows


def _row(metric: str, what: str, test: Permutation, paired: bool) -> Row:
    how = f"{test.relabellings} {'swaps of pairs' if paired else 'shuffles'}"
    return Row("distribution", metric, test.stat, test.n_units, f"{what}; {how}", "difference", test.p_value)
