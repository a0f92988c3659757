"""Make the HTML that token_view.js fills with the tokens of responses."""

from __future__ import annotations

from ppo_repro.analysis.html.markup import element
from ppo_repro.analysis.html.page import scrolled


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


def _labelled(text: str, target: str) -> str:
    return element("span", element("label", text, for_=target) + element("select", id=target), class_="control")
