"""Make the HTML of the token view, which token_view.js fills."""

from __future__ import annotations

from typing import Any

from ppo_repro.analysis.report.markup import element, number
from ppo_repro.analysis.report.page import Section, scrolled
from ppo_repro.analysis.report.response_choice import MAX_TOKENS


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
    return Section("tokens", "Tokens", (note,), (), (needs, token_area()))


def _labelled(text: str, target: str) -> str:
    return element("span", element("label", text, for_=target) + element("select", id=target), class_="control")
