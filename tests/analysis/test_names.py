"""A metric has one name: that of its recorded column, or else of a row of the page of names."""

from __future__ import annotations

import re

import pytest

from ppo_repro.analysis.grid_outcomes import MEASURES
from ppo_repro.analysis.report.data.metrics import CONTENT, Plotted
from ppo_repro.config.files import CONTROL, DPO, LANGUAGE, Kind
from ppo_repro.records.schema import CONTROL_TABLES, DPO_TABLES, ITERATIONS, TABLES, Table
from tests.support.paths import ROOT

PAGE = ROOT / "ppo_repro" / "analysis" / "columns.md"


def explained() -> set[str]:
    """The names in the first columns of the page's tables."""
    rows = PAGE.read_text(encoding="utf-8").splitlines()
    return {name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}


def columns(*tables: Table) -> set[str]:
    return {column.name for table in tables for column in table.columns}


def test_a_measure_of_a_grid_has_the_name_of_its_column() -> None:
    assert set(MEASURES) <= columns(*TABLES) | explained()
    averaged = {name for name, measure in MEASURES.items() if measure.averaged is not None}
    assert averaged
    assert averaged <= columns(ITERATIONS)


@pytest.mark.parametrize(("kind", "tables"), [(LANGUAGE, TABLES), (CONTROL, CONTROL_TABLES), (DPO, DPO_TABLES)])
def test_a_metric_of_a_page_has_the_name_of_its_column(kind: Kind, tables: tuple[Table, ...]) -> None:
    content, by_name = CONTENT[kind], {table.name: columns(table) for table in tables}
    assert {line.key for line in (*content.first_chart, content.last_value, *content.totals)} <= by_name["iterations"]

    def has_name(metric: Plotted) -> bool:
        if metric.source == "samples":  # recomputed
            return metric.key in by_name["iterations"] | explained()
        return metric.key in by_name[metric.source]

    assert [metric.key for metric in (*content.metrics, *content.figures_by_step) if not has_name(metric)] == []
