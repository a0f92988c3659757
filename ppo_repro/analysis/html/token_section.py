"""Choose the responses that a page shows token by token, and make the HTML that token_view.js fills with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.html.markup import element, number
from ppo_repro.analysis.html.page import Section, scrolled

# above this the page would be slow to open
MAX_TOKENS = 100_000
# the reasons to show a response; each key is a button of the page
REASONS = {
    "mismatch": "worst mismatch", "clipped": "most clipped", "best": "best score", "worst": "worst score",
    "first": "first iteration", "last": "last iteration",
}  # fmt: skip


def choose_responses(summary: pd.DataFrame, count: int) -> pd.DataFrame:
    """Choose up to `count` responses, and add `why`: the keys of REASONS that chose each response.

    The reasons take turns. Each reason chooses its next best response until `count` or MAX_TOKENS is reached. `summary`
    has the rows of `PageNumbers.responses`. The returned rows are in the order of `summary`.
    """
    rows = summary.reset_index(drop=True)
    latest = rows.sort_values(["iteration", "sequence"], ascending=[False, True], kind="stable")
    first, last = rows["iteration"].min(), rows["iteration"].max()
    ranked = {
        "mismatch": rows[rows["max_abs_delta"] > 0].sort_values("max_abs_delta", ascending=False, kind="stable"),
        "clipped": rows[rows["clipped"] > 0].sort_values("clipped", ascending=False, kind="stable"),
        "best": latest.sort_values("score", ascending=False, kind="stable"),
        "worst": latest.sort_values("score", kind="stable"),
        "first": rows[rows["iteration"] == first],
        "last": rows[rows["iteration"] == last],
    }
    sizes = rows["tokens"].to_numpy(np.int64)
    reasons: dict[int, list[str]] = {}
    used = 0
    for index, reason in _in_turn({name: frame.index.to_numpy()[:count] for name, frame in ranked.items()}):
        size = 0 if index in reasons else int(sizes[index])
        full = index not in reasons and len(reasons) == count
        # the first response is shown whatever its length
        if full or (reasons and used + size > MAX_TOKENS):
            continue
        used += size
        reasons.setdefault(index, []).append(reason)
    selected = rows.iloc[sorted(reasons)].copy()
    selected["why"] = pd.Series([reasons[index] for index in sorted(reasons)], index=selected.index, dtype=object)
    return selected


def _in_turn(ranked: dict[str, npt.NDArray[np.int64]]) -> Iterator[tuple[int, str]]:
    for rank in range(max(len(order) for order in ranked.values())):
        for reason, order in ranked.items():
            if rank < len(order):
                yield int(order[rank]), reason


def token_area() -> str:
    """Return the HTML of controls, tokens and the values of one token, hidden until token_view.js fills it."""
    many = element(
        "span",
        _labelled("Iteration", "tv-iteration") + _labelled("Sequence", "tv-sequence")
        + element("button", "◀ Previous", type="button", id="tv-previous")
        + element("button", "Next ▶", type="button", id="tv-next"),
        class_="controls tv-many",
    )  # fmt: skip
    controls = _labelled("Colour by", "tv-column") + many
    texts = element("dt", "Prompt") + element("dd", element("bdi", id="tv-prompt", dir="auto"))
    texts += element("dt", "Answer") + element("dd", element("bdi", id="tv-answer", dir="auto"))
    box = {"role": "listbox", "aria_label": "Tokens of the response", "aria_orientation": "horizontal"}
    detail = element("table", element("caption", "Values") + element("tbody", "", id="tv-detail"))
    keys = (
        "Point at a token, or tab to the tokens and use the arrow keys, Home and End; Page Up and Page Down change the "
        "response. Numbers are rounded to six significant digits; the records have every bit."
    )
    return element(
        "div",
        element("div", controls, class_="controls")
        + element("div", "", class_="controls tv-many", id="tv-jumps", role="group", aria_label="Jump to a response")
        + element("p", "", id="tv-about", aria_live="polite")
        + element("dl", texts, class_="texts tv-many")
        + element("ul", "", id="tv-legend", class_="swatches", aria_label="Colours")
        + element("div", element("div", "", id="tv-tokens", **box) + scrolled(detail, "detail"), class_="reading")
        + element("p", keys, class_="quiet"),
        id="token-view",
        hidden=True,
    )


def token_section(view: dict[str, Any], recorded: int) -> Section:
    """Return the section with the token view of `view`; the run has `recorded` responses."""
    needs = element("noscript", element("p", "The token view needs the script inside this page."))
    shown = number(len(view["responses"]))
    note = (
        f"{shown} of {number(recorded)} responses: in turn those with the largest |old - rollout| difference, the most "
        "clipped token updates, the best score, the worst score (the latest first), and the first "
        f"responses of the first and of the last iteration; at most {number(MAX_TOKENS)} tokens. ppo-repro view "
        "shows every response."
    )
    return Section("tokens", "Tokens", (note,), blocks=(needs, token_area()))


def _labelled(text: str, target: str) -> str:
    return element("span", element("label", text, for_=target) + element("select", id=target), class_="control")
