"""Make the HTML of a page: figures, sections, first screen, security policy. A page loads nothing from other places."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import pandas as pd

from ppo_repro.analysis.csv_text import csv_text
from ppo_repro.analysis.html.markup import element, escape, prose, table

HERE = Path(__file__).parent
_START = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8" />'
BEGINNING = f'{_START}<meta name="generator" content="ppo-repro report" />'  # of every page
_MARKS = {"holds": "✓", "differs": "≠", "fact": "•"}


@dataclass(frozen=True)
class Statement:
    """One sentence of a page; `kind` says whether a promise holds, something differs, or the sentence is a fact."""

    kind: Literal["holds", "differs", "fact"]
    text: str


@dataclass(frozen=True)
class Card:
    """Question of the first screen, with a chart and sentences as its answer, and `blocks` of HTML below."""

    question: str
    statements: Sequence[Statement] = ()
    blocks: Sequence[str] = ()
    chart: str = ""


@dataclass(frozen=True)
class Figure:
    """Chart as SVG, the numbers in it, and a caption that says how to read the chart."""

    title: str
    chart: str
    caption: str
    numbers: pd.DataFrame


@dataclass(frozen=True)
class Section:
    """Section of a page: `key` is its anchor, `notes` are sentences above the figures, `blocks` are HTML below them.

    `legend` is HTML between notes and figures.
    """

    key: str
    title: str
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    blocks: Sequence[str] = ()
    legend: str = ""


def figure_html(figure: Figure) -> str:
    """Return the figure as HTML, with a folded table of its numbers and a link that saves them as CSV."""
    numbers = element("summary", "Numbers") + scrolled(table(figure.numbers, figure.title))
    foot = element("div", element("details", numbers) + csv_link(figure.title, figure.numbers), class_="numbers")
    caption = element("figcaption", prose(figure.caption))
    return element("figure", element("h3", escape(figure.title)) + figure.chart + caption + foot)


def csv_link(title: str, frame: pd.DataFrame) -> str:
    """Return a link that saves a frame as CSV, without a network; the floats are exact."""
    text = csv_text(frame)
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    # ASCII alone, and no slash, so that nothing in it looks like an address
    address = f"data:text/csv;charset=utf-8,{quote(text, safe=',.:;()+=_-')}"
    return element("a", "CSV", href=address, download=f"{name}.csv", class_="csv", aria_label=f"{title} as CSV")


def scrolled(inside: str, class_: str = "") -> str:
    """Return `inside` in an element that scrolls if the content is too large for the page."""
    return element("div", inside, class_=f"scroll {class_}".strip(), tabindex="0")


def facts_html(facts: Mapping[str, str]) -> str:
    """Return names and values as HTML, with the values as code."""
    rows = (element("dt", escape(name)) + element("dd", element("code", escape(facts[name]))) for name in facts)
    return element("dl", "".join(rows))


def folded_text(title: str, text: str) -> str:
    """Return a text of several lines as folded HTML."""
    lines = "\n".join(escape(line) for line in text.splitlines())
    return element("details", element("summary", escape(title)) + element("pre", lines, tabindex="0"))


def folded_table(title: str, frame: pd.DataFrame) -> str:
    """Return a table with all rows as folded HTML."""
    inside = scrolled(table(frame, title, limit=len(frame)), "words")
    return element("details", element("summary", escape(title)) + inside)


def _statement(statement: Statement) -> str:
    mark = element("span", _MARKS[statement.kind], class_="mark", aria_hidden="true")
    word = element("span", f"{statement.kind}: ", class_="unseen")
    return element("li", mark + word + prose(statement.text), class_=statement.kind)


def _card(card: Card) -> str:
    sentences = element("ul", "".join(map(_statement, card.statements)), class_="verdicts") if card.statements else ""
    inside = element("h2", escape(card.question)) + card.chart + sentences + "".join(card.blocks)
    return element("div", inside, class_="answer")


def _section(section: Section) -> str:
    notes = "".join(element("p", prose(note)) for note in section.notes)
    charts = "".join(figure_html(figure) for figure in section.figures)
    title = element("h2", escape(section.title), id=f"{section.key}-title")
    figures = element("div", charts, class_="figures") if charts else ""
    inside = title + notes + section.legend + figures + "".join(section.blocks)
    return element("section", inside, id=section.key, aria_labelledby=f"{section.key}-title")


def embedded_json(value: Mapping[str, object]) -> str:
    """Return JSON that cannot end its script element: ASCII only, with `<` escaped. Raises ValueError on NaN."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def document(
    title: str, body: str, styles: Sequence[Path], scripts: Sequence[Path], header: str = "", connect: str = "'none'"
) -> str:
    """Return an HTML document with its styles and scripts inside.

    Args:
        body: HTML of the main part.
        header: HTML below the heading.
        connect: the only source to which the security policy allows requests.
    """

    def source_hash(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    style, script = ("".join(path.read_text(encoding="utf-8") for path in paths) for paths in (styles, scripts))
    policy = (
        f"default-src 'none'; style-src {source_hash(style)}; script-src {source_hash(script)}; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}" />'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />'
        '<meta name="color-scheme" content="light dark" />'
        f'<title>{escape(title)}</title><link rel="icon" href="data:," /><style>{style}</style>'
    )
    main = element("header", element("h1", escape(title)) + header) + "\n" + element("main", body)
    return f"{BEGINNING}{head}</head>\n<body>{main}<script>{script}</script></body></html>\n"


def page(
    title: str, cards: Sequence[Card], sections: Sequence[Section], tokens: Mapping[str, object] | None = None
) -> str:
    """Return the HTML document of a report.

    `tokens` is the JSON from which token_view.js fills the section of tokens; None for a page without tokens.
    """
    links = [("summary", "Summary"), *((section.key, section.title) for section in sections)]
    nav = element("nav", "".join(element("a", escape(t), href=f"#{k}") for k, t in links), aria_label="Sections")
    answers = element("div", "".join(map(_card, cards)), class_="answers")
    body = element("section", answers, id="summary", aria_label="Summary") + "".join(map(_section, sections))
    scripts = [HERE / "charts.js"]
    if tokens is not None:
        body += f'<script type="application/json" id="token-data">{embedded_json(tokens)}</script>'
        scripts.append(HERE / "token_view.js")
    return document(title, body, [HERE / "style.css"], scripts, nav)
