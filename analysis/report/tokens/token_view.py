"""The skeleton of the token view; token_view.js fills it from the JSON beside it."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.report.drawing.markup import element, escape, number, table
from analysis.report.tokens.responses import REASONS

SHOWN_CHARACTERS = 160


def token_section(view: dict[str, Any], selection: str) -> str:
    """Controls, token area, the values of one token, and the shown responses as a table that needs no script."""
    controls = (
        _labelled("Colour by", element("select", id="tv-column"), "tv-column")
        + _labelled("Iteration", element("select", id="tv-iteration"), "tv-iteration")
        + _labelled("Sequence", element("select", id="tv-sequence"), "tv-sequence")
        + element("button", "◀ Previous", type="button", id="tv-previous")
        + element("button", "Next ▶", type="button", id="tv-next")
        + element("label", '<input type="checkbox" id="tv-words" /> whole words', for_="tv-words")
    )
    texts = element("dt", "Prompt") + element("dd", element("bdi", id="tv-prompt", dir="auto"))
    texts += element("dt", "Answer") + element("dd", element("bdi", id="tv-answer", dir="auto"))
    tokens = element(
        "div", "", id="tv-tokens", role="listbox", aria_label="Tokens of the response", aria_orientation="horizontal"
    )
    detail = element("table", element("caption", "Values") + element("tbody", "", id="tv-detail"))
    keys = (
        "Point at a token, or tab to the tokens and use the arrow keys, Home and End; Page Up and Page Down change the "
        "response. Numbers are rounded to six significant digits; the records have every bit."
    )
    area = element(
        "div",
        element("div", controls, class_="controls")
        + element("div", "", class_="controls", id="tv-jumps", role="group", aria_label="Jump to a response")
        + element("p", "", id="tv-about", aria_live="polite")
        + element("dl", texts, class_="texts")
        + element("ul", "", id="tv-legend", class_="swatches", aria_label="Colours")
        + element("div", tokens + element("div", detail, class_="scroll detail", tabindex="0"), class_="reading")
        + element("p", keys, class_="quiet"),
        id="token-view",
        hidden=True,
    )
    needs = element("noscript", element("p", "The token view needs the script inside this page."))
    shown = element("summary", "The responses shown here") + element(
        "div", _listed(view), class_="scroll", tabindex="0"
    )
    return element(
        "section",
        element("h2", "Tokens", id="token-section-title")
        + element("p", escape(selection))
        + needs
        + area
        + element("details", shown),
        id="token-section",
        aria_labelledby="token-section-title",
    )


def _labelled(text: str, control: str, target: str) -> str:
    return element("span", element("label", text, for_=target) + control, class_="control")


def _listed(view: dict[str, Any]) -> str:
    rows = [
        {
            "iteration": response["iteration"], "sequence": response["sequence"],
            "why": ", ".join(REASONS[reason] for reason in response["why"]),
            "prompt": _short(response["prompt"]), "response": _short(response["response"]),
            "score": response["score"], "largest |delta| (nats)": response["max_abs_delta"],
            "clipped updates": response["clipped"],
        }
        for response in view["responses"]
    ]  # fmt: skip
    return table(pd.DataFrame(rows), "Responses in the token view", limit=len(rows))


def _short(text: str) -> str:
    hidden = len(text) - SHOWN_CHARACTERS
    return text if hidden <= 0 else f"{text[:SHOWN_CHARACTERS]} … ({number(hidden)} more characters)"
