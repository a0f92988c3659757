"""The whole page: head with its security policy, summary, sections, token view. It loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.report.drawing.figure import Section, Verdict, section_html
from analysis.report.drawing.markup import element, escape, table

_START = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8" />'
BEGINNING = f'{_START}<meta name="generator" content="ppo-repro report" />'  # of every page
# of pages before they named who wrote them; the rest of the policy was another in every version
EARLIER_BEGINNING = (
    f'{_START}<meta http-equiv="Content-Security-Policy" content="default-src &#x27;none&#x27;; style-src &#x27;sha256-'
)

_HERE = Path(__file__).parents[1]
_MARKS = {"holds": "✓", "differs": "≠", "fact": "•"}
_WORDS = {"holds": "holds", "differs": "differs", "fact": "fact"}


def asset(name: str) -> str:
    """A file of this package that is copied into the page."""
    return (_HERE / name).read_text(encoding="utf-8")


def embedded_json(value: dict[str, Any]) -> str:
    """JSON that cannot end its script element: ASCII only, with `<` escaped; ValueError on NaN."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def security_policy(style: str, script: str) -> str:
    """A policy that allows only this style and this script, by their SHA-256, and no loading."""

    def known(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {known(style)}; script-src {known(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def summary_html(
    verdicts: Sequence[Verdict],
    facts: Sequence[tuple[str, str]],
    tables: Sequence[tuple[str, pd.DataFrame]],
    folded: Sequence[str] = (),
) -> str:
    """Verdicts in words, facts about the run, its key numbers; `folded` are details to open, such as `config_html`."""
    sentences = "".join(
        element(
            "li",
            element("span", _MARKS[v.kind], class_="mark", aria_hidden="true")
            + element("span", f"{_WORDS[v.kind]}: ", class_="unseen")
            + escape(v.text),
            class_=v.kind,
        )
        for v in verdicts
    )
    about = "".join(element("dt", escape(n)) + element("dd", element("code", escape(v))) for n, v in facts)
    numbers = [element("div", table(frame, name), class_="scroll", tabindex="0") for name, frame in tables]
    return element(
        "section",
        element("h2", "Summary", id="summary-title")
        + element("ul", sentences, class_="verdicts")
        + element(
            "div",
            element("div", element("dl", about) + "".join(folded), class_="facts") + "".join(numbers),
            class_="three" if len(tables) > 1 else "stacked",
        ),
        id="summary",
        aria_labelledby="summary-title",
    )


def folded_text(title: str, text: str) -> str:
    """A text of several lines, folded."""
    return element("details", element("summary", escape(title)) + element("pre", _lines(text), tabindex="0"))


def folded_table(title: str, frame: pd.DataFrame) -> str:
    """A table of words with all of its rows, folded."""
    inside = element("div", table(frame, title, limit=len(frame)), class_="scroll words", tabindex="0")
    return element("details", element("summary", escape(title)) + inside)


@dataclass(frozen=True)
class Tokens:
    """The token view: its section, and the data that token_view.js fills it from."""

    section: str
    data: dict[str, Any]


def page(title: str, summary: str, sections: Sequence[Section], tokens: Tokens | None = None) -> str:
    """The HTML document."""
    style, script = asset("drawing/style.css"), asset("drawing/charts.js")
    links = [("summary", "Summary"), *((s.key, s.title) for s in sections)]
    body = summary + "".join(section_html(section) for section in sections)
    if tokens is not None:
        script += asset("tokens/token_view.js")
        links.append(("token-section", "Tokens"))
        body += tokens.section
        body += f'<script type="application/json" id="token-data">{embedded_json(tokens.data)}</script>'
    body += f"<script>{script}</script>"
    nav = element("nav", "".join(element("a", escape(t), href=f"#{k}") for k, t in links), aria_label="Sections")
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{escape(security_policy(style, script))}" />'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />'
        '<meta name="color-scheme" content="light dark" />'
        f'<title>{escape(title)}</title><link rel="icon" href="data:," /><style>{style}</style>'
    )
    header = element("header", element("h1", escape(title)) + nav)
    return f"{BEGINNING}{head}</head>\n<body>{header}\n{element('main', body)}</body></html>\n"


def _lines(text: str) -> str:
    return "\n".join(escape(line) for line in text.splitlines())
