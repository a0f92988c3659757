"""Choose the responses that a page shows token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

# above this the page would be slow to open
MAX_TOKENS = 100_000
# the reasons to show a response; each key is a button of the page
REASONS = {
    "mismatch": "worst mismatch", "clipped": "most clipped", "best": "best score", "worst": "worst score",
    "first": "first iteration", "last": "last iteration",
}  # fmt: skip


class ChosenResponse(NamedTuple):
    """A response that a page shows token by token."""

    iteration: int
    sequence: int
    mismatch: float  # nats
    clipped: int  # token updates
    why: tuple[str, ...]  # keys of REASONS


def choose_responses(summary: pd.DataFrame, count: int) -> list[ChosenResponse]:
    """Choose up to `count` responses of `summary`, which has a row per `ResponseSummary`; its order stays.

    The reasons take turns. Each reason chooses its next best response until `count` or MAX_TOKENS is reached.
    """
    rows = summary.reset_index(drop=True)
    latest = rows.sort_values(["iteration", "sequence"], ascending=[False, True], kind="stable")
    ranked = {
        "mismatch": rows[rows["mismatch"] > 0].sort_values("mismatch", ascending=False, kind="stable"),
        "clipped": rows[rows["clipped"] > 0].sort_values("clipped", ascending=False, kind="stable"),
        "best": latest.sort_values("score", ascending=False, kind="stable"),
        "worst": latest.sort_values("score", kind="stable"),
        "first": rows[rows["iteration"] == rows["iteration"].min()],
        "last": rows[rows["iteration"] == rows["iteration"].max()],
    }
    lengths = rows["tokens"].to_numpy(np.int64)
    reasons: dict[int, list[str]] = {}  # by the response's index in `rows`
    shown_tokens = 0
    for index, reason in _in_turn({reason: best.index.to_numpy()[:count] for reason, best in ranked.items()}):
        added_tokens = 0 if index in reasons else int(lengths[index])
        is_full = index not in reasons and len(reasons) == count
        # the first response is shown whatever its length
        if is_full or (reasons and shown_tokens + added_tokens > MAX_TOKENS):
            continue
        shown_tokens += added_tokens
        reasons.setdefault(index, []).append(reason)
    chosen = sorted(reasons)
    return [
        ChosenResponse(row["iteration"], row["sequence"], row["mismatch"], row["clipped"], tuple(reasons[index]))
        for index, row in zip(chosen, rows.iloc[chosen].to_dict("records"), strict=True)
    ]


def _in_turn(ranked: Mapping[str, npt.NDArray[np.int64]]) -> Iterator[tuple[int, str]]:
    """Yield the best response of each reason, then the second best, and so on."""
    for rank in range(max(len(order) for order in ranked.values())):
        for reason, order in ranked.items():
            if rank < len(order):
                yield int(order[rank]), reason
