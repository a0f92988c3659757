"""A figure: a chart, a caption, its numbers as a table and as CSV. A section: figures and more under a title."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

import pandas as pd

from analysis.report.drawing.markup import element, escape, table


@dataclass(frozen=True)
class Verdict:
    """One sentence; by `kind` it says that a promise holds, that something differs, or states a fact."""

    kind: Literal["holds", "differs", "fact"]
    text: str


@dataclass(frozen=True)
class Figure:
    """`chart` is SVG, `numbers` are the numbers drawn, `caption` says how to read them."""

    title: str
    chart: str
    caption: str
    numbers: pd.DataFrame


@dataclass(frozen=True)
class Section:
    """A section of the page: `key` is its anchor, `notes` are sentences before the figures, `blocks` HTML after."""

    key: str
    title: str
    notes: tuple[str, ...]
    figures: tuple[Figure, ...]
    blocks: tuple[str, ...] = ()


def figure_html(figure: Figure) -> str:
    """The figure as HTML, with its numbers folded, and all of them as CSV in a link that needs no network."""
    numbers = element("summary", "Numbers") + element(
        "div", table(figure.numbers, figure.title), class_="scroll", tabindex="0"
    )
    return element(
        "figure",
        element("h3", escape(figure.title))
        + figure.chart
        + element("figcaption", escape(figure.caption))
        + element("div", element("details", numbers) + csv_link(figure.title, figure.numbers), class_="numbers"),
    )


def csv_link(title: str, frame: pd.DataFrame) -> str:
    """A link that saves a frame as CSV: every row, floats with all digits that it takes to read them back."""
    text = frame.to_csv(index=False, lineterminator="\n")
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    # ASCII alone, and no slash, so that nothing in it looks like an address
    address = f"data:text/csv;charset=utf-8,{quote(text, safe=',.:;()+=_-')}"
    label = f"{title} as CSV"
    return element("a", "CSV", href=address, download=f"{name}.csv", class_="csv", aria_label=label)


def section_html(section: Section) -> str:
    """The section as HTML."""
    notes = "".join(element("p", escape(note)) for note in section.notes)
    charts = "".join(figure_html(figure) for figure in section.figures)
    title = element("h2", escape(section.title), id=f"{section.key}-title")
    figures = element("div", charts, class_="figures") if charts else ""
    inside = title + notes + figures + "".join(section.blocks)
    return element("section", inside, id=section.key, aria_labelledby=f"{section.key}-title")
