"""The whole page: head with its security policy, summary, sections, token view. It loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.report.drawing.figure import Section, section_html
from analysis.report.drawing.markup import element, escape, table
from analysis.report.facts import Verdict
from analysis.report.token_view import token_section

_HERE = Path(__file__).parent
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
    config: str,
) -> str:
    """Verdicts in words, facts about the run, its key numbers, its configuration."""
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
    folded = element("details", element("summary", "Configuration") + element("pre", _lines(config), tabindex="0"))
    numbers = [element("div", table(frame, name), class_="scroll", tabindex="0") for name, frame in tables]
    return element(
        "section",
        element("h2", "Summary", id="summary-title")
        + element("ul", sentences, class_="verdicts")
        + element(
            "div",
            element("div", element("dl", about) + (folded if config else ""), class_="facts") + "".join(numbers),
            class_="three" if len(tables) > 1 else "stacked",
        ),
        id="summary",
        aria_labelledby="summary-title",
    )


def page(title: str, summary: str, sections: Sequence[Section], view: dict[str, Any] | None, selection: str) -> str:
    """The HTML document; `view` is from `responses.token_data`, `selection` describes the responses in it."""
    style, script = asset("style.css"), asset("token_view.js")
    links = [("summary", "Summary"), *((s.key, s.title) for s in sections), ("token-section", "Tokens")]
    if view is None:
        links.pop()
    nav = element("nav", "".join(element("a", escape(t), href=f"#{k}") for k, t in links), aria_label="Sections")
    body = summary + "".join(section_html(section) for section in sections)
    if view is not None:
        body += token_section(view, selection)
        body += f'<script type="application/json" id="token-data">{embedded_json(view)}</script>'
        body += f"<script>{script}</script>"
    head = (
        '<meta charset="utf-8" />'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(security_policy(style, script))}" />'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />'
        '<meta name="color-scheme" content="light dark" />'
        f'<title>{escape(title)}</title><link rel="icon" href="data:," /><style>{style}</style>'
    )
    header = element("header", element("h1", escape(title)) + nav)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{header}\n{element("main", body)}</body></html>\n'
    )


def _lines(text: str) -> str:
    return "\n".join(escape(line) for line in text.splitlines())
