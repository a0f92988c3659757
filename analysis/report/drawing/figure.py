"""A figure: a chart, a caption, and its numbers as a table."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from analysis.report.drawing.markup import element, escape, table


@dataclass(frozen=True)
class Figure:
    """`chart` is SVG, `numbers` are the numbers drawn, `caption` says how to read them."""

    title: str
    chart: str
    caption: str
    numbers: pd.DataFrame


@dataclass(frozen=True)
class Section:
    """A section of the page: `key` is its anchor, `notes` are sentences before the figures."""

    key: str
    title: str
    notes: tuple[str, ...]
    figures: tuple[Figure, ...]


def figure_html(figure: Figure) -> str:
    """The figure as HTML, with its numbers folded."""
    numbers = element("summary", "Numbers") + element(
        "div", table(figure.numbers, figure.title), class_="scroll", tabindex="0"
    )
    return element(
        "figure",
        element("h3", escape(figure.title))
        + figure.chart
        + element("figcaption", escape(figure.caption))
        + element("details", numbers),
    )


def section_html(section: Section) -> str:
    """The section as HTML."""
    notes = "".join(element("p", escape(note)) for note in section.notes)
    charts = "".join(figure_html(figure) for figure in section.figures)
    title = element("h2", escape(section.title), id=f"{section.key}-title")
    figures = element("div", charts, class_="figures") if charts else ""
    return element("section", title + notes + figures, id=section.key, aria_labelledby=f"{section.key}-title")
